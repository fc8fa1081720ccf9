"""Runs `hopper_backward` on trial, on either executor. `backward_kernels` has the cases and the bound."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass

import backward_kernels
from backward_kernels import Case, Run, backward_source, candidate_space, of_backward

from flashgen import launch
from flashgen.emulate import DEADLINE_S, POLICIES, Policy
from flashgen.launch import MappedBackwardStruct, Operand
from flashgen.model import DType, ExecutorName, Mask, Op, Problem, Source, Variant
from flashgen.space import BoundSpace, Space
from flashgen.tensor_map import MAP_BYTES

FAMILY = "hopper_backward"
MASKS = (Mask(), Mask.causal(), Mask.window(-1, -1))


@dataclass(frozen=True)
class HopperBackward:
    """The family on trial."""

    space: Space

    def rows(self, bound: BoundSpace, variant: Variant) -> dict[str, int]:
        """Rows of each map's boxes."""
        return dict(self.space.boxes(bound.problem.klass(), variant))

    def source(self, problem: Problem, variant: Variant) -> Source:
        """The source of a variant."""
        return backward_source(self.space, problem, variant)


def hopper_space() -> HopperBackward:
    """The candidate."""
    return HopperBackward(candidate_space(FAMILY))


def problem_of(dtype: DType, dims: tuple[int, int], mask: Mask) -> Problem:
    return Problem(dtype, *dims, batch=1, heads_q=2, heads_kv=1, seqlen_q=256, seqlen_kv=256, mask=mask, op=Op.BACKWARD)


def mapped_params(
    case: Case, at: Mapping[str, Operand], boxes: Mapping[str, int], workspace: int, counters: int, executor: ExecutorName
) -> MappedBackwardStruct:
    """The parameter block of one call."""
    problem = of_backward(case.problem)
    plain = launch.backward_params(problem, case.softmax_scale, at, workspace)
    params = MappedBackwardStruct(problem=plain, counters=counters)
    for name, rows in boxes.items():
        encoded = launch.map_of(name, rows, plain, problem).encode(executor)
        ctypes.memmove(ctypes.addressof(params) + getattr(MappedBackwardStruct, name).offset, encoded, MAP_BYTES)
    return params


def emulated(hopper: HopperBackward, policy: Policy = POLICIES[1], live_ctas: int = 1, deadline_s: float = DEADLINE_S) -> Run:
    """Runs on the CPU; a run raises EmulationFault with every broken rule."""
    return backward_kernels.emulated(policy, live_ctas, deadline_s)


def cases_for(given: list[Case]) -> list[Case]:
    """All of them: sums whose difference must be exactly 0 are exact in any order."""
    return given
