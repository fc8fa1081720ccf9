"""Standard lists of problems: the same on every GPU, so that tables can be compared and shipped; what they take, and their parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from flashgen.cost import flops
from flashgen.errors import InvalidProblem
from flashgen.model import DType, Mask, Op, Problem

TOKENS = 16_384  # batch × seqlen
HIDDEN = 2048  # heads × head_dim
MASKS = (Mask.causal(), Mask())
DIMS = ((128, 128), (64, 64), (256, 256), (96, 96), (192, 128), (192, 192), (80, 80))  # what is used most comes first
LENGTHS = tuple(2**power for power in range(9, 16))
SPARSE = (1024, 4096, 16_384)  # every length of the range is within a factor of two of one of these
SEARCHED = {Op.FORWARD: (1024, 4096, 16_384), Op.BACKWARD: (1024, 8192)}
BUDGET = 32  # trials of a search: the seeds of the families that can win, and some of the cost model's best
LATER_BUDGET = {Op.FORWARD: 20, Op.BACKWARD: 12}  # of one that begins with what won at another length
GROUPS_BUDGET = 24  # of one that begins with what won without groups, where other kernels win: all seeds are tried too
GROUPS = (4, 8)
SEARCHED_GROUPS = {Op.FORWARD: (), Op.BACKWARD: ((1024, 8),)}  # length, heads per group: sums over a group ask for kernels of their own
OTHER_BATCHES = {Op.FORWARD: (512, 2048), Op.BACKWARD: (1024,)}  # lengths at which batch is also 1, and eight times as large

TENSOR_FLOPS = {Op.FORWARD: 600e12, Op.BACKWARD: 500e12}
# By the times at which entries were made, on one H200 beside 16 cores (2026-12-01): a forward search took 5.0 to 6.2 s, a backward one
# 7.9 to 10.7 s; a forward fill 1.1 s, a backward one 1.6 s.
SEARCH_SECONDS = {Op.FORWARD: (0.65, 0.167), Op.BACKWARD: (3.85, 0.2)}  # per search, and per trial
FILL_SECONDS = {Op.FORWARD: 0.69, Op.BACKWARD: 0.86}
LAUNCH_SECONDS = 60e-6  # around a launch, with the flush of L2
TRIAL_LAUNCHES = 15
FINAL_KERNELS = 9
FINAL_SECONDS = 1.2  # of a final round, as long as that leaves the least number of rounds
ROUNDS = (8, 30)


@dataclass(frozen=True, slots=True)
class Wish:
    """One problem of a list. `searched`: by a search of its own, else by timing the best of its neighbours. `budget` counts trials."""

    problem: Problem
    searched: bool = True
    budget: int | None = None


def small() -> list[Wish]:
    """bf16, head dims 64 and 128, both masks, three lengths, forward: 12 problems."""
    masks = (Mask(), Mask.causal())
    return [Wish(shaped(head_dim, head_dim, seqlen, mask)) for head_dim in (64, 128) for mask in masks for seqlen in (1024, 4096, 16_384)]


def full() -> list[Wish]:
    """Everything that a shipped table holds, what is used most first: head dims 64 to 256 and 192/128, both masks, 512 to 32k rows.

    bf16 with one query head per K/V head at every length, forward and backward, searched at some of them; then, filled by timing
    neighbours: fp16 (backward at three lengths), query groups of 4 and 8 at three lengths (backward searched at one), batch 1 and
    eightfold batch.
    """
    plain = [each for op in Op for each in _plain(op)]
    halves = [_filled(each, dtype=DType.FLOAT16) for each in plain if each.problem.op is Op.FORWARD or each.problem.seqlen_q in SPARSE]
    sparse = [each.problem for each in plain if each.problem.seqlen_q in SPARSE]
    grouped = sorted((_group_wish(each, group) for each in sparse for group in GROUPS), key=lambda wish: not wish.searched)
    batches = [each for each in plain if each.problem.seqlen_q in OTHER_BATCHES[each.problem.op]]
    one = [_filled(each, batch=1) for each in batches]
    many = [_filled(each, batch=8 * each.problem.batch) for each in batches]
    return list(dict.fromkeys([*plain, *halves, *grouped, *one, *many]))


LISTS: dict[str, Callable[[], list[Wish]]] = {"small": small, "full": full}


def shaped(head_dim: int, head_dim_v: int, seqlen: int, mask: Mask, dtype: DType = DType.BFLOAT16, op: Op = Op.FORWARD) -> Problem:
    """16,384 tokens (32,768 for the longest) and a hidden size of 2,048."""
    heads = max(1, HIDDEN // head_dim)
    return Problem(dtype, head_dim, head_dim_v, max(1, TOKENS // seqlen), heads, heads, seqlen, seqlen, mask, op)


def gradients(wishes: Iterable[Wish]) -> list[Wish]:
    """The backward problems of a list, as those ask for them who want the same bits every time."""
    backward = (each for each in wishes if each.problem.op is Op.BACKWARD)
    return [replace(each, problem=replace(each.problem, deterministic=True)) for each in backward]


def _plain(op: Op) -> list[Wish]:
    """Every head dim, mask and length in bf16; those that are searched before the others of their class."""
    lengths = sorted(LENGTHS, key=lambda length: length not in SEARCHED[op])
    return [
        Wish(shaped(*dims, length, mask, op=op), length in SEARCHED[op], _budget(op, length))
        for dims in DIMS
        for mask in MASKS
        for length in lengths
    ]


def _budget(op: Op, length: int) -> int | None:
    if length not in SEARCHED[op]:
        return None
    return BUDGET if length == SEARCHED[op][0] else LATER_BUDGET[op]


def _filled(wish: Wish, **changes: object) -> Wish:
    return Wish(replace(wish.problem, **changes), searched=False)  # type: ignore[arg-type]


def _group_wish(problem: Problem, group: int) -> Wish:
    searched = (problem.seqlen_q, group) in SEARCHED_GROUPS[problem.op]
    return Wish(_grouped(problem, group), searched, GROUPS_BUDGET if searched else None)


def _grouped(problem: Problem, group: int) -> Problem:
    heads = -(-problem.heads_q // group) * group
    return replace(problem, heads_q=heads, heads_kv=heads // group)


def seconds(wish: Wish) -> float:
    """What a wish takes on a GPU of 1,000 dense TFLOP/s beside 16 cores, roughly; elsewhere only the proportions count."""
    op = wish.problem.op
    launch = launch_seconds(wish.problem)
    final = FINAL_KERNELS * rounds(wish.problem, FINAL_KERNELS) * launch
    if not wish.searched:
        return FILL_SECONDS[op] + final
    once, per_trial = SEARCH_SECONDS[op]
    return once + (wish.budget or BUDGET) * (per_trial + TRIAL_LAUNCHES * launch) + final


def launch_seconds(problem: Problem) -> float:
    """One launch of a good kernel on such a GPU, with what measuring adds."""
    return LAUNCH_SECONDS + flops(problem) / TENSOR_FLOPS[problem.op]


def rounds(problem: Problem, kernels: int) -> int:
    """How often each kernel of a final round runs: long kernels vary little, and need fewer turns."""
    least, most = ROUNDS
    return max(least, min(most, int(FINAL_SECONDS / (kernels * launch_seconds(problem)))))


def part_of(wishes: Sequence[Wish], part: str | None) -> list[Wish]:
    """`2/4`: the second of four parts that take equally long. Raises InvalidProblem.

    Problems with the same operation, head dims and mask stay together and in their order, so that all find their neighbours.
    """
    if part is None:
        return list(wishes)
    number, _, count = part.partition("/")
    if not (number.isdigit() and count.isdigit() and 1 <= int(number) <= int(count)):
        raise InvalidProblem(f"A part is written 2/4, the second of four; got {part!r}.")
    takes: dict[tuple[object, ...], float] = {}
    for each in wishes:
        takes[_relatives(each)] = takes.get(_relatives(each), 0.0) + seconds(each)
    loads = [0.0] * int(count)
    share: dict[tuple[object, ...], int] = {}
    for relatives in sorted(takes, key=lambda relatives: -takes[relatives]):
        share[relatives] = loads.index(min(loads))
        loads[share[relatives]] += takes[relatives]
    return [each for each in wishes if share[_relatives(each)] == int(number) - 1]


def _relatives(wish: Wish) -> tuple[object, ...]:
    problem = wish.problem
    return problem.op, problem.head_dim, problem.head_dim_v, problem.mask, problem.deterministic
