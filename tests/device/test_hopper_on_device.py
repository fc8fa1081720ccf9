"""The Hopper family on a GPU: every head dim, type and mask, hostile inputs, repetition, streams and graphs."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest

from flashgen import bench, cases, certify, gpu
from flashgen.cases import Inputs, Layout
from flashgen.compiler import compile_many
from flashgen.cubins import Compiled
from flashgen.errors import FlashgenError
from flashgen.model import DType, Mask, MaskKind, Problem, Source, Variant, Verdict
from flashgen.render import render
from flashgen.runtime import present_limits
from flashgen.space import BoundSpace, load_space
from flashgen.suite import Case, Check, Twin

pytestmark = pytest.mark.device
FAMILY = "hopper_forward"
HEAD_DIMS = ((64, 64), (80, 80), (96, 96), (128, 128), (160, 160), (192, 192), (256, 256), (192, 128), (8, 8), (40, 72), (136, 24))
DTYPES = (DType.BFLOAT16, DType.FLOAT16)
MASKS = (Mask(), Mask.causal(), Mask.window(100, 20))


@cache
def state() -> bench.MeasuringState:
    opened = bench.open_device(0)
    if opened.gpu.sm != 90:
        pytest.skip("needs sm_90")
    return opened


def bound_to(problem: Problem) -> BoundSpace:
    return load_space(FAMILY).bind(problem, present_limits(state().gpu))


Kernel = tuple[Source, Compiled]


def built(wanted: list[tuple[Problem, Variant]]) -> dict[tuple[Problem, Variant], Kernel]:
    """Compiled side by side; what breaks a compiled constraint is left out, as in a search."""
    sources = [render(load_space(FAMILY), problem.klass(), variant) for problem, variant in wanted]
    kept = {}
    for (problem, variant), source, found in zip(wanted, sources, compile_many(sources, sm=90), strict=True):
        if isinstance(found, FlashgenError):
            raise found
        if not any(bound_to(problem).compiled_violations(variant, found.report).values()):
            kept[problem, variant] = source, found
    return kept


@cache
def candidates(problem: Problem) -> list[list[Variant]]:
    """For each softmax mode a few random variants, one of them with dynamic scheduling at least."""
    chosen = random.Random(str(problem))
    feasible = bound_to(problem).feasible()
    found = []
    for mode in (0, 1):
        fitting = [variant for variant in feasible if variant.as_dict()["softmax_mode"] == mode]
        dynamic = [variant for variant in fitting if variant.as_dict()["scheduler"] == 2]
        found.append(chosen.sample(dynamic, 2) + chosen.sample(fitting, 1))
    return found


def problem_of(dtype: DType, dims: tuple[int, int], mask: Mask) -> Problem:
    return Problem(dtype, *dims, batch=2, heads_q=4, heads_kv=2, seqlen_q=1500, seqlen_kv=1500, mask=mask)


@cache
def everything() -> dict[tuple[Problem, Variant], Kernel]:
    """All kernels of this module's certificates, compiled at once."""
    problems = [problem_of(dtype, dims, mask) for dtype in DTYPES for dims in HEAD_DIMS for mask in MASKS]
    return built([(problem, variant) for problem in problems for mode in candidates(problem) for variant in mode])


def one_of_each_mode(problem: Problem) -> list[Kernel]:
    """For each softmax mode the first candidate that keeps the compiled constraints."""
    kernels = everything()
    return [next(kernels[problem, variant] for variant in mode if (problem, variant) in kernels) for mode in candidates(problem)]


@pytest.mark.parametrize("dims", HEAD_DIMS, ids=lambda dims: f"d{dims[0]}" if dims[0] == dims[1] else f"d{dims[0]}v{dims[1]}")
@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: str(mask.kind))
def test_a_variant_of_every_softmax_mode_is_certified(dims: tuple[int, int], mask: Mask) -> None:
    for dtype in DTYPES:
        problem = problem_of(dtype, dims, mask)
        for source, compiled in one_of_each_mode(problem):
            state().executor.load(source, compiled)
            found = certify.full(state().executor, load_space(FAMILY), source, problem, 1)
            assert found.verdict is Verdict.EXACT, f"{source.variant}: {found.failure}"


def spread(nats: float, size_v: float = 1.0) -> Callable[[Problem, np.random.Generator], Inputs]:
    """Scores of this standard deviation, values of this size."""

    def make(problem: Problem, rng: np.random.Generator) -> Inputs:
        drawn = cases.normal(problem, rng)
        return cases.rounded(problem, drawn.q * nats, drawn.k, drawn.v * size_v)

    return make


def large(nats: float) -> Callable[[Problem, np.random.Generator], Inputs]:
    return lambda problem, rng: spread(nats, LARGE[problem.dtype])(problem, rng)


def ramps(direction: str, height: float) -> Callable[[Problem, np.random.Generator], Inputs]:
    return lambda problem, rng: cases.ramp(problem, rng, direction, height)


