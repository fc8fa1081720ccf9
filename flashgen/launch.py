"""How a source is launched: parameter structs as bytes, alignment facts, grids. Shared by both executors.

Each ctypes structure is the twin of one in templates/include/params.cuh.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import log2
from typing import Any, TypeVar

from flashgen.errors import InvalidProblem
from flashgen.model import BackwardTensors, DType, ExecutorName, ForwardTensors, MaskKind, Op, Problem, Source, Tensor
from flashgen.tensor_map import MAP_BYTES, MapBytes, TensorMapSpec

LOG2_E = 1.4426950408889634
VECTOR_BYTES = 16
_Tensors = TypeVar("_Tensors", bound=ForwardTensors | BackwardTensors)


class StridesStruct(ctypes.Structure):
    """Distances in elements between neighbours of one (batch, heads, rows, columns) tensor."""

    _fields_ = [("batch", ctypes.c_int64), ("head", ctypes.c_int64), ("row", ctypes.c_int64)]


class ForwardStruct(ctypes.Structure):
    """Twin of fg::ForwardParams."""

    _fields_ = [
        ("q", ctypes.c_void_p),
        ("k", ctypes.c_void_p),
        ("v", ctypes.c_void_p),
        ("o", ctypes.c_void_p),
        ("lse", ctypes.c_void_p),
        ("workspace", ctypes.c_void_p),
        ("q_strides", StridesStruct),
        ("k_strides", StridesStruct),
        ("v_strides", StridesStruct),
        ("o_strides", StridesStruct),
        ("batch", ctypes.c_int),
        ("heads_q", ctypes.c_int),
        ("heads_kv", ctypes.c_int),
        ("seqlen_q", ctypes.c_int),
        ("seqlen_kv", ctypes.c_int),
        ("diagonal", ctypes.c_int),
        ("window_left", ctypes.c_int),
        ("window_right", ctypes.c_int),
        ("scale_log2", ctypes.c_float),
        ("vector_access", ctypes.c_int),
    ]


class MappedForwardStruct(ctypes.Structure):
    """Twin of fg::MappedForwardParams: tensor maps first, since they are 128-byte aligned, and padded to a multiple of that."""

    _fields_ = [
        *((name, MapBytes) for name in ("q", "k", "v", "o")),
        ("problem", ForwardStruct),
        ("counters", ctypes.c_void_p),
        ("padding", ctypes.c_ubyte * (-(ctypes.sizeof(ForwardStruct) + ctypes.sizeof(ctypes.c_void_p)) % MAP_BYTES)),
    ]


class BackwardStruct(ctypes.Structure):
    """Twin of fg::BackwardParams. `forward` holds what the forward pass had; its workspace is the backward pass's own."""

    _fields_ = [
        ("forward", ForwardStruct),
        *((name, ctypes.c_void_p) for name in ("dout", "dlse", "dq", "dk", "dv")),
        *((f"{name}_strides", StridesStruct) for name in ("dout", "dq", "dk", "dv")),
        ("scale", ctypes.c_float),
    ]


class MappedBackwardStruct(ctypes.Structure):
    """Twin of fg::MappedBackwardParams. Names with query_ are second maps of the same tensors, for a loop with other tiles."""

    _fields_ = [
        *((name, MapBytes) for name in ("q", "k", "v", "dout", "query_q", "query_k", "query_v", "query_dout")),
        ("problem", BackwardStruct),
        ("counters", ctypes.c_void_p),
        ("padding", ctypes.c_ubyte * (-(ctypes.sizeof(BackwardStruct) + ctypes.sizeof(ctypes.c_void_p)) % MAP_BYTES)),
    ]


PlainStruct = ForwardStruct | BackwardStruct


@dataclass(frozen=True, slots=True)
class Operand:
    """Address in bytes and (batch, head, row) strides in elements of one tensor whose last stride is 1."""

    address: int
    strides: tuple[int, int, int]


