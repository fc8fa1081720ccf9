"""Which problems are asked for: an opt-in log of them, and how well tables cover such a log.

The log is JSON lines, one problem each, counted while it is read. Nothing is ever recorded unless `record` was called.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from flashgen.errors import FlashgenError, InvalidProblem, NotWritable
from flashgen.model import Alignment, DeviceLimits, DType, Mask, MaskKind, Op, Problem

if TYPE_CHECKING:  # recording, which a dispatcher does, needs neither search nor tables
    from flashgen.table import Found, Table

MAX_LINE_BYTES = 4096
MAX_PROBLEMS = 100_000

_Size = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
_One = Annotated[int, msgspec.Meta(ge=1, lt=2**31)]


class _Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One line of a log."""

    dtype: DType
    head_dim: _One
    head_dim_v: _One
    batch: _Size
    heads_q: _One
    heads_kv: _One
    seqlen_q: _Size
    seqlen_kv: _Size
    mask: MaskKind = MaskKind.NONE
    alignment: Alignment = Alignment.BOTTOM_RIGHT
    left: int = -1
    right: int = -1
    op: Op = Op.FORWARD
    deterministic: bool = False
    count: _One = 1


def line_of(problem: Problem, count: int = 1) -> str:
    """A problem as one line of a log, without the line's end."""
    mask = problem.mask
    return msgspec.json.encode(
        _Line(
            problem.dtype, problem.head_dim, problem.head_dim_v, problem.batch, problem.heads_q, problem.heads_kv, problem.seqlen_q,
            problem.seqlen_kv, mask.kind, mask.alignment, mask.left, mask.right, problem.op, problem.deterministic, count,
        )
    ).decode()  # fmt: skip


def read(path: Path) -> Counter[Problem]:
    """Problems of a log with their counts. Raises InvalidProblem with file, line and reason."""
    found: Counter[Problem] = Counter()
    try:
        with path.open("rb") as file:
            number = 0
            while line := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                if line.strip():
                    problem, count = _parsed(line, f"{path}:{number}")
                    found[problem] += count
                if len(found) > MAX_PROBLEMS:
                    raise InvalidProblem(f"{path}:{number}: more than {MAX_PROBLEMS} different problems. Split the log.")
    except OSError as problem_:
        raise InvalidProblem(f"{path} cannot be read: {problem_.strerror}. Check the path and its permissions.") from problem_
    return found


def _parsed(line: bytes, where: str) -> tuple[Problem, int]:
    if len(line) > MAX_LINE_BYTES:
        raise InvalidProblem(f"{where}: a line of more than {MAX_LINE_BYTES} bytes is no problem. See `flashgen table coverage --help`.")
    try:
        record = msgspec.json.decode(line, type=_Line)
        mask = Mask(record.mask, record.alignment, record.left, record.right)
        problem = Problem(
            record.dtype, record.head_dim, record.head_dim_v, record.batch, record.heads_q, record.heads_kv, record.seqlen_q,
            record.seqlen_kv, mask, record.op, record.deterministic,
        )  # fmt: skip
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, InvalidProblem) as refused:
        raise InvalidProblem(f"{where}: {refused} Correct or remove the line.") from None
    return problem, record.count


# Recording ------------------------------------------------------------------------------------------------------------


class Recorder:
    """Counts problems in memory, and writes each once when closed. Safe for threads."""

    def __init__(self, path: Path) -> None:
        """For the log `path`, to which is appended."""
        self.path = path
        self.seen: Counter[Problem] = Counter()
        self._lock = threading.Lock()

    def note(self, problem: Problem) -> None:
        """Count one call."""
        with self._lock:
            self.seen[problem] += 1

    def write(self) -> None:
        """Append what was counted. Raises NotWritable."""
        with self._lock:
            lines, self.seen = [line_of(problem, count) for problem, count in self.seen.items()], Counter()
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write("".join(f"{line}\n" for line in lines))
        except OSError as problem_:
            raise NotWritable(f"{self.path} cannot be written: {problem_}. Choose another log file.") from problem_


_recorder: Recorder | None = None


def note(problem: Problem) -> None:
    """What a dispatcher calls for every request. Costs nothing while nothing records."""
    recorder = _recorder
    if recorder is not None:
        recorder.note(problem)


