"""Exact or approximate: methods of attention on one input, each with its error against float64, its bytes and its operations.

Textbook and tiled attention run on the emulated executor, and their bytes are its counters. The approximations run in NumPy; their bytes
and operations are formulas of the methods as published (features, projections and results in the element type, operands moved once).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from flashgen import accounting, cases, compare, cost, reference
from flashgen.approximate import APPROXIMATIONS
from flashgen.cases import Inputs, Layout
from flashgen.emulate import FAST, EmulatedExecutor
from flashgen.model import DeviceLimits, Executor, ForwardTensors, Problem, Source
from flashgen.render import render
from flashgen.space import BoundSpace, load_space

LENGTH = 96
"""Rows of the compared input: enough for several tiles, short enough to emulate within a second."""
TILED_FAMILIES = ("ampere_forward", "simt_forward")
BASELINE = "standard_forward"
APPROXIMATE_ROWS = 4  # features per column of a Performer, keys per projected key of a Linformer
WINDOW = 33


@dataclass(frozen=True, slots=True)
class Method:
    """One method on the compared input. Errors are absolute, against float64 attention; ulp distances against its rounding."""

    name: str
    kind: str  # exact or approximate
    how: str
    max_error: float
    rms_error: float
    histogram: tuple[tuple[int, int, int], ...]  # lowest and highest ulp distance, elements
    bytes: int
    bytes_from: str  # counted or formula
    operations: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """All methods on one input."""

    problem: Problem
    methods: tuple[Method, ...]
    plain_error: float  # of the textbook computation in the element type with float32 sums: what the exactness gate scales with


def compare_methods(problem: Problem, device: DeviceLimits, seed: int = 0) -> Comparison:
    """The methods on one head of LENGTH rows of the problem's type, head dims and mask. Raises MissingDependency without g++."""
    small = replace(problem, batch=1, heads_q=1, heads_kv=1, seqlen_q=LENGTH, seqlen_kv=LENGTH)
    inputs = cases.normal(small, np.random.default_rng(seed))
    exact = reference.attention(inputs.q, inputs.k, inputs.v, small, small.scale).o
    executor = EmulatedExecutor(device, FAST)
    kernels = [bound for bound in (_bound(BASELINE, small, device), _tiled(small, device)) if bound is not None]
    sources = [render(bound.space, small.klass(), bound.fallback()) for bound in kernels]
    executor.prepare(sources)
    methods = []
    for bound, source in zip(kernels, sources, strict=True):
        found = _measured(_run(executor, source, small, inputs), exact, small)
        counters = executor.last_report.counters
        moved = counters.global_bytes_read + counters.global_bytes_written
        name, how = _words(bound)
        methods.append(Method(name, "exact", how, *found, moved, "counted", cost.flops(small)))
    for each in APPROXIMATIONS:
        found = _measured(_run(each, sources[0], small, inputs), exact, small)
        moved, operations, how = _published(each.title, small)
        methods.append(Method(each.title, "approximate", how, *found, moved, "formula", operations))
    plain = reference.plain_error(inputs.q, inputs.k, inputs.v, small, small.scale, exact)
    return Comparison(small, tuple(methods), plain)


def _bound(family: str, problem: Problem, device: DeviceLimits) -> BoundSpace | None:
    space = load_space(family)
    return None if space.unsupported(problem, device) else space.bind(problem, device)


def _tiled(problem: Problem, device: DeviceLimits) -> BoundSpace | None:
    return next((bound for family in TILED_FAMILIES if (bound := _bound(family, problem, device)) is not None), None)


def _words(bound: BoundSpace) -> tuple[str, str]:
    if bound.space.family == BASELINE:
        return "textbook", "three kernels, the matrix of scores in memory, in the element type"
    return "tiled (flash)", f"{bound.space.family}, {bound.fallback().as_dict()['block_q']} query rows at a time, no matrix in memory"


def _run(executor: Executor, source: Source, problem: Problem, inputs: Inputs) -> ForwardTensors:
    tensors = cases.operands(problem, inputs, Layout.CONTIGUOUS)
    executor.forward(source, problem, tensors, problem.scale)
    return tensors


def _measured(tensors: ForwardTensors, exact: reference.Floats, problem: Problem) -> tuple[float, float, tuple[tuple[int, int, int], ...]]:
    """Largest and root-mean-square error, and distances in ulp to the rounded exact result."""
    output = tensors.o.view()
    error = reference.decode(output, problem.dtype).astype(np.float64) - exact
    distance: NDArray[np.int64] = reference.ulp_distance(output, reference.encode(exact, problem.dtype), problem.dtype).ravel()
    return float(np.abs(error).max()), float(np.sqrt((error**2).mean())), compare.buckets(distance)


def _published(title: str, problem: Problem) -> tuple[int, int, str]:
    """Bytes, operations and description of an approximation as published, for one head and a full mask."""
    rows, dim, dim_v, element = problem.seqlen_q, problem.head_dim, problem.head_dim_v, problem.dtype.bytes
    operands = rows * (2 * dim + 2 * dim_v) * element
    if title.startswith("random"):
        features = APPROXIMATE_ROWS * dim
        operations = 2 * 2 * rows * dim * features + 2 * 2 * rows * features * dim_v
        return operands + 2 * 2 * rows * features * element, operations, f"{features} random features, linear in the length"
    if title.startswith("projected"):
        short = max(1, rows // APPROXIMATE_ROWS)
        operations = 2 * short * rows * (dim + dim_v) + 2 * rows * short * (dim + dim_v)
        return operands + 2 * short * (dim + dim_v) * element, operations, f"{rows} keys projected to {short}"
    seen = min(WINDOW, rows)
    return operands, 2 * rows * seen * (dim + dim_v), f"{seen} keys around each row, exact among them"


def textbook_bytes(problem: Problem, device: DeviceLimits) -> accounting.Account:
    """The accounting of the textbook family's fallback on a problem."""
    bound = load_space(BASELINE).bind(problem, device)
    return accounting.account(bound, bound.fallback())
