"""The cases that a backward kernel must pass, derived from its problem class and the tile sizes of its variant."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from flashgen import cases
from flashgen.cases import Inputs, Layout
from flashgen.model import Alignment, DType, Mask, MaskKind, Problem, ProblemClass
from flashgen.suite import Tiles, Twin

SUITE = "attention-backward/1"
HUGE_WINDOW = 2**31 - 1
GARBAGE = {DType.FLOAT32: 1e30, DType.BFLOAT16: 1e30, DType.FLOAT16: 1e4}
"""What keys hold that no row sees. A product with a hidden probability must be exactly 0, so they have to be finite."""

Make = Callable[[Problem, np.random.Generator], Inputs]


@dataclass(frozen=True)
class Case:
    """One problem with inputs, a memory layout, which gradients flow in, and what must come out exactly 0."""

    name: str
    problem: Problem
    make: Make = cases.normal
    layout: Layout = Layout.ROOMY
    dout: bool = True
    dlse: bool = False
    scale: float | None = None
    zeros: tuple[str, ...] = ()
    twin: Twin = Twin.NONE

    @property
    def softmax_scale(self) -> float:
        """The factor of the scores."""
        return self.problem.scale if self.scale is None else self.scale

    @property
    def bitwise(self) -> bool:
        """Whether the case demands exact bits of something."""
        return bool(self.zeros) or self.twin is not Twin.NONE


QUICK_TOPICS = ("group", "ragged", "square", "one_hot", "nothing_flows", "only_lse", "constant", "layout-unaligned", "repeated", "crowd")
"""The cases of the quick suite, by name in the full one."""


@lru_cache(maxsize=64)
def full_suite(klass: ProblemClass, tiles: Tiles, ahead: int = 0) -> tuple[Case, ...]:
    """All cases for the class; `ahead`: how many tiles of keys a kernel prepares for while it works on one."""
    suite = _Suite(klass, tiles)
    for part in (_shapes, _bitwise, _magnitudes, _layouts, _twins, _edges):
        part(suite)
    if ahead:
        _crowd(suite, ahead)
    return tuple(suite.cases)


def quick_suite(klass: ProblemClass, tiles: Tiles, ahead: int = 0) -> tuple[Case, ...]:
    """The few cases that reject most faults, for use inside a search."""
    return tuple(case for case in full_suite(klass, tiles, ahead) if case.name in QUICK_TOPICS)


class _Suite:
    """Collects cases; masks take turns, so that every topic meets several."""

    def __init__(self, klass: ProblemClass, tiles: Tiles) -> None:
        self.klass, self.tiles, self.cases = klass, tiles, list[Case]()
        self.masks = masks_of(klass.mask, tiles.block_kv)

    def add(
        self,
        topic: str,
        lengths: tuple[int, int],
        heads: tuple[int, int, int] = (1, 1, 1),
        mask: Mask | None = None,
        make: Make = cases.normal,
        layout: Layout = Layout.ROOMY,
        dout: bool = True,
        dlse: bool = False,
        scale: float | None = None,
        zeros: tuple[str, ...] = (),
        twin: Twin = Twin.NONE,
    ) -> None:
        klass, (batch, heads_q, heads_kv) = self.klass, heads
        problem = Problem(
            klass.dtype, klass.head_dim, klass.head_dim_v, batch, heads_q, heads_kv, *lengths,
            mask or self.masks[len(self.cases) % len(self.masks)], klass.op, klass.deterministic,
        )  # fmt: skip
        taken = sum(case.name == topic or case.name.startswith(f"{topic}-") for case in self.cases)
        name = f"{topic}-{taken}" if taken else topic
        self.cases.append(Case(name, problem, make, layout, dout, dlse, scale, zeros, twin))

    @property
    def everything(self) -> Mask:
        """A mask of the class's kind that hides nothing from the last query row."""
        return self.masks[0] if self.klass.mask is not MaskKind.WINDOW else Mask.window(-1, -1)


