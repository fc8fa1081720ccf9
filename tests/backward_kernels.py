"""Runs and judges backward kernels: guarded tensors, cases, the bound."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from flashgen import reference
from flashgen.emulate import DEADLINE_S, POLICIES, EmulatedExecutor, Policy
from flashgen.gradient_gate import Expected, expect, gradients_of, operands, run_case
from flashgen.gradient_suite import Case, Make, full_suite
from flashgen.model import BackwardTensors, DeviceLimits, ExecutorName, ForwardTensors, Op, Problem, Source, Tensor, Variant
from flashgen.render import render
from flashgen.space import BoundSpace, Space
from flashgen.suite import Tiles

__all__ = [
    "Case", "Expected", "Make", "Run", "Running", "backward_source", "cases_of", "emulated", "expect",
    "failure_of", "first_failure", "inputs_of", "of_backward", "operands", "outputs_of", "ratios",
]  # fmt: skip


# The family -----------------------------------------------------------------------------------------------------------


def backward_source(space: Space, problem: Problem, variant: Variant) -> Source:
    """The source of a variant for the backward problem of the same shape."""
    return render(space, of_backward(problem).klass(), variant)


def of_backward(problem: Problem) -> Problem:
    """The same shape as a backward problem."""
    return replace(problem, op=Op.BACKWARD)


# Cases ----------------------------------------------------------------------------------------------------------------


def cases_of(problem: Problem, block_q: int, block_kv: int, ahead: int = 0) -> list[Case]:
    """Cases around the tile edges, for the compiled-in part of `problem`."""
    return list(full_suite(of_backward(problem).klass(), Tiles(block_q, block_kv), ahead))


def inputs_of(tensors: BackwardTensors) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.named() if name not in tensors.outputs}


def outputs_of(tensors: BackwardTensors) -> dict[str, Tensor]:
    return dict(gradients_of(tensors))


Run = Callable[[Source, BoundSpace, Case, BackwardTensors], None]
"""All launches of a source, once; results land in the buffers of the outputs. Raises CompileError, LaunchError, EmulationFault."""


def emulated(policy: Policy = POLICIES[1], live_ctas: int = 1, deadline_s: float = DEADLINE_S) -> Run:
    """Runs on the CPU; a run raises EmulationFault with every broken rule."""

    def run(source: Source, bound: BoundSpace, case: Case, tensors: BackwardTensors) -> None:
        def grids(source: Source, problem: Problem) -> tuple[Sequence[int], int]:
            return bound.grids(source.variant), bound.workspace_bytes(source.variant)

        executor = EmulatedExecutor(bound.device, policy, deadline_s=deadline_s, live_ctas=live_ctas, grids=grids)
        executor.backward(source, of_backward(case.problem), tensors, case.softmax_scale)

    return run


# Judging --------------------------------------------------------------------------------------------------------------


class Running:
    """The ways to run of this file, as an executor of the gate."""

    def __init__(self, space: Space, device: DeviceLimits, run: Run) -> None:
        self.space, self.device, self.run, self.name = space, device, run, ExecutorName.EMULATED

    def prepare(self, sources: Sequence[Source]) -> None: ...

    def forward(self, source: Source, problem: Problem, tensors: ForwardTensors, scale: float) -> None:
        raise AssertionError("a backward kernel")

    def backward(self, source: Source, problem: Problem, tensors: BackwardTensors, scale: float) -> None:
        bound = self.space.bind(of_backward(problem), self.device)
        self.run(source, bound, Case("run", problem, scale=scale), tensors)


def failure_of(space: Space, source: Source, device: DeviceLimits, case: Case, run: Run) -> str:
    """Why the source fails the case, in words, or ''. Raises CompileError."""
    promised = space.deterministic(source.klass, source.variant)
    return run_case(Running(space, device, run), source, case, 7, promised).failure


def ratios(case: Case, tensors: BackwardTensors) -> dict[str, float]:
    """Largest error of each gradient in units; the bound is 2."""
    expected = expect(case)
    return {
        name: float(np.abs(_values(outputs_of(tensors)[name], case) - exact).max(initial=0.0)) / expected.units[name]
        for name, exact in expected.exact.named()
    }


def _values(tensor: Tensor, case: Case) -> np.ndarray:
    return reference.decode(tensor.view(), case.problem.dtype).astype(np.float64)


def first_failure(space: Space, source: Source, device: DeviceLimits, chosen: Sequence[Case], runs: Sequence[Run]) -> str:
    """The first failure over ways to run and cases, or ''."""
    return next((failure for run in runs for case in chosen if (failure := failure_of(space, source, device, case, run))), "")
