"""Runs and judges backward kernels on trial: parameters, guarded tensors, cases, the bound. The package has no backward operation yet."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest

from flashgen import cases, gradients, paths, reference
from flashgen.cases import Inputs, Layout
from flashgen.certify import BOUND, error_unit
from flashgen.emulate import DEADLINE_S, POLICIES, EmulationReport, Memory, Policy, shared_emulator
from flashgen.errors import EmulationFault
from flashgen.gradients import Gradients, Saved
from flashgen.launch import ForwardStruct, Operand, StridesStruct, forward_params
from flashgen.model import Alignment, DeviceLimits, DType, Mask, MaskKind, Op, Problem, Source, Tensor, Variant
from flashgen.render import _PARAMS, render
from flashgen.space import BoundSpace, Space, parse_space

CANDIDATES = Path(__file__).parent / "candidates"


class BackwardStruct(ctypes.Structure):
    """Twin of fg::BackwardParams."""

    _fields_ = [
        ("forward", ForwardStruct),
        *((name, ctypes.c_void_p) for name in ("dout", "dlse", "dq", "dk", "dv")),
        *((f"{name}_strides", StridesStruct) for name in ("dout", "dq", "dk", "dv")),
        ("scale", ctypes.c_float),
    ]


# The family -----------------------------------------------------------------------------------------------------------


@contextmanager
def templates_with_candidates(root: Path) -> Iterator[None]:
    """Templates as they would be if the candidates were families; `root` is empty and grows links."""
    shipped = paths.templates()
    for folder in (shipped, CANDIDATES / "templates"):
        for path in folder.rglob("*"):
            link = root / path.relative_to(folder)
            if path.is_file() and not link.exists():
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paths, "templates", lambda: root)
        yield


def candidate_space(family: str) -> Space:
    """The space of a backward candidate, read as if it were a forward one: the package knows no other operation yet."""
    text = (CANDIDATES / "search_spaces" / f"{family}.yaml").read_text()
    assert "\nop: backward\n" in text
    return parse_space(text.replace("\nop: backward\n", "\nop: forward\n"), family)


def backward_source(space: Space, problem: Problem, variant: Variant) -> Source:
    """The source of a candidate, with entry points that take BackwardParams."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(_PARAMS, Op.FORWARD, "BackwardParams")
        return render(space, problem.klass(), variant)


# Cases ----------------------------------------------------------------------------------------------------------------

Make = Callable[[Problem, np.random.Generator], Inputs]


@dataclass(frozen=True)
class Case:
    """One problem with inputs, a memory layout, which gradients flow in, and what must come out exactly 0."""

    name: str
    problem: Problem
    make: Make = cases.normal
    layout: Layout = Layout.ROOMY
    dout: bool = True
    dlse: bool = False
    scale: float | None = None
    zeros: tuple[str, ...] = ()

    @property
    def softmax_scale(self) -> float:
        return self.problem.scale if self.scale is None else self.scale


@dataclass(frozen=True)
class Expected:
    """Inputs of a case, what the forward pass saved, float64 gradients, and one unit of error for each."""

    inputs: Inputs
    given: Saved
    exact: Gradients
    units: dict[str, float]