def masks_of(kind: MaskKind, block_kv: int) -> tuple[Mask, ...]:
    """The masks of a kind that a suite uses in turn."""
    top_left = Alignment.TOP_LEFT
    if kind is MaskKind.NONE:
        return (Mask(),)
    if kind is MaskKind.CAUSAL:
        return Mask.causal(), Mask.causal(top_left)
    return (
        Mask.window(block_kv // 2 + 1, 0), Mask.window(3, block_kv, top_left), Mask.window(-1, 5), Mask.window(7, -1, top_left),
        Mask.window(block_kv - 1, 2), Mask.window(1, 0), Mask.window(2, HUGE_WINDOW),
    )  # fmt: skip


def _shapes(suite: _Suite) -> None:
    q, kv = suite.tiles.block_q, suite.tiles.block_kv
    suite.add("group", (q + 2, kv + 3), (2, 6, 2), layout=Layout.TRANSPOSED, dlse=True)
    suite.add("ragged", (2 * q + 3, kv - 1))
    suite.add("ragged", (q + 1, 2 * kv + 5), layout=Layout.CONTIGUOUS, dlse=True)
    suite.add("tall", (kv + q + 5, 7))
    suite.add("wide", (5, 2 * kv + 9))
    suite.add("square", (2 * q, 2 * q), dlse=True)
    suite.add("multi_query", (9, kv + 1), (1, 4, 1))
    for batch, lengths in ((1, (0, 5)), (1, (5, 0)), (1, (0, 0)), (0, (4, 4))):
        suite.add("nothing", lengths, (batch, 2, 1), dlse=True, zeros=("dq", "dk", "dv"))


def _bitwise(suite: _Suite) -> None:
    """Gradients that are exactly 0: where a row sees one key, or one key takes all, nothing depends on scores."""
    q, kv = suite.tiles.block_q, suite.tiles.block_kv
    suite.add("one", (1, 1), mask=suite.everything, make=cases.averaging, zeros=("dq", "dk"))
    suite.add("one_hot", (q + 1, 2 * kv + 3), make=one_hot(kv), zeros=("dq", "dk"))
    suite.add("one_hot", (9, kv + 1), (1, 4, 2), make=one_hot(kv), zeros=("dq", "dk"))
    if suite.klass.mask is MaskKind.WINDOW:
        suite.add("only_self", (q + 3, q + 3), mask=Mask.window(0, 0), make=_values_on_grid, zeros=("dq", "dk"))
    suite.add("nothing_flows", (q + 3, kv + 1), dout=False, zeros=("dq", "dk", "dv"))
    suite.add("only_lse", (q + 3, kv + 1), dout=False, dlse=True, zeros=("dv",))


def _magnitudes(suite: _Suite) -> None:
    q, kv = suite.tiles.block_q, suite.tiles.block_kv
    suite.add("large", (q + 5, kv + 2), make=lambda at, rng: cases.coarse(at, rng, 4.0))
    # All scores are -96, so exp(0 - lse) overflows: padding that is scored 0 instead of hidden shows.
    suite.add("constant", (7, kv + 7), make=lambda at, rng: cases.constant_scores(at, rng, 4.0, -3.0), scale=8 / suite.klass.head_dim)
    for scale in (0.7, 0.02):
        suite.add("scale", (q, kv + 9), make=cases.coarse, scale=scale)


def _layouts(suite: _Suite) -> None:
    kv = suite.tiles.block_kv
    for layout in (Layout.UNALIGNED, Layout.FUSED, Layout.ODD_ROWS, Layout.EXPANDED):
        make = cases.shared_heads if layout is Layout.EXPANDED else cases.normal
        suite.add(f"layout-{layout}", (9, kv + 3), (2, 2, 2), layout=layout, make=make, twin=Twin.CONTIGUOUS)


def _twins(suite: _Suite) -> None:
    q, kv = suite.tiles.block_q, suite.tiles.block_kv
    suite.add("repeated", (min(q, 64) + 3, 2 * kv + 5), layout=Layout.TIGHT, dlse=True, twin=Twin.REPEATED)
    suite.add("repeated", (2 * q + 1, kv + 1), (2, 4, 2), twin=Twin.REPEATED)
    suite.add("alone", (9, kv + 1), (3, 2, 1), layout=Layout.TRANSPOSED, dlse=True, twin=Twin.ALONE)
    hiding = {
        MaskKind.NONE: Mask(), MaskKind.CAUSAL: Mask.causal(Alignment.TOP_LEFT), MaskKind.WINDOW: Mask.window(9, 2, Alignment.TOP_LEFT)
    }  # fmt: skip
    suite.add("unseen", (11, kv + 30), mask=hiding[suite.klass.mask], twin=Twin.GARBAGE)


def _edges(suite: _Suite) -> None:
    """Mask edges at every distance from the edges of tiles: a loop that ends a row or a key too early errs at single ones."""
    q, kv = suite.tiles.block_q, suite.tiles.block_kv
    for shift in range(min(kv, 16) if suite.klass.mask is MaskKind.CAUSAL else 0):
        suite.add("edge_of_keys", (q + 1, kv + 1 + shift), mask=suite.masks[shift % 2])
    for shift in range(min(q, 16) if suite.klass.mask is MaskKind.WINDOW else 0):
        suite.add("edge_of_rows", (q + kv + 4, q + kv + 4), mask=Mask.window(shift, 2))
        suite.add("edge_of_keys", (q + 1, 2 * kv + 1), mask=Mask.window(2, shift))


def _crowd(suite: _Suite, ahead: int) -> None:
    """Twice as many tiles of keys as a kernel looks ahead, and more, of many short heads."""
    suite.add("crowd", (5, 2 * suite.tiles.block_kv + 1), (ahead // 4 + 5, 8, 4))


def one_hot(block_kv: int) -> Make:
    """Inputs in which one key takes all of every row, near a tile border; v is on the grid of `on_grid`."""

    def make(problem: Problem, rng: np.random.Generator) -> Inputs:
        chosen = cases.selection(problem, rng, cases.border_winners(problem, block_kv), problem.scale)
        return Inputs(chosen.q, chosen.k, on_grid(chosen.v))

    return make


def _values_on_grid(problem: Problem, rng: np.random.Generator) -> Inputs:
    inputs = cases.normal(problem, rng)
    return Inputs(inputs.q, inputs.k, on_grid(inputs.v))


def on_grid(values: np.ndarray) -> np.ndarray:
    """Multiples of 1/8 within ±2: sums of their products are exact in float32 in any order, so that dP - delta can be exactly 0."""
    return np.clip(np.rint(values * np.float32(8)), -16, 16).astype(np.float32) / np.float32(8)


def with_garbage(problem: Problem, inputs: Inputs, unseen: np.ndarray) -> Inputs:
    """The inputs with large numbers in the given keys of k and v."""
    keys, garbage = unseen[:, None], np.float32(GARBAGE[problem.dtype])
    return cases.rounded(problem, inputs.q, *(np.where(keys, garbage, each) for each in (inputs.k, inputs.v)))
