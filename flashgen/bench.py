"""Measuring on a GPU: cold L2, CUDA events, kernels and peers on the same random operands. What runs here runs in the measuring child.

The tasks at the end fit `worker.MeasuringChild`: `MeasuringChild(bench.open_device, 0)`, then `child.call(culprit, bench.measure_task, …)`.
"""

from __future__ import annotations

import ctypes
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from flashgen import cost, launch, peers, reference, telemetry, timing
from flashgen.cubins import Compiled
from flashgen.errors import BusyDeviceWarning, LaunchError
from flashgen.gpu import DeviceBuffer, Gpu
from flashgen.launch import Operand
from flashgen.model import Certificate, Measurement, Op, Problem, Source, Verdict
from flashgen.peers import DeviceArray, PeerOperands, PeerUnavailable
from flashgen.render import render
from flashgen.runtime import DeviceExecutor, LoadedKernel, check_grids, present_limits
from flashgen.space import Space, load_space, load_spaces
from flashgen.timing import Launchable, Plan, Ratio

POOL_ELEMENTS = 1_048_573
"""Normal numbers drawn once and repeated to fill the operands. A prime: no two rows of a head get the same numbers."""

POOL_STARTS = {"q": 0, "k": POOL_ELEMENTS // 3, "v": POOL_ELEMENTS // 3 * 2, "dout": POOL_ELEMENTS // 2}
"""Where in the pool an operand begins, so that no two hold the same numbers. All others are results."""

LEAST_FLUSH_BYTES = 64 * 2**20
MAX_FLUSHES = 20

Certify = Callable[[DeviceExecutor, Space, Source, Problem, int], Certificate]


class DeviceStopwatch:
    """Times launches with CUDA events on the default stream. Before each, outside the timed part, at least twice the L2 is overwritten.

    The flush also keeps the GPU busy while the host enqueues; for a launch that is slow to enqueue (the wrappers of some peers) it is
    repeated, so that the time between the events is the GPU's alone.
    """

    def __init__(self, gpu: Gpu, flush_bytes: int | None = None) -> None:
        """On one device, with an L2 flush of `flush_bytes` (default: twice the L2)."""
        self._gpu = gpu
        self._flush = gpu.allocate(max(2 * gpu.l2_bytes, LEAST_FLUSH_BYTES) if flush_bytes is None else flush_bytes)
        self._events: list[tuple[Any, Any]] = []
        self._flush_us = self._time_flush()
        self._repeats: WeakKeyDictionary[Launchable, int] = WeakKeyDictionary()

    def run(self, launches: Sequence[Launchable]) -> list[float]:
        """Launch all, wait for the end, and return each one's time in µs. Raises LaunchError when a kernel is refused or aborted."""
        repeats = [self._flushes(each) for each in launches]
        while len(self._events) < len(launches):
            self._events.append((self._gpu.event(), self._gpu.event()))
        with self._gpu.current():
            for each, flushes, (start, end) in zip(launches, repeats, self._events, strict=False):
                for _ in range(flushes):
                    self._gpu.fill(self._flush, 0)
                self._gpu.record_event(start)
                each()
                self._gpu.record_event(end)
        self._gpu.synchronize(" / ".join(dict.fromkeys(each.name for each in launches)))
        return [self._gpu.elapsed_us(start, end) for start, end in self._events[: len(launches)]]

    def _flushes(self, each: Launchable) -> int:
        """How often to flush before a launch: long enough to enqueue it meanwhile. Measured once per launchable."""
        known = self._repeats.get(each)
        if known is not None:
            return known
        with self._gpu.current():
            each()
            self._gpu.synchronize(each.name)
            started = time.perf_counter()
            each()
            host_us = (time.perf_counter() - started) * 1e6
            self._gpu.synchronize(each.name)
        flushes = min(MAX_FLUSHES, 1 + int(2.0 * host_us / self._flush_us))
        self._repeats[each] = flushes
        return flushes

    def _time_flush(self) -> float:
        start, end = self._gpu.event(), self._gpu.event()
        with self._gpu.current():
            self._gpu.fill(self._flush, 0)
            self._gpu.record_event(start)
            for _ in range(4):
                self._gpu.fill(self._flush, 0)
            self._gpu.record_event(end)
        self._gpu.synchronize("Flushing the L2")
        return max(1.0, self._gpu.elapsed_us(start, end) / 4)


@dataclass(frozen=True)
class BenchOperands:
    """Random q, k, v and room for o and lse on one device, all (batch, rows, heads, columns) in memory as other libraries keep them.

    For a backward problem o and lse are those of a forward pass, dout is random, and there is room for dq, dk and dv; lse has no gradient.
    """

    problem: Problem
    buffers: dict[str, DeviceBuffer] = field(repr=False)
    operands: dict[str, Operand]

    def params(self, workspace: DeviceBuffer, problem: Problem | None = None, score_std: float = 1.0) -> launch.PlainStruct:
        """The parameter block of a launch on these operands, of the problem's operation or that of `problem`.

        Elements of q and k are standard normal, so the scale decides how far the scores spread.
        """
        return launch.plain_params(problem or self.problem, self.problem.scale * score_std, self.operands, workspace.address)

    def for_peers(self, gpu: Gpu) -> PeerOperands:
        """The same memory for a peer."""
        arrays = {
            name: DeviceArray(self.operands[name].address, shape, self.problem.dtype, self.buffers[name])
            for name, shape in memory_shapes(self.problem).items()
        }
        return PeerOperands(self.problem, gpu.index, arrays["q"], arrays["k"], arrays["v"], arrays.get("dout"))


def memory_shapes(problem: Problem) -> dict[str, tuple[int, int, int, int]]:
    """(batch, rows, heads, columns) of q, k, v and o; for a backward problem also of dout, dq, dk and dv."""
    queries, keys = (problem.batch, problem.seqlen_q, problem.heads_q), (problem.batch, problem.seqlen_kv, problem.heads_kv)
    shapes = {
        "q": (*queries, problem.head_dim),
        "k": (*keys, problem.head_dim),
        "v": (*keys, problem.head_dim_v),
        "o": (*queries, problem.head_dim_v),
    }
    if problem.op is Op.FORWARD:
        return shapes
    return shapes | {"dout": shapes["o"], "dq": shapes["q"], "dk": shapes["k"], "dv": shapes["v"]}


def make_operands(gpu: Gpu, problem: Problem, seed: int) -> BenchOperands:
    """Operands of standard normal numbers. Raises LaunchError when the device has not enough memory."""
    pool = np.random.default_rng(seed).standard_normal(POOL_ELEMENTS, np.float32)
    on_device = gpu.upload(reference.encode(pool, problem.dtype))
    buffers, operands = {}, {}
    for name, shape in memory_shapes(problem).items():
        _, rows, heads, columns = shape
        size = int(np.prod(shape, dtype=np.int64)) * problem.dtype.bytes
        buffers[name] = gpu.allocate(size)
        if name in POOL_STARTS:
            _tile(gpu, buffers[name], on_device, POOL_STARTS[name] * problem.dtype.bytes)
        else:
            gpu.fill(buffers[name])
        operands[name] = Operand(buffers[name].address, (rows * heads * columns, columns, heads * columns))
    buffers["lse"] = gpu.allocate(problem.batch_heads * problem.seqlen_q * 4)
    gpu.fill(buffers["lse"])
    operands["lse"] = Operand(buffers["lse"].address, (problem.heads_q * problem.seqlen_q, problem.seqlen_q, 1))
    gpu.synchronize(f"Making operands for {problem}")
    return BenchOperands(problem, buffers, operands)


def _tile(gpu: Gpu, target: DeviceBuffer, pool: DeviceBuffer, offset: int) -> None:
    """Fill `target` with the pool over and over, beginning `offset` bytes into it."""
    done = 0
    while done < target.bytes:
        size = min(pool.bytes - offset, target.bytes - done)
        gpu.copy(target.address + done, pool.address + offset, size)
        done, offset = done + size, 0


@dataclass(frozen=True, eq=False)
class KernelLaunch:
    """A loaded kernel on given operands, ready to be timed."""

    name: str
    kernel: LoadedKernel
    grids: tuple[int, ...]
    params: ctypes.Structure = field(repr=False)
    owned: tuple[object, ...] = field(repr=False, default=())  # keeps operands and workspace alive

    def __call__(self) -> None:
        """Enqueue it on the default stream."""
        self.kernel.launch(self.grids, self.params)


@dataclass(frozen=True, slots=True)
class Timed:
    """What a trial in the measuring child found out: the certificate, and times only when it is exact."""

    certificate: Certificate | None
    measurement: Measurement | None
    registers: tuple[int, ...] = ()
    seconds: tuple[float, float] = (0.0, 0.0)  # spent on certifying, on timing


@dataclass(frozen=True, slots=True)
class Comparison:
    """Interleaved times in µs per round and name, the clocks around them, and why peers are missing."""

    samples: dict[str, list[float]]
    clock_mhz: tuple[int, int] | None
    throttle: tuple[str, ...]
    missing: dict[str, str]

    def measurement(self, name: str, problem: Problem) -> Measurement:
        """Median and spread of one of them."""
        return timing.measurement(self.samples[name], cost.flops(problem), self.clock_mhz, self.throttle)

    def ratio(self, left: str, right: str) -> Ratio:
        """Time of `left` over time of `right`; above 1 `right` is faster."""
        return timing.ratio(self.samples[left], self.samples[right])


class MeasuringState:
    """What the measuring child keeps between tasks: the device, loaded kernels, the operands of the last problem."""

    def __init__(self, index: int = 0) -> None:
        """On device `index`. Raises MissingDependency without one."""
        self.gpu = Gpu(index)
        self.executor = DeviceExecutor(self.gpu)
        self.telemetry = telemetry.Telemetry(self.gpu.pci_bus_id)
        self._stopwatch: DeviceStopwatch | None = None
        self._operands: tuple[Problem, int, BenchOperands] | None = None

    @property
    def stopwatch(self) -> DeviceStopwatch:
        """The clock, made when first used."""
        if self._stopwatch is None:
            self._stopwatch = DeviceStopwatch(self.gpu)
        return self._stopwatch

    def settle(self) -> None:
        """Wait for the device, so that an abort is blamed on the task that caused it. Raises LaunchError when the context is lost."""
        self.gpu.synchronize("Settling the device")

    def operands(self, problem: Problem, seed: int) -> BenchOperands:
        """Operands of a problem, kept until another one comes."""
        if self._operands is not None and self._operands[:2] == (problem, seed):
            return self._operands[2]
        self.forget_operands()
        made = make_operands(self.gpu, problem, seed)
        if problem.op is Op.BACKWARD:
            self._run_forward(made)
        self._operands = (problem, seed, made)
        return made

    def _run_forward(self, made: BenchOperands) -> None:
        """Fill o and lse by the fastest fallback: the power that a backward pass draws, and so its time, depends on its numbers."""
        problem, limits = replace(made.problem, op=Op.FORWARD, deterministic=False), present_limits(self.gpu)
        bounds = [space.bind(problem, limits) for space in load_spaces(Op.FORWARD) if space.unsupported(problem, limits) is None]
        bound = min(bounds, key=lambda each: cost.roofline_us(each, each.fallback()))
        variant = bound.fallback()
        source = render(bound.space, problem.klass(), variant)
        kernel, workspace = self.executor.load(source), self.executor.workspace(bound.workspace_bytes(variant))
        kernel.launch(bound.grids(variant), self.executor.params(source, made.params(workspace, problem), problem))
        self.gpu.synchronize(f"Running the forward pass of {made.problem}")

    def forget_operands(self) -> None:
        """Give their memory back."""
        self._operands = None
        self.gpu.release_memory()

    def launchable(
        self, name: str, source: Source, compiled: Compiled | None, problem: Problem, seed: int, score_std: float = 1.0
    ) -> KernelLaunch:
        """A kernel on the operands of a problem, on scores of that standard deviation. Raises CompileError, LaunchError."""
        kernel = self.executor.load(source, compiled)
        bound = self.executor.bound(source, problem)
        grids = bound.grids(source.variant)
        check_grids(source, grids)
        made = self.operands(problem, seed)
        workspace = self.executor.workspace(bound.workspace_bytes(source.variant))
        params = self.executor.params(source, made.params(workspace, score_std=score_std), problem)
        return KernelLaunch(name, kernel, grids, params, (made, workspace))


def open_device(index: int = 0) -> MeasuringState:
    """The state of a measuring child."""
    return MeasuringState(index)


def measure_task(
    state: MeasuringState,
    source: Source,
    compiled: Compiled | None,
    problem: Problem,
    certify: Certify | None = None,
    seed: int = 0,
    plan: Plan | None = None,
    best_us: float | None = None,
) -> Timed:
    """Certify one variant, then time it on a problem. An inexact one is not timed; `certify` is `gate.quick`, or None when already done.

    Raises CompileError, LaunchError.
    """
    started = time.perf_counter()
    certificate = None
    kernel = state.executor.load(source, compiled)
    if certify is not None:
        certificate = certify(state.executor, load_space(source.family), source, problem, seed)
        if certificate.verdict is not Verdict.EXACT:
            return Timed(certificate, None, kernel.registers, (time.perf_counter() - started, 0.0))
    certified = time.perf_counter()
    try:
        each = state.launchable(str(source.variant), source, compiled, problem, seed)
        before = state.telemetry.clocks()
        samples = timing.sample(state.stopwatch, each, plan or Plan(), best_us)
        clock, throttle = telemetry.spanning(before, state.telemetry.clocks())
    except LaunchError:
        state.forget_operands()  # it may have been the memory
        raise
    measured = timing.measurement(samples, cost.flops(problem), clock, throttle)
    return Timed(certificate, measured, kernel.registers, (certified - started, time.perf_counter() - certified))


def interleave_task(
    state: MeasuringState,
    finalists: Sequence[tuple[str, Source, Compiled | None]],
    problem: Problem,
    rounds: int = 20,
    seed: int = 0,
    against: Sequence[str] = (),
    score_std: float = 1.0,
) -> Comparison:
    """Time finalists (name, source, cubin) and peers side by side in random order. Peers that are missing say why.

    `score_std` is the standard deviation of the finalists' scores, in nats; peers always have 1. Raises CompileError, LaunchError.
    """
    launches: list[Launchable] = [
        state.launchable(name, source, compiled, problem, seed, score_std) for name, source, compiled in finalists
    ]
    missing: dict[str, str] = {}
    for peer in against:
        try:
            launches.append(peers.prepare(peer, state.operands(problem, seed).for_peers(state.gpu)))
        except PeerUnavailable as error:
            missing[peer] = str(error)
    before = state.telemetry.clocks()
    samples = timing.interleaved(launches, rounds, state.stopwatch, seed)
    clock, throttle = telemetry.spanning(before, state.telemetry.clocks())
    return Comparison(samples, clock, throttle, missing)


def warn_when_busy(index: int = 0, own: Sequence[int] = ()) -> str | None:
    """Warn once before measuring when the GPU is busy with other work; returns the reason. `own` are process ids that belong to us."""
    reason = telemetry.Telemetry(Gpu(index).pci_bus_id).busy(own)
    if reason is not None:
        warnings.warn(
            f"Times will be too long: {reason}. Wait, or choose another GPU with CUDA_VISIBLE_DEVICES.", BusyDeviceWarning, stacklevel=2
        )
    return reason
