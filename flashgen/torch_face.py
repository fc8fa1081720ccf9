"""Attention on torch tensors: the custom operators, their fake, autograd and vmap rules, and a short way past them.

Two operators, `flashgen::forward` and `flashgen::backward`, are what torch.compile, autograd and vmap see. A plain eager call without
gradients goes the short way instead: one map look-up, two allocations, one launch. Operators take (batch, heads, rows, columns).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.autograd import forward_ad

from flashgen import arguments, torch_gradients, traffic
from flashgen.dispatch import Answer
from flashgen.errors import UnsupportedProblem
from flashgen.launch import VECTOR_BYTES
from flashgen.model import Problem
from flashgen.torch_tensors import (
    Options,
    check_tensors,
    dispatcher_of,
    mappable,
    problem_of,
    stream_of,
    strides_fit_maps,
    strides_of,
    unit_stride,
)

Tensor = torch.Tensor


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, alignment: str, window: Any, scale: float | None,
    return_lse: bool, layout: str, strict: bool, deterministic: bool | None,
) -> Any:  # fmt: skip
    """`flashgen.attention` for torch tensors."""
    check_tensors(q, k, v)
    kind, left, right = arguments.resolve_mask(causal, window, alignment)
    options = Options(arguments.resolve_scale(scale, q.shape[-1]), kind, alignment, left, right, strict, deterministic)
    if layout == "bshd":
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if torch.compiler.is_compiling() or not _plain(q, k, v):
        if not torch.compiler.is_compiling():
            _refuse_transforms(q, k, v)
        o, lse = forward_op(q, k, v, *options)
    else:
        o, lse = run(q, k, v, options)
    if layout == "bshd":
        o = o.transpose(1, 2)
    return (o, lse) if return_lse else o


def explain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options) -> Answer:
    """The kernel that would run on (batch, heads, rows, columns) tensors, and that of the gradients where an input wants one."""
    served = dispatcher_of(q).serve(problem_of(q, k, v, options), strict=options.strict, stream=stream_of(q))
    reasons = (
        arguments.why_copied(name, each.data_ptr(), each.shape, each.stride(), each.element_size(), served.mapped)
        for name, each in (("q", q), ("k", k), ("v", v))
    )
    answer = replace(served.answer, copies=tuple(filter(None, reasons)))
    if not (q.requires_grad or k.requires_grad or v.requires_grad):
        return answer
    return replace(answer, gradients=torch_gradients.explain(q, k, v, options))


# The short way ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Plan:
    """What one combination of shapes, strides and options needs at each call."""

    problem: Problem
    launch: Callable[..., None] | None  # None: no tensor map describes these strides, so copies are read, which have a plan of their own
    workspace_bytes: int
    mapped: bool  # reads through tensor maps, which want aligned rows: addresses are looked at in every call


def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate, launch on the current stream of the tensors' device, return o (in `outputs` layout) and lse.

    The allocations belong to that stream, so torch keeps them until the kernel is through, whatever the caller frees.
    """
    strides = q.stride(), k.stride(), v.stride()
    if not strides[0][3] == strides[1][3] == strides[2][3] == 1:
        q, k, v = unit_stride(q), unit_stride(k), unit_stride(v)
        strides = q.stride(), k.stride(), v.stride()
    dispatcher, stream = dispatcher_of(q), stream_of(q)
    key = (q.dtype, q.shape, k.shape, v.shape, strides, options)
    plan: Plan | None = dispatcher.plans.get(key)
    if plan is None:
        problem = problem_of(q, k, v, options)
        served = dispatcher.serve(problem, strict=options.strict, stream=stream)
    o, lse = outputs(q, k, v)
    if plan is None:
        prepared = None
        if not served.mapped or all(strides_fit_maps(each) for each in (q, k, v)):
            prepared = dispatcher.prepare(served, options.scale, *(strides_of(each) for each in (q, k, v, o)))
        plan = Plan(problem, prepared, served.workspace_bytes, served.mapped)
        dispatcher.keep(key, plan)
    at_q, at_k, at_v = q.data_ptr(), k.data_ptr(), v.data_ptr()
    if plan.launch is None or (plan.mapped and (at_q | at_k | at_v) % VECTOR_BYTES):
        q, k, v = (each if mappable(each) else each.clone(memory_format=torch.contiguous_format) for each in (q, k, v))
        return run(q, k, v, options)
    # A workspace may be freed as soon as the launch is enqueued: its memory is reused in stream order only.
    workspace = q.new_empty(plan.workspace_bytes, dtype=torch.uint8) if plan.workspace_bytes else None
    traffic.note(plan.problem)
    plan.launch(at_q, at_k, at_v, o.data_ptr(), lse.data_ptr(), 0 if workspace is None else workspace.data_ptr(), stream)
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


# The operators ----------------------------------------------------------------------------------------------------------


def _forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    check_tensors(q, k, v)
    return run(q, k, v, Options(*options))


def _fake_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    check_tensors(q, k, v)
    arguments.check_shapes(q.shape, k.shape, v.shape)
    return outputs(q, k, v)


def _backward(
    dout: torch.Tensor,
    dlse: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    *rest: Any,
) -> tuple[torch.Tensor, ...]:
    """Gradients; an empty tensor stands for one that is not needed, since operators return tensors only."""
    *options, need_q, need_k, need_v = rest
    found = torch_gradients.run(dout, dlse, q, k, v, o, lse, Options(*options), (need_q, need_k, need_v))
    return tuple(q.new_empty(0) if each is None else each for each in found)


def _fake_backward(
    dout: torch.Tensor,
    dlse: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    *rest: Any,
) -> tuple[torch.Tensor, ...]:
    needs = rest[-3:]
    return tuple(torch_gradients.like(like) if needed else like.new_empty(0) for needed, like in zip(needs, (q, k, v), strict=True))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, k, v, *options = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.options = Options(*options)


def _gradients(ctx: Any, dout: torch.Tensor, dlse: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    needs = ctx.needs_input_grad[:3]
    found = backward_op(dout, dlse, *ctx.saved_tensors, *ctx.options, *needs)
    return (*(each if needed else None for each, needed in zip(found, needs, strict=True)), *(None for _ in ctx.options))


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


_OPTIONS = "float scale, str kind, str alignment, SymInt left, SymInt right, bool strict, bool? deterministic"
forward_op: Any = torch.library.custom_op(
    "flashgen::forward", _forward, mutates_args=(), schema=f"(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor, Tensor)"
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
