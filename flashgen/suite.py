"""The cases that a kernel must pass, derived from its problem class and the tile sizes of its variant."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache

import numpy as np

from flashgen import cases
from flashgen.cases import Inputs, Layout
from flashgen.model import Alignment, DType, Mask, MaskKind, Problem, ProblemClass

SUITE = "attention-forward/1"
HUGE_WINDOW = 2**31 - 1
MOST_ELEMENTS = 1 << 23
"""A tensor of the real-size check holds at most so many elements, so that a certificate stays quick."""

Make = Callable[[Problem, np.random.Generator], Inputs]


class Check(StrEnum):
    """How the output of a case is compared with the reference."""

    BOUNDED = "bounded"  # elementwise maximum within twice the error of the plain computation plus 2 ulp
    BITWISE = "bitwise"  # the rounded reference, bit for bit
    BITWISE_POWERS = "bitwise_powers"  # bit for bit in rows that see a power of two of keys, bounded in the others


class Twin(StrEnum):
    """A second run that must yield the same bits."""

    NONE = "none"
    REPEATED = "repeated"  # the same launch again, several times
    ALONE = "alone"  # each batch element by itself
    CONTIGUOUS = "contiguous"  # contiguous copies of the same operands
    GARBAGE = "garbage"  # NaN in k and large numbers in v where no query looks


@dataclass(frozen=True)
class Case:
    """One problem with inputs, a memory layout, a scale and what to check."""

    name: str
    problem: Problem
    make: Make
    check: Check
    twin: Twin
    layout: Layout
    scale: float

    @property
    def bitwise(self) -> bool:
        """Whether the case demands equal bits of something."""
        return self.check is not Check.BOUNDED or self.twin is not Twin.NONE


@dataclass(frozen=True, slots=True)
class Tiles:
    """Rows of a Q tile and of a K/V tile, around whose multiples the cases place their lengths; heads that a tile takes together."""

    block_q: int = 64
    block_kv: int = 64
    group: int = 1  # query heads per key head come in multiples of it


QUICK_TOPICS = ("selection-0", "averaging-0", "ragged-4", "rising-0", "strongly_negative-0", "unseen-0", "layout-0", "repeated-0")
"""The cases of the quick suite, by name in the full one."""


@lru_cache(maxsize=64)
def full_suite(klass: ProblemClass, tiles: Tiles) -> tuple[Case, ...]:
    """All cases for the class."""
    suite = _Suite(klass, tiles)
    for part in (_selection, _averaging, _ragged, _heads, _magnitudes, _layouts, _empty, _twins, _MASK_CASES[klass.mask]):
        part(suite)
    return tuple(suite.cases)


def quick_suite(klass: ProblemClass, tiles: Tiles) -> tuple[Case, ...]:
    """The eight cases that reject most faults, for use inside a search."""
    return tuple(case for case in full_suite(klass, tiles) if case.name in QUICK_TOPICS)


class _Suite:
    """Collects cases; masks take turns, so that every topic meets several."""

    def __init__(self, klass: ProblemClass, tiles: Tiles) -> None:
        self.klass, self.tiles, self.cases = klass, tiles, list[Case]()
        self.masks = _masks(klass.mask, tiles.block_kv)

    def add(
        self,
        topic: str,
        lengths: tuple[int, int],
        make: Make,
        *,
        heads: tuple[int, int, int] = (1, 1, 1),
        mask: Mask | None = None,
        check: Check = Check.BOUNDED,
        twin: Twin = Twin.NONE,
        layout: Layout = Layout.ROOMY,
        scale: float | None = None,
    ) -> None:
        number = sum(case.name.rsplit("-", 1)[0] == topic for case in self.cases)
        klass, (batch, heads_q, heads_kv) = self.klass, heads
        problem = Problem(
            klass.dtype, klass.head_dim, klass.head_dim_v, batch, heads_q * self.tiles.group, heads_kv, *lengths,
            mask or self.masks[number % len(self.masks)], klass.op, klass.deterministic,
        )  # fmt: skip
        self.cases.append(Case(f"{topic}-{number}", problem, make, check, twin, layout, problem.scale if scale is None else scale))

    @property
    def everything(self) -> Mask:
        """A mask of the class's kind that hides nothing from the last query row."""
        return self.masks[0] if self.klass.mask is not MaskKind.WINDOW else Mask.window(-1, -1)


