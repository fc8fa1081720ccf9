"""Tuned tables: one YAML file per device, read strictly or leniently, written atomically under a lock, looked up by one rule."""

from __future__ import annotations

import os
import re
import secrets
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashgen import paths
from flashgen.errors import InvalidTable, NotWritable
from flashgen.launch import log2_bucket
from flashgen.model import DeviceLimits, MaskKind, Problem, TableEntry, Variant
from flashgen.table_schema import (
    SCHEMA,
    DeviceRecord,
    EntryRecord,
    IntegrityRecord,
    canonical_digest,
    convert,
    device_record,
    entries_digest,
    to_entry,
    to_raw,
)
from flashgen.yaml_io import Path as NodePath
from flashgen.yaml_io import dump, load_strict

if TYPE_CHECKING:
    from collections.abc import Iterator

LOCK_SECONDS = 120.0
SAME_MEMORY = 0.1  # relative difference of DRAM bandwidth within which two devices count as alike
MAX_BYTES = 16 * 2**20  # of one file; an entry takes about 2 kB
MAX_DISTANCE = 2.0  # log2 steps per axis: an entry serves lengths up to four times shorter or longer
CLEARLY = 0.89  # of a predicted time: where good variants of a recorded study are predicted so far apart, nine in ten pairs are in order

RESEAL = "Restore it, or run `flashgen table check --reseal` after an edit by hand."

VariantCheck = Callable[[TableEntry], str | None]
"""Why an entry's variant is not one of its family's space, or None. The space lies beside this module, so the caller brings it."""


@dataclass(frozen=True, slots=True)
class Table:
    """The entries of one file. `skipped` says, per refused entry or fault, what was wrong (lenient reading only)."""

    path: Path
    device: DeviceRecord
    entries: tuple[TableEntry, ...]
    skipped: tuple[str, ...] = ()

    def find(self, problem: Problem) -> TableEntry | None:
        """The entry with exactly this key and shape."""
        wanted = full_key(problem)
        return next((entry for entry in self.entries if full_key(entry.problem) == wanted), None)


@dataclass(frozen=True, slots=True)
class Change:
    """What a merge did to one entry."""

    path: Path
    old: TableEntry | None
    new: TableEntry
    written: bool
    reason: str = ""

    def describe(self) -> str:
        """The difference in words, one line per field that changed."""
        head = f"{self.new.problem} in {self.path}"
        if not self.written:
            return f"kept: {head}\n  {self.reason}"
        lines = [f"{'replaced' if self.old else 'added'}: {head}"]
        before = _facts(self.old) if self.old else {}
        for name, value in _facts(self.new).items():
            if name not in before:
                lines.append(f"  {name}: {value}")
            elif before[name] != value:
                lines.append(f"  {name}: {before[name]} → {value}")
        lines += [f"  {name}: {value} → (gone)" for name, value in before.items() if name not in _facts(self.new)]
        return "\n".join(lines if len(lines) > 1 else [*lines, "  nothing but its date"])


def full_key(problem: Problem) -> tuple[object, ...]:
    """Hard key and exact shape: two entries of one table never share it. Batch and heads count by their product and ratio."""
    window = (problem.mask.left, problem.mask.right) if problem.mask.kind is MaskKind.WINDOW else None
    return (problem.klass(), problem.seqlen_q, problem.seqlen_kv, problem.batch_heads, problem.gqa_group, window)


def read(path: Path, *, strict: bool, check: VariantCheck | None = None) -> Table:
    """The table in `path`.

    Strict: any fault raises InvalidTable with file and line. Lenient: a bad entry is skipped; a file that is unreadable as a whole, newer
    than this reader, or not a table raises InvalidTable all the same (`load_all` turns that into a warning).
    """
    return _parse(path, strict=strict, check=check, sealed=True)


def parse(content: bytes, origin: Path, *, check: VariantCheck | None = None) -> Table:
    """A table that is in memory already, read strictly. `origin` names it in messages."""
    return _parsed(_decoded(content, origin), origin, strict=True, check=check, sealed=True)


def load_all(directories: Sequence[Path] | None = None, check: VariantCheck | None = None) -> tuple[Table, ...]:
    """All tables, leniently, user directory first. What had to be skipped is reported in one warning per file."""
    tables = []
    for directory in (paths.user_tables(), paths.shipped_tables()) if directories is None else directories:
        for path in sorted(directory.glob("*.yaml")) if directory.is_dir() else ():
            try:
                table = read(path, strict=False, check=check)
            except InvalidTable as problem:
                warnings.warn(f"Tuned table ignored: {problem}", stacklevel=2)
                continue
            if table.skipped:
                warnings.warn(f"{path}: {len(table.skipped)} fault(s), the rest is used. First: {table.skipped[0]}", stacklevel=2)
            tables.append(table)
    return tuple(tables)


