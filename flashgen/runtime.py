"""The device executor: Source → cubin → loaded kernel → launch on raw pointers and a given stream."""

from __future__ import annotations

import ctypes
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from flashgen import compiler, launch
from flashgen.cubins import Compiled, CubinStore
from flashgen.errors import FlashgenError, LaunchError
from flashgen.gpu import DEFAULT_STREAM, DeviceBuffer, Gpu, cupy, launch_errors
from flashgen.model import BackwardTensors, DeviceLimits, EntryPoint, ExecutorName, ForwardTensors, Problem, Source, Tensor, Variant

DEFAULT_SHARED_BYTES = 48 * 1024
"""Static plus dynamic shared memory that a CTA gets without asking; from here on the function must opt in."""

MAX_GRID = 2**31 - 1
KEPT_KERNELS = 256
_ONE_POINTER = ctypes.c_void_p * 1


class Bound(Protocol):
    """What a launch needs of `space.BoundSpace`."""

    def grids(self, variant: Variant) -> tuple[int, ...]:
        """CTAs per entry point."""
        ...

    def workspace_bytes(self, variant: Variant) -> int:
        """Device memory between the launches of one call."""
        ...


@dataclass(frozen=True)
class LoadedKernel:
    """A source in the memory of one device, ready to launch. `registers` and `local_bytes` are what the driver says, per entry point."""

    source: Source
    compiled: Compiled = field(repr=False)
    gpu: Gpu
    functions: tuple[int, ...] = field(repr=False)
    static_shared_bytes: tuple[int, ...]
    registers: tuple[int, ...]
    local_bytes: tuple[int, ...]
    context: int = field(repr=False)
    module: Any = field(repr=False)  # CuPy unloads the cubin with it

    def launch(self, grids: Sequence[int], params: ctypes.Structure, stream: int = DEFAULT_STREAM) -> None:
        """Enqueue all entry points on a stream, `params` by value; returns at once. A grid of 0 is skipped: it has nothing to write.

        Raises LaunchError for a refused launch; an abort inside the kernel shows at the next synchronisation.
        """
        driver = cupy().cuda.driver
        pointers = _ONE_POINTER(ctypes.addressof(params))
        address = ctypes.addressof(pointers)
        entered = driver.ctxGetCurrent()
        if entered != self.context:
            driver.ctxSetCurrent(self.context)
        try:
            for entry, function, grid in zip(self.source.entry_points, self.functions, grids, strict=True):
                if grid > 0:
                    driver.launchKernel(function, grid, 1, 1, entry.threads, 1, 1, entry.shared_bytes, stream, address, 0)
        except (driver.CUDADriverError, OverflowError) as error:
            raise LaunchError(self._refusal(grids, error)) from error
        finally:
            if entered != self.context:
                driver.ctxSetCurrent(entered)

    def _refusal(self, grids: Sequence[int], error: Exception) -> str:
        launches = ", ".join(
            f"{entry.name}<<<{grid}, {entry.threads}, {entry.shared_bytes} B>>>"
            for entry, grid in zip(self.source.entry_points, grids, strict=True)
        )
        return f"The driver refused to launch {self.source.variant} ({launches}): {error}"


def load(source: Source, compiled: Compiled, gpu: Gpu) -> LoadedKernel:
    """Load a cubin and opt in to its shared memory. Raises LaunchError for a cubin or a size that the device refuses."""
    check_limits(source, compiled.report.static_shared_bytes, gpu.shared_bytes_per_cta)
    driver = cupy().cuda.driver
    with gpu.current(), launch_errors(f"Loading {source.variant} ({compiled.architecture}) on {gpu.name} (sm_{gpu.sm})"):
        module = cupy().cuda.Module()
        module.load(compiled.cubin)
        functions = tuple(int(module.get_function(entry.name).ptr) for entry in source.entry_points)
        static = tuple(int(driver.funcGetAttribute(driver.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, each)) for each in functions)
        registers = tuple(int(driver.funcGetAttribute(driver.CU_FUNC_ATTRIBUTE_NUM_REGS, each)) for each in functions)
        local = tuple(int(driver.funcGetAttribute(driver.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES, each)) for each in functions)
        for entry, function, static_bytes in zip(source.entry_points, functions, static, strict=True):
            check_entry(source, entry, static_bytes, gpu.shared_bytes_per_cta)
            if needs_opt_in(static_bytes, entry.shared_bytes):
                driver.funcSetAttribute(function, driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, entry.shared_bytes)
        context = int(driver.ctxGetCurrent())
    return LoadedKernel(source, compiled, gpu, functions, static, registers, local, context, module)


