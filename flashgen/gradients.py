"""Gradients of attention in float64, and the plain computation in the element type: the yardstick of every backward kernel.

With S = scale·QKᵀ, P = exp(S - lse), dP = dO·Vᵀ and delta = rowsum(dO∘O) - dlse, the gradient of the scores is dS = P∘(dP - delta), and
dV = PᵀdO, dK = scale·dSᵀQ, dQ = scale·dS·K. A hidden score has P = 0, so a row that sees no key and a key that no row sees get exactly 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashgen import reference
from flashgen.model import DType, Problem
from flashgen.reference import Floats, _product, round_to


@dataclass(frozen=True)
class Gradients:
    """Gradients of q, k and v, in their shapes; of one head (rows, columns) or of all (batch, heads, rows, columns)."""

    dq: Floats
    dk: Floats
    dv: Floats

    def named(self) -> tuple[tuple[str, Floats], ...]:
        """Name and array."""
        return (("dq", self.dq), ("dk", self.dk), ("dv", self.dv))


@dataclass(frozen=True)
class Saved:
    """What a backward kernel is given besides q, k, v: o, natural lse, gradient of o, gradient of lse; heads_q heads each.

    o and dout are (batch, heads_q, seqlen_q, head_dim_v), lse and dlse (batch, heads_q, seqlen_q).
    """

    o: Floats
    lse: Floats
    dout: Floats
    dlse: Floats


def saved(q: Floats, k: Floats, v: Floats, dout: Floats, dlse: Floats, problem: Problem, scale: float) -> Saved:
    """What an exact forward pass saves: o rounded to the element type, lse to float32."""
    exact = reference.attention(q, k, v, problem, scale)
    return Saved(round_to(exact.o, problem.dtype), exact.lse.astype(np.float32), dout, dlse)


def attention(q: Floats, k: Floats, v: Floats, dout: Floats, dlse: Floats, problem: Problem, scale: float) -> Gradients:
    """Float64 gradients of sum(dout∘o) + sum(dlse∘lse); dk and dv summed over the query heads of their group.

    Shapes as in `reference.attention` and `Saved`. Keys and values that no row sees may hold anything.
    """
    seen = reference.visible(problem.mask, problem.seqlen_q, problem.seqlen_kv)
    total = _zeros(q, k, v, np.float64)
    for batch, query_head in np.ndindex(problem.batch, problem.heads_q):
        at, kv = (batch, query_head), (batch, query_head // problem.gqa_group)
        _add(total, at, kv, head(q[at], k[kv], v[kv], dout[at], dlse[at], seen, scale))
    return total


def head(q: Floats, k: Floats, v: Floats, dout: Floats, dlse: Floats, seen: NDArray[np.bool_], scale: float) -> Gradients:
    """Float64 gradients of one head: q (rows, head_dim), k, v (keys, …), dout (rows, head_dim_v), dlse (rows), seen (rows, keys)."""
    k, v = _seen_rows(k, seen).astype(np.float64), _seen_rows(v, seen).astype(np.float64)
    q, dout = q.astype(np.float64), dout.astype(np.float64)
    forward = reference.head(q, k, v, seen, scale)
    base = np.where(np.isneginf(forward.lse), 0.0, forward.lse)[:, None]
    probabilities = np.exp(np.where(seen, q @ k.T * scale - base, -np.inf))
    delta = (dout * forward.o).sum(axis=1) - dlse
    scores = probabilities * (dout @ v.T - delta[:, None]) * scale
    return Gradients(scores @ k, scores.T @ q, probabilities.T @ dout)


def from_saved(q: Floats, k: Floats, v: Floats, given: Saved, seen: NDArray[np.bool_], scale: float) -> Gradients:
    """Float64 gradients of one head from any o and lse, not only those of an exact forward pass; shapes as in `head`.

    Rows stand alone in dq, keys in dk and dv: a part of the rows gives theirs, and a part of the keys with all rows gives theirs.
    """
    q, k, v, dout, o = (x.astype(np.float64) for x in (q, _seen_rows(k, seen), _seen_rows(v, seen), given.dout, given.o))
    base = np.where(np.isneginf(given.lse), 0.0, given.lse.astype(np.float64))[:, None]
    probabilities = np.exp(np.where(seen, q @ k.T * scale - base, -np.inf))
    delta = (dout * o).sum(axis=1) - given.dlse
    scores = probabilities * (dout @ v.T - delta[:, None]) * scale
    return Gradients(scores @ k, scores.T @ q, probabilities.T @ dout)


def plain(q: Floats, k: Floats, v: Floats, given: Saved, problem: Problem, scale: float) -> Gradients:
    """The textbook computation in the element type, from what the forward pass saved, rounded to the type at the end.

    Products and sums are float32, also over a group of query heads; probabilities and gradients of scores are rounded to the element type
    before they meet dO, Q and K.
    """
    seen = reference.visible(problem.mask, problem.seqlen_q, problem.seqlen_kv)
    total = _zeros(q, k, v, np.float32)
    for batch, query_head in np.ndindex(problem.batch, problem.heads_q):
        at, kv = (batch, query_head), (batch, query_head // problem.gqa_group)
        one = Saved(given.o[at], given.lse[at], given.dout[at], given.dlse[at])
        _add(total, at, kv, plain_head(q[at], k[kv], v[kv], one, seen, scale, problem.dtype))
    return Gradients(*(round_to(values, problem.dtype) for _, values in total.named()))


def plain_head(q: Floats, k: Floats, v: Floats, given: Saved, seen: NDArray[np.bool_], scale: float, dtype: DType) -> Gradients:
    """The textbook computation of one head, before the last rounding; shapes as in `head`."""
    q, k, v, dout, o = (x.astype(np.float32) for x in (q, _seen_rows(k, seen), _seen_rows(v, seen), given.dout, given.o))
    lse = np.where(np.isneginf(given.lse), np.float32(0), given.lse).astype(np.float32)[:, None]
    scores = np.where(seen, _product(q, k.T, dtype) * np.float32(scale) - lse, np.float32(-np.inf))
    probabilities = np.exp(scores)
    delta = _row_sums(dout * o, dtype) - given.dlse.astype(np.float32)
    differences = probabilities * (_product(dout, v.T, dtype) - delta[:, None])
    weights, gradients, factor = round_to(probabilities, dtype), round_to(differences, dtype), np.float32(scale)
    dq, dk = _product(gradients, k, dtype) * factor, _product(gradients.T, q, dtype) * factor
    return Gradients(dq, dk, _product(weights.T, dout, dtype))


def plain_errors(q: Floats, k: Floats, v: Floats, given: Saved, problem: Problem, scale: float, exact: Gradients) -> dict[str, float]:
    """Largest absolute error of the plain computation in dq, dk and dv, over the orders of summation that count as plain.

    For float32 elements these are ascending and descending, as for the forward pass.
    """
    results = [plain(q, k, v, given, problem, scale)]
    if problem.dtype is DType.FLOAT32:
        results.append(_descending(q, k, v, given, problem, scale))
    worst = dict.fromkeys(("dq", "dk", "dv"), 0.0)
    for result in results:
        for (name, values), (_, right) in zip(result.named(), exact.named(), strict=True):
            worst[name] = max(worst[name], float(np.abs(values - right).max(initial=0.0)))
    return worst


def _descending(q: Floats, k: Floats, v: Floats, given: Saved, problem: Problem, scale: float) -> Gradients:
    """`plain` with rows, keys and columns in reverse order, and the result turned back."""
    seen = reference.visible(problem.mask, problem.seqlen_q, problem.seqlen_kv)[::-1, ::-1]
    total = _zeros(q, k, v, np.float32)
    for batch, query_head in reversed(list(np.ndindex(problem.batch, problem.heads_q))):
        at, kv = (batch, query_head), (batch, query_head // problem.gqa_group)
        one = Saved(_turned(given.o[at]), given.lse[at][::-1], _turned(given.dout[at]), given.dlse[at][::-1])
        result = plain_head(_turned(q[at]), _turned(k[kv]), _turned(v[kv]), one, seen, scale, problem.dtype)
        _add(total, at, kv, Gradients(*(_turned(values) for _, values in result.named())))
    return Gradients(*(round_to(values, problem.dtype) for _, values in total.named()))


def _turned(values: Floats) -> Floats:
    return values[::-1, ::-1]


def _zeros(q: Floats, k: Floats, v: Floats, kind: type[np.floating[Any]]) -> Gradients:
    return Gradients(*(np.zeros(values.shape, dtype=kind) for values in (q, k, v)))


def _add(total: Gradients, at: tuple[int, int], kv: tuple[int, int], one: Gradients) -> None:
    total.dq[at] += one.dq
    total.dk[kv] += one.dk
    total.dv[kv] += one.dv


def _seen_rows(values: Floats, seen: NDArray[np.bool_]) -> Floats:
    """The rows that some query sees; 0 in the others, whatever they hold."""
    kept: Floats = np.where(np.logical_or.reduce(seen, axis=0)[:, None], values, values.dtype.type(0))
    return kept


def _row_sums(values: NDArray[np.float32], dtype: DType) -> NDArray[np.float32]:
    """Float32 sums of the rows; for float32 elements in index order, rounding every step."""
    sums: NDArray[np.float32] = np.add.accumulate(values, axis=1)[:, -1] if dtype is DType.FLOAT32 else values.sum(axis=1)
    return sums
