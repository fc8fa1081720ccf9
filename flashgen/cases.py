"""Inputs of certification: what numbers, in which memory layout, surrounded by NaN. The suite that uses them is in `suite`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import ArrayLike, NDArray

from flashgen.model import DType, ForwardTensors, Problem, Tensor
from flashgen.reference import encode, max_finite, round_to, storage, visible

LOG2_E = 1.4426950408889634
GUARD_ROWS = 64
"""Rows of NaN before and after every tensor; an access that strays by up to a tile meets them."""

_POISON = {DType.FLOAT32: 0x7FE5A5A5, DType.FLOAT16: 0x7FA5, DType.BFLOAT16: 0x7FE5}
"""Quiet NaNs with a payload that no computation yields, so that an element never written differs from one computed to NaN."""


class Layout(StrEnum):
    """How a logical (batch, heads, rows, columns) tensor lies in memory."""

    CONTIGUOUS = "contiguous"
    ROOMY = "roomy"  # NaN rows after the last row of every head, as in a cache longer than the sequence
    TRANSPOSED = "transposed"  # (batch, rows, heads, columns) memory
    FUSED = "fused"  # slices of one (batch, rows, q heads + k heads + v heads) projection
    EXPANDED = "expanded"  # one k, v head seen as many: head stride 0
    UNALIGNED = "unaligned"  # contiguous, base one element past a 16-byte boundary
    TIGHT = "tight"  # contiguous without guards, so that a checker of memory bounds sees every stray access
    ODD_ROWS = "odd_rows"  # row stride one element more than the columns


@dataclass(frozen=True)
class Inputs:
    """Logical q, k, v as float32 arrays (batch, heads, rows, columns) whose values are elements of the problem's type."""

    q: NDArray[np.float32]
    k: NDArray[np.float32]
    v: NDArray[np.float32]


# Memory ---------------------------------------------------------------------------------------------------------------


def poisoned(count: int, dtype: DType) -> NDArray[Any]:
    """A 64-byte aligned buffer of poison."""
    spare = 64 // dtype.bytes
    bits = np.full(count + spare, _POISON[dtype], dtype=np.uint32 if dtype is DType.FLOAT32 else np.uint16)
    first = (-bits.ctypes.data % 64) // dtype.bytes
    return bits[first : first + count].view(storage(dtype))


def is_poison(elements: NDArray[Any], dtype: DType) -> NDArray[np.bool_]:
    """Which elements still hold the poison."""
    return np.asarray(bits_of(elements) == _POISON[dtype])


def bits_of(elements: NDArray[Any]) -> NDArray[Any]:
    """The elements as unsigned integers of the same size."""
    return np.ascontiguousarray(elements).view(np.uint32 if elements.itemsize == 4 else np.uint16)


def owned(tensor: Tensor) -> NDArray[np.bool_]:
    """Which elements of the buffer belong to the tensor; the rest is guard."""
    flags = np.zeros(tensor.buffer.shape, dtype=bool)
    as_strided(flags[tensor.offset :], tensor.shape, tensor.strides)[...] = True
    return flags


