"""Who runs the kernels that dispatch chooses: a GPU of this process, or the emulation on the CPU for tests.

Both take raw addresses and strides, so they know nothing of torch or CuPy arrays.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from flashgen import launch
from flashgen.errors import LaunchError
from flashgen.launch import Operand
from flashgen.launch_blocks import ParameterBlocks
from flashgen.model import BackwardTensors, Certificate, DeviceLimits, DType, ExecutorName, ForwardTensors, Problem, Source, Tensor
from flashgen.space import Space

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from flashgen.bench import MeasuringState
    from flashgen.cubins import Compiled
    from flashgen.emulate import Policy
    from flashgen.gpu import DeviceBuffer

CERTIFY_SECONDS = 120.0
_COUNTER_WORDS = 65536


Strides = tuple[int, int, int]
"""Of batch, heads and rows, in elements."""

Launch = Callable[[int, int, int, int, int, int, int], None]
"""Enqueues one forward call: addresses of q, k, v, o, lse and workspace, and the raw handle of a stream of their device."""

GRADIENT_OPERANDS = ("q", "k", "v", "o", "dout", "dq", "dk", "dv")
"""What a backward call takes besides lse and dlse, in the order of its strides."""

BackwardLaunch = Callable[[Mapping[str, int], int], None]
"""Enqueues one backward call: addresses of GRADIENT_OPERANDS, lse, dlse and workspace by name, and the raw handle of a stream."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A kernel that a backend can launch, and the digest of its cubin; '' where nothing was compiled for a device."""

    source: Source
    handle: Any
    cubin_digest: str


class Backend(Protocol):
    """What dispatch needs of an executor."""

    @property
    def name(self) -> ExecutorName:
        """Which executor this is."""
        ...

    @property
    def limits(self) -> DeviceLimits:
        """What the device offers."""
        ...

    def check_process(self) -> None:
        """Raises LaunchError in a process that cannot launch, such as a fork."""
        ...

    def capturing(self, stream: int) -> bool:
        """Whether a CUDA graph is being captured on the stream, so that nothing may be compiled or loaded now."""
        ...

    def load(self, source: Source) -> Loaded:
        """Compile, or take from the store, and load. Raises CompileError, LaunchError, MissingDependency."""
        ...

    def quick(self, space: Space, loaded: Loaded, problem: Problem) -> Certificate:
        """The quick certificate of a kernel on this device. Raises LaunchError, WorkerLost."""
        ...

    def prepare(self, loaded: Loaded, problem: Problem, grids: Sequence[int], scale: float, strides: Sequence[Strides]) -> Launch:
        """All that does not depend on addresses, done once. `strides` are those of q, k, v and o. Raises InvalidProblem."""
        ...

    def prepare_backward(
        self, loaded: Loaded, problem: Problem, grids: Sequence[int], scale: float, strides: Sequence[Strides]
    ) -> BackwardLaunch:
        """The same for a backward call. `strides` are those of GRADIENT_OPERANDS. Raises InvalidProblem."""
        ...


_forked = False
_watching = False


def _mark_fork() -> None:
    global _forked
    _forked = True


def _watch_forks() -> None:
    """From now on a fork of this process knows that it is one: CUDA does not survive a fork."""
    global _watching
    if not _watching and hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_mark_fork)
        _watching = True