def masks_of(kind: MaskKind, block_kv: int) -> tuple[Mask, ...]:
    top_left = Alignment.TOP_LEFT
    if kind is MaskKind.NONE:
        return (Mask(),)
    if kind is MaskKind.CAUSAL:
        return Mask.causal(), Mask.causal(top_left)
    return (
        Mask.window(block_kv // 2 + 1, 0), Mask.window(3, block_kv, top_left), Mask.window(-1, 5), Mask.window(7, -1, top_left),
        Mask.window(block_kv - 1, 2), Mask.window(0, 0), Mask.window(2, 2**31 - 1),
    )  # fmt: skip


def cases_of(problem: Problem, block_q: int, block_kv: int) -> list[Case]:
    """Cases around the tile edges, for the compiled-in part of `problem`; the masks of its kind take turns."""
    masks, found = masks_of(problem.mask.kind, block_kv), list[Case]()
    everything = masks[0] if problem.mask.kind is not MaskKind.WINDOW else Mask.window(-1, -1)

    def add(
        name: str, lengths: tuple[int, int], heads: tuple[int, int, int] = (1, 1, 1), mask: Mask | None = None,
        make: Make = cases.normal, layout: Layout = Layout.ROOMY, dout: bool = True, dlse: bool = False, scale: float | None = None,
        zeros: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        batch, heads_q, heads_kv = heads
        at = replace(
            problem, batch=batch, heads_q=heads_q, heads_kv=heads_kv, seqlen_q=lengths[0], seqlen_kv=lengths[1],
            mask=mask or masks[len(found) % len(masks)],
        )  # fmt: skip
        found.append(Case(name, at, make, layout, dout, dlse, scale, zeros))

    q, kv = block_q, block_kv
    add("group", (q + 2, kv + 3), (2, 6, 2), layout=Layout.TRANSPOSED, dlse=True)
    add("ragged-0", (2 * q + 3, kv - 1))
    add("ragged-1", (q + 1, 2 * kv + 5), layout=Layout.CONTIGUOUS, dlse=True)
    add("tall", (kv + q + 5, 7))
    add("wide", (5, 2 * kv + 9))
    add("square", (2 * q, 2 * q), dlse=True)
    add("one", (1, 1), mask=everything, make=cases.averaging, zeros=("dq", "dk"))
    add("one_hot", (q + 1, 2 * kv + 3), make=_one_hot(kv), zeros=("dq", "dk"))
    add("nothing_flows", (q + 3, kv + 1), dout=False, zeros=("dq", "dk", "dv"))
    add("only_lse", (q + 3, kv + 1), dout=False, dlse=True, zeros=("dv",))
    add("large", (q + 5, kv + 2), make=lambda at, rng: cases.coarse(at, rng, 4.0))
    # All scores are -96, so exp(0 - lse) overflows: padding that is scored 0 instead of hidden shows.
    add("constant", (7, kv + 7), make=lambda at, rng: cases.constant_scores(at, rng, 4.0, -3.0), scale=8 / problem.head_dim)
    add("scale", (q, kv + 9), make=cases.coarse, scale=0.7)
    for layout in (Layout.UNALIGNED, Layout.FUSED, Layout.ODD_ROWS, Layout.EXPANDED):
        make = cases.shared_heads if layout is Layout.EXPANDED else cases.normal
        add(f"layout-{layout}", (9, kv + 3), (2, 2, 2), layout=layout, make=make)
    for batch, lengths in ((1, (0, 5)), (1, (5, 0)), (1, (0, 0)), (0, (4, 4))):
        add("nothing", lengths, (batch, 2, 1), dlse=True, zeros=("dq", "dk", "dv"))
    # Mask edges at every distance from the edges of tiles: a loop that ends a row or a key too early errs at single ones.
    for shift in range(min(kv, 16) if problem.mask.kind is MaskKind.CAUSAL else 0):
        add("edge_of_keys", (q + 1, kv + 1 + shift), mask=masks[shift % 2])
    for shift in range(min(q, 16) if problem.mask.kind is MaskKind.WINDOW else 0):
        add("edge_of_rows", (q + kv + 4, q + kv + 4), mask=Mask.window(shift, 2))
        add("edge_of_keys", (q + 1, 2 * kv + 1), mask=Mask.window(2, shift))
    return found


def _one_hot(block_kv: int) -> Make:
    return lambda at, rng: cases.selection(at, rng, cases.border_winners(at, block_kv), at.scale)


@lru_cache(maxsize=512)
def expect(case: Case, seed: int = 7) -> Expected:
    problem, scale = case.problem, case.softmax_scale
    rng = np.random.default_rng([seed, *case.name.encode()])
    inputs = case.make(problem, rng)
    rows = (problem.batch, problem.heads_q, problem.seqlen_q)
    dout = reference.round_to(rng.standard_normal((*rows, problem.head_dim_v)) * case.dout, problem.dtype)
    if case.layout is Layout.EXPANDED:
        dout = np.broadcast_to(dout[:, :1], dout.shape)
    dlse = rng.standard_normal(rows).astype(np.float32) * np.float32(case.dlse)
    given = gradients.saved(inputs.q, inputs.k, inputs.v, dout, dlse, problem, scale)
    exact = gradients.attention(inputs.q, inputs.k, inputs.v, dout, dlse, problem, scale)
    plain = gradients.plain_errors(inputs.q, inputs.k, inputs.v, given, problem, scale, exact)
    return Expected(inputs, given, exact, {name: error_unit(x, plain[name], problem.dtype) for name, x in exact.named()})


# Running --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BackwardTensors:
    """Operands of one backward call by name, inputs and outputs."""

    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]


def operands(case: Case, expected: Expected) -> BackwardTensors:
    """Inputs surrounded by NaN, and poisoned outputs of the same layout."""
    problem, given, layout = case.problem, expected.given, case.layout
    forward = cases.operands(problem, expected.inputs, layout)
    forward.o.view()[...] = reference.encode(given.o, problem.dtype)
    forward.lse.view()[..., 0] = given.lse
    plain_layout = {Layout.FUSED: Layout.TRANSPOSED, Layout.EXPANDED: Layout.CONTIGUOUS}.get(layout, layout)
    dout = cases.allocate(cases.shape_of(given.dout), problem.dtype, Layout.EXPANDED if layout is Layout.EXPANDED else plain_layout)
    dout.view()[...] = reference.encode(given.dout, problem.dtype)
    dlse = cases.allocate((*given.dlse.shape, 1), DType.FLOAT32, Layout.CONTIGUOUS)  # type: ignore[arg-type]
    dlse.view()[..., 0] = given.dlse
    outputs = {f"d{name}": cases.allocate(x.shape, problem.dtype, plain_layout) for name, x in forward.named()[:3]}
    return BackwardTensors(dict(forward.named()) | {"dout": dout, "dlse": dlse}, outputs)


Run = Callable[[Source, BoundSpace, Case, BackwardTensors], None]
"""All launches of a source, once; results land in the buffers of the outputs. Raises CompileError, LaunchError, EmulationFault."""


def params_of(case: Case, at: Mapping[str, Operand], workspace_address: int) -> BackwardStruct:
    """The parameter block of one call."""
    forward = forward_params(case.problem, case.softmax_scale, at["q"], at["k"], at["v"], at["o"], at["lse"].address, workspace_address)
    pointers = {name: at[name].address for name in ("dout", "dq", "dk", "dv")} | {"dlse": at["dlse"].address if case.dlse else None}
    strides = {f"{name}_strides": StridesStruct(*at[name].strides) for name in ("dout", "dq", "dk", "dv")}
    return BackwardStruct(forward=forward, scale=case.softmax_scale, **pointers, **strides)


def emulated(policy: Policy = POLICIES[1], live_ctas: int = 1, deadline_s: float = DEADLINE_S) -> Run:
    """Runs on the CPU; a run raises EmulationFault with every broken rule."""

    def run(source: Source, bound: BoundSpace, case: Case, tensors: BackwardTensors) -> None:
        named, workspace = tensors.inputs | tensors.outputs, bound.workspace_bytes(source.variant)
        memory = Memory.for_buffers([*(tensor.buffer.nbytes for tensor in named.values()), workspace])
        at = {
            name: Operand(memory.place(x.buffer, name in tensors.outputs) + x.offset * x.buffer.itemsize, x.strides[:3])
            for name, x in named.items()
        }
        params, report = params_of(case, at, memory.scratch(workspace)), EmulationReport()
        for entry, grid in zip(source.entry_points, bound.grids(source.variant), strict=True):
            report += shared_emulator().launch(
                source.text, entry.name, grid, entry.threads, entry.shared_bytes, params, memory, policy, live_ctas, deadline_s=deadline_s
            )
            if report.num_faults:
                break
        memory.fetch()
        report.check(f"{source.variant} for {case.problem} under {policy}")

    return run


# Judging --------------------------------------------------------------------------------------------------------------


def failure_of(space: Space, source: Source, device: DeviceLimits, case: Case, run: Run) -> str:
    """Why the source fails the case, in words, or ''. Raises CompileError."""
    expected = expect(case)
    tensors = operands(case, expected)
    before = {name: cases.bits_of(tensor.buffer).copy() for name, tensor in tensors.inputs.items()}
    try:
        run(source, space.bind(case.problem, device), case, tensors)
    except EmulationFault as fault:
        return str(fault)
    changed = [name for name, tensor in tensors.inputs.items() if not np.array_equal(cases.bits_of(tensor.buffer), before[name])]
    failure = f"the kernel changed its input {changed[0]}" if changed else ""
    for name, exact in expected.exact.named():
        failure = failure or _gradient_failure(case, tensors.outputs[name], exact, expected.units[name], name)
    return f"{case.name} ({case.problem}, {case.layout}): {failure}" if failure else ""


def ratios(case: Case, tensors: BackwardTensors) -> dict[str, float]:
    """Largest error of each gradient in units; the bound is 2."""
    expected = expect(case)
    return {
        name: float(np.abs(_values(tensors.outputs[name], case) - exact).max(initial=0.0)) / expected.units[name]
        for name, exact in expected.exact.named()
    }


def _values(tensor: Tensor, case: Case) -> np.ndarray:
    return reference.decode(tensor.view(), case.problem.dtype).astype(np.float64)


def _gradient_failure(case: Case, tensor: Tensor, exact: np.ndarray, unit: float, name: str) -> str:
    dtype = case.problem.dtype
    strayed = ~cases.is_poison(tensor.buffer, dtype) & ~cases.owned(tensor)
    if strayed.any():
        return f"the kernel wrote {strayed.sum()} elements outside {name}"
    if cases.is_poison(tensor.view(), dtype).any():
        return f"{cases.is_poison(tensor.view(), dtype).sum()} elements of {name} were never written"
    values = _values(tensor, case)
    wrong = np.argwhere((values != 0) & _must_be_zero(case, name)[:, None])
    if len(wrong):
        return f"{name}{wrong[0].tolist()} = {values[tuple(wrong[0])]:.9g} must be exactly 0"
    error = np.abs(values - exact)
    error[np.isnan(error)] = np.inf
    if error.max(initial=0.0) <= BOUND * unit:
        return ""
    place = np.unravel_index(int(error.argmax()), error.shape)
    numbers = f"{values[place]:.9g}, expected {exact[place]:.9g}, error {error[place]:.3g}"
    return f"{name}{[int(i) for i in place]} = {numbers}, allowed {BOUND * unit:.3g}"


def _must_be_zero(case: Case, name: str) -> np.ndarray:
    """Rows of a gradient that must be exactly 0: those that see or are seen by nothing, and all where the case says so."""
    problem = case.problem
    seen = reference.visible(problem.mask, problem.seqlen_q, problem.seqlen_kv)
    return np.logical_not(seen.any(axis=1 if name == "dq" else 0)) | (name in case.zeros)


def first_failure(space: Space, source: Source, device: DeviceLimits, chosen: Sequence[Case], runs: Sequence[Run]) -> str:
    """The first failure over ways to run and cases, or ''."""
    return next((failure for run in runs for case in chosen if (failure := failure_of(space, source, device, case, run))), "")
