"""Runs `hopper_backward` on trial: its parameters with tensor maps, on either executor. `backward_kernels` has the cases and the bound."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import pytest
from backward_kernels import CANDIDATES, BackwardStruct, BackwardTensors, Case, Run, params_of

from flashgen.emulate import DEADLINE_S, POLICIES, EmulationReport, Memory, Policy, shared_emulator
from flashgen.errors import EmulationFault
from flashgen.launch import Operand, contiguous_copy, mappable
from flashgen.model import DType, ExecutorName, Mask, Op, Problem, Source, Tensor, Variant
from flashgen.render import _PARAMS, render
from flashgen.space import BoundSpace, Space, parse_space
from flashgen.tensor_map import MAP_BYTES, MapBytes, TensorMapSpec

FAMILY = "hopper_backward"
MAPS = ("q", "k", "v", "dout", "query_q", "query_k", "query_v", "query_dout")
MASKS = (Mask(), Mask.causal(), Mask.window(-1, -1))


class MappedBackwardStruct(ctypes.Structure):
    """Twin of fg::MappedBackwardParams."""

    _fields_ = [
        *((name, MapBytes) for name in MAPS),
        ("problem", BackwardStruct),
        ("counters", ctypes.c_void_p),
        ("padding", ctypes.c_ubyte * (-(ctypes.sizeof(BackwardStruct) + ctypes.sizeof(ctypes.c_void_p)) % MAP_BYTES)),
    ]


@dataclass(frozen=True)
class HopperBackward:
    """The space, and the rows of the boxes of its tensor maps by name: formulas that the package does not know for these names yet."""

    space: Space
    boxes: Mapping[str, str]

    def rows(self, bound: BoundSpace, variant: Variant) -> dict[str, int]:
        """Rows of each map's boxes."""
        names = bound.names(variant)
        return {name: names[rule] if rule in names else int(rule) for name, rule in self.boxes.items()}

    def source(self, problem: Problem, variant: Variant) -> Source:
        """The source of a variant, with entry points that take MappedBackwardParams."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(_PARAMS, Op.FORWARD, "MappedBackwardParams")
            return render(self.space, problem.klass(), variant)


def hopper_space() -> HopperBackward:
    """The candidate's space, read as if it were a forward one."""
    text = (CANDIDATES / "search_spaces" / f"{FAMILY}.yaml").read_text()
    maps = re.search(r"^tensor_maps: \{(.*)\}", text, re.MULTILINE)
    assert maps
    boxes = {name.strip(): rule.strip(' "') for name, rule in (pair.split(":") for pair in maps[1].split(","))}
    assert tuple(boxes) == MAPS
    text = text.replace("\nop: backward\n", "\nop: forward\n").replace(maps[0], "")
    return HopperBackward(parse_space(text, FAMILY), boxes)


def problem_of(dtype: DType, dims: tuple[int, int], mask: Mask) -> Problem:
    return Problem(dtype, *dims, batch=1, heads_q=2, heads_kv=1, seqlen_q=256, seqlen_kv=256, mask=mask)


def map_of(name: str, rows: int, at: Operand, problem: Problem) -> TensorMapSpec:
    """The tensor map of q, k, v or dout: dims (columns, rows, heads, batch), boxes of 64 columns of `rows` rows."""
    tensor = name.removeprefix("query_")
    heads, length = (problem.heads_q, problem.seqlen_q) if tensor in ("q", "dout") else (problem.heads_kv, problem.seqlen_kv)
    columns, size = (problem.head_dim if tensor in "qk" else problem.head_dim_v), problem.dtype.bytes
    batch_stride, head_stride, row_stride = at.strides
    pairs = ((row_stride, length), (head_stride, heads), (batch_stride, problem.batch))
    in_bytes = tuple(stride * size if extent > 1 else 16 for stride, extent in pairs)
    dims = (columns, max(1, length), heads, max(1, problem.batch))
    return TensorMapSpec(at.address or 16, problem.dtype, dims, in_bytes, (64, rows, 1, 1))


def mapped_params(
    case: Case, at: Mapping[str, Operand], boxes: Mapping[str, int], workspace: int, counters: int, executor: ExecutorName
) -> MappedBackwardStruct:
    """The parameter block of one call."""
    params = MappedBackwardStruct(problem=params_of(case, at, workspace), counters=counters)
    for name, rows in boxes.items():
        encoded = map_of(name, rows, at[name.removeprefix("query_")], case.problem).encode(executor)
        ctypes.memmove(ctypes.addressof(params) + getattr(MappedBackwardStruct, name).offset, encoded, MAP_BYTES)
    return params


def mapped_inputs(tensors: BackwardTensors, dtype: DType) -> BackwardTensors:
    """The tensors, with contiguous copies of those that no tensor map can describe."""
    inputs = {
        name: contiguous_copy(tensor) if name in ("q", "k", "v", "dout") and not mappable(tensor, dtype) else tensor
        for name, tensor in tensors.inputs.items()
    }
    return replace(tensors, inputs=inputs)


def emulated(hopper: HopperBackward, policy: Policy = POLICIES[1], live_ctas: int = 1, deadline_s: float = DEADLINE_S) -> Run:
    """Runs on the CPU; a run raises EmulationFault with every broken rule."""

    def run(source: Source, bound: BoundSpace, case: Case, given: BackwardTensors) -> None:
        tensors = mapped_inputs(given, case.problem.dtype)
        named, workspace = tensors.inputs | tensors.outputs, bound.workspace_bytes(source.variant)
        counters = np.zeros(2, np.uint32)
        memory = Memory.for_buffers([*(tensor.buffer.nbytes for tensor in named.values()), workspace, counters.nbytes])
        at = {name: placed(memory, x, name in tensors.outputs) for name, x in named.items()}
        boxes = hopper.rows(bound, source.variant)
        params = mapped_params(case, at, boxes, memory.scratch(workspace), memory.place(counters, True), ExecutorName.EMULATED)
        report = EmulationReport()
        for entry, grid in zip(source.entry_points, bound.grids(source.variant), strict=True):
            report += shared_emulator().launch(
                source.text, entry.name, grid, entry.threads, entry.shared_bytes, params, memory, policy, live_ctas, deadline_s=deadline_s
            )
            if report.num_faults:
                break
        memory.fetch()
        report.check(f"{source.variant} for {case.problem} under {policy}")
        if counters.any():
            raise EmulationFault(f"{source.variant} for {case.problem} left its counters at {counters.tolist()}.")

    return run


def placed(memory: Memory, tensor: Tensor, writable: bool) -> Operand:
    """A tensor in emulated memory."""
    return Operand(memory.place(tensor.buffer, writable) + tensor.offset * tensor.buffer.itemsize, tensor.strides[:3])


def cases_for(given: list[Case]) -> list[Case]:
    """The cases without those whose exact gradients are 0 by cancellation of dP and delta: tensor cores sum dP in an order of their own."""
    return [case for case in given if case.name != "one_hot"]
