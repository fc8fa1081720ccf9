"""Filling a table with a list of problems (`wishes`).

Part of a list is searched; the rest is filled by timing what won nearby. What a search found is in the table at once, what was filled some
seconds later, so a run that was stopped, by whatever means, goes on where it ended; several runs can share the parts of one list.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import zip_longest
from pathlib import Path
from typing import ClassVar

from flashgen import gate, near, search, table
from flashgen.ahead import Ahead, Texts
from flashgen.compiler import CompilePool
from flashgen.errors import CompileError, EmptySpace, FlashgenError, LaunchError, UnsupportedProblem
from flashgen.evaluators import DeviceEvaluator, Evaluator, PredictedEvaluator, measuring_child
from flashgen.model import (
    Certificate,
    DeviceLimits,
    DType,
    ExecutorName,
    Problem,
    ProblemClass,
    Provenance,
    Source,
    TableEntry,
    Variant,
    Verdict,
)
from flashgen.shelf import Shelf
from flashgen.space import BoundSpace, load_space, load_spaces
from flashgen.staleness import Tools, assess, bare
from flashgen.strategy import Predicted
from flashgen.study import ranked
from flashgen.table_schema import device_record
from flashgen.trials import Progress
from flashgen.wishes import Wish, rounds
from flashgen.wishes import seconds as expected

NEIGHBOURS = 8
AHEAD = 24  # problems that are ranked and compiled while earlier ones are timed; what takes longer to compile than to time catches up


@dataclass(frozen=True, slots=True)
class Done:
    """How one problem of a list ended: kept (in the table already), searched, filled, or skipped with the reason."""

    wish: Wish
    how: str
    change: table.Change | None = None
    why: str = ""


def is_current(entry: TableEntry, device: DeviceLimits, tools: Tools, executor: ExecutorName) -> bool:
    """Whether an entry needs no work: today's text and compiler, and as much evidence as `executor` can give."""
    enough = executor is ExecutorName.EMULATED or entry.measurement.source == "measured"
    found = assess(entry, device_record(device), device, tools, None)
    return enough and found.state.serves and not found.altered


@dataclass(frozen=True, slots=True)
class _Order:
    """How a list is worked through."""

    device: DeviceLimits
    executor: ExecutorName
    make: search.EvaluatorFactory
    budget: int | None
    seconds: float | None
    seed: int
    progress: Progress
    tools: Tools
    current: set[Problem] = field(default_factory=set)  # found so once

    def trials(self, wish: Wish) -> int | None:
        """Trials of a search; None where nobody says."""
        return self.budget or (wish.budget if self.executor is ExecutorName.DEVICE else None)

    def is_kept(self, problem: Problem, shelf: Shelf) -> bool:
        """Whether the table needs no other entry of a problem."""
        if problem not in self.current:
            found = shelf.find(problem)
            if found is None or not is_current(found, self.device, self.tools, self.executor):
                return False
            self.current.add(problem)
        return True


def tune(
    wishes: Iterable[Wish],
    device: DeviceLimits,
    executor: ExecutorName,
    tools: Tools,
    *,
    path: Path | None = None,
    budget: int | None = None,
    seconds: float | None = None,
    within: float | None = None,
    seed: int = 0,
    progress: Progress = lambda _: None,
    make_evaluator: search.EvaluatorFactory | None = None,
) -> Iterator[Done]:
    """Bring the table at `path` up to date with a list, one problem at a time. Raises as `search.tune` does.

    `budget` goes before the wishes' own. Ends early rather than begin what would hardly end `within` so many seconds from now.
    """
    started, wishes = time.monotonic(), list(wishes)
    shelf = Shelf(path or table.table_path(device), device)
    with nullcontext(make_evaluator) if make_evaluator else evaluators(executor) as make, ahead(make, device) as coming:
        order = _Order(device, executor, make, budget, seconds, seed, progress, tools)
        try:
            for number, wish in enumerate(wishes):
                if order.is_kept(wish.problem, shelf):
                    yield Done(wish, "kept")
                    continue
                if within is not None and time.monotonic() - started + expected(wish) > within:
                    return
                if coming.works:
                    _prepare(wishes[number + 1 : number + 1 + AHEAD], order, shelf, coming)
                with coming.begun(wish.problem) as predicted:
                    done = _done(wish, order, shelf, predicted)
                yield done
        finally:
            shelf.write()