def forward_params(
    problem: Problem, scale: float, q: Operand, k: Operand, v: Operand, o: Operand, lse_address: int, workspace_address: int
) -> ForwardStruct:
    """The parameter block of one forward launch. Raises InvalidProblem for a scale that is not a positive finite number."""
    if not 0.0 < scale < float("inf"):
        raise InvalidProblem(f"softmax_scale must be a positive finite number; got {scale}.")
    left, right = window_bounds(problem)
    params = ForwardStruct(
        q=q.address, k=k.address, v=v.address, o=o.address, lse=lse_address, workspace=workspace_address,
        batch=problem.batch, heads_q=problem.heads_q, heads_kv=problem.heads_kv,
        seqlen_q=problem.seqlen_q, seqlen_kv=problem.seqlen_kv, diagonal=problem.diagonal,
        window_left=left, window_right=right, scale_log2=scale * LOG2_E,
        vector_access=int(all_rows_aligned((q, k, v, o), problem.dtype.bytes)),
    )  # fmt: skip
    for name, operand in (("q", q), ("k", k), ("v", v), ("o", o)):
        setattr(params, f"{name}_strides", StridesStruct(*operand.strides))
    return params


def backward_params(problem: Problem, scale: float, at: Mapping[str, Operand], workspace_address: int) -> BackwardStruct:
    """The parameter block of one backward launch, from operands named as in `BackwardTensors`; dlse may be absent.

    Raises InvalidProblem for a scale that is not a positive finite number.
    """
    lse, dlse = at["lse"], at.get("dlse")
    params = BackwardStruct(
        forward=forward_params(problem, scale, at["q"], at["k"], at["v"], at["o"], lse.address, workspace_address),
        dlse=dlse.address if dlse else None, scale=scale,
    )  # fmt: skip
    for name in ("dout", "dq", "dk", "dv"):
        setattr(params, name, at[name].address)
        setattr(params, f"{name}_strides", StridesStruct(*at[name].strides))
    rows = [operand for name, operand in at.items() if name not in ("lse", "dlse")]
    params.forward.vector_access = int(all_rows_aligned(rows, problem.dtype.bytes))
    return params


def plain_params(problem: Problem, scale: float, at: Mapping[str, Operand], workspace_address: int) -> PlainStruct:
    """The parameter block of one launch of the problem's operation, from operands by name. Raises InvalidProblem for a bad scale."""
    if problem.op is Op.BACKWARD:
        return backward_params(problem, scale, at, workspace_address)
    return forward_params(problem, scale, at["q"], at["k"], at["v"], at["o"], at["lse"].address, workspace_address)


def source_params(source: Source, plain: PlainStruct, problem: Problem, counters_address: int, executor: ExecutorName) -> ctypes.Structure:
    """The parameter block that `source` takes: `plain` itself, or with tensor maps and counters around it. Raises LaunchError."""
    if not source.boxes:
        return plain
    mapped = MappedForwardStruct if isinstance(plain, ForwardStruct) else MappedBackwardStruct
    params = mapped(problem=plain, counters=counters_address)
    for name, rows in source.boxes:
        encoded = map_of(name, rows, plain, problem).encode(executor)
        ctypes.memmove(ctypes.addressof(params) + getattr(mapped, name).offset, encoded, MAP_BYTES)
    return params


def map_of(name: str, rows: int, plain: PlainStruct, problem: Problem) -> TensorMapSpec:
    """The tensor map of one tensor: dims (columns, rows, heads, batch), boxes of 64 columns of `rows` rows."""
    name = name.removeprefix("query_")
    heads, length = (problem.heads_kv, problem.seqlen_kv) if name in "kv" else (problem.heads_q, problem.seqlen_q)
    columns = problem.head_dim_v if name in ("v", "o", "dout") else problem.head_dim
    holder = plain if hasattr(plain, name) else plain.forward
    strides, size = getattr(holder, f"{name}_strides"), problem.dtype.bytes
    # A stride along an extent of 1 is never used, and an empty tensor is never read; both must still be numbers that the driver takes.
    pairs = ((strides.row, length), (strides.head, heads), (strides.batch, problem.batch))
    in_bytes = tuple(stride * size if extent > 1 else 16 for stride, extent in pairs)
    dims = (columns, max(1, length), heads, max(1, problem.batch))
    return TensorMapSpec(getattr(holder, name) or 16, problem.dtype, dims, in_bytes, (64, rows, 1, 1))


