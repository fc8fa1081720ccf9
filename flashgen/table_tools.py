"""Tables as things to review: what is in them, what two of them differ in, and how several become one. Nothing here needs a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from flashgen import device, paths, table
from flashgen.errors import InvalidTable
from flashgen.model import DeviceLimits, ExecutorName, Problem, TableEntry
from flashgen.near import look_up
from flashgen.staleness import bare
from flashgen.table import Table, VariantCheck, full_key
from flashgen.table_schema import DeviceRecord, device_record, to_raw


class Difference(StrEnum):
    """What became of one problem between two tables."""

    NEW = "new"
    GONE = "gone"
    FASTER = "faster"
    SLOWER = "slower"
    LEVEL = "level"
    RECERTIFIED = "recertified"
    SAME = "same"


@dataclass(frozen=True, slots=True)
class Changed:
    """One problem in two tables. `ratio` is new median over old, where both are of one kind; `stale` names entries to be refreshed."""

    difference: Difference
    old: TableEntry | None
    new: TableEntry | None
    ratio: float | None = None
    words: str = ""

    @property
    def entry(self) -> TableEntry:
        """The newer of the two."""
        found = self.new or self.old
        assert found is not None
        return found


@dataclass(frozen=True, slots=True)
class Conflict:
    """Two entries for one problem, which one was kept, and by which rule."""

    kept: TableEntry
    dropped: TableEntry
    rule: str


def find(names: Sequence[str]) -> list[Path]:
    """Table files by path, or by name among the user's and the shipped ones (`nvidia-h200`); without names all of them.

    Raises InvalidTable for a name that is neither.
    """
    folders = (paths.user_tables(), paths.shipped_tables())
    if not names:
        return [path for folder in folders if folder.is_dir() for path in sorted(folder.glob("*.yaml"))]
    found = []
    for name in names:
        candidates = [Path(name), *(folder / f"{name}.yaml" for folder in folders)]
        path = next((path for path in candidates if path.is_file()), None)
        if path is None:
            known = ", ".join(path.stem for path in find(())) or "none"
            raise InvalidTable(f"There is no table {name!r}: neither a file, nor one of {known}. `flashgen table list` shows all.")
        found.append(path)
    return found


def origin(path: Path) -> str:
    """Whose table it is: user, shipped or file."""
    folders = {"user": paths.user_tables(), "shipped": paths.shipped_tables()}
    return next((name for name, folder in folders.items() if path.parent == folder), "file")


def shadowed(tables: Sequence[Table]) -> list[tuple[TableEntry, Path, Path]]:
    """Entries that another table's entry for the same device, key and shape goes before: (entry, its file, the file that serves)."""
    hidden = []
    for number, later in enumerate(tables):
        for entry in later.entries:
            for earlier in tables[:number]:
                other = earlier.find(entry.problem) if table.same_device(earlier.device, later.device) else None
                if other is None:
                    continue
                last = other.measurement.source == "predicted" and entry.measurement.source == "measured"
                hidden.append((other, earlier.path, later.path) if last else (entry, later.path, earlier.path))
    return hidden


def limits_of(record: DeviceRecord) -> DeviceLimits:
    """The limits of a table's device: those of a preset or the present device that is alike, else the nearest preset's."""
    for known in device.PRESETS.values():
        if table.same_device(device_record(known), record):
            return replace(known, name=record.name)
    if device.is_present() and table.same_device(device_record(device.present()), record):
        return device.present()
    like = min(device.PRESETS.values(), key=lambda known: (abs(known.sm - record.sm), abs(known.sm_count - record.sm_count)))
    return replace(like, **{name: getattr(record, name) for name in DeviceRecord.__struct_fields__}, source="table")


def serving(problems: Iterable[Problem], of: Table) -> list[TableEntry]:
    """The entries of one table that serve these problems on its own device, each once, in the table's order."""
    limits = limits_of(of.device)
    answers = [look_up(problem, limits, [of]) for problem in problems]
    served = {full_key(answer.found.entry.problem) for answer in answers if answer.found}
    return [entry for entry in of.entries if full_key(entry.problem) in served]


# Differences ----------------------------------------------------------------------------------------------------------


def diff(old: Table, new: Table) -> list[Changed]:
    """What happened to every problem, in the order of the new table; those that are gone come last."""
    before = {full_key(entry.problem): entry for entry in old.entries}
    changes = [_compared(before.pop(full_key(entry.problem), None), entry) for entry in new.entries]
    return changes + [Changed(Difference.GONE, entry, None) for entry in before.values()]


def _compared(old: TableEntry | None, new: TableEntry) -> Changed:
    if old is None:
        return Changed(Difference.NEW, None, new)
    if to_raw(old) == to_raw(new):
        return Changed(Difference.SAME, old, new, 1.0)
    words = _words(old, new)
    if old.measurement.source != new.measurement.source:
        return Changed(Difference.RECERTIFIED, old, new, None, f"{old.measurement.source} → {new.measurement.source}; {words}")
    ratio = new.measurement.median_us / old.measurement.median_us
    if clearly_below(new, old):
        return Changed(Difference.FASTER, old, new, ratio, words)
    if clearly_below(old, new):
        return Changed(Difference.SLOWER, old, new, ratio, words)
    kind = Difference.RECERTIFIED if old.variant == new.variant else Difference.LEVEL
    return Changed(kind, old, new, ratio, words)


