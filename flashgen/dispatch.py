"""Problem → table entry → loaded kernel, by one rule: user tables, shipped tables, another device of the architecture, fallback.

The first call of a problem looks it up, compiles or loads, and proves what is not proved for this binary; later calls find the kernel in a
map. Nothing here reads a file, parses or compiles once a problem is served.
"""

from __future__ import annotations

import logging
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from flashgen import near, paths, table, table_image, trust
from flashgen.backends import Backend, BackwardLaunch, DeviceBackend, EmulatedBackend, Loaded, Strides
from flashgen.errors import (
    FlashgenError,
    LaunchError,
    MissingDependency,
    UnsupportedProblem,
    UntunedProblem,
    UntunedProblemWarning,
)
from flashgen.model import DeviceLimits, ExecutorName, Problem, ProblemClass, Source, TableEntry, Variant
from flashgen.render import render
from flashgen.runtime import check_grids
from flashgen.space import BoundSpace, load_space
from flashgen.table import Table, shape_bucket
from flashgen.untuned import fallbacks, tune_command

KEPT_PROBLEMS = 8192
"""Problems in the in-process map; a program that asks for more different shapes looks them up again."""

FEW_ROWS = 256
"""Up to so many queries, which one or two tiles hold, all lengths of a bucket are served alike; beyond, each is looked up itself."""

log = logging.getLogger("flashgen")


class Origin(StrEnum):
    """Where the served variant comes from."""

    TABLE = "table"
    SISTER = "table of another device"
    PREDICTED = "predicted entry"
    FALLBACK = "fallback"


@dataclass(frozen=True, slots=True)
class Answer:
    """What serves a problem and why; print it."""

    problem: Problem
    device: str
    executor: ExecutorName
    variant: Variant
    origin: Origin
    entry: TableEntry | None
    path: Path | None
    steps: tuple[str, ...]
    gradients: Answer | str = ""
    """What serves the backward pass, or in words why no kernel does; '' where no input wants a gradient."""
    workspace_bytes: int = 0
    """Device memory that a call takes beyond its results, while it runs."""
    copies: tuple[str, ...] = ()
    """Operands that are copied before the kernel runs, and why."""

    def __str__(self) -> str:
        """The whole story, for people."""
        head = f"{self.problem} on {self.device} ({self.executor}): {self.variant}, from the {self.origin}"
        lines = [head, *(f"{number}. {step}" for number, step in enumerate(self.steps, 1))]
        lines += self.copies
        if self.workspace_bytes:
            lines.append(f"Takes {self.workspace_bytes:,} bytes of memory beyond its results while it runs.")
        if self.origin is Origin.FALLBACK:
            lines.append(f"Tune it: {tune_command(self.problem)}")
        if self.gradients:
            lines.append(f"Gradients: {self.gradients}")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Served:
    """A kernel ready for one problem."""

    answer: Answer
    loaded: Loaded = field(repr=False)
    grids: tuple[int, ...]
    workspace_bytes: int

    @property
    def mapped(self) -> bool:
        """Whether the kernel reads through tensor maps, so that operands must have aligned rows and no stride of 0."""
        return bool(self.loaded.source.boxes)


