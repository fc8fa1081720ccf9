"""The backward pass on torch tensors: the kernel that the tables name, and a recomputation in torch where no family can compute it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from flashgen import recompute, traffic
from flashgen.backends import GRADIENT_OPERANDS
from flashgen.dispatch import Answer, Dispatcher
from flashgen.errors import UnsupportedProblem
from flashgen.model import Op, Problem
from flashgen.torch_tensors import Options, dispatcher_of, mappable, problem_of, stream_of, strides_fit_maps, strides_of, unit_stride

Gradients = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


@dataclass(frozen=True, slots=True)
class Plan:
    """What one combination of shapes, strides and options needs at each call."""

    problem: Problem
    launch: Callable[..., None] | None  # None: torch computes it or, if `mapped`, no tensor map describes these strides: copies are read
    workspace_bytes: int = 0
    mapped: bool = False


def run(
    dout: torch.Tensor, dlse: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor,
    lse: torch.Tensor, options: Options, needs: tuple[bool, bool, bool] = (True, True, True),
) -> Gradients:  # fmt: skip
    """dq, dk, dv in the memory order of `like`, on the current stream of the tensors' device; None where not needed.

    Beyond them a call takes the workspace of its kernel: at most 4 bytes per element of q and two float32 numbers per row, up to padding.
    Raises UntunedProblem, LaunchError.
    """
    results = like(q), like(k), like(v)
    inputs = [unit_stride(each) for each in (q, k, v, o, dout)]
    dlse = None if dlse is None else dlse.float().contiguous()
    plan = _planned(inputs, results, options)
    if plan.mapped and not all(mappable(each) for each in inputs):
        inputs = [each if mappable(each) else each.clone(memory_format=torch.contiguous_format) for each in inputs]
        plan = _planned(inputs, results, options)
    q, k, v, o, dout = inputs
    if plan.launch is None:
        return recompute.gradients(dout, dlse, q, k, v, o, lse, scale=options.scale, mask=options.mask, needs=needs)
    # The workspace may be freed as soon as the launch is enqueued: its memory is reused in stream order only.
    workspace = q.new_empty(plan.workspace_bytes, dtype=torch.uint8) if plan.workspace_bytes else None
    sums = lse.contiguous()
    others = {"lse": sums.data_ptr(), "dlse": 0 if dlse is None else dlse.data_ptr()}
    others["workspace"] = 0 if workspace is None else workspace.data_ptr()
    traffic.note(plan.problem)
    addresses = {name: each.data_ptr() for name, each in zip(GRADIENT_OPERANDS, (*inputs, *results), strict=True)}
    plan.launch(addresses | others, stream_of(q))
    dq, dk, dv = (each if needed else None for each, needed in zip(results, needs, strict=True))
    return dq, dk, dv


def like(tensor: torch.Tensor) -> torch.Tensor:
    """Room for the gradient of a tensor: in its memory order, without gaps, columns side by side."""
    found = torch.empty_like(tensor)
    return found if found.stride(3) == 1 else tensor.new_empty(tensor.shape)


def wants_determinism(options: Options) -> bool:
    """What the caller said, else torch's own switch as it stands now."""
    return torch.are_deterministic_algorithms_enabled() if options.deterministic is None else options.deterministic


def explain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options) -> Answer | str:
    """The kernel that would compute the gradients, or why torch does. Raises UntunedProblem."""
    problem = problem_of(q, k, v, options, Op.BACKWARD, wants_determinism(options))
    try:
        return dispatcher_of(q).serve(problem, strict=options.strict, stream=stream_of(q)).answer
    except UnsupportedProblem as reason:
        return f"recomputed by torch in float32, block by block, since no kernel can: {reason}"


def _planned(inputs: Sequence[torch.Tensor], results: Sequence[torch.Tensor], options: Options) -> Plan:
    """The plan of these shapes and strides, made once."""
    deterministic, dispatcher = wants_determinism(options), dispatcher_of(inputs[0])
    shapes = tuple((each.shape, each.stride()) for each in (*inputs, *results))
    key = ("gradients", inputs[0].dtype, options, deterministic, shapes)
    plan: Plan | None = dispatcher.plans.get(key)
    if plan is None:
        plan = _plan(dispatcher, inputs, results, options, deterministic)
        dispatcher.keep(key, plan)
    return plan


def _plan(
    dispatcher: Dispatcher, inputs: Sequence[torch.Tensor], results: Sequence[torch.Tensor], options: Options, deterministic: bool
) -> Plan:
    problem = problem_of(inputs[0], inputs[1], inputs[2], options, Op.BACKWARD, deterministic)
    try:
        served = dispatcher.serve(problem, strict=options.strict, stream=stream_of(inputs[0]))
    except UnsupportedProblem:
        return Plan(problem, None)
    prepared = None
    if not served.mapped or all(strides_fit_maps(each) for each in inputs):
        prepared = dispatcher.prepare_backward(served, options.scale, [strides_of(each) for each in (*inputs, *results)])
    return Plan(problem, prepared, served.workspace_bytes, served.mapped)