class DeviceBackend:
    """One GPU. Kernels are certified in a measuring child, never in this process."""

    name = ExecutorName.DEVICE

    def __init__(self, index: int) -> None:
        """GPU `index`, as the driver counts what is visible. Raises LaunchError in a fork, MissingDependency without that GPU."""
        self.check_process()
        from flashgen.gpu import Gpu
        from flashgen.runtime import DeviceExecutor, present_limits

        self._gpu = Gpu(index)
        self._executor = DeviceExecutor(self._gpu)
        self.limits: DeviceLimits = present_limits(self._gpu)
        self._lock = threading.Lock()
        self._words: DeviceBuffer | None = None
        self._used = 0
        self._given: dict[tuple[str, int], int] = {}
        _watch_forks()

    def check_process(self) -> None:
        """Raises LaunchError in a child that was forked after CUDA had started."""
        if _forked:
            raise LaunchError(
                "This process was forked from one in which flashgen had started CUDA, and CUDA does not survive a fork. Start it with "
                "multiprocessing's 'spawn' or 'forkserver' method, or fork before the first call of flashgen.attention."
            )

    def capturing(self, stream: int) -> bool:
        """Asks the CUDA runtime."""
        from flashgen.gpu import cupy

        return bool(cupy().cuda.runtime.streamIsCapturing(stream))

    def load(self, source: Source) -> Loaded:
        """Through the cubin store."""
        kernel = self._executor.load(source)
        if source.counters and self._words is None:
            self._words = self._gpu.allocate(4 * _COUNTER_WORDS)
            self._gpu.fill(self._words, 0)
            self._gpu.synchronize("Clearing counters")
        return Loaded(source, kernel, kernel.compiled.report.cubin_digest)

    def quick(self, space: Space, loaded: Loaded, problem: Problem) -> Certificate:
        """In a measuring child that lives for this certificate: an unproved kernel must not endanger the caller's CUDA context."""
        from flashgen.bench import open_device
        from flashgen.worker import MeasuringChild

        with MeasuringChild(open_device, self._gpu.index, deadline_s=CERTIFY_SECONDS) as child:
            arguments = (loaded.source, loaded.handle.compiled, problem)
            certificate: Certificate = child.call(f"Certifying {loaded.source.variant}", quick_task, *arguments)
            return certificate

    def prepare(self, loaded: Loaded, problem: Problem, grids: Sequence[int], scale: float, strides: Sequence[Strides]) -> Launch:
        """Every call has a block of its own, so that calls of several threads do not meet."""
        kernel, source = loaded.handle, loaded.source
        blocks = ParameterBlocks(source, forward_template(problem, scale, strides), problem, self.name)

        def launch_once(q: int, k: int, v: int, o: int, lse: int, workspace: int, stream: int) -> None:
            if _forked:
                self.check_process()
            addresses = {"q": q, "k": k, "v": v, "o": o, "lse": lse, "workspace": workspace}
            kernel.launch(grids, blocks.make(addresses, self._counters(source, stream)), stream)

        return launch_once

    def prepare_backward(
        self, loaded: Loaded, problem: Problem, grids: Sequence[int], scale: float, strides: Sequence[Strides]
    ) -> BackwardLaunch:
        """The same for a backward call."""
        kernel, source = loaded.handle, loaded.source
        blocks = ParameterBlocks(source, gradient_template(problem, scale, strides), problem, self.name)

        def launch_once(addresses: Mapping[str, int], stream: int) -> None:
            if _forked:
                self.check_process()
            kernel.launch(grids, blocks.make(addresses, self._counters(source, stream)), stream)

        return launch_once

    def _counters(self, source: Source, stream: int) -> int:
        """Address of zeroed words that no concurrent launch uses: one set per kernel and stream, and a new one per captured launch.

        A graph may be replayed beside other work, so its launches keep their words. Raises LaunchError when all words are given away.
        """
        if not source.counters:
            return 0
        with self._lock:
            captured = self.capturing(stream)
            known = None if captured else self._given.get((source.digest, stream))
            if known is not None:
                return known
            if self._words is None or self._used + source.counters > _COUNTER_WORDS:
                raise LaunchError(
                    f"All {_COUNTER_WORDS} counter words of GPU {self._gpu.index} are given away to streams and captured launches. Capture "
                    "fewer graphs in one process."
                )
            address = self._words.address + 4 * self._used
            self._used += source.counters
            if not captured:
                self._given[source.digest, stream] = address
            return address


def quick_task(state: MeasuringState, source: Source, compiled: Compiled, problem: Problem) -> Certificate:
    """In the measuring child: the quick suite on one kernel."""
    from flashgen import gate
    from flashgen.space import load_space

    state.executor.load(source, compiled)
    return gate.quick(state.executor, load_space(source.family), source, problem, 0)


