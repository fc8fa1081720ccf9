"""A table in memory while many problems are worked through: a file of a thousand entries takes seconds to read and to write."""

from __future__ import annotations

import time
from pathlib import Path

from flashgen import table
from flashgen.model import DeviceLimits, Problem, TableEntry

WRITE_SECONDS, WRITE_SHARE = 5.0, 10.0  # between writes at least so long, and ten times as long as the last write took


class Shelf:
    """The entries of one file: parsed again only after somebody wrote it, and written several at a time."""

    def __init__(self, path: Path, device: DeviceLimits) -> None:
        """Of the table at `path`, which need not exist, of `device`."""
        self.path, self.device = path, device
        self._entries: dict[tuple[object, ...], TableEntry] = {}
        self._waiting: list[TableEntry] = []
        self._seen: tuple[int, int, int] | None = None  # as the file was when these were its entries
        self._written, self._pause = time.monotonic(), WRITE_SECONDS

    def entries(self) -> tuple[TableEntry, ...]:
        """What is in the file, and what will be. Raises InvalidTable."""
        if (stamp := self._stamp()) != self._seen:
            present = table.read(self.path, strict=True).entries if stamp else ()
            self._entries = {table.full_key(each.problem): each for each in (*present, *self._waiting)}
            self._seen = stamp
        return tuple(self._entries.values())

    def find(self, problem: Problem) -> TableEntry | None:
        """The entry of exactly this problem."""
        self.entries()
        return self._entries.get(table.full_key(problem))

    def put(self, entry: TableEntry) -> table.Change:
        """Add or replace an entry; it is written at once, or soon."""
        change = table.change(self.path, self.find(entry.problem), entry)
        if change.written:
            self._entries[table.full_key(entry.problem)] = entry
            self._waiting.append(entry)
        if time.monotonic() - self._written > self._pause:
            self.write()
        return change

    def write(self) -> None:
        """Put what waits into the file. Raises InvalidTable and NotWritable."""
        began = time.monotonic()
        if self._waiting:
            alone = self._stamp() == self._seen
            table.merge_all(self.path, self.device, self._waiting)
            self._waiting.clear()
            self._seen = self._stamp() if alone else None
        self._written = time.monotonic()
        self._pause = max(WRITE_SECONDS, WRITE_SHARE * (self._written - began))

    def _stamp(self) -> tuple[int, int, int] | None:
        try:
            found = self.path.stat()
        except FileNotFoundError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino
