"""Attention on torch tensors: the custom operators, their fake, autograd and vmap rules, and a short way past them.

Two operators, `flashgen::forward` and `flashgen::backward`, are what torch.compile, autograd and vmap see. A plain eager call without
gradients goes the short way instead: one map look-up, two allocations, one launch. Operators take (batch, heads, rows, columns).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import forward_ad

from flashgen import arguments, dispatch, recompute, traffic
from flashgen.dispatch import Dispatcher, Served
from flashgen.errors import InvalidProblem, UnsupportedProblem
from flashgen.launch import VECTOR_BYTES
from flashgen.model import Alignment, DType, Mask, MaskKind, Problem

Tensor = torch.Tensor
_DTYPES = {torch.float32: DType.FLOAT32, torch.float16: DType.FLOAT16, torch.bfloat16: DType.BFLOAT16}


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, alignment: str, window: Any, scale: float | None,
    return_lse: bool, layout: str, strict: bool,
) -> Any:  # fmt: skip
    """`flashgen.attention` for torch tensors."""
    check_tensors(q, k, v)
    kind, left, right = arguments.resolve_mask(causal, window, alignment)
    scale = arguments.resolve_scale(scale, q.shape[-1])
    if layout == "bshd":
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if torch.compiler.is_compiling() or not _plain(q, k, v):
        if not torch.compiler.is_compiling():
            _refuse_transforms(q, k, v)
        o, lse = forward_op(q, k, v, scale, kind, alignment, left, right, strict)
    else:
        o, lse = run(q, k, v, scale, kind, alignment, left, right, strict)
    if layout == "bshd":
        o = o.transpose(1, 2)
    return (o, lse) if return_lse else o


def check_tensors(q: Any, k: Any, v: Any) -> None:
    """Raises InvalidProblem or UnsupportedProblem, naming argument, rule and value."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, torch.Tensor):
            raise InvalidProblem(f"q, k and v must be of one kind; q is a torch tensor, {name} is {type(tensor).__name__}.")
        arguments.check_rank(name, tensor.shape)
    if k.dtype != q.dtype or v.dtype != q.dtype or q.dtype not in _DTYPES:
        arguments.check_dtypes(_word(q.dtype), _word(k.dtype), _word(v.dtype))
    if k.device != q.device or v.device != q.device:
        arguments.check_devices(q.device, k.device, v.device)


def explain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kind: str, alignment: str, left: int, right: int, strict: bool) -> Served:
    """The kernel that would run, from (batch, heads, rows, columns) tensors."""
    return _dispatcher(q).serve(_problem(q, k, v, kind, alignment, left, right), strict=strict, stream=_stream(q))


# The short way ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Plan:
    """What one combination of shapes, strides and options needs at each call."""

    problem: Problem
    launch: Callable[..., None]
    workspace_bytes: int
    mapped: bool  # reads through tensor maps, which want aligned rows and no repeated ones