def needs_opt_in(static_bytes: int, dynamic_bytes: int) -> bool:
    """Whether a launch could exceed what a CTA gets without asking. At exactly 48 KiB asking is harmless, so the test is not strict."""
    return dynamic_bytes > 0 and static_bytes + dynamic_bytes >= DEFAULT_SHARED_BYTES


def check_limits(source: Source, static_bytes: int, maximum: int) -> None:
    """Refuse, before anything is loaded, what the device cannot launch. Raises LaunchError."""
    for entry in source.entry_points:
        check_entry(source, entry, static_bytes if len(source.entry_points) == 1 else 0, maximum)


def check_entry(source: Source, entry: EntryPoint, static_bytes: int, maximum: int) -> None:
    """Raises LaunchError when an entry point asks for more shared memory than a CTA can have, or for a block that no device runs."""
    total = static_bytes + entry.shared_bytes
    if total > maximum:
        raise LaunchError(
            f"{entry.name} of {source.variant} needs {total} bytes of shared memory "
            f"({static_bytes} static + {entry.shared_bytes} dynamic); "
            f"the maximum per CTA is {maximum}. Choose smaller tiles or fewer stages."
        )
    if not 0 < entry.threads <= 1024:
        raise LaunchError(f"{entry.name} of {source.variant} asks for {entry.threads} threads per CTA; 1 to 1024 are allowed.")


def check_grids(source: Source, grids: Sequence[int]) -> None:
    """Raises LaunchError for a grid that the driver cannot take."""
    for entry, grid in zip(source.entry_points, grids, strict=True):
        if not 0 <= grid <= MAX_GRID:
            raise LaunchError(f"{entry.name} of {source.variant} asks for {grid} CTAs; 0 to {MAX_GRID} are allowed. Split the batch.")


def present_limits(gpu: Gpu) -> DeviceLimits:
    """The limits of a present device."""
    from flashgen import device

    with gpu.current():
        return device.present()


def bound_by_space(limits: DeviceLimits) -> Callable[[Source, Problem], Bound]:
    """The rule that gives grids and workspaces: the family's search space, bound to the problem and the device."""
    from flashgen.space import load_space

    def bind(source: Source, problem: Problem) -> Bound:
        return load_space(source.family).bind(problem, limits)

    return bind