def merge(path: Path, device: DeviceLimits, entry: TableEntry, *, check: VariantCheck | None = None) -> Change:
    """Put `entry` into the table at `path` (created when absent), keeping all others.

    A measured entry is never replaced by a predicted one. Raises InvalidTable when the present file has a fault, and NotWritable when
    the file system refuses.
    """
    return merge_all(path, device, [entry], check=check)[0]


def merge_all(path: Path, device: DeviceLimits, entries: Sequence[TableEntry], *, check: VariantCheck | None = None) -> list[Change]:
    """`merge` for several entries at once. Raises as `merge` does."""
    changes: list[Change] = []

    def put(present: tuple[TableEntry, ...]) -> Iterable[TableEntry]:
        kept = {full_key(each.problem): each for each in present}
        for entry in entries:
            changes.append(change(path, kept.get(full_key(entry.problem)), entry))
            if changes[-1].written:
                kept[full_key(entry.problem)] = entry
        return list(kept.values())

    update(path, device_record(device), put, check=check)
    return changes


def change(path: Path, old: TableEntry | None, new: TableEntry) -> Change:
    """What putting `new` in the place of `old` does: a measured entry gives way to no predicted one."""
    if old and old.measurement.source == "measured" and new.measurement.source == "predicted":
        return Change(path, old, new, False, "a measured entry is never replaced by a predicted one")
    return Change(path, old, new, True)


Rewrite = Callable[[tuple[TableEntry, ...]], Iterable[TableEntry]]


def update(path: Path, device: DeviceRecord, rewrite: Rewrite, *, check: VariantCheck | None = None) -> Table:
    """Replace the entries of the table at `path` (created when absent) by `rewrite(entries)`, under the lock; the new table.

    Raises InvalidTable when the present file has a fault or belongs to another device, and NotWritable when the file system refuses.
    """
    with _locked(path):
        present = read(path, strict=True, check=check) if path.exists() else Table(path, device, ())
        if not same_device(present.device, device):
            raise InvalidTable(f"{path} belongs to {present.device.name}, not to {device.name}. Choose another file with --table.")
        entries = tuple(rewrite(present.entries))
        if entries != present.entries or not path.exists():
            _replace(path, render_table(present.device, entries))
        return Table(path, present.device, entries)


def reseal(path: Path, *, check: VariantCheck | None = None) -> Table:
    """Write the integrity digest anew after an edit by hand. Every other fault raises InvalidTable as in a strict reading."""
    with _locked(path):
        table = _parse(path, strict=True, check=check, sealed=False)
        _replace(path, render_table(table.device, table.entries))
        return table


def render_table(device: DeviceRecord, entries: Iterable[TableEntry]) -> str:
    """The text of a table file: sorted entries, digest over them. The only writer of the format."""
    raw = [to_raw(entry) for entry in sorted(entries, key=lambda entry: _order(full_key(entry.problem)))]
    owner = {name: getattr(device, name) for name in DeviceRecord.__struct_fields__}
    return dump(
        {
            "schema": SCHEMA,
            "integrity": {"entries": len(raw), "digest": entries_digest(raw), "device": canonical_digest(owner)},
            "device": owner,
            "entries": raw,
        }
    )


def table_path(device: DeviceLimits, directory: Path | None = None) -> Path:
    """The file of a device in `directory` (default: the user's tables): the one with equal resources, else a new name."""
    directory = paths.user_tables() if directory is None else directory
    slug = re.sub(r"[^a-z0-9]+", "-", device.name.lower()).strip("-") or f"sm-{device.sm}"
    wanted = device_record(device)
    for path in sorted(directory.glob("*.yaml")) if directory.is_dir() else ():
        with suppress(InvalidTable):
            if same_device(_read_device(path), wanted):
                return path
    if (directory / f"{slug}.yaml").exists():
        slug += f"-{device.sm_count}sm-{round(device.dram_gb_per_s)}gbps"
    return directory / f"{slug}.yaml"