def run(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, kind: str, alignment: str, left: int, right: int, strict: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate, launch on the current stream of the tensors' device, return o (in `outputs` layout) and lse.

    The allocations belong to that stream, so torch keeps them until the kernel is through, whatever the caller frees.
    """
    q, k, v = _unit_stride(q), _unit_stride(k), _unit_stride(v)
    dispatcher, stream = _dispatcher(q), _stream(q)
    key = (
        q.dtype, q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), scale, kind, alignment, left, right, strict
    )  # fmt: skip
    plan: Plan | None = dispatcher.plans.get(key)
    if plan is None:
        problem = _problem(q, k, v, kind, alignment, left, right)
        served = dispatcher.serve(problem, strict=strict, stream=stream)
    o, lse = outputs(q, k, v)
    if plan is None:
        prepared = dispatcher.prepare(served, scale, *(_strides(each) for each in (q, k, v, o)))
        plan = Plan(problem, prepared, served.workspace_bytes, served.mapped)
        dispatcher.keep(key, plan)
    if plan.mapped and not (_mappable(q) and _mappable(k) and _mappable(v)):
        q, k, v = (each if _mappable(each) else each.clone(memory_format=torch.contiguous_format) for each in (q, k, v))
        return run(q, k, v, scale, kind, alignment, left, right, strict)
    # A workspace may be freed as soon as the launch is enqueued: its memory is reused in stream order only.
    workspace = q.new_empty(plan.workspace_bytes, dtype=torch.uint8) if plan.workspace_bytes else None
    traffic.note(plan.problem)
    plan.launch(
        q.data_ptr(), k.data_ptr(), v.data_ptr(), o.data_ptr(), lse.data_ptr(), 0 if workspace is None else workspace.data_ptr(), stream
    )
    return o, lse


def outputs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """o (batch, heads, rows, columns) in memory order batch, rows, heads, columns, whatever the inputs' strides; lse contiguous float32.

    The order does not depend on the variant, so that fake tensors can know it, and a model's next step, a view as (batch, rows, hidden),
    costs nothing.
    """
    batch, heads, rows, _ = q.shape
    columns = v.shape[3]
    o = q.new_empty_strided((batch, heads, rows, columns), (rows * heads * columns, columns, heads * columns, 1))
    return o, q.new_empty((batch, heads, rows), dtype=torch.float32)


def _plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether no part of torch needs to see an operator: no gradient, no tracing, no transform, no tensor subclass, real memory."""
    return (
        type(q) is type(k) is type(v) is torch.Tensor
        and not ((q.requires_grad or k.requires_grad or v.requires_grad) and torch.is_grad_enabled())
        and q.device.type in ("cuda", "cpu")
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
        and forward_ad._current_level < 0
    )


def _refuse_transforms(*tensors: torch.Tensor) -> None:
    """Raises UnsupportedProblem inside torch.func.grad, vjp, jvp and their like, and for forward-mode tangents; vmap is fine."""
    if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(each).tangent is not None for each in tensors):
        raise UnsupportedProblem("flashgen.attention has no forward-mode derivatives, and an input carries a tangent. Use backward().")
    if torch._C._functorch.peek_interpreter_stack() is None:
        return
    from torch._functorch import pyfunctorch

    kinds = {each.key() for each in pyfunctorch.retrieve_all_functorch_interpreters()}
    transforms = torch._C._functorch.TransformType
    if kinds & {transforms.Grad, transforms.Jvp}:
        raise UnsupportedProblem(
            "flashgen.attention cannot be differentiated by torch.func (grad, vjp, jvp, jacrev); of its transforms it knows vmap. Use "
            "autograd: requires_grad_() and backward()."
        )


def _unit_stride(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, copied when its columns do not lie side by side: the kernels read rows."""
    return tensor if tensor.stride(3) == 1 else tensor.contiguous()


def _mappable(tensor: torch.Tensor) -> bool:
    """Whether a tensor map can describe it: rows on 16-byte boundaries, no stride of 0."""
    size = tensor.element_size()
    strides = (stride * size for stride, extent in zip(tensor.stride()[:3], tensor.shape, strict=False) if extent > 1)
    return tensor.data_ptr() % VECTOR_BYTES == 0 and all(stride > 0 and stride % VECTOR_BYTES == 0 for stride in strides)


def _strides(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Strides of batch, heads and rows. That of an extent of 1 means nothing and may be odd, so it becomes that of aligned rows."""
    row = tensor.shape[3]
    batch, head, rows = (row if size == 1 else stride for size, stride in zip(tensor.shape[:3], tensor.stride(), strict=False))
    return batch, head, rows


def _problem(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kind: str, alignment: str, left: int, right: int) -> Problem:
    arguments.check_shapes(q.shape, k.shape, v.shape)
    return Problem(
        _DTYPES[q.dtype], q.shape[3], v.shape[3], q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2],
        Mask(MaskKind(kind), Alignment(alignment), left, right),
    )  # fmt: skip


def _dispatcher(q: torch.Tensor) -> Dispatcher:
    if q.device.type == "cuda":
        return dispatch.for_device(q.device.index)
    emulated = dispatch.emulated()
    if emulated is None or q.device.type != "cpu":
        arguments.refuse_cpu("q", q.device)
    assert emulated is not None
    return emulated


def _stream(q: torch.Tensor) -> int:
    """The raw handle of torch's current stream on the tensor's device, whatever the current device is."""
    return int(_raw_stream(q.device.index)) if q.device.type == "cuda" else 0


def _slow_stream(index: int) -> int:
    return int(torch.cuda.current_stream(index).cuda_stream)


_raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _slow_stream)


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# The operators ----------------------------------------------------------------------------------------------------------


def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, kind: str, alignment: str, left: int, right: int, strict: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    check_tensors(q, k, v)
    return run(q, k, v, scale, kind, alignment, left, right, strict)


def _fake_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, kind: str, alignment: str, left: int, right: int, strict: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    check_tensors(q, k, v)
    arguments.check_shapes(q.shape, k.shape, v.shape)
    return outputs(q, k, v)


def _backward(
    dout: torch.Tensor, dlse: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, lse: torch.Tensor,
    scale: float, kind: str, alignment: str, left: int, right: int, need_q: bool, need_k: bool, need_v: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Gradients; an empty tensor stands for one that is not needed, since operators return tensors only."""
    mask, needs = Mask(MaskKind(kind), Alignment(alignment), left, right), (need_q, need_k, need_v)
    found = recompute.gradients(dout, dlse, q, k, v, o, lse, scale=scale, mask=mask, needs=needs)
    return tuple(q.new_empty(0) if each is None else each for each in found)


def _fake_backward(
    dout: torch.Tensor, dlse: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, lse: torch.Tensor,
    scale: float, kind: str, alignment: str, left: int, right: int, need_q: bool, need_k: bool, need_v: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    pairs = ((need_q, q), (need_k, k), (need_v, v))
    return tuple(like.new_empty(like.shape if needed else (0,)) for needed, like in pairs)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, k, v, *options = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.options = options[:5]


def _gradients(ctx: Any, dout: torch.Tensor, dlse: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    needs = ctx.needs_input_grad[:3]
    found = backward_op(dout, dlse, *ctx.saved_tensors, *ctx.options, *needs)
    return (*(each if needed else None for each, needed in zip(found, needs, strict=True)), None, None, None, None, None, None)


def _refuse_second_order(ctx: Any, *gradients: torch.Tensor) -> None:
    raise UnsupportedProblem(
        "flashgen.attention has no second-order gradients (create_graph=True, or a gradient of a gradient). Use torch's math backend "
        "there: torch.nn.attention.sdpa_kernel(SDPBackend.MATH)."
    )


def _save_nothing(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    return None


def _vmap_of(operator: Any, tensors: int) -> Any:
    """A vmap rule: the mapped dimension is folded into the batch, the first dimension of all tensors and results."""

    def rule(info: Any, dims: tuple[int | None, ...], *values: Any) -> Any:
        size = info.batch_size
        moved = [
            value.unsqueeze(0).expand(size, *value.shape) if dim is None else value.movedim(dim, 0)
            for value, dim in zip(values[:tensors], dims, strict=False)
        ]
        batch = moved[0].shape[1]
        found = operator(*(value.flatten(0, 1) for value in moved), *values[tensors:])
        results = tuple(each.unflatten(0, (size, batch)) if each.dim() > 1 else each.expand(size, 0) for each in found)
        return results, (0,) * len(results)

    return rule


_OPTIONS = "float scale, str kind, str alignment, SymInt left, SymInt right"
forward_op: Any = torch.library.custom_op(
    "flashgen::forward", _forward, mutates_args=(), schema=f"(Tensor q, Tensor k, Tensor v, {_OPTIONS}, bool strict) -> (Tensor, Tensor)"
)
backward_op: Any = torch.library.custom_op(
    "flashgen::backward", _backward, mutates_args=(),
    schema=f"(Tensor dout, Tensor dlse, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, {_OPTIONS}, "
    "bool need_q, bool need_k, bool need_v) -> (Tensor, Tensor, Tensor)",
)  # fmt: skip
forward_op.register_fake(_fake_forward)
forward_op.register_autograd(_gradients, setup_context=_save)
forward_op.register_vmap(_vmap_of(forward_op, 3))
backward_op.register_fake(_fake_backward)
backward_op.register_autograd(_refuse_second_order, setup_context=_save_nothing)
backward_op.register_vmap(_vmap_of(backward_op, 7))
