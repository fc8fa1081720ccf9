"""Attention forward in float64, the plain computation in the element type, and element conversions. The yardstick of every certificate."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashgen.model import DType, Mask, MaskKind, Problem

Floats = NDArray[np.floating[Any]]

_MANTISSA_BITS = {DType.FLOAT32: 23, DType.FLOAT16: 10, DType.BFLOAT16: 7}
_MIN_EXPONENT = {DType.FLOAT32: -126, DType.FLOAT16: -14, DType.BFLOAT16: -126}
_MAX_FINITE = {DType.FLOAT32: 3.4028234663852886e38, DType.FLOAT16: 65504.0, DType.BFLOAT16: 3.3895313892515355e38}
_STORAGE = {DType.FLOAT32: np.float32, DType.FLOAT16: np.float16, DType.BFLOAT16: np.uint16}
NAN_DISTANCE = 2**32
"""ULP distance between a number and a NaN: more than any two numbers can be apart."""


@dataclass(frozen=True)
class Attention:
    """Output (…, rows, head_dim_v) and natural log-sum-exp (…, rows) of one computation."""

    o: Floats
    lse: Floats


def storage(dtype: DType) -> np.dtype[Any]:
    """The NumPy type that holds elements: float32, float16, or uint16 with bfloat16 bits."""
    return np.dtype(_STORAGE[dtype])


def max_finite(dtype: DType) -> float:
    """The largest finite element."""
    return _MAX_FINITE[dtype]


def decode(elements: NDArray[Any], dtype: DType) -> NDArray[np.float32]:
    """Elements as float32, exactly."""
    if dtype is DType.BFLOAT16:
        return (elements.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return elements.astype(np.float32)


def encode(values: Floats, dtype: DType) -> NDArray[Any]:
    """Float32 or float64 values rounded once, to nearest even, into elements of `storage(dtype)`."""
    with np.errstate(over="ignore", invalid="ignore"):
        if dtype is not DType.BFLOAT16:
            return values.astype(storage(dtype))
        bits = np.asarray(_round_to_odd(values), order="C").view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), np.uint32(0x7FFF), rounded).astype(np.uint16)


def _round_to_odd(values: Floats) -> NDArray[np.float32]:
    """Float64 to float32 such that a second rounding to bfloat16 equals a single one: inexact results end in an odd bit."""
    nearest = np.asarray(values).astype(np.float32)
    if values.dtype == np.float32:
        return nearest
    inexact = (nearest.astype(np.float64) != values) & ~np.isnan(values)
    too_large = inexact & (np.abs(nearest.astype(np.float64)) > np.abs(values))
    bits = nearest.view(np.uint32) - too_large.astype(np.uint32)
    odd: NDArray[np.float32] = (bits | inexact.astype(np.uint32)).view(np.float32)
    return odd


def round_to(values: Floats, dtype: DType) -> NDArray[np.float32]:
    """Values rounded to the element type and read back as float32."""
    return decode(encode(values, dtype), dtype)


def ulp(magnitude: float, dtype: DType) -> float:
    """Distance between neighbouring elements at `magnitude` (finite)."""
    exponent = math.frexp(magnitude)[1] - 1 if magnitude else _MIN_EXPONENT[dtype]
    return math.ldexp(1.0, max(exponent, _MIN_EXPONENT[dtype]) - _MANTISSA_BITS[dtype])


def ulp_distance(left: NDArray[Any], right: NDArray[Any], dtype: DType) -> NDArray[np.int64]:
    """Number of representable steps between elements; -0 and +0 are 0 apart, NaN and a number NAN_DISTANCE, two NaN 0."""
    distance: NDArray[np.int64] = np.abs(_ordered(left, dtype) - _ordered(right, dtype))
    left_nan, right_nan = np.isnan(decode(left, dtype)), np.isnan(decode(right, dtype))
    distance[left_nan != right_nan] = NAN_DISTANCE
    distance[left_nan & right_nan] = 0
    return distance


def _ordered(elements: NDArray[Any], dtype: DType) -> NDArray[np.int64]:
    """Integers in the order of the values; both zeros are 0."""
    bits = np.asarray(elements, order="C").view(np.uint32 if dtype is DType.FLOAT32 else np.uint16).astype(np.int64)
    sign = 1 << (8 * dtype.bytes - 1)
    ordered: NDArray[np.int64] = np.where(bits & sign, -(bits & (sign - 1)), bits)
    return ordered


def visible(mask: Mask, seqlen_q: int, seqlen_kv: int, rows: NDArray[np.int64] | None = None) -> NDArray[np.bool_]:
    """Whether each query row (all, or the given ones) sees each key: (rows, seqlen_kv)."""
    row = (np.arange(seqlen_q) if rows is None else rows)[:, None] + mask.diagonal(seqlen_q, seqlen_kv)
    key = np.arange(seqlen_kv)[None, :]
    seen = np.ones((row.shape[0], seqlen_kv), dtype=bool)
    if mask.kind is MaskKind.CAUSAL:
        return seen & (key <= row)
    if mask.left >= 0:
        seen &= key >= row - mask.left
    if mask.right >= 0:
        seen &= key <= row + mask.right
    return seen


def visible_counts(mask: Mask, seqlen_q: int, seqlen_kv: int) -> NDArray[np.int64]:
    """How many keys each query row sees: (seqlen_q,). Builds no matrix of queries by keys."""
    row = np.arange(seqlen_q, dtype=np.int64) + mask.diagonal(seqlen_q, seqlen_kv)
    right = 0 if mask.kind is MaskKind.CAUSAL else mask.right
    last = np.full(seqlen_q, seqlen_kv) if right < 0 else np.clip(row + right + 1, 0, seqlen_kv)
    first = np.zeros(seqlen_q, dtype=np.int64) if mask.left < 0 else np.clip(row - mask.left, 0, seqlen_kv)
    counts: NDArray[np.int64] = np.maximum(last - first, 0)
    return counts


def head(q: Floats, k: Floats, v: Floats, seen: NDArray[np.bool_], scale: float) -> Attention:
    """Float64 attention of one head: q (rows, head_dim), k (keys, head_dim), v (keys, head_dim_v), seen (rows, keys).

    A row that sees no key gives output 0 and lse -inf. Keys that no row sees may hold NaN; a NaN in a seen key reaches its rows.
    """
    used = _any(seen, 0)
    k, v, seen = k[used].astype(np.float64), v[used].astype(np.float64), seen[:, used]
    with np.errstate(invalid="ignore"):
        scores = np.where(seen, q.astype(np.float64) @ k.T * scale, -np.inf)
        highest = scores.max(axis=1, initial=-np.inf)
        base = np.where(np.isneginf(highest), 0.0, highest)
        weights = np.where(seen, np.exp(scores - base[:, None]), 0.0)
        total = weights.sum(axis=1)
        empty = ~_any(seen, 1)
        o = np.where(empty[:, None], 0.0, (weights @ v) / np.where(empty, 1.0, total)[:, None])
        lse = np.where(empty, -np.inf, base + np.log(np.where(empty, 1.0, total)))
    return Attention(o, lse)


def plain_head(q: Floats, k: Floats, v: Floats, seen: NDArray[np.bool_], scale: float, dtype: DType) -> Attention:
    """The textbook computation of one head in the element type, on float32 arrays holding elements; output rounded to the type.

    Scores, softmax and both products are float32; exp(score - maximum) is rounded to the element type before the second product.
    """
    q, k, v = (x.astype(np.float32) for x in (q, k, v))
    with np.errstate(invalid="ignore", over="ignore"):
        scores = np.where(seen, _product(q, k.T, dtype) * np.float32(scale), np.float32(-np.inf))
        highest = scores.max(axis=1, initial=-np.inf, keepdims=True)
        base = np.where(np.isneginf(highest), np.float32(0), highest)
        weights = np.where(seen, np.exp(scores - base), np.float32(0))
        total = weights.sum(axis=1, keepdims=True, dtype=np.float32)
        empty = ~_any(seen, 1)[:, None]
        used = np.where(_any(seen, 0)[:, None], v, np.float32(0))
        o = round_to(_product(round_to(weights, dtype), used, dtype) / np.where(empty, np.float32(1), total), dtype)
        lse = (base + np.log(total, where=~empty, out=np.full_like(total, -np.inf)))[:, 0]
    return Attention(o, lse)


def _any(flags: NDArray[np.bool_], axis: int) -> NDArray[np.bool_]:
    reduced: NDArray[np.bool_] = np.logical_or.reduce(flags, axis=axis)
    return reduced


def _product(left: NDArray[np.float32], right: NDArray[np.float32], dtype: DType) -> NDArray[np.float32]:
    """Float32 matrix product. For float32 elements each sum runs in index order and rounds every step, as a textbook loop does.

    A blocked library product would be unusually accurate, and differ between machines. For 16-bit elements other roundings dominate.
    """
    if dtype is not DType.FLOAT32:
        return left @ right
    total = np.zeros((left.shape[0], right.shape[1]), dtype=np.float32)
    for index in range(left.shape[1]):
        total += left[:, index, None] * right[None, index, :]
    return total


def plain_head_error(q: Floats, k: Floats, v: Floats, seen: NDArray[np.bool_], scale: float, dtype: DType, exact: Floats) -> float:
    """Largest absolute error of the plain computation of one head, over the orders of summation that count as plain.

    For float32 elements these are ascending and descending: with one order alone the smallest cases would be judged by luck.
    """
    orders = (1, -1) if dtype is DType.FLOAT32 else (1,)
    results = [plain_head(q[:, ::step], k[::step, ::step], v[::step], seen[:, ::step], scale, dtype).o for step in orders]
    with np.errstate(invalid="ignore"):
        return max(float(np.abs(o - exact)[np.isfinite(exact)].max(initial=0.0)) for o in results)


def attention(q: Floats, k: Floats, v: Floats, problem: Problem, scale: float) -> Attention:
    """Float64 attention of all heads: q (batch, heads_q, seqlen_q, head_dim), k, v (batch, heads_kv, seqlen_kv, head_dim or head_dim_v)."""
    seen = visible(problem.mask, problem.seqlen_q, problem.seqlen_kv)
    o = np.empty((problem.batch, problem.heads_q, problem.seqlen_q, problem.head_dim_v), dtype=np.float64)
    lse = np.empty(o.shape[:3], dtype=np.float64)
    for batch, query_head in np.ndindex(problem.batch, problem.heads_q):
        at, kv = (batch, query_head), (batch, query_head // problem.gqa_group)
        result = head(q[at], k[kv], v[kv], seen, scale)
        o[at], lse[at] = result.o, result.lse
    return Attention(o, lse)


def plain_error(q: Floats, k: Floats, v: Floats, problem: Problem, scale: float, exact: Floats) -> float:
    """Largest absolute error of the plain computation over all heads where `exact` is finite; shapes as in `attention`."""
    seen = visible(problem.mask, problem.seqlen_q, problem.seqlen_kv)
    worst = 0.0
    for batch, query_head in np.ndindex(problem.batch, problem.heads_q):
        at, kv = (batch, query_head), (batch, query_head // problem.gqa_group)
        worst = max(worst, plain_head_error(q[at], k[kv], v[kv], seen, scale, problem.dtype, exact[at]))
    return worst