def allocate(shape: tuple[int, int, int, int], dtype: DType, layout: Layout, fused_heads: int = 0, first_head: int = 0) -> Tensor:
    """A poisoned tensor with guards on both sides, and in the gaps that its strides leave.

    `fused_heads` heads of the same width lie in one row of the fused projection, this tensor's from `first_head` on.
    """
    batch, heads, rows, columns = shape
    stored_heads, shift = heads, 0
    if layout is Layout.TRANSPOSED:
        strides = (rows * heads * columns, columns, heads * columns, 1)
    elif layout is Layout.FUSED:
        width = fused_heads * columns
        strides, shift = (rows * width, columns, width, 1), first_head * columns
    else:
        room = rows + GUARD_ROWS // 4 if layout is Layout.ROOMY else rows
        row_stride = columns + 1 if layout is Layout.ODD_ROWS else columns
        stored_heads = 1 if layout is Layout.EXPANDED else heads
        strides = (stored_heads * room * row_stride, 0 if layout is Layout.EXPANDED else room * row_stride, row_stride, 1)
    guard = 0 if layout is Layout.TIGHT else -(-GUARD_ROWS * strides[2] // 64) * 64
    extent = shift + max(strides[0], 1) * batch
    offset = guard + shift + (1 if layout is Layout.UNALIGNED else 0)
    return Tensor(poisoned(2 * guard + extent + (1 if layout is Layout.UNALIGNED else 0), dtype), offset, shape, strides)


def operands(problem: Problem, inputs: Inputs, layout: Layout) -> ForwardTensors:
    """Guarded tensors that hold the inputs, and poisoned outputs."""
    heads_q, heads_kv = problem.heads_q, problem.heads_kv
    fused = heads_q + 2 * heads_kv
    output_layout = {Layout.EXPANDED: Layout.CONTIGUOUS, Layout.FUSED: Layout.TRANSPOSED}.get(layout, layout)
    query_layout = Layout.CONTIGUOUS if layout is Layout.EXPANDED else layout
    q = allocate(shape_of(inputs.q), problem.dtype, query_layout, fused, 0)
    k = allocate(shape_of(inputs.k), problem.dtype, layout, fused, heads_q)
    v = allocate(shape_of(inputs.v), problem.dtype, layout, fused, heads_q + heads_kv)
    for tensor, values in ((q, inputs.q), (k, inputs.k), (v, inputs.v)):
        tensor.view()[...] = encode(values, problem.dtype)
    o = allocate((problem.batch, heads_q, problem.seqlen_q, problem.head_dim_v), problem.dtype, output_layout)
    lse_layout = Layout.TIGHT if layout is Layout.TIGHT else Layout.CONTIGUOUS
    lse = allocate((problem.batch, heads_q, problem.seqlen_q, 1), DType.FLOAT32, lse_layout)
    return ForwardTensors(q, k, v, o, lse)


def shape_of(values: NDArray[Any]) -> tuple[int, int, int, int]:
    """The four extents of an array."""
    batch, heads, rows, columns = values.shape
    return batch, heads, rows, columns


# Numbers --------------------------------------------------------------------------------------------------------------


def normal(problem: Problem, rng: np.random.Generator, spread: float = 1.0, shift_v: float = 0.0) -> Inputs:
    """Normal q, k (standard deviation `spread`) and v (mean `shift_v`)."""
    q, k, v = (rng.standard_normal(shape, dtype=np.float32) for shape in shapes(problem))
    return rounded(problem, q * np.float32(spread), k * np.float32(spread), v + np.float32(shift_v))


def coarse(problem: Problem, rng: np.random.Generator, spread: float = 1.0) -> Inputs:
    """As `normal`, with q and k on a grid of spread/32 within ±4 spreads, so that float32 scores are exact in any order of summation.

    Large scores would otherwise make the float32 bound a matter of luck: their rounding, amplified by exp, decides single rows.
    """
    inputs, step = normal(problem, rng), np.float32(spread / 32)
    q, k = (np.clip(np.rint(x * 32), -127, 127) * step for x in (inputs.q, inputs.k))
    return rounded(problem, q, k, inputs.v)


def shapes(problem: Problem) -> tuple[tuple[int, int, int, int], ...]:
    """Shapes of q, k, v."""
    kv = (problem.batch, problem.heads_kv, problem.seqlen_kv)
    return (problem.batch, problem.heads_q, problem.seqlen_q, problem.head_dim), (*kv, problem.head_dim), (*kv, problem.head_dim_v)


def rounded(problem: Problem, q: ArrayLike, k: ArrayLike, v: ArrayLike) -> Inputs:
    """Arrays, broadcast to the problem's shapes and rounded to its type."""
    given = zip((q, k, v), shapes(problem), strict=True)
    return Inputs(*(round_to(np.broadcast_to(np.asarray(x, dtype=np.float32), shape), problem.dtype) for x, shape in given))


def constant_scores(problem: Problem, rng: np.random.Generator, q: float, k: float) -> Inputs:
    """All scores equal: q·k·head_dim before scaling; v normal."""
    return rounded(problem, np.float32(q), np.float32(k), normal(problem, rng).v)


def averaging(problem: Problem, rng: np.random.Generator) -> Inputs:
    """Zero keys, so that all weights are 1, and integer v from 64 to 127: sums are exact in float32, not in 11 bits of mantissa."""
    return rounded(problem, normal(problem, rng).q, np.float32(0), rng.integers(64, 128, shapes(problem)[2]))


def ramp(problem: Problem, rng: np.random.Generator, direction: str, height: float = 24.0) -> Inputs:
    """Scaled scores that rise, fall or zigzag along the keys by `height` natural-log units in all, plus noise."""
    keys = np.linspace(-1.0, 1.0, max(problem.seqlen_kv, 1))[: problem.seqlen_kv]
    course = {"rising": keys, "falling": -keys, "zigzag": np.where(np.arange(keys.size) % 2, keys, -keys)}[direction]
    noise = normal(problem, rng, 0.25)
    along = course[:, None] * height / (2 * problem.scale * problem.head_dim)
    return rounded(problem, 1.0 + noise.q, along + noise.k, noise.v * 4)


def top_of_range(problem: Problem, rng: np.random.Generator, spread: float = 1.0) -> Inputs:
    """v near the top of what the type holds (1e30, or half the float16 maximum); q and k of standard deviation `spread`."""
    base = coarse(problem, rng, spread)
    top = min(1e30, max_finite(problem.dtype) / 2)
    size = 0.75 + 0.25 * rng.random(base.v.shape, dtype=np.float32)
    return rounded(problem, base.q, base.k, np.sign(base.v) * np.float32(top) * size)


def strongly_negative(problem: Problem) -> Inputs:
    """Raw scores of -250,000 or below, those of odd keys slightly higher; v row j is all j. Finite sentinels for -inf fail here."""
    key = np.arange(problem.seqlen_kv, dtype=np.float32)[:, None]
    lift = 2.0 ** np.ceil(np.log2(max(1.0, 128 / problem.head_dim)))  # small head dims reach such scores by larger queries
    return rounded(problem, np.float32(44 * lift), np.where(key % 2, np.float32(-43.75), np.float32(-44)), key)


def cancelling(problem: Problem, rng: np.random.Generator) -> Inputs:
    """Large v whose weighted sum nearly vanishes: the error of probabilities shows, since no large output hides it."""
    inputs = coarse(problem, rng, 0.5)
    sign = np.where(np.arange(problem.seqlen_kv) % 2, np.float32(-1), np.float32(1))[:, None]
    v = inputs.v * np.float32(0.25) + sign * np.float32(64)
    return rounded(problem, inputs.q, inputs.k, v)


def cluster(problem: Problem, low: int, last_first: bool) -> Inputs:
    """Along the keys, or from the last one back: `low` low scores, 32 equal high ones, then scores 14 log2 units below those.

    v is 1 for what comes last, else 0, so the output is the weight of the many small probabilities. A softmax reference that jumps above
    the maximum takes from those what their type cannot hold.
    """
    height = np.full(problem.seqlen_kv, -14.0, dtype=np.float32)
    height[:low], height[low : low + 32] = -40.0, 0.0
    v = height == -14.0
    q, k = np.zeros((1, problem.head_dim)), np.zeros((problem.seqlen_kv, problem.head_dim))
    q[:, 0], k[:, 0] = 1.0 / (problem.scale * LOG2_E), height[::-1] if last_first else height
    return rounded(problem, q, k, (v[::-1] if last_first else v)[:, None])


def selection(problem: Problem, rng: np.random.Generator, winners: NDArray[np.int64], scale: float) -> Inputs:
    """For query row i, key winners[i] scores 0 and every other at most -200 log2 units, exactly, whatever the order of summation.

    The score is -(a - wa)² - (b - wb)² for key 256·b + a, expanded into seven products of integers times a power of two.
    Output row i must be row winners[i] of v, bit for bit.
    """
    factor = 2.0 ** np.ceil(np.log2(200.0 / (scale * LOG2_E)))
    key_factor = 64.0
    key = np.arange(problem.seqlen_kv)
    a, b = key % 256 - 128, key // 256
    wa, wb = winners % 256 - 128, winners // 256
    keys = np.stack([a, a * a // 256, a * a % 256, b, b * b, np.full_like(a, 256), np.ones_like(a)], axis=1)
    constant = wa * wa + wb * wb
    one = np.ones_like(wa)
    queries = np.stack([2 * wa, -256 * one, -one, 2 * wb, -one, -(constant // 256), -(constant % 256)], axis=1)
    q, k = np.zeros((winners.size, problem.head_dim)), np.zeros((key.size, problem.head_dim))
    q[:, :7], k[:, :7] = queries * (factor / key_factor), keys * key_factor
    v = normal(problem, rng).v
    return rounded(problem, q, k, np.where(v == 0, np.float32(1), v))


def border_winners(problem: Problem, block_kv: int, start: int = 0) -> NDArray[np.int64]:
    """For every query row one visible key at a tile border (first, last, both sides of each edge), cycling; 0 where none is visible."""
    length = problem.seqlen_kv
    edges = {0, length - 1, *(edge + side for edge in range(block_kv, length, block_kv) for side in (-1, 0))}
    winners = np.zeros(problem.seqlen_q, dtype=np.int64)
    for row, seen in enumerate(visible(problem.mask, problem.seqlen_q, length)):
        keys = np.flatnonzero(seen)
        if keys.size:
            candidates = sorted({edge for edge in edges if seen[edge : edge + 1].any()} | {int(keys[0]), int(keys[-1])})
            winners[row] = candidates[(row + start) % len(candidates)]
    return winners


def huge_single_key(problem: Problem) -> Inputs:
    """q = k = v, all 133120 (240 in float16): a scaled score that no fused multiply-subtract survives. The output is v, bit for bit."""
    return rounded(problem, *(np.float32(240 if problem.dtype is DType.FLOAT16 else 133120) for _ in range(3)))


def shared_heads(problem: Problem, rng: np.random.Generator) -> Inputs:
    """Normal inputs whose k and v are the same in every head, for expanded layouts."""
    inputs = normal(problem, rng)
    return Inputs(inputs.q, *(np.broadcast_to(x[:, :1], x.shape) for x in (inputs.k, inputs.v)))


def with_garbage(problem: Problem, inputs: Inputs, keys: NDArray[np.bool_]) -> Inputs:
    """The inputs with NaN in the given keys of k, and large finite numbers in the same rows of v."""
    garbage = np.float32(max_finite(problem.dtype) / 4)
    chosen = keys[None, None, :, None]
    return rounded(problem, inputs.q, np.where(chosen, np.float32(np.nan), inputs.k), np.where(chosen, garbage, inputs.v))