def same_device(left: DeviceRecord, right: DeviceRecord) -> bool:
    """Whether two devices offer the same: all limits equal and DRAM bandwidth alike. Names do not count."""
    limits = ("sm", "sm_count", "shared_bytes_per_cta", "shared_bytes_per_sm", "registers_per_sm")
    alike = abs(left.dram_gb_per_s - right.dram_gb_per_s) <= SAME_MEMORY * max(left.dram_gb_per_s, right.dram_gb_per_s)
    return alike and all(getattr(left, name) == getattr(right, name) for name in limits)


def shape_bucket(problem: Problem) -> tuple[int, int, int, int]:
    """Nearest power of two, as exponent, of seqlen_q, seqlen_kv, batch_heads and gqa_group: the unit of tuning and of look-up."""
    return tuple(int(value + 0.5) for value in _coordinates(problem))  # type: ignore[return-value]


def distance(tuned: Problem, asked: Problem) -> float | None:
    """Sum of |log2 ratio| over the four shape axes; None when one axis differs by more than a factor of four."""
    return None if max(_steps(tuned, asked)) > MAX_DISTANCE else _apart(tuned, asked)


def _steps(tuned: Problem, asked: Problem) -> list[float]:
    return [abs(left - right) for left, right in zip(_coordinates(tuned), _coordinates(asked), strict=True)]


def _apart(tuned: Problem, asked: Problem) -> float:
    return sum(_steps(tuned, asked))


@dataclass(frozen=True, slots=True)
class Found:
    """An entry that serves a problem. `sister` means another device of the same SM version: re-verify before use."""

    entry: TableEntry
    path: Path
    distance: float
    sister: bool


@dataclass(frozen=True, slots=True)
class Lookup:
    """The answer of the look-up rule and how it came about, one line per step."""

    found: Found | None
    steps: tuple[str, ...]

    def explain(self) -> str:
        """The steps as numbered lines."""
        return "\n".join(f"{number}. {step}" for number, step in enumerate(self.steps, 1))


def lookup(
    problem: Problem,
    device: DeviceLimits,
    tables: Sequence[Table],
    refuse: Callable[[TableEntry], str | None],
    expect: Callable[[TableEntry], float | None] = lambda _: None,
) -> Lookup:
    """The entry for `problem` on `device`.

    `refuse` says why a variant cannot compute `problem` on `device` (its static constraints), or None. Tables come in order of
    precedence: of two entries with the same key and shape the earlier table's counts. A measured entry goes before a predicted one, one
    with query groups before one without where the problem has some, and the reverse; then the same bucket before another, the least
    distance, the smaller tile, the earlier table. `expect` predicts the µs of an entry's variant, or None: where the nearest entry was
    tuned for another shape, one of the same key gives way to one that is expected to take clearly less.
    """
    wanted = device_record(device)
    steps: list[str] = []
    groups = (
        (False, f"{device.name}", [table for table in tables if same_device(table.device, wanted)]),
        (True, f"other devices of sm_{device.sm}", [t for t in tables if t.device.sm == device.sm and not same_device(t.device, wanted)]),
    )
    for sister, name, group in groups:
        equal = [(entry, table.path) for table in group for entry in table.entries if entry.problem.klass() == problem.klass()]
        total = sum(len(table.entries) for table in group)
        steps.append(f"{name}: {len(group)} table(s), {total} entries, {len(equal)} with the key of {problem}")
        for found in _ranked(equal, problem, sister, steps):
            reason = refuse(found.entry)
            if reason is None:
                found = _preferred(found, equal, problem, refuse, expect, steps)
                steps.append(
                    f"serves: {found.entry.variant} tuned for {found.entry.problem}, distance {found.distance:.2f}, from {found.path}"
                )
                return Lookup(found, tuple(steps))
            steps.append(f"passed over: {found.entry.variant} tuned for {found.entry.problem}: {reason}")
    steps.append("no entry serves; the certified fallback of the space does")
    return Lookup(None, tuple(steps))


def _ranked(candidates: list[tuple[TableEntry, Path]], problem: Problem, sister: bool, steps: list[str]) -> list[Found]:
    near = []
    for precedence, (entry, path) in enumerate(_first_of_each(candidates)):
        apart = distance(entry.problem, problem)
        if apart is None:
            steps.append(f"too far: tuned for {entry.problem}, more than a factor of four on one axis")
            continue
        rank = (
            _evidence(entry, problem),
            shape_bucket(entry.problem) != shape_bucket(problem),
            round(apart, 9),
            _window_distance(entry.problem, problem),
            _tile(entry.variant),
            precedence,
        )
        near.append((rank, Found(entry, path, apart, sister)))
    return [found for _, found in sorted(near, key=lambda pair: pair[0])]