@contextmanager
def record(path: str | Path) -> Iterator[Recorder]:
    """Record the problems that this process asks for while the block runs, and append them to the log at `path`."""
    global _recorder
    if _recorder is not None:
        raise InvalidProblem(f"Problems are being recorded already, to {_recorder.path}. End that block first.")
    _recorder = recorder = Recorder(Path(path))
    try:
        yield recorder
    finally:
        _recorder = None
        recorder.write()


# Coverage -------------------------------------------------------------------------------------------------------------


class Cover(StrEnum):
    """How a problem is served."""

    EXACT = "exact"
    NEAR = "near"
    FALLBACK = "fallback"
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True)
class Covered:
    """One problem of a log: how often, how it is served and by what; `why` is the look-up's last word."""

    problem: Problem
    count: int
    cover: Cover
    found: Found | None
    why: str


def coverage(problems: Mapping[Problem, int], device: DeviceLimits, tables: Sequence[Table]) -> list[Covered]:
    """How tables serve a log on a device, most frequent problems first."""
    return [
        _covered(problem, count, device, tables) for problem, count in sorted(problems.items(), key=lambda each: (-each[1], str(each[0])))
    ]


def _covered(problem: Problem, count: int, device: DeviceLimits, tables: Sequence[Table]) -> Covered:
    from flashgen.near import look_up

    answer = look_up(problem, device, tables)
    passed = next((step for step in reversed(answer.steps[:-1]) if step.startswith(("passed over", "too far"))), answer.steps[-1])
    if answer.found is None:
        return Covered(problem, count, *_untuned(problem, device, passed))
    exact = answer.found.distance == 0.0 and not answer.found.sister
    return Covered(problem, count, Cover.EXACT if exact else Cover.NEAR, answer.found, answer.steps[-1])


def _untuned(problem: Problem, device: DeviceLimits, why: str) -> tuple[Cover, None, str]:
    from flashgen.search import bind_families

    try:
        bind_families(problem, device)
    except FlashgenError as refused:
        return Cover.NOTHING, None, str(refused).splitlines()[0]
    return Cover.FALLBACK, None, why


def tune_commands(covered: Sequence[Covered], gpu: str = "") -> list[str]:
    """One `flashgen tune` command per group of problems that fall back and differ in their length alone."""
    groups: dict[str, set[int]] = {}
    for each in covered:
        problem = each.problem
        if each.cover is not Cover.FALLBACK:
            continue
        words = ["flashgen tune", f"--head-dim {problem.head_dim}", f"--dtype {problem.dtype}", f"--batch {problem.batch}"]
        words += [f"--heads {problem.heads_q}"] + ([f"--kv-heads {problem.heads_kv}"] if problem.heads_kv != problem.heads_q else [])
        words += [f"--head-dim-v {problem.head_dim_v}"] if problem.head_dim_v != problem.head_dim else []
        words += [f"--op {problem.op}"] if problem.op is not Op.FORWARD else []
        words += ["--deterministic"] if problem.deterministic else []
        words += [_mask_option(problem.mask)]
        words += [f"--gpu {gpu}"] if gpu else []
        if problem.seqlen_q != problem.seqlen_kv:
            words += [f"--seqlen-q {problem.seqlen_q}", f"--seqlen-kv {problem.seqlen_kv}"]
        groups.setdefault(" ".join(words), set()).add(problem.seqlen_q)
    return [
        command if "--seqlen-q" in command else f"{command} --seqlen {','.join(map(str, sorted(lengths)))}"
        for command, lengths in groups.items()
    ]


def _mask_option(mask: Mask) -> str:
    if mask.kind is MaskKind.WINDOW:
        return f"--window {mask.left},{mask.right}"
    return "--causal" if mask.kind is MaskKind.CAUSAL else "--no-causal"


def coverage_record(covered: Sequence[Covered], device: DeviceLimits) -> dict[str, Any]:
    """Coverage for machines."""
    totals: Counter[str] = Counter()
    for each in covered:
        totals[str(each.cover)] += each.count
    return {
        "schema": "flashgen.coverage/1",
        "device": device.name,
        "calls": {str(cover): totals[str(cover)] for cover in Cover},
        "problems": [
            {
                "problem": json.loads(line_of(each.problem, each.count)), "name": str(each.problem), "cover": str(each.cover),
                "entry": str(each.found.entry.problem) if each.found else None, "table": str(each.found.path) if each.found else None,
                "why": each.why,
            }
            for each in covered
        ],
        "tune": tune_commands(covered),
    }  # fmt: skip
