"""Studies on disk: every trial of a search as one line of JSON, written before the next trial begins; read back to resume or to replay.

A study belongs to one problem, device, executor, toolchain and set of spaces. Lines are appended and synced, so a process that dies loses
at most the trial it was running; a torn last line is cut off by the next writer.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from flashgen import paths
from flashgen.errors import HomeNotWritable, NotWritable, StudyMismatch
from flashgen.model import CompileReport, DeviceLimits, ExecutorName, Measurement, Outcome, Problem, Trial, Variant

SCHEMA = "flashgen.study/1"
MAX_STARTS = 2  # a variant that never came back from so many starts is not started again


class VariantRecord(msgspec.Struct, frozen=True):
    """A variant with its booleans kept."""

    family: str
    params: dict[str, bool | int]

    @classmethod
    def of(cls, variant: Variant) -> VariantRecord:
        """The record of a variant."""
        return cls(variant.family, dict(variant.params))

    def variant(self) -> Variant:
        """The variant of a record."""
        return Variant.of(self.family, self.params)


class Header(msgspec.Struct, frozen=True, tag="study", kw_only=True):
    """First line: what the trials belong to. `spaces` maps family to space digest."""

    schema: str = SCHEMA
    problem: Problem
    device: DeviceLimits
    executor: ExecutorName
    spaces: dict[str, str]
    nvrtc: str
    flashgen: str

    def digest(self) -> str:
        """Identity of the study: everything above but the project's version and the device's name."""
        device = asdict(self.device) | {"name": "", "source": ""}
        key = [SCHEMA, repr(self.problem), sorted(device.items()), str(self.executor), sorted(self.spaces.items()), self.nvrtc]
        return hashlib.sha256(repr(key).encode()).hexdigest()


class Started(msgspec.Struct, frozen=True, tag="start"):
    """A trial that is about to run."""

    variant: VariantRecord


class Ended(msgspec.Struct, frozen=True, tag="trial", kw_only=True):
    """A finished trial. `seconds` is the wall time it took, compilation ahead of it not counted."""

    variant: VariantRecord
    outcome: Outcome
    detail: str = ""
    measurement: Measurement | None = None
    report: CompileReport | None = None
    source_digest: str = ""
    seconds: float = 0.0

    @classmethod
    def of(cls, trial: Trial, seconds: float) -> Ended:
        """The record of a trial."""
        return cls(
            variant=VariantRecord.of(trial.variant), outcome=trial.outcome, detail=trial.detail, measurement=trial.measurement,
            report=trial.report, source_digest=trial.source_digest, seconds=round(seconds, 4),
        )  # fmt: skip

    def trial(self) -> Trial:
        """The trial of a record."""
        return Trial(self.variant.variant(), self.outcome, self.detail, self.measurement, self.report, self.source_digest)


_LINE: msgspec.json.Decoder[Header | Started | Ended] = msgspec.json.Decoder(Header | Started | Ended)


@dataclass(frozen=True, slots=True)
class RecordedStudy:
    """A study as read: finished trials in order, their seconds, and how often each unfinished one was started."""

    header: Header
    trials: tuple[Trial, ...]
    seconds: tuple[float, ...]
    unfinished: Mapping[Variant, int]
    whole_bytes: int  # length of the file up to the last whole line


def read_study(path: Path) -> RecordedStudy:
    """The study in `path`. A torn last line is left out. Raises StudyMismatch for anything else that is no study."""
    try:
        content = path.read_bytes()
    except OSError as problem:
        raise StudyMismatch(f"{path} cannot be read: {problem.strerror}. Check the path.") from problem
    whole = content.rfind(b"\n") + 1
    records = []
    for number, line in enumerate(content[:whole].splitlines(), 1):
        try:
            records.append(_LINE.decode(line))
        except (msgspec.MsgspecError, ValueError) as problem:
            raise StudyMismatch(f"{path}:{number}: not a line of a {SCHEMA} study: {problem}. Run with --fresh to start anew.") from None
    if not records or not isinstance(records[0], Header) or records[0].schema != SCHEMA:
        raise StudyMismatch(f"{path} does not begin with the header of a {SCHEMA} study. Run with --fresh to start anew.")
    return _collected(records[0], records[1:], whole)


def _collected(header: Header, records: Iterable[Header | Started | Ended], whole: int) -> RecordedStudy:
    ended: dict[Variant, tuple[Trial, float]] = {}
    started: Counter[Variant] = Counter()
    for record in records:
        if isinstance(record, Started):
            started[record.variant.variant()] += 1
        elif isinstance(record, Ended):
            trial = record.trial()
            ended[trial.variant] = (trial, record.seconds)
            del started[trial.variant]
    trials, seconds = tuple(trial for trial, _ in ended.values()), tuple(took for _, took in ended.values())
    return RecordedStudy(header, trials, seconds, dict(started), whole)


class Journal:
    """The study of a running search: what is known already, and the file that new trials go to. One writer at a time."""

    def __init__(self, header: Header, path: Path | None, known: RecordedStudy | None = None) -> None:
        """Use `Journal.open`; this takes a path whose header is written already, or None to keep everything in memory."""
        self.header = header
        self.path = path
        self.trials: dict[Variant, Trial] = {trial.variant: trial for trial in known.trials} if known else {}
        self._starts: Counter[Variant] = Counter(known.unfinished if known else {})
        self._handle = -1
        self._lock: Any = None
        self._started_at = time.monotonic()

    @classmethod
    def open(cls, header: Header, *, fresh: bool = False, directory: Path | None = None) -> Journal:
        """The study's journal, resumed, or begun anew when `fresh`, absent or unreadable (the old file is kept as `.previous`).

        Raises NotWritable when another process runs the same search. Warns HomeNotWritable and keeps trials in memory when it cannot write.
        """
        directory = paths.study_store() if directory is None else directory
        path = directory / f"{study_name(header)}.jsonl"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            lock = _lock(path)
        except OSError as problem:
            if isinstance(problem, NotWritable):
                raise
            _warn_memory(directory, problem)
            return cls(header, None)
        known = None if fresh else _resumable(path, header)
        journal = cls(header, path, known)
        journal._lock = lock
        try:
            journal._begin_file(known)
        except OSError as problem:
            journal._give_up(problem)
        return journal

    def start(self, variant: Variant) -> None:
        """Note that a trial begins."""
        self._started_at = time.monotonic()
        self._starts[variant] += 1
        self._write(Started(VariantRecord.of(variant)), sync=False)

    def end(self, trial: Trial) -> None:
        """Note a finished trial; on disk when this returns."""
        self.trials[trial.variant] = trial
        del self._starts[trial.variant]
        self._write(Ended.of(trial, time.monotonic() - self._started_at), sync=True)

    def lost(self, variant: Variant) -> bool:
        """Whether the search ended without a result every time this variant ran, often enough to leave it alone."""
        return self._starts[variant] >= MAX_STARTS

    def forget(self, variant: Variant) -> None:
        """Drop a known trial whose source has changed; it will run again."""
        self.trials.pop(variant, None)

    def close(self) -> None:
        """Close the file and let other searches in."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _begin_file(self, known: RecordedStudy | None) -> None:
        assert self.path is not None
        if known is None and self.path.exists():
            os.replace(self.path, self.path.with_suffix(".previous"))
        self._handle = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        if known is None:
            self._write(self.header, sync=True)
        else:
            os.ftruncate(self._handle, known.whole_bytes)

    def _write(self, record: Header | Started | Ended, *, sync: bool) -> None:
        if self._handle < 0:
            return
        try:
            line = msgspec.json.encode(record) + b"\n"
            while line:
                line = line[os.write(self._handle, line) :]
            if sync:
                os.fsync(self._handle)
        except OSError as problem:
            self._give_up(problem)

    def _give_up(self, problem: OSError) -> None:
        assert self.path is not None
        _warn_memory(self.path.parent, problem)
        self.close()
        self.path = None