def _done(wish: Wish, order: _Order, shelf: Shelf, predicted: Predicted | None) -> Done:
    """One problem of a list. Raises KeyboardInterrupt for a search that was stopped."""
    present = shelf.entries()
    candidates = neighbours(wish.problem, order.device, present)
    try:
        if candidates and not wish.searched:
            defended = _defended(wish.problem, candidates)
            return Done(wish, "filled", shelf.put(fill(wish.problem, order.device, candidates, present, order.make, order.seed, defended)))
        shelf.write()
        result = search.tune(
            wish.problem, order.device, budget=order.trials(wish), seconds=order.seconds, seed=order.seed, executor=order.executor,
            table=shelf.path, progress=order.progress, make_evaluator=order.make, predicted=predicted, start=candidates,
        )  # fmt: skip
    except (UnsupportedProblem, EmptySpace, CompileError, LaunchError) as problem:  # of this problem, not of the list
        return Done(wish, "skipped", None, str(problem).splitlines()[0])
    if result.partial:
        raise KeyboardInterrupt
    return Done(wish, "searched", result.change)


def _defended(problem: Problem, candidates: Sequence[Variant]) -> Sequence[Variant]:
    """With query groups, what won nearest.

    Where few K/V heads are left, variants that take them in another order are alike; the one is wanted that is better where there are more.
    """
    return candidates[:1] if problem.gqa_group > 1 else ()


def _prepare(wishes: Iterable[Wish], order: _Order, shelf: Shelf, coming: Ahead) -> None:
    """Begin with what comes: fills that have neighbours already, and searches."""
    entries = shelf.entries()
    known = {_kin(each.problem) for each in entries}
    for wish in wishes:
        if wish.problem in coming or order.is_kept(wish.problem, shelf):
            continue
        nearby = neighbours(wish.problem, order.device, entries) if _kin(wish.problem) in known else []
        if wish.searched:
            coming.search(wish.problem, order.trials(wish) or search.DEFAULT_BUDGET[order.executor], order.seed, nearby)
        elif nearby:
            coming.fill(wish.problem, nearby)


def neighbours(problem: Problem, device: DeviceLimits, entries: Sequence[TableEntry], most: int = NEIGHBOURS) -> list[Variant]:
    """The best for the nearest problems of the same head dims, operation and mask; any type and any distance.

    What won and what came second, then, where that is not enough, the next best in the journals of their searches; all of them as they are
    for `problem`, without what it does not allow.
    """
    kin = _kin(problem)

    def apart(entry: TableEntry) -> tuple[bool, bool, float, str]:
        steps = zip(table.shape_bucket(entry.problem), table.shape_bucket(problem), strict=True)
        grouped = (entry.problem.gqa_group > 1) != (problem.gqa_group > 1)
        return entry.problem.dtype is not problem.dtype, grouped, float(sum(abs(one - other) for one, other in steps)), str(entry.problem)

    nearest = sorted((entry for entry in entries if _kin(entry.problem) == kin), key=apart)
    bounds = _bounds(problem, device) if nearest else {}
    best = (each for entry in nearest for each in (entry.variant, entry.runner_up[0] if entry.runner_up else None))
    found = _adapted(best, bounds)
    if len(found) < most:
        searched = [_ranked(entry) for entry in nearest if entry.provenance.sampler != "neighbours"]
        found = _adapted([*found, *(each for place in zip_longest(*searched) for each in place)], bounds)
    return found[:most]


def _bounds(problem: Problem, device: DeviceLimits) -> dict[str, BoundSpace]:
    """By family, those that compute a problem; empty where none does."""
    try:
        return {bound.space.family: bound for bound in search.bind_supported(problem, device)}
    except UnsupportedProblem:
        return {}


def _adapted(variants: Iterable[Variant | None], bounds: Mapping[str, BoundSpace]) -> list[Variant]:
    """Each once, as it is for a problem with these bounds; without those that it does not allow."""
    known = (each for each in variants if each is not None and each.family in bounds)
    return [each for each in dict.fromkeys(bounds[each.family].adapted(each) for each in known) if each is not None]


