"""Small hand-written kernels with the parameters of a forward call: one that works, and one for each way to fail.

A module of its own, so that the measuring child can import it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from flashgen.model import DType, EntryPoint, ForwardTensors, MaskKind, Op, Problem, ProblemClass, Source, Tensor, Variant

HEAD_DIM = 64

PREAMBLE = """
struct Strides { long long batch, head, row; };
struct Params {
  const float* q; const float* k; const float* v; float* o; float* lse; float* workspace;
  Strides q_strides, k_strides, v_strides, o_strides;
  int batch, heads_q, heads_kv, seqlen_q, seqlen_kv, diagonal, window_left, window_right;
  float scale_log2; int vector_access;
};
extern __shared__ float tile[];
"""

# One CTA per (batch, head, row): the scaled row of q through shared memory into o, the row number into lse.
COPY = """
extern "C" __global__ void copy_rows(const __grid_constant__ Params p) {
  int row = blockIdx.x % p.seqlen_q, head = blockIdx.x / p.seqlen_q % p.heads_q, batch = blockIdx.x / p.seqlen_q / p.heads_q;
  tile[threadIdx.x] = p.q[batch * p.q_strides.batch + head * p.q_strides.head + row * p.q_strides.row + threadIdx.x];
  __syncthreads();
  p.o[batch * p.o_strides.batch + head * p.o_strides.head + row * p.o_strides.row + threadIdx.x] = tile[threadIdx.x] * p.scale_log2;
  if (threadIdx.x == 0) p.lse[blockIdx.x] = row;
}
"""
# Two entry points: the first leaves numbers in the workspace, the second reads them. They meet only in stream order.
RELAY = """
extern "C" __global__ void leave(const __grid_constant__ Params p) { p.workspace[blockIdx.x] = blockIdx.x; }
extern "C" __global__ void fetch(const __grid_constant__ Params p) {
  p.lse[blockIdx.x] = p.workspace[blockIdx.x];
  for (int row = 0; row < 1; ++row) p.o[blockIdx.x * p.o_strides.row + threadIdx.x] = p.workspace[blockIdx.x];
}
"""
POISON = 'extern "C" __global__ void poison(const __grid_constant__ Params p) { p.lse[blockIdx.x] = p.workspace[blockIdx.x]; }\n'
ILLEGAL = 'extern "C" __global__ void illegal(const __grid_constant__ Params p) { *(volatile float*)16 = p.scale_log2; }\n'
TRAP = 'extern "C" __global__ void trap(const __grid_constant__ Params p) { asm volatile("trap;"); }\n'
HANG = """
extern "C" __global__ void hang(const __grid_constant__ Params p) {
  volatile float* flag = p.lse;
  for (;;) if (flag[0] == 12345.0f) break;
}
"""
STRAY = 'extern "C" __global__ void stray(const __grid_constant__ Params p) { ((float*)p.q)[-1] = 1.0f; }\n'
STATIC_16 = """
extern "C" __global__ void static_16(const __grid_constant__ Params p) {
  __shared__ volatile float fixed[4];
  fixed[threadIdx.x % 4] = p.scale_log2;
  tile[threadIdx.x] = fixed[threadIdx.x % 4];
  __syncthreads();
  p.lse[blockIdx.x] = tile[0];
}
"""


def small_problem(batch: int = 2, heads: int = 3, seqlen: int = 5, seqlen_kv: int = 7) -> Problem:
    """A float32 problem that the small kernels take."""
    return Problem(DType.FLOAT32, HEAD_DIM, HEAD_DIM, batch, heads, heads, seqlen, seqlen_kv)


def small_source(body: str, *entries: tuple[str, int, int]) -> Source:
    """A source of (entry name, threads, dynamic shared bytes) launches."""
    klass = ProblemClass(Op.FORWARD, DType.FLOAT32, HEAD_DIM, HEAD_DIM, MaskKind.NONE)
    points = tuple(EntryPoint(*entry) for entry in entries)
    variant = Variant.of("small", {entry.name: entry.shared_bytes for entry in points})
    return Source("small", klass, variant, PREAMBLE + body, hashlib.sha256(f"{variant}{body}".encode()).hexdigest(), points, 75)


def copy_source(shared_bytes: int = HEAD_DIM * 4) -> Source:
    """The kernel that works: o = q * scale_log2, lse = row."""
    return small_source(COPY, ("copy_rows", HEAD_DIM, shared_bytes))


@dataclass(frozen=True)
class FixedBound:
    """Grids and workspace that a test chooses."""

    grids_: tuple[int, ...]
    workspace: int = 0

    def grids(self, variant: Variant) -> tuple[int, ...]:
        """The chosen grids."""
        return self.grids_

    def workspace_bytes(self, variant: Variant) -> int:
        """The chosen size."""
        return self.workspace


def one_cta_per_row(source: Source, problem: Problem) -> FixedBound:
    """The grid of the small kernels: one CTA per row, and a float of workspace for each."""
    rows = problem.batch * problem.heads_q * problem.seqlen_q
    return FixedBound((rows,) * len(source.entry_points), 4 * rows)


def tensors(problem: Problem, guard: int = 32, seed: int = 0) -> ForwardTensors:
    """Random inputs, NaN outputs, NaN guards of `guard` elements on both sides of each."""
    generator = np.random.default_rng(seed)

    def tensor(heads: int, rows: int, columns: int, random: bool) -> Tensor:
        count = problem.batch * heads * rows * columns
        buffer = np.full(count + 2 * guard, np.nan, np.float32)
        if random:
            buffer[guard : guard + count] = generator.standard_normal(count, np.float32)
        return Tensor(buffer, guard, (problem.batch, heads, rows, columns), (heads * rows * columns, rows * columns, columns, 1))

    q = tensor(problem.heads_q, problem.seqlen_q, HEAD_DIM, True)
    k, v = (tensor(problem.heads_kv, problem.seqlen_kv, HEAD_DIM, True) for _ in range(2))
    return ForwardTensors(
        q, k, v, tensor(problem.heads_q, problem.seqlen_q, HEAD_DIM, False), tensor(problem.heads_q, problem.seqlen_q, 1, False)
    )