class Dispatcher:
    """The in-process map of one device. Safe for threads."""

    def __init__(self, backend: Backend, directories: Sequence[Path] | None = None) -> None:
        """Over the tables of `directories` (default: the user's, then the shipped ones), which are read when first needed."""
        self.backend = backend
        self._directories = directories
        self._tables: tuple[Table, ...] | None = None
        self._by_class: dict[ProblemClass, tuple[Table, ...]] = {}
        self._keys: dict[ProblemClass, set[object]] = {}
        self._served: dict[Problem, Served] = {}
        self._sources: dict[tuple[ProblemClass, Variant], Source] = {}
        self._loaded: dict[str, Loaded] = {}
        self._aside: dict[tuple[str, object], str] = {}  # (source digest, problem class) or entry → why it must not serve
        self._told: set[object] = set()
        self._proofs = trust.Proofs(backend)
        self._lock = threading.RLock()
        self.plans: dict[Any, Any] = {}

    def serve(self, problem: Problem, *, strict: bool = False, stream: int = 0) -> Served:
        """The kernel for a problem. Strict: raises UntunedProblem where no table entry serves.

        Raises UnsupportedProblem when no family can compute it, LaunchError when it would have to be loaded during graph capture.
        """
        served = self._served.get(problem)
        if served is None:
            with self._lock:
                served = self._served.get(problem) or self._first(problem, stream)
        if served.answer.origin is Origin.FALLBACK:
            if strict:
                raise UntunedProblem(f"strict: no table entry serves {problem} on {self.backend.limits.name}. {_advice(problem)}")
            self._warn_untuned(problem)
        return served

    def prepare(self, served: Served, scale: float, q: Strides, k: Strides, v: Strides, o: Strides) -> Callable[..., None]:
        """A function of the addresses of q, k, v, o, lse, workspace and the stream that enqueues one call; it raises LaunchError."""
        return self.backend.prepare(served.loaded, served.answer.problem, served.grids, scale, (q, k, v, o))

    def prepare_backward(self, served: Served, scale: float, strides: Sequence[Strides]) -> BackwardLaunch:
        """A function of addresses by name and the stream that enqueues one backward call; it raises LaunchError."""
        return self.backend.prepare_backward(served.loaded, served.answer.problem, served.grids, scale, strides)

    def keep(self, key: object, plan: object) -> None:
        """Remember in `plans` what a caller prepared, until tables are read again."""
        if len(self.plans) >= KEPT_PROBLEMS:
            self.plans.clear()
        self.plans[key] = plan

    def forget(self) -> None:
        """Read the tables again and choose anew; loaded kernels stay."""
        with self._lock:
            self._tables = None
            self._by_class.clear()
            self._keys.clear()
            self._served.clear()
            self.plans.clear()
            self._aside.clear()

    def _first(self, problem: Problem, stream: int) -> Served:
        self.backend.check_process()
        capturing = self.backend.capturing(stream)
        served = self._as_its_bucket(problem, capturing) or self._resolved(problem, capturing)
        self._keep(problem, served)
        self._tell(served.answer)
        return served

    def _resolved(self, problem: Problem, capturing: bool) -> Served:
        steps: list[str] = []
        return self._from_tables(problem, capturing, steps) or self._from_fallbacks(problem, capturing, steps)

    def _as_its_bucket(self, problem: Problem, capturing: bool) -> Served | None:
        """What serves the middle of the bucket of a problem with few queries, if it can compute the problem; None for one tuned as it is.

        A look-up takes milliseconds, and a model that generates text asks for another length with every token.
        """
        middle = bucket_middle(problem)
        if middle == problem or problem.seqlen_q > FEW_ROWS or table.full_key(problem) in self._tuned(problem.klass()):
            return None
        model = self._served.get(middle)
        if model is None:
            model = self._resolved(middle, capturing)
            self._keep(middle, model)
        bound = load_space(model.answer.variant.family).bind(problem, self.backend.limits)
        if bound.explain(model.answer.variant):
            return None
        steps = (f"chosen as for {middle}, the middle of its bucket", *model.answer.steps)
        return self._ready(bound, model.loaded, replace(model.answer, problem=problem, steps=steps))

    def _keep(self, problem: Problem, served: Served) -> None:
        if len(self._served) >= KEPT_PROBLEMS:
            self._served.clear()
        self._served[problem] = served

    def _from_tables(self, problem: Problem, capturing: bool, steps: list[str]) -> Served | None:
        """The best entry that can be trusted; entries that fail are set aside, so each turn of the loop drops one."""
        while True:
            found = near.look_up(problem, self.backend.limits, self._tables_of(problem.klass()), self._set_aside_before)
            if found.found is None:
                steps.extend(found.steps)
                return None
            entry = found.found.entry
            try:
                bound = load_space(entry.variant.family).bind(problem, self.backend.limits)
                loaded = self._load(bound, bound.variant(entry.variant.as_dict()), capturing)
                doubt = self._proofs.doubt(entry, found.found.sister, loaded)
                if doubt:
                    _refuse_capture(capturing, problem, "proved")
                    self._proofs.prove(bound.space, loaded, problem)
            except FlashgenError as fault:
                if capturing or isinstance(fault, MissingDependency):
                    raise
                self._set_aside(entry, str(fault))
                continue
            steps.extend(found.steps)
            steps.append(f"proved on this device: {doubt}" if doubt else "the binary is the one that the entry's certificate was given for")
            origin = Origin.PREDICTED if entry.measurement.source == "predicted" else Origin.SISTER if found.found.sister else Origin.TABLE
            return self._ready(bound, loaded, Answer(
                problem, self.backend.limits.name, self.backend.name, loaded.source.variant, origin, entry, found.found.path, tuple(steps)
            ))  # fmt: skip

    def _from_fallbacks(self, problem: Problem, capturing: bool, steps: list[str]) -> Served:
        """The fallback with the least predicted time; the next one where it cannot be compiled or loaded."""
        fault: FlashgenError | None = None
        for bound, variant in fallbacks(problem, self.backend.limits):
            try:
                loaded = self._load(bound, variant, capturing)
            except FlashgenError as refused:
                if capturing or isinstance(refused, MissingDependency):
                    raise
                fault = refused
                steps.append(f"passed over: the fallback of {bound.space.family}: {_short(refused)}")
                continue
            answer = Answer(
                problem, self.backend.limits.name, self.backend.name, variant, Origin.FALLBACK, None, None,
                (*steps, f"serves: {variant}, the fallback of its space, which the device tests certify"),
            )  # fmt: skip
            return self._ready(bound, loaded, answer)
        raise fault or UnsupportedProblem(f"No kernel family fits {problem}.")

    def _ready(self, bound: BoundSpace, loaded: Loaded, answer: Answer) -> Served:
        grids = bound.grids(answer.variant)
        check_grids(loaded.source, grids)
        workspace = bound.workspace_bytes(answer.variant)
        return Served(replace(answer, workspace_bytes=workspace), loaded, grids, workspace)

    def _load(self, bound: BoundSpace, variant: Variant, capturing: bool) -> Loaded:
        klass = bound.problem.klass()
        source = self._sources.get((klass, variant))
        if source is None:
            source = self._sources[klass, variant] = render(bound.space, klass, variant)
        loaded = self._loaded.get(source.digest)
        if loaded is None:
            _refuse_capture(capturing, bound.problem, "compiled and loaded")
            loaded = self._loaded[source.digest] = self.backend.load(source)
        return loaded

    def _tables_of(self, klass: ProblemClass) -> tuple[Table, ...]:
        """All tables, reduced to the entries of one class, so that a look-up among thousands of entries stays short."""
        if self._tables is None:
            self._tables = table_image.load_all(self._directories)
        if klass not in self._by_class:
            self._by_class[klass] = tuple(
                Table(each.path, each.device, tuple(entry for entry in each.entries if entry.problem.klass() == klass))
                for each in self._tables
            )
        return self._by_class[klass]

    def _tuned(self, klass: ProblemClass) -> set[object]:
        """Full keys of all entries of a class."""
        if klass not in self._keys:
            self._keys[klass] = {table.full_key(entry.problem) for each in self._tables_of(klass) for entry in each.entries}
        return self._keys[klass]

    def _set_aside_before(self, entry: TableEntry) -> str | None:
        return self._aside.get(_identity(entry))

    def _set_aside(self, entry: TableEntry, reason: str) -> None:
        self._aside[_identity(entry)] = f"set aside: {reason}"
        warnings.warn(
            f"The table entry {entry.variant} for {entry.problem} is set aside, since it could not be used here: {_short(reason)}. "
            "The next best serves. Tune again to replace it: " + tune_command(entry.problem),
            UserWarning,
            stacklevel=_levels_to_the_caller(),
        )

    def _warn_untuned(self, problem: Problem) -> None:
        key = ("untuned", problem.klass(), shape_bucket(problem))
        if key in self._told:
            return
        self._told.add(key)
        warnings.warn(
            f"No table entry serves {problem} on {self.backend.limits.name}; the certified fallback runs, which is slower. "
            + _advice(problem),
            UntunedProblemWarning,
            stacklevel=_levels_to_the_caller(),
        )

    def _tell(self, answer: Answer) -> None:
        key = (answer.problem.klass(), shape_bucket(answer.problem), answer.variant)
        if key not in self._told:
            self._told.add(key)
            log.info("%s on %s: %s, from the %s", answer.problem, answer.device, answer.variant, answer.origin)