def _masks(kind: MaskKind, block_kv: int) -> tuple[Mask, ...]:
    if kind is MaskKind.NONE:
        return (Mask(),)
    if kind is MaskKind.CAUSAL:
        return Mask.causal(), Mask.causal(Alignment.TOP_LEFT)
    top_left = Alignment.TOP_LEFT
    return (
        Mask.window(block_kv // 2 + 1, 0), Mask.window(block_kv, 3, top_left), Mask.window(-1, 5), Mask.window(7, -1, top_left),
        Mask.window(block_kv - 1, block_kv), Mask.window(0, 0), Mask.window(-1, -1),
    )  # fmt: skip


def _selection(suite: _Suite) -> None:
    q, kv = suite.tiles.block_q, suite.tiles.block_kv
    shapes = ((min(q, 64) + 1, 2 * kv + 3), (17, 3 * kv), (5, kv + 1), (q, kv), (33, 2 * kv + kv // 2), (q + 1, kv - 1))
    for number, lengths in enumerate(shapes):
        scale = 0.3 if number == 2 else suite.klass.head_dim**-0.5

        def make(problem: Problem, rng: np.random.Generator, start: int = number, scale: float = scale) -> Inputs:
            return cases.selection(problem, rng, cases.border_winners(problem, kv, start), scale)

        suite.add("selection", lengths, make, check=Check.BITWISE, scale=scale, heads=(1, 2, 1) if number == 2 else (1, 1, 1))


def _averaging(suite: _Suite) -> None:
    power = 1 << (2 * suite.tiles.block_kv - 1).bit_length()
    for lengths in ((9, power), (33, 64), (suite.tiles.block_q + 1, power // 2)):
        suite.add("averaging", lengths, cases.averaging, check=Check.BITWISE_POWERS)


def _ragged(suite: _Suite) -> None:
    q, kv = suite.tiles.block_q, suite.tiles.block_kv
    shapes = (
        (1, 1), (1, kv + 5), (3, kv - 1), (q - 1, kv + 1), (min(q, 64) + 9, 2 * kv - 1), (2, 5), (5, 6), (4, 2), (1, 228),
        (2 * q, kv), (q, 2 * kv), (113, 203), (100, 164), (128, 64),
    )  # fmt: skip
    for number, lengths in enumerate(shapes):
        suite.add("ragged", lengths, cases.normal, layout=(Layout.ROOMY, Layout.CONTIGUOUS)[number % 2])


def _heads(suite: _Suite) -> None:
    q, kv = suite.tiles.block_q, suite.tiles.block_kv
    for heads, lengths in (((1, 6, 2), (3, 4)), ((1, 4, 1), (9, kv + 1)), ((2, 8, 2), (5, 17)), ((3, 2, 2), (7, kv + 3))):
        suite.add("heads", lengths, cases.normal, heads=heads)
    # Several query tiles of several heads, which persistent kernels compute one after the other.
    for lengths in ((2 * q, 2 * q), (q + 9, 2 * kv + 5)):
        suite.add("successive", lengths, cases.normal, heads=(1, 4, 2))


def _magnitudes(suite: _Suite) -> None:
    kv = suite.tiles.block_kv
    for direction in ("rising", "falling", "zigzag"):
        for lengths in ((19, 3 * kv + 7), (min(suite.tiles.block_q, 64) + 1, kv + 1)):
            suite.add(direction, lengths, _ramp(direction))
    suite.add("large", (21, 2 * kv + 1), lambda problem, rng: cases.coarse(problem, rng, 8.0))
    suite.add("constant", (5, kv + 7), lambda problem, rng: cases.constant_scores(problem, rng, 4.0, -3.0))
    suite.add("one_sided", (11, 3 * kv), lambda problem, rng: cases.normal(problem, rng, 0.5, 8.0))
    if suite.klass.dtype is not DType.FLOAT32:  # probabilities are not rounded there
        for lengths in ((16, kv + 6), (min(suite.tiles.block_q, 64) + 1, 2 * kv + 2)):
            suite.add("cancelling", lengths, cases.cancelling)
    suite.add("top_of_range", (6, kv + 2), cases.top_of_range)
    # A kernel whose softmax reference lags behind the maximum lets the accumulator overflow here: with the wider scores at once, with the
    # narrower ones before the probabilities do.
    for spread in (8.0, 3.0):
        suite.add("top_of_range", (18, 3 * kv + 1), _at_the_top(spread))
    for direction in ("rising", "falling"):
        suite.add(direction, (17, 2 * kv + 3), _ramp(direction, 80.0))
    for last_first in (False, True):
        suite.add("cluster", (20, 5 * kv + 3), _cluster(kv + 3, last_first), mask=suite.everything)
    negative = _without_rng(cases.strongly_negative)
    for scale in (suite.klass.head_dim**-0.5, 1.0):
        suite.add("strongly_negative", (1, 64), negative, check=Check.BITWISE, scale=scale, mask=suite.everything)
    suite.add("huge_single_key", (1, 1), _without_rng(cases.huge_single_key), check=Check.BITWISE, mask=suite.everything)
    for scale in (0.02, 0.7):
        suite.add("scale", (10, kv + 9), cases.coarse, scale=scale)


def _ramp(direction: str, height: float = 24.0) -> Make:
    return lambda problem, rng: cases.ramp(problem, rng, direction, height)


def _cluster(low: int, last_first: bool) -> Make:
    return lambda problem, rng: cases.cluster(problem, low, last_first)


def _at_the_top(spread: float) -> Make:
    return lambda problem, rng: cases.top_of_range(problem, rng, spread)


def _without_rng(make: Callable[[Problem], Inputs]) -> Make:
    return lambda problem, rng: make(problem)


def _layouts(suite: _Suite) -> None:
    kv = suite.tiles.block_kv
    for layout in (Layout.UNALIGNED, Layout.TRANSPOSED, Layout.FUSED, Layout.EXPANDED, Layout.ODD_ROWS):
        make = cases.shared_heads if layout is Layout.EXPANDED else cases.normal
        suite.add("layout", (13, kv + 3), make, heads=(1, 2, 2), layout=layout, twin=Twin.CONTIGUOUS)


def _empty(suite: _Suite) -> None:
    for batch, lengths in ((1, (0, 5)), (1, (5, 0)), (1, (0, 0)), (0, (4, 4))):
        suite.add("nothing", lengths, cases.normal, heads=(batch, 2, 1))


def _twins(suite: _Suite) -> None:
    q, kv = suite.tiles.block_q, suite.tiles.block_kv
    suite.add("repeated", (min(q, 64) + 3, 2 * kv + 5), cases.normal, twin=Twin.REPEATED, layout=Layout.TIGHT)
    suite.add("repeated", (9, kv + 1), cases.normal, heads=(2, 4, 2), twin=Twin.REPEATED)
    suite.add("alone", (9, kv + 1), cases.normal, heads=(3, 2, 1), twin=Twin.ALONE, layout=Layout.TRANSPOSED)


def _unseen(suite: _Suite, masks: Iterable[Mask]) -> None:
    """Keys that no query sees, and keys that only some see, hold garbage."""
    kv = suite.tiles.block_kv
    for mask in masks:
        suite.add("unseen", (21, kv + 30), cases.normal, mask=mask, twin=Twin.GARBAGE)
        suite.add("future", (kv + 5, kv + 9), _garbage_at_the_end, mask=mask)


def _garbage_at_the_end(problem: Problem, rng: np.random.Generator) -> Inputs:
    last = np.arange(problem.seqlen_kv) >= problem.seqlen_kv * 2 // 3
    return cases.with_garbage(problem, cases.normal(problem, rng), last)


def _residues(suite: _Suite) -> None:
    """Mask edges at every distance from the edges of 16-row products and of tiles: bounds that skip masks or tiles err at single ones."""
    kv = suite.tiles.block_kv
    for shift in range(16):
        if suite.klass.mask is MaskKind.CAUSAL:
            suite.add("residue", (33, kv + 17 + shift), cases.normal, mask=suite.masks[0])
        else:
            suite.add("residue_left", (33, kv + 33), cases.normal, mask=Mask.window(16 + shift, 3))
            suite.add("residue_right", (33, kv + 15 + shift), cases.normal, mask=Mask.window(kv, 2))


def _no_mask(suite: _Suite) -> None:
    kv = suite.tiles.block_kv
    suite.add("unseen", (21, kv + 30), cases.normal, twin=Twin.GARBAGE)  # nothing is hidden: only the guards are garbage
    for lengths in ((2, 2 * kv - 2), (6, kv + kv // 2), (suite.tiles.block_q + 7, 9), (3, 3 * kv + 1)):
        suite.add("tail", lengths, cases.normal, heads=(1, 2, 1))


def _causal(suite: _Suite) -> None:
    q, kv = suite.tiles.block_q, suite.tiles.block_kv
    bottom_right, top_left = suite.masks
    _residues(suite)
    _unseen(suite, (top_left,))
    for mask in (bottom_right, top_left):
        for lengths in ((kv + 3, 9), (9, kv + 3), (q + 5, 2 * kv + 1)):
            suite.add("rectangular", lengths, cases.normal, mask=mask)


def _window(suite: _Suite) -> None:
    kv = suite.tiles.block_kv
    _residues(suite)
    _unseen(suite, (Mask.window(9, 0), Mask.window(9, 2, Alignment.TOP_LEFT)))
    edges = ((kv - 1, 0), (kv, 0), (kv + 1, 0), (0, kv - 1), (0, kv), (3, 3), (-1, 0), (0, -1), (2, HUGE_WINDOW))
    for number, (left, right) in enumerate(edges):
        mask = Mask.window(left, right, (Alignment.BOTTOM_RIGHT, Alignment.TOP_LEFT)[number % 2])
        suite.add("edges", (kv + 5, 2 * kv + 1 if number % 3 else kv + 5), cases.normal, mask=mask)
    suite.add("edges", (6, 3), cases.normal, mask=Mask.window(-1, HUGE_WINDOW))
    suite.add("edges", (129, 32), cases.normal, mask=Mask.window(32, 64))
    suite.add("only_self", (kv + 1, kv + 1), cases.normal, mask=Mask.window(0, 0), check=Check.BITWISE)


_MASK_CASES = {MaskKind.NONE: _no_mask, MaskKind.CAUSAL: _causal, MaskKind.WINDOW: _window}


def real_size(problem: Problem, most_elements: int = MOST_ELEMENTS) -> Problem:
    """The problem itself, with fewer batches and heads where a tensor would hold more than `most_elements`."""
    longest = max(problem.seqlen_q * problem.gqa_group, problem.seqlen_kv, 1) * max(problem.head_dim, problem.head_dim_v)
    sequences = max(1, most_elements // longest)
    heads_kv = min(problem.heads_kv, sequences)
    return replace(
        problem, heads_kv=heads_kv, heads_q=heads_kv * problem.gqa_group, batch=min(problem.batch, max(1, sequences // heads_kv))
    )