class EmulatedBackend:
    """The emulated executor on host memory. For tests: thousands of times slower than a GPU."""

    name = ExecutorName.EMULATED

    def __init__(self, limits: DeviceLimits, policy: Policy | None = None) -> None:
        """Limits of the device to play; `policy` schedules the emulated threads (default: values only, no race checks)."""
        from flashgen.emulate import FAST, EmulatedExecutor

        self.limits = limits
        self._executor = EmulatedExecutor(limits, policy or FAST)

    def check_process(self) -> None:
        """A fork may emulate."""

    def capturing(self, stream: int) -> bool:
        """There are no graphs."""
        return False

    def load(self, source: Source) -> Loaded:
        """Compile with the host compiler."""
        self._executor.prepare([source])
        return Loaded(source, None, "")

    def quick(self, space: Space, loaded: Loaded, problem: Problem) -> Certificate:
        """Here, on the CPU."""
        from flashgen import gate

        return gate.quick(self._executor, space, loaded.source, problem, 0)

    def prepare(self, loaded: Loaded, problem: Problem, grids: Sequence[int], scale: float, strides: Sequence[Strides]) -> Launch:
        """A launch runs to its end, and raises EmulationFault too. Strides that a device would refuse are refused here."""
        ParameterBlocks(loaded.source, forward_template(problem, scale, strides), problem, self.name)

        def launch_once(q: int, k: int, v: int, o: int, lse: int, workspace: int, stream: int) -> None:
            operands = tuple(Operand(address, each) for address, each in zip((q, k, v, o), strides, strict=True))
            self._executor.forward(loaded.source, problem, _host_tensors(problem, operands, lse), scale)

        return launch_once

    def prepare_backward(
        self, loaded: Loaded, problem: Problem, grids: Sequence[int], scale: float, strides: Sequence[Strides]
    ) -> BackwardLaunch:
        """The same for a backward call."""
        ParameterBlocks(loaded.source, gradient_template(problem, scale, strides), problem, self.name)

        def launch_once(addresses: Mapping[str, int], stream: int) -> None:
            at = {name: Operand(addresses[name], each) for name, each in zip(GRADIENT_OPERANDS, strides, strict=True)}
            tensors = _host_gradients(problem, at, addresses["lse"], addresses["dlse"])
            self._executor.backward(loaded.source, problem, tensors, scale)

        return launch_once


def forward_template(problem: Problem, scale: float, strides: Sequence[Strides]) -> launch.ForwardStruct:
    """The parameter block of a forward call, without addresses. Raises InvalidProblem for a bad scale."""
    q, k, v, o = (Operand(0, each) for each in strides)
    return launch.forward_params(problem, scale, q, k, v, o, 0, 0)


def gradient_template(problem: Problem, scale: float, strides: Sequence[Strides]) -> launch.BackwardStruct:
    """The parameter block of a backward call, without addresses. Raises InvalidProblem for a bad scale."""
    at = {name: Operand(0, each) for name, each in zip(GRADIENT_OPERANDS, strides, strict=True)}
    return launch.backward_params(problem, scale, at | {"lse": Operand(0, (0, 0, 0))}, 0)


def _host_tensors(problem: Problem, operands: Sequence[Operand], lse: int) -> ForwardTensors:
    """Views of host memory as the executor takes them."""
    rows_q, rows_kv = (problem.batch, problem.heads_q, problem.seqlen_q), (problem.batch, problem.heads_kv, problem.seqlen_kv)
    shapes = (
        (*rows_q, problem.head_dim), (*rows_kv, problem.head_dim), (*rows_kv, problem.head_dim_v), (*rows_q, problem.head_dim_v)
    )  # fmt: skip
    q, k, v, o = (_host_tensor(operand, shape, problem.dtype) for operand, shape in zip(operands, shapes, strict=True))
    sums = Operand(lse, (problem.heads_q * problem.seqlen_q, problem.seqlen_q, 1))
    return ForwardTensors(q, k, v, o, _host_tensor(sums, (*rows_q, 1), DType.FLOAT32))


def _host_gradients(problem: Problem, at: Mapping[str, Operand], lse: int, dlse: int) -> BackwardTensors:
    """Views of host memory as the executor takes them."""
    forward = _host_tensors(problem, [at[name] for name in "qkvo"], lse)
    like = {"dout": forward.o, "dq": forward.q, "dk": forward.k, "dv": forward.v}
    others: dict[str, Any] = {name: _host_tensor(at[name], each.shape, problem.dtype) for name, each in like.items()}
    flowing = _host_tensor(Operand(dlse, forward.lse.strides[:3]), forward.lse.shape, DType.FLOAT32) if dlse else None
    return BackwardTensors(**dict(forward.named()), dlse=flowing, **others)


def _host_tensor(operand: Operand, shape: tuple[int, int, int, int], dtype: DType) -> Tensor:
    import numpy as np

    strides = (*operand.strides, 1)
    extent = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) if all(shape) else 0
    element: Any = {DType.FLOAT32: np.float32, DType.FLOAT16: np.float16, DType.BFLOAT16: np.uint16}[dtype]
    # The executor finds tensors of one buffer by its address: an empty one must not share the address of another.
    buffer: NDArray[Any] = np.empty(0, element)
    if extent:
        raw = (ctypes.c_ubyte * (extent * np.dtype(element).itemsize)).from_address(operand.address)
        buffer = np.frombuffer(memoryview(raw), dtype=element)
    return Tensor(buffer, 0, shape, strides)
