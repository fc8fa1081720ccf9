"""Tiled attention with online softmax in NumPy, step for step what the CUDA kernels do: the patient of the planted faults.

Mutations replace lines of this text, so every step has its own line.
"""
# ruff: noqa: ANN001, ANN201

from __future__ import annotations

import numpy as np
from numpy.lib.stride_tricks import as_strided

from flashgen.launch import window_bounds
from flashgen.model import DType, ExecutorName, MaskKind  # noqa: F401  faults use DType
from flashgen.reference import decode, encode, round_to, storage


class ModelKernel:
    """An executor that ignores the source's text and computes its problem class with its tile sizes."""

    name = ExecutorName.EMULATED

    def prepare(self, sources):
        pass

    def forward(self, source, problem, tensors, scale):
        block_q, block_kv = (source.variant.as_dict()[name] for name in ("block_q", "block_kv"))
        for batch in range(problem.batch):
            for head in range(problem.heads_q):
                for row0 in range(0, problem.seqlen_q, block_q):
                    rows = np.arange(row0, min(row0 + block_q, problem.seqlen_q))
                    self.tile(problem, tensors, np.float32(scale), batch, head, rows, block_kv)

    def tile(self, problem, tensors, scale, batch, head, rows, block_kv):
        dtype = problem.dtype
        kv_head = head // problem.gqa_group
        diagonal = problem.diagonal
        q = self.load(tensors.q, dtype, batch, head, rows[0], rows.size, rows.size)
        output = np.zeros((rows.size, problem.head_dim_v), dtype=np.float32)
        row_max = np.full((rows.size, 1), -np.inf, dtype=np.float32)
        row_sum = np.zeros((rows.size, 1), dtype=np.float32)
        first, last = self.key_range(problem, rows, diagonal)
        for key0 in range(first // block_kv * block_kv, last, block_kv):
            keys = np.arange(key0, key0 + block_kv)
            present = min(block_kv, problem.seqlen_kv - key0)
            k = self.load(tensors.k, dtype, batch, kv_head, key0, block_kv, present)
            v = self.load(tensors.v, dtype, batch, kv_head, key0, block_kv, present)
            scores = q @ k.T
            seen = self.seen(problem, rows[:, None] + diagonal, keys[None, :])
            seen &= keys < problem.seqlen_kv
            scores = np.where(seen, scores, np.float32(-np.inf))
            new_max = np.maximum(row_max, scores.max(axis=1, keepdims=True))
            base = np.where(np.isneginf(new_max), np.float32(0), new_max)
            rescale = np.exp((row_max - base) * scale)
            weights = np.exp((scores - base) * scale)
            row_sum = row_sum * rescale + weights.sum(axis=1, keepdims=True, dtype=np.float32)
            output = output * rescale
            output = output + round_to(weights, dtype) @ v
            row_max = new_max
        self.store(problem, tensors, scale, batch, head, rows, output, row_max, row_sum)

    def store(self, problem, tensors, scale, batch, head, rows, output, row_max, row_sum):
        empty = row_sum == 0
        output = np.where(empty, np.float32(0), output / np.where(empty, np.float32(1), row_sum))
        lse = np.where(empty, np.float32(-np.inf), row_max * scale + np.log(np.where(empty, np.float32(1), row_sum)))
        tensors.o.view()[batch, head, rows] = encode(output, problem.dtype)
        tensors.lse.view()[batch, head, rows] = lse

    def key_range(self, problem, rows, diagonal):
        first, last = 0, problem.seqlen_kv
        left, right = window_bounds(problem)
        if problem.mask.kind is not MaskKind.NONE:
            last = min(last, rows[-1] + diagonal + right + 1)
        if problem.mask.kind is MaskKind.WINDOW:
            first = max(first, rows[0] + diagonal - left)
        return first, last

    def seen(self, problem, row, key):
        left, right = window_bounds(problem)
        seen = np.ones(np.broadcast_shapes(row.shape, key.shape), dtype=bool)
        if problem.mask.kind is not MaskKind.NONE:
            seen &= key <= row + right
        if problem.mask.kind is MaskKind.WINDOW:
            seen &= key >= row - left
        return seen

    def load(self, tensor, dtype, batch, head, row0, rows, present):
        """`rows` rows from row0 on; those after the first `present` are zeros."""
        strides = tensor.strides
        start = tensor.offset + batch * strides[0] + head * strides[1] + row0 * strides[2]
        columns = tensor.shape[3]
        tile = np.zeros((rows, columns), dtype=storage(dtype))
        memory = as_strided(tensor.buffer[start:], (rows, columns), (strides[2] * tensor.buffer.itemsize, tensor.buffer.itemsize))
        tile[:present] = memory[:present]
        return decode(tile, dtype)
