"""Three well-known approximations of attention in NumPy, as executors: what the exactness gate must reject.

They write float32 results rounded to the element type, like a kernel, and ignore the source's text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from flashgen.model import ExecutorName, ForwardTensors, Problem, Source
from flashgen.reference import decode, encode, head, visible

Floats = NDArray[np.floating]
OneHead = Callable[[Floats, Floats, Floats, NDArray[np.bool_], float], tuple[Floats, Floats]]


class Approximation:
    """An executor that runs one head after the other through a function of (q, k, v, seen, scale)."""

    def __init__(self, title: str, one_head: OneHead) -> None:
        self.title = title
        self._one_head = one_head

    @property
    def name(self) -> ExecutorName:
        """Runs on the CPU."""
        return ExecutorName.EMULATED

    def prepare(self, sources: Sequence[Source]) -> None:
        """Nothing to compile."""

    def forward(self, source: Source, problem: Problem, tensors: ForwardTensors, scale: float) -> None:
        """Approximate output and log-sum-exp of every head."""
        q, k, v = (decode(tensor.view(), problem.dtype).astype(np.float64) for _, tensor in tensors.named()[:3])
        seen = visible(problem.mask, problem.seqlen_q, problem.seqlen_kv)
        for batch, query_head in np.ndindex(problem.batch, problem.heads_q):
            kv_head = query_head // problem.gqa_group
            with np.errstate(all="ignore"):
                o, lse = self._one_head(q[batch, query_head], k[batch, kv_head], v[batch, kv_head], seen, scale)
                tensors.o.view()[batch, query_head] = encode(o, problem.dtype)
            tensors.lse.view()[batch, query_head, :, 0] = lse


def random_features(q: Floats, k: Floats, v: Floats, seen: NDArray[np.bool_], scale: float) -> tuple[Floats, Floats]:
    """Performer: exp(q·k) as an inner product of positive random features, four per column."""
    directions = np.random.default_rng(0).standard_normal((4 * q.shape[1], q.shape[1]))
    features = [np.exp(x @ directions.T - (x * x).sum(axis=1, keepdims=True) / 2) for x in (q * scale**0.5, k * scale**0.5)]
    weights = np.where(seen, features[0] @ features[1].T / len(directions), 0.0)
    return _normalised(weights, v)


def projected_keys(q: Floats, k: Floats, v: Floats, seen: NDArray[np.bool_], scale: float) -> tuple[Floats, Floats]:
    """Linformer: the keys and values that a row sees are projected to a quarter of their number before the softmax."""
    o, lse = np.zeros((len(q), v.shape[1])), np.full(len(q), -np.inf)
    for row, keys in enumerate(seen):
        count = int(keys.sum())
        if count:
            short = max(1, count // 4)
            projection = np.random.default_rng(0).standard_normal((short, count)) / short**0.5
            result = head(q[row : row + 1], projection @ k[keys], projection @ v[keys], np.ones((1, short), dtype=bool), scale)
            o[row], lse[row] = result.o[0], result.lse[0]
    return o, lse


def local_window(q: Floats, k: Floats, v: Floats, seen: NDArray[np.bool_], scale: float) -> tuple[Floats, Floats]:
    """Sparse attention: of the keys it sees, each row uses the 16 on either side of its own place only."""
    place = np.arange(len(q))[:, None] + len(k) - len(q)
    near = seen & (np.abs(np.arange(len(k))[None, :] - place) <= 16)
    result = head(q, k, v, near, scale)
    return result.o, result.lse


def _normalised(weights: Floats, v: Floats) -> tuple[Floats, Floats]:
    total = weights.sum(axis=1)
    empty = total == 0
    o = np.where(empty[:, None], 0.0, (weights @ v) / np.where(empty, 1.0, total)[:, None])
    return o, np.where(empty, -np.inf, np.log(np.where(empty, 1.0, total)))


APPROXIMATIONS = (
    Approximation("random features (Performer)", random_features),
    Approximation("projected keys (Linformer)", projected_keys),
    Approximation("local window (sparse)", local_window),
)