def _kin(problem: Problem) -> ProblemClass:
    """What neighbours have in common: all of a class but the type."""
    return replace(problem.klass(), dtype=DType.BFLOAT16)


def _ranked(entry: TableEntry) -> tuple[Variant, ...]:
    """The best of the search that made an entry, from its journal; nothing where there is none, or spaces have changed."""
    spaces = {space.family: space.digest for space in load_spaces(entry.problem.op)}
    return ranked(entry.problem, entry.provenance.device, entry.certificate.executor, spaces, NEIGHBOURS)


def fill(
    problem: Problem,
    device: DeviceLimits,
    candidates: Sequence[Variant],
    known: Sequence[TableEntry],
    make: search.EvaluatorFactory,
    seed: int = 0,
    defended: Sequence[Variant] = (),
) -> TableEntry:
    """The entry of a problem by timing candidates side by side, without a search. Certificates of the same text are not made again.

    What is `defended`, as the fallback always is, gives way only to what is clearly faster. Raises UnsupportedProblem when nothing can run.
    """
    bounds = search.bind_supported(problem, device)
    families = {bound.space.family: bound for bound in bounds}
    variants = _adapted(candidates, families)
    incumbents = _adapted([*defended, near.fallback_of(bounds)], families)
    evaluator = make(bounds, problem, device, seed)
    try:
        sound = _sound(evaluator, families, list(dict.fromkeys([*variants, *incumbents])))
        decision = evaluator.decide(sound, [each for each in incumbents if each in sound], {})
        ranked = decision.ranked()
        for winner in ranked:
            proven = _proven(evaluator, winner, known) or evaluator.certify(winner)
            if proven.verdict is Verdict.EXACT:
                break
        else:
            raise UnsupportedProblem(f"None of {len(ranked)} variants is exact for {problem}: {proven.failure}")
        second = next((each for each in ranked if each != winner), None)
        report, source = evaluator.report(winner), evaluator.source(winner)
        return TableEntry(
            problem, winner, source.digest, report.cubin_digest, report.options, decision.measurements[winner], proven,
            _provenance(evaluator, winner, device, len(sound), seed),
            (second, decision.measurements[second].median_us) if second else None,
        )  # fmt: skip
    finally:
        evaluator.close()


def _sound(evaluator: Evaluator, families: Mapping[str, BoundSpace], variants: Sequence[Variant]) -> list[Variant]:
    """Those that compile within the limits of their space. Raises UnsupportedProblem when none does."""
    sound: list[Variant] = []
    refused = "there is none"
    for each in variants:
        evaluator.prepare(each)
    for each in variants:
        try:
            reason = "; ".join(families[each.family].explain(each, evaluator.report(each)))
        except CompileError as problem:
            reason = str(problem).splitlines()[0]
        if reason:
            refused = reason
        else:
            sound.append(each)
    if not sound:
        raise UnsupportedProblem(f"None of {len(variants)} variants can be used: {refused}")
    return sound


def _proven(evaluator: Evaluator, variant: Variant, known: Sequence[TableEntry]) -> Certificate | None:
    """The whole suite's certificate of exactly this machine code, by the same executor and the present suite, from another entry."""
    source, cubin = evaluator.source(variant), evaluator.report(variant).cubin_digest
    for entry in known:
        found = entry.certificate
        same = bare(entry.source_digest) == source.digest and bare(entry.cubin_digest) == bare(cubin)
        if same and found.executor is evaluator.executor and bare(found.suite_digest) == gate.suite_digest(source.klass.op):
            return found
    return None


def _provenance(evaluator: Evaluator, winner: Variant, device: DeviceLimits, tried: int, seed: int) -> Provenance:
    tools = evaluator.toolchain()
    measured = tried if evaluator.executor is ExecutorName.DEVICE else 0
    created = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return Provenance(
        created, search.version(), "neighbours", seed, tried, measured, load_space(winner.family).digest, tools.nvrtc, tools.driver,
        tools.cupy, device.name,
    )  # fmt: skip