def _levels_to_the_caller() -> int:
    """The `stacklevel` at which a warning points to the line that called into flashgen."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("flashgen", "torch"):
        frame, level = frame.f_back, level + 1
    return level


def bucket_middle(problem: Problem) -> Problem:
    """The problem with both lengths at the nearest power of two; a length of 0 or 1 stays."""
    exponents = shape_bucket(problem)
    lengths = (
        2**exponent if length > 1 else length for length, exponent in zip((problem.seqlen_q, problem.seqlen_kv), exponents, strict=False)
    )
    seqlen_q, seqlen_kv = (min(length, 2**30) for length in lengths)
    return replace(problem, seqlen_q=seqlen_q, seqlen_kv=seqlen_kv)


# The dispatchers of this process ---------------------------------------------------------------------------------------

_devices: dict[int, Dispatcher] = {}
_emulated: Dispatcher | None = None
_guard = threading.Lock()


def for_device(index: int) -> Dispatcher:
    """The dispatcher of a GPU, made when first asked for. Raises MissingDependency without CuPy or that GPU."""
    found = _devices.get(index)
    if found is None:
        with _guard:
            found = _devices.get(index) or _devices.setdefault(index, Dispatcher(DeviceBackend(index)))
    return found


def emulated() -> Dispatcher | None:
    """The dispatcher for host memory; None outside `flashgen.testing.emulated()`."""
    return _emulated


def set_emulated(dispatcher: Dispatcher | None) -> Dispatcher | None:
    """Replace it; returns the one before."""
    global _emulated
    before, _emulated = _emulated, dispatcher
    return before


def emulation_of(limits: DeviceLimits, policy: object = None, directories: Sequence[Path] | None = None) -> Dispatcher:
    """A dispatcher that runs kernels on the CPU as if on a device with these limits."""
    return Dispatcher(EmulatedBackend(limits, policy), directories)  # type: ignore[arg-type]


def forget() -> None:
    """Let every dispatcher read its tables again, as after tuning in this process."""
    for each in (*_devices.values(), *([_emulated] if _emulated else [])):
        each.forget()


def tables_of(file: Path | None = None) -> tuple[Table, ...]:
    """The tables that dispatch uses, or the one in `file`."""
    return (table_image.load(file),) if file is not None else table_image.load_all((paths.user_tables(), paths.shipped_tables()))


def _identity(entry: TableEntry) -> tuple[str, object]:
    return entry.source_digest, table.full_key(entry.problem)


def _advice(problem: Problem) -> str:
    return f"Tune it: {tune_command(problem)}"


def _short(reason: object) -> str:
    lines = str(reason).strip().splitlines() or [type(reason).__name__]
    return lines[0].rstrip(".") if len(lines) == 1 else f"{lines[0].rstrip('.:')} …"


def _refuse_capture(capturing: bool, problem: Problem, what: str) -> None:
    if capturing:
        raise LaunchError(
            f"The kernel for {problem} would have to be {what} while a CUDA graph is captured. Warm up first: call flashgen.attention once "
            "with arguments of these shapes before the capture."
        )
