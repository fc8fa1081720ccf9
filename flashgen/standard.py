"""Standard lists of problems, and filling a table with one: the same problems on every GPU, so that tables can be compared and shipped.

Part of a list is searched; the rest is filled by timing what won nearby. Every finished problem is in the table at once, so a run that was
stopped, by whatever means, goes on where it ended, and several runs can share the parts of one list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import ClassVar

from flashgen import gate, search, table
from flashgen.errors import CompileError, EmptySpace, FlashgenError, InvalidProblem, LaunchError, UnsupportedProblem
from flashgen.evaluators import DeviceEvaluator, Evaluator, PredictedEvaluator, measuring_child
from flashgen.model import Certificate, DeviceLimits, DType, ExecutorName, Mask, Problem, Provenance, TableEntry, Variant, Verdict
from flashgen.space import BoundSpace, load_space
from flashgen.staleness import Tools, assess, bare
from flashgen.table_schema import device_record
from flashgen.trials import Progress

TOKENS = 16_384  # batch × seqlen
HIDDEN = 2048  # heads × head_dim
NEIGHBOURS = 8
MASKS = (Mask(), Mask.causal())
DIMS = ((64, 64), (80, 80), (96, 96), (128, 128), (192, 192), (256, 256), (192, 128))


@dataclass(frozen=True, slots=True)
class Wish:
    """One problem of a list. `searched`: by a search of its own, else by timing the best of its neighbours."""

    problem: Problem
    searched: bool = True


def small() -> list[Wish]:
    """bf16, head dims 64 and 128, both masks, three lengths: 12 problems."""
    return [Wish(shaped(head_dim, head_dim, seqlen, mask)) for head_dim in (64, 128) for mask in MASKS for seqlen in (1024, 4096, 16_384)]


def full() -> list[Wish]:
    """Everything that a shipped table holds: head dims 64 to 256 and 192/128, both masks, 512 to 32k rows, bf16 and fp16, query groups.

    bf16 with one query head per K/V head is searched, the rest filled: fp16, query groups of 4 and 8, small and large batch × heads.
    """
    lengths = [2**power for power in range(9, 16)]
    searched = [Wish(shaped(*dims, seqlen, mask)) for dims in DIMS for mask in MASKS for seqlen in lengths]
    others = [replace(each, searched=False) for each in searched]
    filled = [replace(each, problem=replace(each.problem, dtype=DType.FLOAT16)) for each in others]
    filled += [replace(each, problem=_grouped(each.problem, group)) for each in others for group in (4, 8)]
    filled += [replace(each, problem=replace(each.problem, batch=1)) for each in others if each.problem.batch > 4]
    filled += [
        replace(each, problem=replace(each.problem, batch=each.problem.batch * 8)) for each in others if each.problem.seqlen_q <= 4096
    ]
    return list(dict.fromkeys(searched + filled))


LISTS: dict[str, Callable[[], list[Wish]]] = {"small": small, "full": full}


def shaped(head_dim: int, head_dim_v: int, seqlen: int, mask: Mask, dtype: DType = DType.BFLOAT16) -> Problem:
    """16,384 tokens (32,768 for the longest) and a hidden size of 2,048."""
    heads = max(1, HIDDEN // head_dim)
    return Problem(dtype, head_dim, head_dim_v, max(1, TOKENS // seqlen), heads, heads, seqlen, seqlen, mask)


def _grouped(problem: Problem, group: int) -> Problem:
    heads = -(-problem.heads_q // group) * group
    return replace(problem, heads_q=heads, heads_kv=heads // group)


def part_of(wishes: Sequence[Wish], part: str | None) -> list[Wish]:
    """`2/4`: the second quarter. Searched problems come first, so that others find neighbours. Raises InvalidProblem."""
    if part is None:
        return list(wishes)
    number, _, count = part.partition("/")
    if not (number.isdigit() and count.isdigit() and 1 <= int(number) <= int(count)):
        raise InvalidProblem(f"A part is written 2/4, the second of four; got {part!r}.")
    return list(wishes[int(number) - 1 :: int(count)])


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
    return enough and assess(entry, device_record(device), device, tools, None).state.serves


def tune(
    wishes: Iterable[Wish],
    device: DeviceLimits,
    executor: ExecutorName,
    tools: Tools,
    *,
    path: Path | None = None,
    budget: int | None = None,
    seconds: float | None = None,
    seed: int = 0,
    progress: Progress = lambda _: None,
    make_evaluator: search.EvaluatorFactory | None = None,
) -> Iterator[Done]:
    """Bring the table at `path` up to date with a list, one problem at a time. Raises as `search.tune` does."""
    path = path or table.table_path(device)
    with nullcontext(make_evaluator) if make_evaluator else evaluators(executor) as make:
        for wish in wishes:
            yield _done(wish, device, executor, tools, path, make, budget=budget, seconds=seconds, seed=seed, progress=progress)


def _done(
    wish: Wish,
    device: DeviceLimits,
    executor: ExecutorName,
    tools: Tools,
    path: Path,
    make: search.EvaluatorFactory,
    *,
    budget: int | None,
    seconds: float | None,
    seed: int,
    progress: Progress,
) -> Done:
    """One problem of a list, in the table when this returns. Raises KeyboardInterrupt for a search that was stopped."""
    present = table.read(path, strict=True).entries if path.exists() else ()
    old = next((entry for entry in present if table.full_key(entry.problem) == table.full_key(wish.problem)), None)
    if old is not None and is_current(old, device, tools, executor):
        return Done(wish, "kept")
    candidates = neighbours(wish.problem, present)
    try:
        if candidates and not wish.searched:
            return Done(wish, "filled", table.merge(path, device, fill(wish.problem, device, candidates, present, make, seed)))
        result = search.tune(
            wish.problem, device, budget=budget, seconds=seconds, seed=seed, executor=executor, table=path, progress=progress,
            make_evaluator=make,
        )  # fmt: skip
    except (UnsupportedProblem, EmptySpace, CompileError, LaunchError) as problem:  # of this problem, not of the list
        return Done(wish, "skipped", None, str(problem).splitlines()[0])
    if result.partial:
        raise KeyboardInterrupt
    return Done(wish, "searched", result.change)


def neighbours(problem: Problem, entries: Sequence[TableEntry], most: int = NEIGHBOURS) -> list[Variant]:
    """What won, or came second, for the nearest problems of the same head dims, operation and mask; any type and any distance."""

    def alike(entry: TableEntry) -> bool:
        one, other = replace(entry.problem.klass(), dtype=problem.dtype), problem.klass()
        return one == other

    def apart(entry: TableEntry) -> tuple[bool, float, str]:
        steps = zip(table.shape_bucket(entry.problem), table.shape_bucket(problem), strict=True)
        return entry.problem.dtype is not problem.dtype, float(sum(abs(one - other) for one, other in steps)), str(entry.problem)

    found: dict[Variant, None] = {}
    for entry in sorted(filter(alike, entries), key=apart):
        found[entry.variant] = None
        if entry.runner_up is not None:
            found[entry.runner_up[0]] = None
    return list(found)[:most]


def fill(
    problem: Problem,
    device: DeviceLimits,
    candidates: Sequence[Variant],
    known: Sequence[TableEntry],
    make: search.EvaluatorFactory,
    seed: int = 0,
) -> TableEntry:
    """The entry of a problem by timing candidates side by side, without a search. Certificates of the same text are not made again.

    Raises UnsupportedProblem when none of them can run.
    """
    bounds = search.bind_families(problem, device)
    families = {bound.space.family: bound for bound in bounds}
    variants = [each for each in candidates if each.family in families and not families[each.family].explain(each)]
    fallback = search.fallback_of(bounds)
    incumbents = [fallback] if fallback is not None else []
    evaluator = make(bounds, problem, device, seed)
    try:
        sound = _sound(evaluator, families, list(dict.fromkeys([*variants, *incumbents])))
        decision = evaluator.decide(sound, [each for each in incumbents if each in sound], {})
        ranked = sorted(decision.measurements, key=lambda each: (each != decision.winner, decision.measurements[each].median_us))
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
    """Prove and time `entries` of a table anew without searching; each is written when done. What fails keeps its old entry.

    On a GPU an entry's variant is timed beside its runner-up and the fallback, and gives way only to what is clearly faster.
    """
    with nullcontext(make_evaluator) if make_evaluator else evaluators(executor) as make:
        for entry in entries:
            candidates = [entry.variant, *([entry.runner_up[0]] if entry.runner_up else [])]
            try:
                made = fill(entry.problem, device, candidates, (), make, seed)
                made = replace(made, provenance=_kept(entry.provenance, made.provenance))
                yield entry, table.merge(of.path, device, made)
            except FlashgenError as problem:
                yield entry, problem


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

    proven: dict[tuple[str, str], Certificate]

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


@contextmanager
def evaluators(executor: ExecutorName) -> Iterator[search.EvaluatorFactory]:
    """Evaluators for a whole list. On a GPU they share one measuring child, which takes long to start, and what has been proved."""
    if executor is ExecutorName.EMULATED:
        yield Frugal
        return
    child, proven = measuring_child(), dict[tuple[str, str], Certificate]()

    def made(bounds: Sequence[BoundSpace], problem: Problem, device: DeviceLimits, seed: int) -> Evaluator:
        found = Remembering(bounds, problem, device, seed, child)
        found.proven = proven
        return found

    try:
        yield made
    finally:
        child.kill()


def _kept(old: Provenance, new: Provenance) -> Provenance:
    """How the variant was found stays; with what it was proved is new."""
    return replace(new, sampler=old.sampler, seed=old.seed, asks=old.asks, measured=old.measured)