LARGE = {DType.BFLOAT16: 1e30, DType.FLOAT16: 1e4}
HOSTILE: dict[str, Callable[[Problem, np.random.Generator], Inputs]] = {
    **{f"spread of {nats:g} nats": spread(nats) for nats in (1.0, 2.0, 8.0, 16.0, 30.0)},
    **{f"large values, spread of {nats:g} nats": large(nats) for nats in (1.0, 8.0, 30.0)},
    **{f"{way} by {height:g} nats": ramps(way, height) for way in ("rising", "falling", "zigzag") for height in (20.0, 40.0, 80.0)},
}


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("mask", [Mask(), Mask.causal()], ids=lambda mask: str(mask.kind))
@pytest.mark.parametrize("dtype", DTYPES)
def test_hostile_scores_and_values_stay_within_the_bound(head_dim: int, mask: Mask, dtype: DType) -> None:
    problem = Problem(dtype, head_dim, head_dim, 1, 4, 2, 500, 700, mask)
    for source, compiled in one_of_each_mode(problem_of(dtype, (head_dim, head_dim), mask)):
        state().executor.load(source, compiled)
        for name, make in HOSTILE.items():
            case = Case(name, problem, make, Check.BOUNDED, Twin.REPEATED, Layout.ROOMY, problem.scale)
            found = certify.run_case(state().executor, source, case, 5)
            assert not found.failure, f"{source.variant}: {found.failure}"


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_needle_at_every_tile_border_is_found_bit_for_bit(head_dim: int) -> None:
    problem = Problem(DType.BFLOAT16, head_dim, head_dim, 1, 2, 1, 300, 1100, Mask())
    for source, compiled in one_of_each_mode(problem_of(DType.BFLOAT16, (head_dim, head_dim), Mask())):
        state().executor.load(source, compiled)
        block_kv = source.variant.as_dict()["block_kv"]

        def needles(problem: Problem, rng: np.random.Generator, block_kv: int = block_kv) -> Inputs:
            return cases.selection(problem, rng, cases.border_winners(problem, block_kv), problem.scale)

        case = Case("needles", problem, needles, Check.BITWISE, Twin.REPEATED, Layout.ROOMY, problem.scale)
        found = certify.run_case(state().executor, source, case, 6)
        assert not found.failure, f"{source.variant}: {found.failure}"


def launches_of(problem: Problem) -> list[bench.KernelLaunch]:
    """The first feasible seed with each softmax mode, on operands of its own."""
    seed = bound_to(problem).seeds()[0].as_dict()
    modes = [bound_to(problem).variant(seed | {"softmax_mode": mode}) for mode in (0, 1)]
    kernels = built([(problem, variant) for variant in modes]).values()
    return [state().launchable(str(source.variant), source, compiled, problem, 3) for source, compiled in kernels]


def output_of(each: bench.KernelLaunch) -> np.ndarray:
    operands = each.owned[0]
    assert isinstance(operands, bench.BenchOperands)
    buffer = operands.buffers["o"]
    host = np.empty(buffer.bytes, np.uint8)
    state().gpu.synchronize()
    state().gpu.download(buffer, host)
    return host


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("mask", [Mask(), Mask.causal()], ids=lambda mask: str(mask.kind))
def test_a_thousand_launches_give_the_same_bits(head_dim: int, mask: Mask) -> None:
    """All tiles of all SMs; compared on the device."""
    cupy = gpu.cupy()
    heads = 2048 // head_dim
    problem = Problem(DType.BFLOAT16, head_dim, head_dim, 2, heads, heads, 1024, 1024, mask)
    for each in launches_of(problem):
        operands = each.owned[0]
        assert isinstance(operands, bench.BenchOperands)
        buffer = operands.buffers["o"]
        memory = cupy.cuda.UnownedMemory(buffer.address, buffer.bytes, operands)
        live = cupy.ndarray(buffer.bytes // 4, cupy.uint32, cupy.cuda.MemoryPointer(memory, 0))
        each()
        first = live.copy()
        different = cupy.zeros((), cupy.int64)
        for _ in range(1000):
            live.fill(0xFFFFFFFF)
            each()
            different += (live != first).sum()
        assert int(different) == 0, each.name
        assert bool((first != 0xFFFFFFFF).any())


def test_two_streams_at_once_and_a_graph_give_the_bits_of_one_launch() -> None:
    """Persistent kernels of two streams share the SMs; each stream has a tile counter of its own, which a replay finds at zero."""
    cupy = gpu.cupy()
    problem = Problem(DType.BFLOAT16, 128, 128, 2, 16, 16, 2048, 2048, Mask.causal())
    ((source, compiled),) = built([(problem, bound_to(problem).seeds()[0])]).values()
    first = state().launchable("first", source, compiled, problem, 3)
    first()
    expected = output_of(first)
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    own = []
    for stream in streams:
        operands = bench.make_operands(state().gpu, problem, 3)
        params = state().executor.params(source, operands.params(state().executor.workspace(0)), problem, stream.ptr)
        own.append((stream, operands, params))
    for _ in range(20):
        for stream, _, params in own:
            first.kernel.launch(first.grids, params, stream.ptr)
    graphs = []
    for stream, _, params in own:
        stream.synchronize()
        stream.begin_capture()
        for _ in range(3):
            first.kernel.launch(first.grids, params, stream.ptr)
        graphs.append(stream.end_capture())
    for _, operands, _ in own:
        state().gpu.fill(operands.buffers["o"])
    state().gpu.synchronize()
    for _ in range(10):
        for (stream, _, _), graph in zip(own, graphs, strict=True):
            graph.launch(stream)
    for stream, operands, _ in own:
        stream.synchronize()
        assert np.array_equal(output_of(bench.KernelLaunch("", first.kernel, first.grids, first.params, (operands,))), expected)
        state().executor.check_counters(source, stream.ptr)


def test_the_masks_in_scope_are_all_kinds_of_masks() -> None:
    assert {mask.kind for mask in MASKS} == set(MaskKind)