def _evidence(entry: TableEntry, problem: Problem) -> tuple[bool, bool]:
    """The less, the more an entry says about a problem: one that was measured, and with query groups where the problem has some."""
    return entry.measurement.source != "measured", (entry.problem.gqa_group > 1) != (problem.gqa_group > 1)


def _preferred(
    nearest: Found,
    candidates: list[tuple[TableEntry, Path]],
    problem: Problem,
    refuse: Callable[[TableEntry], str | None],
    expect: Callable[[TableEntry], float | None],
    steps: list[str],
) -> Found:
    """The nearest, or what is expected to be clearly faster: wave and tile counts of a length between others can ask for another tile."""
    expected = expect(nearest.entry) if full_key(nearest.entry.problem) != full_key(problem) else None
    if expected is None:
        return nearest
    rated = [
        (other, number, entry, path)
        for number, (entry, path) in enumerate(_first_of_each(candidates))
        if _evidence(entry, problem) <= _evidence(nearest.entry, problem) and (other := expect(entry)) is not None
    ]
    for other, _, entry, path in sorted(rated, key=lambda each: each[:2]):
        if other > expected * CLEARLY:
            break
        if refuse(entry) is None:
            steps.append(f"passed over: tuned for {nearest.entry.problem}, predicted to take {expected:.1f} µs, the next {other:.1f} µs")
            return Found(entry, path, _apart(entry.problem, problem), nearest.sister)
    return nearest


def _first_of_each(candidates: list[tuple[TableEntry, Path]]) -> list[tuple[TableEntry, Path]]:
    """One entry per key and shape: the earliest table's, but a measured one before any predicted one."""
    chosen: dict[tuple[object, ...], tuple[TableEntry, Path]] = {}
    for entry, path in sorted(candidates, key=lambda candidate: candidate[0].measurement.source != "measured"):
        chosen.setdefault(full_key(entry.problem), (entry, path))
    return list(chosen.values())


def _window_distance(tuned: Problem, asked: Problem) -> float:
    def reach(problem: Problem) -> float:
        left, right = problem.mask.left, problem.mask.right
        return log2_bucket((problem.seqlen_kv if left < 0 else left) + (problem.seqlen_kv if right < 0 else right) + 1)

    return round(abs(reach(tuned) - reach(asked)), 9) if asked.mask.kind is MaskKind.WINDOW else 0.0


def _tile(variant: Variant) -> int:
    params = variant.as_dict()
    return params.get("block_q", 1) * params.get("block_kv", 1)


def _coordinates(problem: Problem) -> tuple[float, float, float, float]:
    return (
        log2_bucket(problem.seqlen_q), log2_bucket(problem.seqlen_kv),
        log2_bucket(problem.batch_heads), log2_bucket(problem.gqa_group),
    )  # fmt: skip


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as problem:
        raise InvalidTable(f"{path} cannot be read: {problem.strerror}. Check the path and its permissions.") from problem
    return _decoded(content, path)


def _decoded(content: bytes, path: Path) -> str:
    if len(content) > MAX_BYTES:
        raise InvalidTable(f"{path} is larger than {MAX_BYTES} bytes, the most that is read. Split the table or remove the file.")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as problem:
        raise InvalidTable(f"{path}: not UTF-8 text at byte {problem.start}. Restore the file from its history or remove it.") from None


def _parse(path: Path, *, strict: bool, check: VariantCheck | None, sealed: bool) -> Table:
    return _parsed(_text(path), path, strict=strict, check=check, sealed=sealed)


def _parsed(text: str, path: Path, *, strict: bool, check: VariantCheck | None, sealed: bool) -> Table:
    lines: dict[NodePath, int] = {}
    document = load_strict(text, str(path), error=InvalidTable, lines=lines)
    _check_schema(document, path)
    faults: list[str] = []
    device = convert(document["device"], DeviceRecord, f"{path}:{lines[('device',)]}: device")
    raw_entries = document["entries"]
    if not isinstance(raw_entries, list):
        raise InvalidTable(f"{path}:{lines[('entries',)]}: `entries` must be a list. Restore the file from its history or remove it.")
    if sealed:
        _collect(lambda: _check_integrity(document, raw_entries, path), faults, strict)
    entries: dict[tuple[object, ...], tuple[TableEntry, int]] = {}
    for number, raw in enumerate(raw_entries):
        line = lines[("entries", number)]
        _collect(partial(_add, raw, path, line, check, entries), faults, strict)
    return Table(path, device, tuple(entry for entry, _ in entries.values()), tuple(faults))


