"""JSON images of tuned tables, so that serving a problem parses no YAML: the first reader writes one, the next ones read it.

An image lies in `.images` beside the user's tables, also for shipped tables, whose directory may be read-only. It is valid for one size,
modification time and sha256 of its table; what it holds passes the same checks as the table.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from flashgen import paths, table
from flashgen.errors import InvalidTable
from flashgen.table import Table
from flashgen.table_schema import DeviceRecord, EntryRecord, Record, to_entry, to_raw

SCHEMA = "flashgen.image/1"


class ImageRecord(Record, frozen=True):
    """What an image file holds. `skipped` are the faults that the lenient reading found."""

    schema: str
    size: int
    mtime_ns: int
    sha256: str
    device: DeviceRecord
    entries: list[EntryRecord]
    skipped: list[str]


_DECODER = msgspec.json.Decoder(ImageRecord)


def load_all(directories: Sequence[Path] | None = None) -> tuple[Table, ...]:
    """All tables, leniently, user directory first, each from its image where that is valid. One warning per file with faults."""
    found = []
    for directory in (paths.user_tables(), paths.shipped_tables()) if directories is None else directories:
        for path in sorted(directory.glob("*.yaml")) if directory.is_dir() else ():
            try:
                loaded = load(path)
            except InvalidTable as problem:
                warnings.warn(f"Tuned table ignored: {problem}", stacklevel=2)
                continue
            if loaded.skipped:
                warnings.warn(f"{path}: {len(loaded.skipped)} fault(s), the rest is used. First: {loaded.skipped[0]}", stacklevel=2)
            found.append(loaded)
    return tuple(found)


def load(path: Path) -> Table:
    """One table, leniently. Raises InvalidTable for a file that is no table."""
    known = _read_image(path)
    if known is not None:
        return known
    before = _facts(path)
    loaded = table.read(path, strict=False)
    if before is not None and before == _facts(path):  # not replaced while it was read
        _write_image(path, loaded, before)
    return loaded


def image_path(path: Path) -> Path:
    """Where the image of a table lies."""
    name = hashlib.sha256(os.path.abspath(path).encode()).hexdigest()[:12]
    return paths.user_tables() / ".images" / f"{path.stem}-{name}.json"


def _facts(path: Path) -> tuple[int, int, str] | None:
    """Size, modification time and sha256 of a table."""
    try:
        status = path.stat()
        return status.st_size, status.st_mtime_ns, hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None


def _read_image(path: Path) -> Table | None:
    """The table in its image; None when there is no valid one."""
    try:
        image = _DECODER.decode(image_path(path).read_bytes())
        status = path.stat()
        if image.schema != SCHEMA or status.st_size != image.size:
            return None
        if status.st_mtime_ns != image.mtime_ns and hashlib.sha256(path.read_bytes()).hexdigest() != image.sha256:
            return None
        entries = tuple(to_entry(record, f"{path} (image)") for record in image.entries)
        return Table(path, image.device, entries, tuple(image.skipped))
    except (OSError, msgspec.MsgspecError, InvalidTable):
        return None


def _write_image(path: Path, loaded: Table, facts: tuple[int, int, str]) -> None:
    """Publish an image; a home that cannot be written costs the next process a YAML reading, nothing else."""
    target = image_path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}-{secrets.token_hex(4)}")
    document = {
        "schema": SCHEMA, "size": facts[0], "mtime_ns": facts[1], "sha256": facts[2],
        "device": {name: getattr(loaded.device, name) for name in DeviceRecord.__struct_fields__},
        "entries": [to_raw(entry) for entry in loaded.entries], "skipped": list(loaded.skipped),
    }  # fmt: skip
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(msgspec.json.encode(document))
        os.replace(temporary, target)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