class DeviceExecutor:
    """Runs sources on one GPU (fulfils `model.Executor`). Compiles what it is given, and keeps the last loaded kernels."""

    def __init__(
        self, gpu: Gpu | None = None, store: CubinStore | None = None, bind: Callable[[Source, Problem], Bound] | None = None
    ) -> None:
        """On `gpu` (default: device 0). `bind` replaces the search space as the source of grids and workspaces."""
        self.gpu = gpu if gpu is not None else Gpu(0)
        self._store = store
        self._bind = bind
        self._limits: DeviceLimits | None = None
        self._loaded: OrderedDict[str, LoadedKernel] = OrderedDict()
        self._counters: dict[tuple[str, int], DeviceBuffer] = {}

    @property
    def name(self) -> ExecutorName:
        """This is the device executor."""
        return ExecutorName.DEVICE

    def prepare(self, sources: Sequence[Source]) -> None:
        """Compile in parallel what the store does not hold. Raises the first CompileError."""
        for result in compiler.compile_many(sources, sm=self.gpu.sm, store=self._store):
            if isinstance(result, FlashgenError):
                raise result

    def load(self, source: Source, compiled: Compiled | None = None) -> LoadedKernel:
        """The source on this device: the kernel kept from last time, `compiled`, or compiled now. Raises CompileError, LaunchError."""
        kept = self._loaded.get(source.digest)
        if kept is not None and (compiled is None or compiled.report.cubin_digest == kept.compiled.report.cubin_digest):
            self._loaded.move_to_end(source.digest)
            return kept
        if compiled is None:
            compiled = compiler.compile_source(source, compiler.architecture(source, self.gpu.sm), self._store)
        kernel = self._loaded[source.digest] = load(source, compiled, self.gpu)
        if len(self._loaded) > KEPT_KERNELS:
            self._loaded.popitem(last=False)
        return kernel

    def bound(self, source: Source, problem: Problem, *, crowded: bool = False) -> Bound:
        """Grids and workspaces of a problem, on the device or crowded as for certificates. Raises UnsupportedProblem."""
        if self._bind is not None:
            return self._bind(source, problem)
        if self._limits is None:
            self._limits = present_limits(self.gpu)
        limits = self._limits.crowded(problem) if crowded else self._limits
        return bound_by_space(limits)(source, problem)

    def forward(self, source: Source, problem: Problem, tensors: ForwardTensors, scale: float) -> None:
        """Run once on copies of the whole buffers, guards included, and copy all of them back, so that stray writes are seen.

        The workspace is NaN before the launch. Raises CompileError, LaunchError.
        """
        self._run(source, problem, tensors, scale)

    def backward(self, source: Source, problem: Problem, tensors: BackwardTensors, scale: float) -> None:
        """The same for a backward source."""
        self._run(source, problem, tensors, scale)

    def _run(self, source: Source, problem: Problem, tensors: ForwardTensors | BackwardTensors, scale: float) -> None:
        kernel = self.load(source)
        bound = self.bound(source, problem, crowded=True)
        grids = bound.grids(source.variant)
        check_grids(source, grids)
        used = launch.copied_for_maps(tensors, problem.dtype) if source.boxes else tensors
        copies = {id(tensor.buffer): (tensor.buffer, self.gpu.upload(tensor.buffer)) for _, tensor in used.named()}
        workspace = self.workspace(bound.workspace_bytes(source.variant))
        at = {name: operand(tensor, copies[id(tensor.buffer)][1]) for name, tensor in used.named()}
        plain = launch.plain_params(problem, scale, at, workspace.address)
        kernel.launch(grids, self.params(source, plain, problem))
        self.gpu.synchronize(f"{source.variant} on {problem}")
        for array, buffer in copies.values():
            self.gpu.download(buffer, array)
        launch.copy_results_back(used, tensors)
        self.check_counters(source)

    def params(self, source: Source, plain: launch.PlainStruct, problem: Problem, stream: int = DEFAULT_STREAM) -> ctypes.Structure:
        """The parameter block that `source` takes, with counters of its own per stream, so that concurrent launches share none."""
        key = source.digest, stream
        if source.counters and key not in self._counters:
            buffer = self._counters[key] = self.gpu.allocate(4 * source.counters)
            self.gpu.fill(buffer, 0)
        address = self._counters[key].address if source.counters else 0
        return launch.source_params(source, plain, problem, address, self.name)

    def check_counters(self, source: Source, stream: int = DEFAULT_STREAM) -> None:
        """Raises LaunchError when a launch that has ended left its counters other than zero."""
        if source.counters:
            import numpy as np

            left = np.empty(source.counters, np.uint32)
            self.gpu.download(self._counters[source.digest, stream], left)
            if left.any():
                raise LaunchError(f"{source.variant} left its counters at {left.tolist()}; the next launch needs zeros.")

    def workspace(self, size: int) -> DeviceBuffer:
        """Device memory filled with NaN bytes; address 0 for none."""
        if size == 0:
            return DeviceBuffer(0, 0, None)
        buffer = self.gpu.allocate(size)
        self.gpu.fill(buffer)
        return buffer


def operand(tensor: Tensor, buffer: DeviceBuffer) -> launch.Operand:
    """Where a tensor lies in the device copy of its buffer."""
    batch, head, row, _ = tensor.strides
    return launch.Operand(buffer.address + tensor.offset * tensor.buffer.itemsize, (batch, head, row))