def refresh(
    of: table.Table,
    entries: Sequence[TableEntry],
    device: DeviceLimits,
    executor: ExecutorName,
    *,
    seed: int = 0,
    make_evaluator: search.EvaluatorFactory | None = None,
) -> Iterator[tuple[TableEntry, table.Change | FlashgenError]]:
    """Prove and time `entries` of a table anew without searching; each is written soon after. What fails keeps its old entry.

    On a GPU an entry's variant is timed beside its runner-up and the fallback, and gives way only to what is clearly faster.
    """
    shelf = Shelf(of.path, device)
    try:
        with nullcontext(make_evaluator) if make_evaluator else evaluators(executor) as make:
            for entry in entries:
                yield entry, _refreshed(entry, shelf, make, seed)
    finally:
        shelf.write()


def _refreshed(entry: TableEntry, shelf: Shelf, make: search.EvaluatorFactory, seed: int) -> table.Change | FlashgenError:
    candidates = [entry.variant, *([entry.runner_up[0]] if entry.runner_up else [])]
    try:
        made = fill(entry.problem, shelf.device, candidates, (), make, seed, candidates[:1])
        return shelf.put(replace(made, provenance=_kept(entry.provenance, made.provenance)))
    except FlashgenError as problem:
        return problem


class Frugal(PredictedEvaluator):
    """Predictions for whole lists: the best by the cost model is proved alone, and each text once per process."""

    finalists = 1
    proven: ClassVar[dict[tuple[str, int], Certificate]] = {}

    def certify(self, variant: Variant) -> Certificate:
        """The whole suite on the CPU, or what it said before of the same text."""
        key = self.source(variant).digest, self.device.shared_bytes_per_cta
        if key not in self.proven:
            self.proven[key] = super().certify(variant)
        return self.proven[key]


class Remembering(DeviceEvaluator):
    """Measurements for whole lists: the same machine code runs the whole suite once, and every problem of its class at its own size."""

    finalists = 5
    proved = 2  # what won, and what the entry names as the second
    proven: dict[tuple[str, str], Certificate]
    texts: Texts

    def source(self, variant: Variant) -> Source:
        """The text of a variant, which may have been rendered for another problem."""
        return self.texts.of(self.bounds[variant.family].space, self.problem.klass(), variant)

    def rounds(self, kernels: int) -> int:
        """Fewer for kernels that run long."""
        return rounds(self.problem, kernels)

    def certify(self, variant: Variant) -> Certificate:
        """The whole suite on the GPU, or what it said before of the same machine code after a launch of this problem's size."""
        try:
            key = self.source(variant).digest, self.report(variant).cubin_digest
        except CompileError:
            return super().certify(variant)
        if key in self.proven:
            return self.at_real_size(variant, self.proven[key])
        found = super().certify(variant)
        if found.verdict is Verdict.EXACT:
            self.proven[key] = found
        return found


class Together:
    """Makes evaluators that share one measuring child, which takes long to start, one compile pool, and what was rendered and proved."""

    def __init__(self) -> None:
        self.child, self.pool, self.texts = measuring_child(), CompilePool(), Texts()
        self._proven = dict[tuple[str, str], Certificate]()

    def __call__(self, bounds: Sequence[BoundSpace], problem: Problem, device: DeviceLimits, seed: int) -> Evaluator:
        """An evaluator for one problem; closing it leaves alone what is shared."""
        found = Remembering(bounds, problem, device, seed, self.child, self.pool)
        found.proven, found.texts = self._proven, self.texts
        return found

    def close(self) -> None:
        """End the child and the threads."""
        self.child.kill()
        self.pool.close()


@contextmanager
def evaluators(executor: ExecutorName) -> Iterator[search.EvaluatorFactory]:
    """Evaluators for a whole list; on a GPU they work together (`Together`)."""
    if executor is ExecutorName.EMULATED:
        yield Frugal
        return
    with closing(Together()) as made:
        yield made


def ahead(make: search.EvaluatorFactory, device: DeviceLimits) -> Ahead:
    """Prepares coming problems for evaluators that work together; for others it does nothing."""
    return Ahead(device, make.pool, make.texts) if isinstance(make, Together) else Ahead(device, None)


def _kept(old: Provenance, new: Provenance) -> Provenance:
    """How the variant was found stays; with what it was proved is new."""
    return replace(new, sampler=old.sampler, seed=old.seed, asks=old.asks, measured=old.measured)
