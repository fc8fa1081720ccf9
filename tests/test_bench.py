"""Measuring on a simulated device: what is launched in which order, and that nothing inexact is timed."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from small_kernels import HEAD_DIM, copy_source, small_problem

from flashgen import bench, launch, peers, reference
from flashgen.errors import LaunchError
from flashgen.gpu import DeviceBuffer
from flashgen.model import Certificate, DType, ExecutorName, Problem, Verdict
from flashgen.peers import PeerUnavailable
from flashgen.timing import Launchable, Plan


class SimulatedGpu:
    """Device memory as a bytearray; addresses are offsets into it, events are readings of a counter in µs."""

    index = 0
    l2_bytes = 1 << 20

    def __init__(self, size: int = 80 << 20) -> None:
        self.memory = np.zeros(size, np.uint8)
        self.top = 512
        self.now = 0.0
        self.log: list[str] = []

    def allocate(self, size: int) -> DeviceBuffer:
        buffer = DeviceBuffer(self.top, size, None)
        self.top += -(-max(size, 1) // 512) * 512
        if self.top > self.memory.size:
            raise LaunchError("out of memory")
        return buffer

    def upload(self, array: np.ndarray[Any, Any]) -> DeviceBuffer:
        buffer = self.allocate(array.nbytes)
        self.memory[buffer.address : buffer.address + buffer.bytes] = array.view(np.uint8)
        return buffer

    def fill(self, buffer: DeviceBuffer, byte: int = 0xFF) -> None:
        self.memory[buffer.address : buffer.address + buffer.bytes] = byte
        self.now += 40.0
        self.log.append("flush")

    def copy(self, target: int, source: int, size: int) -> None:
        self.memory[target : target + size] = self.memory[source : source + size].copy()

    def current(self) -> Any:
        import contextlib

        return contextlib.nullcontext()

    def event(self) -> list[float]:
        return [0.0]

    def record_event(self, event: list[float]) -> None:
        event[0] = self.now
        self.log.append("event")

    def elapsed_us(self, start: list[float], end: list[float]) -> float:
        return end[0] - start[0]

    def synchronize(self, what: str = "") -> None:
        self.log.append("wait")

    def elements(self, buffer: DeviceBuffer, dtype: DType) -> np.ndarray[Any, Any]:
        return self.memory[buffer.address : buffer.address + buffer.bytes].view(reference.storage(dtype))


class Kernel:
    """A launch that takes a known time."""

    def __init__(self, gpu: SimulatedGpu, name: str, us: float) -> None:
        self.gpu, self.name, self.us = gpu, name, us

    def __call__(self) -> None:
        self.gpu.now += self.us
        self.gpu.log.append(self.name)


def stopwatch(gpu: SimulatedGpu) -> bench.DeviceStopwatch:
    return bench.DeviceStopwatch(gpu)  # type: ignore[arg-type]


def test_the_time_of_a_launch_does_not_contain_the_flush() -> None:
    gpu = SimulatedGpu()
    assert stopwatch(gpu).run([Kernel(gpu, "a", 7.0), Kernel(gpu, "b", 300.0)]) == [7.0, 300.0]


def test_every_launch_comes_right_after_a_flush_and_the_host_waits_once() -> None:
    gpu = SimulatedGpu()
    clock, launches = stopwatch(gpu), [Kernel(gpu, "a", 7.0), Kernel(gpu, "b", 9.0)]
    clock.run(launches)
    gpu.log.clear()
    clock.run(launches * 3)
    told = " ".join(gpu.log)
    for name in "ab":
        assert told.count(f"flush event {name} event") == 3
    assert gpu.log.count("wait") == 1


def test_the_flush_is_at_least_twice_the_l2(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    gpu = SimulatedGpu(256 << 20)
    gpu.l2_bytes = 50 << 20
    allocate = gpu.allocate

    def noted(size: int) -> DeviceBuffer:
        sizes.append(size)
        return allocate(size)

    monkeypatch.setattr(gpu, "allocate", noted)
    stopwatch(gpu)
    assert max(sizes) >= 100 << 20


def test_a_forgotten_launch_keeps_no_memory_alive() -> None:
    import gc
    import weakref

    gpu = SimulatedGpu()
    clock, kernel = stopwatch(gpu), Kernel(gpu, "a", 1.0)
    clock.run([kernel])
    remembered = weakref.ref(kernel)
    del kernel
    gc.collect()
    assert remembered() is None


@pytest.mark.parametrize("dtype", list(DType))
def test_operands_are_standard_normal_everywhere_and_different_from_each_other(dtype: DType) -> None:
    gpu = SimulatedGpu()
    problem = Problem(dtype, 64, 32, 3, 8, 4, 1000, 1500)
    made = bench.make_operands(gpu, problem, seed=1)  # type: ignore[arg-type]
    values = {name: reference.decode(gpu.elements(made.buffers[name], dtype), dtype) for name in ("q", "k", "v")}
    assert {name: array.size for name, array in values.items()} == {"q": 3 * 1000 * 8 * 64, "k": 3 * 1500 * 4 * 64, "v": 3 * 1500 * 4 * 32}
    for array in values.values():
        assert abs(array.mean()) < 0.01 and abs(array.std() - 1.0) < 0.01
    shortest = min(array.size for array in values.values())
    assert abs(np.corrcoef([array[:shortest] for array in values.values()]) - np.eye(3)).max() < 0.01
    assert np.isnan(reference.decode(gpu.elements(made.buffers["o"], dtype), dtype)).all()


def test_operands_repeat_with_their_seed() -> None:
    problem, found = small_problem(), []
    for seed in (5, 5, 6):
        gpu = SimulatedGpu()
        made = bench.make_operands(gpu, problem, seed)  # type: ignore[arg-type]
        found.append(gpu.elements(made.buffers["q"], problem.dtype).tobytes())
    assert found[0] == found[1] != found[2]


def test_the_memory_order_is_batch_rows_heads_columns() -> None:
    gpu = SimulatedGpu()
    problem = Problem(DType.FLOAT16, 64, 32, 2, 4, 2, 10, 20)
    made = bench.make_operands(gpu, problem, 0)  # type: ignore[arg-type]
    assert made.operands["q"].strides == (10 * 4 * 64, 64, 4 * 64)
    assert made.operands["v"].strides == (20 * 2 * 32, 32, 2 * 32)
    assert bench.memory_shapes(problem)["o"] == (2, 10, 4, 32)


class FixedStopwatch:
    """Every launch takes what its name says."""

    def run(self, launches: Sequence[Launchable]) -> list[float]:
        """Times without launching."""
        return [float(each.name.split("@")[1]) for each in launches]


class State:
    """A measuring state whose device is simulated."""

    def __init__(self) -> None:
        self.timed: list[str] = []
        self.spreads: list[object] = []
        self.forgotten = 0
        self.executor = SimpleNamespace(load=lambda source, compiled=None: SimpleNamespace(registers=(64,)))
        self.telemetry = SimpleNamespace(clocks=lambda: None)
        self.stopwatch = FixedStopwatch()
        self.gpu = SimpleNamespace(index=0)

    def launchable(self, name: str, *arguments: object) -> Any:
        self.timed.append(name)
        self.spreads.append(arguments[4] if len(arguments) > 4 else 1.0)
        return SimpleNamespace(name=name if "@" in name else f"{name}@50")

    def forget_operands(self) -> None:
        self.forgotten += 1


def certificate(verdict: Verdict) -> Certificate:
    return Certificate(verdict, "suite", "digest", ExecutorName.DEVICE, 8, 3, 1.1, "case", 0.0)


@pytest.fixture
def state(monkeypatch: pytest.MonkeyPatch) -> State:
    monkeypatch.setattr(bench, "load_space", lambda family: family)
    return State()


def test_an_inexact_variant_is_never_timed(state: State) -> None:
    timed = bench.measure_task(state, copy_source(), None, small_problem(), lambda *_: certificate(Verdict.INEXACT))  # type: ignore[arg-type]
    assert timed.measurement is None and timed.certificate == certificate(Verdict.INEXACT) and state.timed == []


def test_an_exact_variant_is_timed_with_the_rate_of_its_problem(state: State) -> None:
    problem = small_problem()
    timed = bench.measure_task(state, copy_source(), None, problem, lambda *_: certificate(Verdict.EXACT), plan=Plan(samples=9))  # type: ignore[arg-type]
    flops = 2 * 5 * 7 * 2 * HEAD_DIM * 6  # visible pairs, both products, two operations, batch times heads
    assert timed.measurement is not None and (timed.measurement.median_us, timed.measurement.samples) == (50.0, 9)
    assert timed.measurement.tflops == pytest.approx(flops / 50.0 / 1e6, abs=0.006)


def test_running_out_of_memory_gives_the_operands_back(state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: object) -> None:
        raise LaunchError("Allocating failed")

    monkeypatch.setattr(state, "launchable", no_memory)
    with pytest.raises(LaunchError):
        bench.measure_task(state, copy_source(), None, small_problem())  # type: ignore[arg-type]
    assert state.forgotten == 1


def test_missing_peers_say_why_and_the_rest_is_compared(state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str, operands: object) -> None:
        raise PeerUnavailable(f"{name} is not here")

    monkeypatch.setattr(peers, "prepare", absent)
    state.operands = lambda *_: SimpleNamespace(for_peers=lambda gpu: None)  # type: ignore[attr-defined]
    finalists = [("ours@90", copy_source(), None), ("entry@100", copy_source(), None)]
    found = bench.interleave_task(state, finalists, small_problem(), rounds=8, against=["fa3"])  # type: ignore[arg-type]
    assert found.missing == {"fa3": "fa3 is not here"}
    assert found.ratio("entry@100", "ours@90").median == pytest.approx(100 / 90)
    assert found.measurement("ours@90", small_problem()).median_us == 90.0


def test_finalists_are_launched_on_scores_of_the_spread_that_is_asked_for(state: State) -> None:
    bench.interleave_task(state, [("ours@90", copy_source(), None)], small_problem(), 8, score_std=16.0)  # type: ignore[arg-type]
    bench.interleave_task(state, [("ours@90", copy_source(), None)], small_problem(), 8)  # type: ignore[arg-type]
    assert state.spreads == [16.0, 1.0]


def test_the_spread_of_scores_is_a_factor_of_the_scale() -> None:
    problem = small_problem()
    operands = {name: launch.Operand(4096, (0, 0, 0)) for name in ("q", "k", "v", "o", "lse")}
    made = bench.BenchOperands(problem, {}, operands)
    plain, wide = (made.params(DeviceBuffer(0, 0, None), score_std=std).scale_log2 for std in (1.0, 16.0))
    assert wide == pytest.approx(16.0 * plain) and plain == pytest.approx(problem.scale * launch.LOG2_E)


def test_what_the_child_returns_survives_a_pickle(state: State) -> None:
    import pickle

    timed = bench.measure_task(state, copy_source(), None, small_problem(), lambda *_: certificate(Verdict.EXACT))  # type: ignore[arg-type]
    assert pickle.loads(pickle.dumps(timed)) == timed
