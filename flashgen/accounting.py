"""Where the bytes go: every pass of a kernel over global memory, counted exactly, as its threads request them.

Requested bytes are what a kernel asks of the memory system: caches may answer some of them, so they bound the traffic of L2 from above and,
with `once` of each pass, that of DRAM from below. The emulated executor counts the same bytes when it runs the same text; a test holds both
equal. What DRAM sees after L2 is the cost model's estimate, `cost.traffic`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flashgen.model import Problem, Variant
from flashgen.reference import visible_counts
from flashgen.space import BoundSpace

LSE_BYTES = 4  # one float32 per query row


@dataclass(frozen=True, slots=True)
class Pass:
    """One walk over one operand: `bytes` as requested, `once` when every address counted once."""

    kernel: str  # entry point
    operand: str  # q, k, v, o, lse, scores or probabilities
    action: str  # read or write
    bytes: int
    once: int
    times: str = ""  # why `bytes` exceeds `once`, in words

    @property
    def is_matrix(self) -> bool:
        """Whether the operand is one of the seqlen_q × seqlen_kv matrices."""
        return self.operand in ("scores", "probabilities")


@dataclass(frozen=True, slots=True)
class Account:
    """All passes of one run, in the order of execution."""

    passes: tuple[Pass, ...]

    @property
    def read_bytes(self) -> int:
        """Requested by loads and asynchronous copies."""
        return sum(each.bytes for each in self.passes if each.action == "read")

    @property
    def written_bytes(self) -> int:
        """Requested by stores."""
        return sum(each.bytes for each in self.passes if each.action == "write")

    @property
    def total_bytes(self) -> int:
        """Reads and writes."""
        return self.read_bytes + self.written_bytes

    @property
    def matrix_bytes(self) -> int:
        """Of them, over the matrices of scores and probabilities."""
        return sum(each.bytes for each in self.passes if each.is_matrix)

    @property
    def once_bytes(self) -> int:
        """Each pass with every address once: what an ideal cache inside each kernel would leave for DRAM."""
        return sum(each.once for each in self.passes)


def matrix_bytes(problem: Problem) -> int:
    """Bytes of one seqlen_q × seqlen_kv matrix in the element type, of one head."""
    return problem.seqlen_q * problem.seqlen_kv * problem.dtype.bytes


def account(bound: BoundSpace, variant: Variant) -> Account:
    """Exact requested bytes of one run: textbook passes for a family that materialises scores, else those of tiled attention."""
    if bound.space.definition.cost.get("materialised", 0):
        return _materialised(bound.problem, bound.names(variant)["tile"])
    at = bound.names(variant)
    return _tiled(bound.problem, at.get("block_q", 64), at.get("block_kv", 64))  # the defaults of the cost model


def _tiled(problem: Problem, block_q: int, block_kv: int) -> Account:
    """Queries once, outputs once, and the K and V rows of every visited tile once per query tile."""
    element, heads = problem.dtype.bytes, problem.batch_heads
    rows = heads * problem.seqlen_q
    keys = _visited_rows(problem, block_q, block_kv) * heads
    held = problem.batch * problem.heads_kv * problem.seqlen_kv if keys else 0
    times = f"once per query tile of {block_q} rows"
    dim, dim_v = problem.head_dim * element, problem.head_dim_v * element
    return Account(
        (
            Pass("forward", "q", "read", rows * dim, rows * dim),
            Pass("forward", "k", "read", keys * dim, min(keys, held) * dim, times),
            Pass("forward", "v", "read", keys * dim_v, min(keys, held) * dim_v, times),
            Pass("forward", "o", "write", rows * dim_v, rows * dim_v),
            Pass("forward", "lse", "write", rows * LSE_BYTES, rows * LSE_BYTES),
        )
    )


def _visited_rows(problem: Problem, block_q: int, block_kv: int) -> int:
    """K/V rows that the query tiles of one head copy, summed over the tiles; as `TileRange` of templates/include/mask.cuh decides."""
    if not problem.seqlen_q:
        return 0
    top = np.arange(0, problem.seqlen_q, block_q, dtype=np.int64)
    bottom = np.minimum(top + block_q, problem.seqlen_q) - 1
    first, last = _visible(problem, top)[0], _visible(problem, bottom)[1]
    first_tile = first // block_kv
    last_tile = np.maximum(first_tile, -(-np.maximum(last + 1, 0) // block_kv))
    ends = np.minimum(last_tile * block_kv, problem.seqlen_kv)
    return int(np.maximum(ends - first_tile * block_kv, 0).sum())


def _visible(problem: Problem, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """First and last key column that each row sees."""
    diagonal, mask = rows + problem.diagonal, problem.mask
    right = 0 if mask.kind == "causal" else mask.right
    last = np.full_like(rows, problem.seqlen_kv - 1)
    if right >= 0:
        last = np.minimum(last, diagonal + right)
    first = np.zeros_like(rows) if mask.left < 0 else np.maximum(diagonal - mask.left, 0)
    return first, last


def _materialised(problem: Problem, tile: int) -> Account:
    """Scores, softmax, product as three kernels: the matrix is written, read three times, written, and read by every column tile of O."""
    element, heads = problem.dtype.bytes, problem.batch_heads
    rows, matrix = heads * problem.seqlen_q, heads * matrix_bytes(problem)
    row_tiles, key_tiles = -(-problem.seqlen_q // tile), -(-problem.seqlen_kv // tile)
    column_tiles = -(-problem.head_dim_v // tile)
    q = rows * problem.head_dim * element
    k, v = (problem.seqlen_kv * dim * element for dim in (problem.head_dim, problem.head_dim_v))
    k_once, v_once = (problem.batch * problem.heads_kv * each if rows else 0 for each in (k, v))
    empty = int((visible_counts(problem.mask, problem.seqlen_q, problem.seqlen_kv) == 0).sum()) if problem.seqlen_q else 0
    unread = heads * empty * problem.seqlen_kv * element  # the last loop of the softmax writes zeros there, and reads nothing
    o = rows * problem.head_dim_v * element
    return Account(
        (
            Pass("scores", "q", "read", q * key_tiles, q if key_tiles else 0, f"once per {tile} key columns"),
            Pass("scores", "k", "read", heads * k * row_tiles, k_once, f"once per {tile} query rows"),
            Pass("scores", "scores", "write", matrix, matrix),
            Pass("softmax", "scores", "read", 3 * matrix - unread, matrix, "for the maximum, the sum and the probabilities"),
            Pass("softmax", "probabilities", "write", matrix, matrix),
            Pass("softmax", "lse", "write", rows * LSE_BYTES, rows * LSE_BYTES),
            Pass("product", "probabilities", "read", matrix * column_tiles, matrix, f"once per {tile} output columns"),
            Pass("product", "v", "read", heads * v * row_tiles, v_once, f"once per {tile} query rows"),
            Pass("product", "o", "write", o, o),
        )
    )


def crossover_block_q(problem: Problem) -> float:
    """The query tile below which tiled attention moves more than textbook attention's four ideal matrix passes, long sequences, full mask.

    Tiled: seqlen_q/block_q reads of K and V, (head_dim + head_dim_v)·seqlen_kv elements each. Textbook: 4·seqlen_q·seqlen_kv elements.
    """
    return (problem.head_dim + problem.head_dim_v) / 4


def paper_block_kv(problem: Problem, shared_bytes: int) -> int:
    """Rows of a K/V tile by the rule ceil(M / 4d) of the FlashAttention paper: M in elements, a quarter each for Q, K, V and O tiles."""
    return -(-shared_bytes // (4 * max(problem.head_dim, problem.head_dim_v) * problem.dtype.bytes))
