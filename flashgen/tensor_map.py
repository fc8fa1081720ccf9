"""Tensor maps: what the host says about a tensor, so that bulk tensor copies find a box of it (TMA, sm_90 and later).

One spec gives the 128 bytes for either executor: the driver's opaque descriptor, or the plain struct that the emulation reads
(templates/include/emu/machine.hpp, MapImage).
"""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import Any

from flashgen.errors import LaunchError, MissingDependency
from flashgen.model import DType, ExecutorName

MAP_BYTES = 128
RANK = 5
"""Every map has five dimensions; those left out have extent 1."""
EMULATED_MAGIC = 0x90A0E4D1

_ALIGNMENT = 16  # of addresses, strides and the innermost box extent, in bytes
_MAX_BOX = 256
_MAX_DIM = 2**32
_MAX_STRIDE = 2**40
_DATA_TYPE = {DType.FLOAT16: 6, DType.FLOAT32: 7, DType.BFLOAT16: 9}  # CUtensorMapDataType
_NO_INTERLEAVE = 0
_PROMOTE_TO_128_BYTES = 2  # CUtensorMapL2promotion
_FILL_WITH_ZEROS = 0  # CUtensorMapFloatOOBfill
_DRIVER = "libcuda.so.1"


class Swizzle(IntEnum):
    """How 16-byte pieces are permuted in shared memory, as CUtensorMapSwizzle counts."""

    NONE = 0
    BYTES_32 = 1
    BYTES_64 = 2
    BYTES_128 = 3

    @property
    def width(self) -> int:
        """Bytes of a line: the most that the innermost extent of a box may have. 0 for no swizzle."""
        return 16 << self.value if self else 0


class MapBytes(ctypes.Structure):
    """Twin of fg::TensorMap as a member of a parameter struct. In C++ it is 128-byte aligned: put maps first, and pad the struct's end."""

    _fields_ = [("bytes", ctypes.c_ubyte * MAP_BYTES)]


@dataclass(frozen=True, slots=True)
class TensorMapSpec:
    """A tensor in global memory and the box of it that one copy moves; dimensions run from the innermost one, whose stride is 1 element.

    `dims` and `box` count elements, one to five of them; `strides_bytes` are the distances of dims[1:], and need not grow. Two dimensions
    may overlap or split one row, as (64, rows, head_dim / 64) does. Raises LaunchError for what the hardware cannot address.
    """

    address: int
    element: DType
    dims: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: Swizzle = Swizzle.BYTES_128

    def __post_init__(self) -> None:
        """Check everything here, since the driver only says that a value is invalid."""
        rank = len(self.dims)
        if not 1 <= rank <= RANK or len(self.strides_bytes) != rank - 1 or len(self.box) != rank:
            raise LaunchError(
                f"A tensor map has 1 to {RANK} dims, as many box extents and one stride fewer; got {rank} dims, "
                f"{len(self.box)} box extents and {len(self.strides_bytes)} strides."
            )
        _need(self.address > 0 and self.address % _ALIGNMENT == 0, "starts on a 16-byte boundary", "address", self.address)
        for dim in self.dims:
            _need(1 <= dim <= _MAX_DIM, "has dims of 1 to 2^32 elements", "dims", self.dims)
        for stride in self.strides_bytes:
            _need(0 < stride < _MAX_STRIDE and stride % _ALIGNMENT == 0, "has strides of multiples of 16 bytes below 2^40", "strides_bytes",
                  self.strides_bytes)  # fmt: skip
        for extent in self.box:
            _need(1 <= extent <= _MAX_BOX, "has box extents of 1 to 256 elements", "box", self.box)
        line = self.box[0] * self.element.bytes
        _need(line % _ALIGNMENT == 0, "moves lines of a multiple of 16 bytes", "box", self.box)
        if self.swizzle and line > self.swizzle.width:
            raise LaunchError(
                f"A {self.swizzle.width}-byte swizzle takes lines of at most that many bytes; got {line} (box {self.box} of "
                f"{self.element}). Cut the row into chunks, one dimension or one copy each."
            )

    @property
    def box_bytes(self) -> int:
        """Bytes of one copy, and what an mbarrier expects for it, also at the edge of the tensor."""
        count = self.element.bytes
        for extent in self.box:
            count *= extent
        return count

    def encode(self, executor: ExecutorName) -> bytes:
        """The 128 bytes for one executor. Raises MissingDependency without a driver, LaunchError when the driver refuses."""
        return self.for_emulation() if executor is ExecutorName.EMULATED else self.for_device()

    def for_emulation(self) -> bytes:
        """The struct that the emulated engine reads."""
        dims, strides, box = self._padded()
        packed = struct.pack(
            "<IIQ5I5I4QI", EMULATED_MAGIC, self.element.bytes, self.address, *(min(dim, _MAX_DIM - 1) for dim in dims), *box, *strides,
            self.swizzle,
        )  # fmt: skip
        return packed.ljust(MAP_BYTES, b"\0")

    def for_device(self) -> bytes:
        """The driver's descriptor. Needs an initialised CUDA driver, but no context."""
        room = (ctypes.c_ubyte * (2 * MAP_BYTES))()
        start = -ctypes.addressof(room) % MAP_BYTES  # the driver asks for 64-byte alignment
        status = _driver().cuTensorMapEncodeTiled(*self.driver_arguments(ctypes.addressof(room) + start))
        if status:
            raise LaunchError(f"The driver refused a tensor map (CUDA error {status}): {self}.")
        return bytes(room[start : start + MAP_BYTES])

    def driver_arguments(self, target: int) -> tuple[Any, ...]:
        """Arguments of cuTensorMapEncodeTiled that write the descriptor to host address `target`."""
        dims, strides, box = self._padded()
        return (
            ctypes.c_void_p(target),
            ctypes.c_int(_DATA_TYPE[self.element]),
            ctypes.c_uint32(RANK),
            ctypes.c_void_p(self.address),
            (ctypes.c_uint64 * RANK)(*dims),
            (ctypes.c_uint64 * (RANK - 1))(*strides),
            (ctypes.c_uint32 * RANK)(*box),
            (ctypes.c_uint32 * RANK)(*[1] * RANK),
            ctypes.c_int(_NO_INTERLEAVE),
            ctypes.c_int(self.swizzle),
            ctypes.c_int(_PROMOTE_TO_128_BYTES),
            ctypes.c_int(_FILL_WITH_ZEROS),
        )

    def _padded(self) -> tuple[list[int], list[int], list[int]]:
        """dims, strides and box of five dimensions. The stride of an extent of 1 is never used, but must be a valid one."""
        missing = RANK - len(self.dims)
        return [*self.dims, *[1] * missing], [*self.strides_bytes, *[_ALIGNMENT] * missing], [*self.box, *[1] * missing]


def _need(holds: bool, rule: str, name: str, value: object) -> None:
    if not holds:
        raise LaunchError(f"A tensor map {rule}; got {name} {value}. Copy the tensor into a contiguous one, or use a family without TMA.")


@lru_cache(maxsize=1)
def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL(_DRIVER)
    except OSError as error:
        raise MissingDependency(f"Tensor maps are encoded by the NVIDIA driver, and {_DRIVER} cannot be loaded ({error}).") from error