def _check_schema(document: Any, path: Path) -> None:
    found = document.get("schema") if isinstance(document, dict) else None
    if found != SCHEMA:
        what = "names no schema" if found is None else f"has schema {found!r}"
        raise InvalidTable(
            f"{path} {what}; this version reads {SCHEMA!r} only. Upgrade flashgen if the table is newer, or remove the file."
        )
    fields = {"schema", "integrity", "device", "entries"}
    if set(document) != fields:
        unknown, missing = sorted(set(document) - fields), sorted(fields - set(document))
        raise InvalidTable(f"{path}: unknown fields {unknown}, missing fields {missing}. Restore the file from its history or remove it.")


def _check_integrity(document: Any, entries: list[Any], path: Path) -> None:
    sealed = convert(document["integrity"], IntegrityRecord, f"{path}: integrity")
    if sealed.device is not None and sealed.device != canonical_digest(document["device"]):
        raise InvalidTable(f"{path}: the device's record is not the sealed one: edited. {RESEAL}")
    if sealed.entries != len(entries) or sealed.digest != entries_digest(entries):
        raise InvalidTable(
            f"{path}: {len(entries)} entries with digest {entries_digest(entries)[:19]}…, but sealed as {sealed.entries} with "
            f"{sealed.digest[:19]}…: cut or edited. {RESEAL}"
        )


def _collect(step: Callable[[], None], faults: list[str], strict: bool) -> None:
    try:
        step()
    except InvalidTable as problem:
        if strict:
            raise
        faults.append(str(problem))


def _add(raw: Any, path: Path, line: int, check: VariantCheck | None, entries: dict[tuple[object, ...], tuple[TableEntry, int]]) -> None:
    where = f"{path}:{line}: entry"
    entry = to_entry(convert(raw, EntryRecord, where), where)
    reason = check(entry) if check else None
    if reason:
        raise InvalidTable(f"{where}: {entry.variant}: {reason}. Correct the entry or remove it.")
    key = full_key(entry.problem)
    if key in entries:
        raise InvalidTable(f"{where} for {entry.problem} again (first on line {entries[key][1]}). Keep one of the two.")
    entries[key] = (entry, line)


def _read_device(path: Path) -> DeviceRecord:
    document = load_strict(_text(path), str(path), error=InvalidTable)
    _check_schema(document, path)
    record: DeviceRecord = convert(document["device"], DeviceRecord, f"{path}: device")
    return record


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Exclude other writers of `path`. The lock is the kernel's, so it ends with its holder, however that dies."""
    from filelock import FileLock, Timeout

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(str(path) + ".lock", timeout=LOCK_SECONDS, mode=0o666)
        lock.acquire()
    except Timeout:
        raise NotWritable(f"{path} is being written by another process for more than {LOCK_SECONDS:.0f} s. Try again later.") from None
    except OSError as problem:
        raise NotWritable(f"{path} cannot be written: {problem}. Choose another file with --table, or set FLASHGEN_HOME.") from problem
    try:
        yield
    finally:
        lock.release()


def _replace(path: Path, text: str) -> None:
    """Write a whole new file beside the old one and swap them, so that a reader sees either. Nothing is left behind on failure."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)  # minus the umask: a shared directory stays shared
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as problem:
        with suppress(OSError):
            temporary.unlink()
        raise NotWritable(
            f"{path} cannot be written: {problem}. Free space, choose another file with --table, or set FLASHGEN_HOME."
        ) from problem


def _order(key: tuple[object, ...]) -> str:
    """Sort order of entries in a file: by text, with numbers padded."""
    return re.sub(r"\d+", lambda number: number[0].zfill(10), repr(key))


def _facts(entry: TableEntry) -> dict[str, str]:
    taken, certificate = entry.measurement, entry.certificate
    speed = f"{taken.median_us:.1f} µs, {taken.tflops:.1f} TFLOP/s ({taken.source}, spread {taken.spread:.1%})"
    return {
        "family": entry.variant.family,
        **{name: str(int(value)) for name, value in entry.variant.params},
        "time": speed,
        "certificate": f"{certificate.suite}, {certificate.cases} cases, {certificate.executor}",
        "source": entry.source_digest.removeprefix("sha256:")[:12],
    }