def clearly_below(left: TableEntry, right: TableEntry) -> bool:
    """Whether the left median is lower by more than the spread (p90 - p10) of either."""
    one, other = left.measurement, right.measurement
    spread = max(one.p90_us - one.p10_us, other.p90_us - other.p10_us)
    return one.median_us < other.median_us - spread


def _words(old: TableEntry, new: TableEntry) -> str:
    parts = []
    if old.variant != new.variant:
        was, now = old.variant.as_dict(), new.variant.as_dict()
        changed = [f"{name} {int(was[name])} → {int(now[name])}" for name in now if name in was and was[name] != now[name]]
        same_family = old.variant.family == new.variant.family
        parts.append(" ".join(changed) if same_family else f"{old.variant.family} → {new.variant.family}")
    for name, was_, now_ in (
        ("text", bare(old.source_digest)[:12], bare(new.source_digest)[:12]),
        ("machine code", bare(old.cubin_digest)[:12], bare(new.cubin_digest)[:12]),
        ("NVRTC", old.provenance.nvrtc, new.provenance.nvrtc),
        ("driver", old.provenance.driver, new.provenance.driver),
        ("executor", str(old.certificate.executor), str(new.certificate.executor)),
    ):
        if was_ != now_:
            parts.append(f"{name} {was_ or 'none'} → {now_ or 'none'}")
    return ", ".join(parts) or "times only"


def diff_record(changes: Iterable[Changed]) -> list[dict[str, Any]]:
    """Differences for machines."""
    return [
        {
            "difference": str(each.difference),
            "problem": str(each.entry.problem),
            "old_us": each.old.measurement.median_us if each.old else None,
            "new_us": each.new.measurement.median_us if each.new else None,
            "ratio": None if each.ratio is None else round(each.ratio, 4),
            "words": each.words,
        }
        for each in changes
    ]


# Merging --------------------------------------------------------------------------------------------------------------


def merge(into: Path, sources: Sequence[Table], *, check: VariantCheck | None = None) -> tuple[Table, list[Conflict]]:
    """Put all entries of `sources` into the table at `into`, which is created when absent. Conflicts go by evidence (`stronger`).

    Every problem of every table is in the result. Raises InvalidTable when a source belongs to another device.
    """
    if not sources:
        raise InvalidTable("There is nothing to merge. Name at least one table after the one to merge into.")
    for each in sources[1:]:
        if not table.same_device(each.device, sources[0].device):
            raise InvalidTable(
                f"{each.path} belongs to {each.device.name}, {sources[0].path} to {sources[0].device.name}. Merge per device."
            )
    conflicts: list[Conflict] = []

    def together(present: tuple[TableEntry, ...]) -> list[TableEntry]:
        kept = {full_key(entry.problem): entry for entry in present}
        for entry in (entry for source in sources for entry in source.entries):
            key = full_key(entry.problem)
            if key in kept and to_raw(kept[key]) != to_raw(entry):
                conflict = stronger(kept[key], entry)
                conflicts.append(conflict)
                kept[key] = conflict.kept
            else:
                kept[key] = kept.get(key, entry)
        return list(kept.values())

    return table.update(into, sources[0].device, together, check=check), conflicts


def stronger(present: TableEntry, other: TableEntry) -> Conflict:
    """The entry with more evidence. The rules, in order; the first that tells them apart decides, and the present one stays on a tie.

    Measured over predicted; certified on a device over emulated; proved with the newer NVRTC; the later case suite's date of proof when
    the suites differ; the lower median, when lower by more than the spread.
    """
    rules: tuple[tuple[str, Callable[[TableEntry], Any]], ...] = (
        ("measured over predicted", lambda entry: entry.measurement.source == "measured"),
        ("certified on a device", lambda entry: entry.certificate.executor is ExecutorName.DEVICE),
        ("proved with the newer NVRTC", lambda entry: _version(entry.provenance.nvrtc)),
    )
    for rule, rank in rules:
        if rank(present) != rank(other):
            kept, dropped = (present, other) if rank(present) > rank(other) else (other, present)
            return Conflict(kept, dropped, rule)
    if present.certificate.suite_digest != other.certificate.suite_digest and present.provenance.created != other.provenance.created:
        kept, dropped = sorted((present, other), key=lambda entry: entry.provenance.created, reverse=True)
        return Conflict(kept, dropped, "proved later, by another edition of the suite")
    if clearly_below(other, present):
        return Conflict(other, present, "faster by more than the spread")
    if clearly_below(present, other):
        return Conflict(present, other, "faster by more than the spread")
    return Conflict(present, other, "no difference beyond the spread: the present entry stays")


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".") if part.isdigit())
