"""What forward and backward passes on torch tensors share: the options of one call, checks, strides, and who serves a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from flashgen import arguments, dispatch
from flashgen.dispatch import Dispatcher
from flashgen.errors import InvalidProblem
from flashgen.launch import VECTOR_BYTES, map_obstacle
from flashgen.model import Alignment, DType, Mask, MaskKind, Op, Problem

_DTYPES = {torch.float32: DType.FLOAT32, torch.float16: DType.FLOAT16, torch.bfloat16: DType.BFLOAT16}


class Options(NamedTuple):
    """Everything besides tensors that a call depends on, in the order of the operators' arguments. The backward pass gets the same one."""

    scale: float
    kind: str
    alignment: str
    left: int
    right: int
    strict: bool
    deterministic: bool | None  # None: as torch's own switch says when the gradients are computed

    @property
    def mask(self) -> Mask:
        """Which keys a row sees."""
        return Mask(MaskKind(self.kind), Alignment(self.alignment), self.left, self.right)


def check_tensors(q: Any, k: Any, v: Any) -> None:
    """Raises InvalidProblem or UnsupportedProblem, naming argument, rule and value."""
    if (
        isinstance(q, torch.Tensor) and isinstance(k, torch.Tensor) and isinstance(v, torch.Tensor)
        and q.ndim == k.ndim == v.ndim == 4 and q.dtype == k.dtype == v.dtype and q.dtype in _DTYPES and q.device == k.device == v.device
    ):  # fmt: skip
        return  # the way of nearly every call
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, torch.Tensor):
            raise InvalidProblem(f"q, k and v must be of one kind; q is a torch tensor, {name} is {type(tensor).__name__}.")
        arguments.check_rank(name, tensor.shape)
    if k.dtype != q.dtype or v.dtype != q.dtype or q.dtype not in _DTYPES:
        arguments.check_dtypes(_word(q.dtype), _word(k.dtype), _word(v.dtype))
    if k.device != q.device or v.device != q.device:
        arguments.check_devices(q.device, k.device, v.device)


def problem_of(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options, op: Op = Op.FORWARD, deterministic: bool = False
) -> Problem:
    """The problem of (batch, heads, rows, columns) tensors. Raises InvalidProblem."""
    arguments.check_shapes(q.shape, k.shape, v.shape)
    (batch, heads, rows, columns), (_, heads_kv, keys, columns_v) = q.shape, v.shape
    return Problem(_DTYPES[q.dtype], columns, columns_v, batch, heads, heads_kv, rows, keys, options.mask, op, deterministic)


def unit_stride(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, copied when its columns do not lie side by side: the kernels read rows."""
    return tensor if tensor.stride(3) == 1 else tensor.contiguous()


def mappable(tensor: torch.Tensor) -> bool:
    """Whether a tensor map can describe it: rows on 16-byte boundaries, no stride of 0."""
    return tensor.data_ptr() % VECTOR_BYTES == 0 and strides_fit_maps(tensor)


def strides_fit_maps(tensor: torch.Tensor) -> bool:
    """The part of `mappable` that does not depend on where the tensor lies."""
    return not map_obstacle(0, tensor.shape, tensor.stride(), tensor.element_size())


def strides_of(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Strides of batch, heads and rows. That of an extent of 1 means nothing and may be odd, so it becomes that of aligned rows."""
    row = tensor.shape[3]
    batch, head, rows = (row if size == 1 else stride for size, stride in zip(tensor.shape[:3], tensor.stride(), strict=False))
    return batch, head, rows


def dispatcher_of(q: torch.Tensor) -> Dispatcher:
    """Who serves the tensor's device. Raises UnsupportedProblem for host memory outside the emulation."""
    if q.device.type == "cuda":
        return dispatch.for_device(q.device.index)
    emulated = dispatch.emulated()
    if emulated is None or q.device.type != "cpu":
        arguments.refuse_cpu("q", q.device)
    assert emulated is not None
    return emulated


def stream_of(q: torch.Tensor) -> int:
    """The raw handle of torch's current stream on the tensor's device, whatever the current device is."""
    return int(_raw_stream(q.device.index)) if q.device.type == "cuda" else 0


def _slow_stream(index: int) -> int:
    return int(torch.cuda.current_stream(index).cuda_stream)


_raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _slow_stream)


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
