"""One GPU through CuPy: memory, events, errors in words. No kernels, and no CuPy array operations, which would need headers to compile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from flashgen.errors import LaunchError, MissingDependency

if TYPE_CHECKING:
    from numpy.typing import NDArray

NAN_BYTE = 0xFF
"""A buffer filled with this byte holds NaN in float32, float16 and bfloat16."""

DEFAULT_STREAM = 0
"""The legacy default stream, on which CuPy and torch work unless told otherwise."""


@lru_cache(maxsize=1)
def cupy() -> Any:
    """The CuPy package. Raises MissingDependency."""
    try:
        import cupy
    except ImportError as error:
        raise MissingDependency(
            f'Running on a GPU needs CuPy, which cannot be imported ({error}). Install it: pip install "flashgen[cuda13]" '
            '(or "flashgen[cuda12]" for a CUDA 12 driver).'
        ) from error
    return cupy


def device_count() -> int:
    """GPUs that this process can use; 0 without CuPy, driver or GPU."""
    try:
        return int(cupy().cuda.runtime.getDeviceCount())
    except (MissingDependency, RuntimeError):
        return 0


@contextmanager
def launch_errors(what: str) -> Iterator[None]:
    """Turn errors of the driver, the runtime and the allocator into LaunchError that says what was being done."""
    package = cupy()
    kinds = (package.cuda.runtime.CUDARuntimeError, package.cuda.driver.CUDADriverError, package.cuda.memory.OutOfMemoryError)
    try:
        yield
    except kinds as error:
        raise LaunchError(f"{what} failed: {error}") from error


@dataclass(frozen=True)
class DeviceBuffer:
    """Device memory that is freed with this object. `memory` is CuPy's owner of it."""

    address: int
    bytes: int
    memory: Any = field(repr=False)


class Gpu:
    """One device of this process. Every method makes the device current for its own duration only."""

    def __init__(self, index: int = 0) -> None:
        """Device `index`, as the driver counts what is visible. Raises MissingDependency without CuPy, driver or that GPU."""
        self.index = index
        count = device_count()
        if not 0 <= index < count:
            cupy()
            raise MissingDependency(
                f"GPU {index} was asked for, and the driver offers {count} GPU(s) to this process. "
                "Check the driver and CUDA_VISIBLE_DEVICES, or use the emulated executor (--executor emulated)."
            )

    def __repr__(self) -> str:
        """The index says it all."""
        return f"Gpu({self.index})"

    def current(self) -> AbstractContextManager[Any]:
        """Make the device current inside a `with` block."""
        device: AbstractContextManager[Any] = cupy().cuda.Device(self.index)
        return device

    @property
    def sm(self) -> int:
        """Compute capability times ten, such as 90."""
        return int(cupy().cuda.Device(self.index).compute_capability)

    @property
    def name(self) -> str:
        """The product name, such as NVIDIA H200."""
        found = cupy().cuda.runtime.getDeviceProperties(self.index)["name"]
        return found.decode() if isinstance(found, bytes) else str(found)

    @property
    def pci_bus_id(self) -> str:
        """The address that NVML also knows the device by."""
        return str(cupy().cuda.Device(self.index).pci_bus_id)

    def attribute(self, name: str) -> int:
        """A device attribute by the end of its name, such as L2CacheSize."""
        runtime = cupy().cuda.runtime
        return int(runtime.deviceGetAttribute(getattr(runtime, f"cudaDevAttr{name}"), self.index))

    @property
    def shared_bytes_per_cta(self) -> int:
        """The opt-in maximum of static plus dynamic shared memory of one CTA."""
        return self.attribute("MaxSharedMemoryPerBlockOptin")

    @property
    def l2_bytes(self) -> int:
        """Size of the L2 cache."""
        return self.attribute("L2CacheSize")

    def context(self) -> int:
        """The driver's handle of the device's primary context."""
        with self.current():
            cupy().cuda.runtime.free(0)  # creates the context when nothing has been done on the device yet
            return int(cupy().cuda.driver.ctxGetCurrent())

    def allocate(self, size: int) -> DeviceBuffer:
        """`size` bytes of device memory, aligned to 512 bytes. Raises LaunchError when there is none left."""
        with self.current(), launch_errors(f"Allocating {size} bytes on GPU {self.index}"):
            memory = cupy().cuda.alloc(max(size, 1))
            return DeviceBuffer(int(memory.ptr), size, memory)

    def upload(self, array: NDArray[Any]) -> DeviceBuffer:
        """A copy of a contiguous array on the device."""
        buffer = self.allocate(array.nbytes)
        if array.nbytes:
            runtime = cupy().cuda.runtime
            with self.current(), launch_errors(f"Copying {array.nbytes} bytes to GPU {self.index}"):
                runtime.memcpy(buffer.address, _contiguous(array).ctypes.data, array.nbytes, runtime.memcpyHostToDevice)
        return buffer

    def download(self, buffer: DeviceBuffer, array: NDArray[Any]) -> None:
        """Copy a device buffer into a contiguous array of the same size in bytes, after all work on the default stream."""
        if array.nbytes != buffer.bytes:
            raise ValueError(f"The array has {array.nbytes} bytes, the device buffer {buffer.bytes}.")
        if array.nbytes:
            runtime = cupy().cuda.runtime
            with self.current(), launch_errors(f"Copying {array.nbytes} bytes from GPU {self.index}"):
                runtime.memcpy(_contiguous(array).ctypes.data, buffer.address, array.nbytes, runtime.memcpyDeviceToHost)

    def fill(self, buffer: DeviceBuffer, byte: int = NAN_BYTE, stream: int = DEFAULT_STREAM) -> None:
        """Set every byte of a buffer, in stream order."""
        if buffer.bytes:
            with self.current(), launch_errors(f"Filling {buffer.bytes} bytes on GPU {self.index}"):
                cupy().cuda.runtime.memsetAsync(buffer.address, byte, buffer.bytes, stream)

    def copy(self, target: int, source: int, size: int, stream: int = DEFAULT_STREAM) -> None:
        """Copy `size` bytes between two device addresses, in stream order."""
        runtime = cupy().cuda.runtime
        with self.current(), launch_errors(f"Copying {size} bytes on GPU {self.index}"):
            runtime.memcpyAsync(target, source, size, runtime.memcpyDeviceToDevice, stream)

    def synchronize(self, what: str = "The work on the device") -> None:
        """Wait for all work. Raises LaunchError, naming `what`, when a kernel was aborted: an illegal access, a trap."""
        with self.current(), launch_errors(what):
            cupy().cuda.runtime.deviceSynchronize()

    def event(self) -> Any:
        """A timing event; `record_event` places it in a stream."""
        with self.current():
            return cupy().cuda.Event()

    def record_event(self, event: Any, stream: int = DEFAULT_STREAM) -> None:
        """Place an event in a stream."""
        cupy().cuda.runtime.eventRecord(event.ptr, stream)

    def elapsed_us(self, start: Any, end: Any) -> float:
        """Time between two events that have happened, in µs."""
        return float(cupy().cuda.get_elapsed_time(start, end)) * 1000.0

    def release_memory(self) -> None:
        """Give freed device memory back to the driver."""
        with self.current():
            cupy().get_default_memory_pool().free_all_blocks()


def _contiguous(array: NDArray[Any]) -> NDArray[Any]:
    if not array.flags.c_contiguous:
        raise ValueError(f"Device copies need a contiguous array; got shape {array.shape} with strides {array.strides}.")
    return array