def study_name(header: Header) -> str:
    """File name of a study, readable first, unique by its digest."""
    return f"{_readable(header.problem, header.device.name, header.executor)}-{header.digest()[:16]}"


def _readable(problem: Problem, device: str, executor: ExecutorName) -> str:
    return re.sub(r"[^a-z0-9]+", "-", f"{problem} {device} {executor}".lower()).strip("-")[:120]


def ranked(problem: Problem, device: str, executor: ExecutorName, spaces: Mapping[str, str], most: int) -> tuple[Variant, ...]:
    """The fastest variants of journalled searches for a problem on a device of that name, best first; `spaces`: digests by family.

    Journals of other spaces, and files that are no journals, are passed over.
    """
    timed: dict[Variant, float] = {}
    for path in sorted(paths.study_store().glob(f"{_readable(problem, device, executor)}-*.jsonl")):
        with suppress(StudyMismatch):
            found = read_study(path)
            if found.header.problem == problem and found.header.spaces.items() <= spaces.items():
                good = (each for each in found.trials if each.outcome is Outcome.OK)
                timed |= {each.variant: each.measurement.median_us for each in good if each.measurement}
    return tuple(sorted(timed, key=lambda variant: (timed[variant], str(variant)))[:most])


def _resumable(path: Path, header: Header) -> RecordedStudy | None:
    if not path.exists():
        return None
    try:
        known = read_study(path)
    except StudyMismatch as problem:
        warnings.warn(f"The study is begun anew, the old file is kept as .previous: {problem}", stacklevel=3)
        return None
    return known if known.header.digest() == header.digest() else None


def _lock(path: Path) -> Any:
    from filelock import FileLock, Timeout

    lock = FileLock(str(path) + ".lock", timeout=0, mode=0o666)
    try:
        lock.acquire()
    except Timeout:
        raise NotWritable(
            f"Another process searches the same problem on the same device ({path}). Wait for it, or stop it and start again."
        ) from None
    return lock


def _warn_memory(directory: Path, problem: OSError) -> None:
    warnings.warn(
        f"{directory} cannot be written ({problem}); this search cannot be resumed. "
        f"Set {paths.ENVIRONMENT_VARIABLE} to a writable directory.",
        HomeNotWritable,
        stacklevel=4,
    )