def copied_for_maps(tensors: _Tensors, dtype: DType) -> _Tensors:
    """The tensors, those that no tensor map can describe (unaligned rows, repeated heads) replaced by contiguous copies."""
    elements = ((name, tensor) for name, tensor in tensors.named() if name not in ("lse", "dlse"))
    copies: dict[str, Any] = {name: contiguous_copy(tensor) for name, tensor in elements if not mappable(tensor, dtype)}
    return replace(tensors, **copies)


def copy_results_back(used: _Tensors, tensors: _Tensors) -> None:
    """Results of a run on the tensors of `copied_for_maps`, copied to where the caller wants them."""
    given = dict(tensors.named())
    for name, tensor in used.named():
        if name in tensors.outputs and tensor is not given[name]:
            given[name].view()[...] = tensor.view()


def mappable(tensor: Tensor, dtype: DType) -> bool:
    """Whether a tensor map can describe the tensor, given a buffer that starts on a 16-byte boundary."""
    return not map_obstacle(tensor.offset * dtype.bytes, tensor.shape, tensor.strides, dtype.bytes)


def map_obstacle(address: int, shape: Sequence[int], strides: Sequence[int], element_bytes: int) -> str:
    """Why no tensor map describes a (batch, heads, rows, columns) tensor whose columns lie side by side, or ''. Strides are in elements.

    Rows must start on 16-byte boundaries, and no stride may be 0; the stride of an extent of 1 is never used.
    """
    if address % VECTOR_BYTES:
        return f"it starts {address % VECTOR_BYTES} bytes after a multiple of {VECTOR_BYTES}"
    for dimension, extent, stride in zip(("batch", "head", "row"), shape, strides, strict=False):
        if extent > 1 and (stride <= 0 or stride * element_bytes % VECTOR_BYTES):
            return f"its {dimension} stride is {stride} elements, and must be a positive multiple of {VECTOR_BYTES} bytes"
    return ""


def contiguous_copy(tensor: Tensor) -> Tensor:
    """A tensor of the same values in a buffer of its own."""
    import numpy as np

    _, heads, rows, columns = tensor.shape
    values = np.ascontiguousarray(tensor.view()).reshape(-1)
    return Tensor(values, 0, tensor.shape, (heads * rows * columns, rows * columns, columns, 1))


def window_bounds(problem: Problem) -> tuple[int, int]:
    """(left, right) as the kernel wants them: causal is (all, 0), and a bound beyond both lengths is cut where it stops mattering.

    The cut keeps `row + diagonal + bound` inside 32 bits; it is the sum of both lengths, since with seqlen_q > seqlen_kv a bound longer
    than seqlen_kv still reveals keys.
    """
    reach = min(problem.seqlen_q + problem.seqlen_kv, 2**30)
    if problem.mask.kind is MaskKind.CAUSAL:
        return reach, 0
    left, right = problem.mask.left, problem.mask.right
    return (reach if left < 0 else min(left, reach)), (reach if right < 0 else min(right, reach))


def all_rows_aligned(operands: Sequence[Operand], element_bytes: int) -> bool:
    """Whether every row of every operand starts on a 16-byte boundary, so that 16-byte accesses are allowed."""
    return all(
        operand.address % VECTOR_BYTES == 0 and all(stride * element_bytes % VECTOR_BYTES == 0 for stride in operand.strides)
        for operand in operands
    )


def log2_bucket(value: int) -> float:
    """log2 of a length or count; 0 counts as 1."""
    return log2(max(1, value))
