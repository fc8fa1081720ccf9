"""Tensor maps: what the driver and the emulation are told, and what is refused before either is asked."""

from __future__ import annotations

import ctypes
import struct
from typing import Any

import pytest

from flashgen import tensor_map
from flashgen.errors import LaunchError, MissingDependency
from flashgen.model import DType, ExecutorName
from flashgen.tensor_map import MAP_BYTES, MapBytes, Swizzle, TensorMapSpec

GOOD: dict[str, Any] = {
    "address": 0x7F0000001000, "element": DType.BFLOAT16, "dims": (64, 1000, 2, 8, 3), "strides_bytes": (2048, 128, 256, 2048000),
    "box": (64, 128, 2, 1, 1), "swizzle": Swizzle.BYTES_128,
}  # fmt: skip


def spec(**changes: Any) -> TensorMapSpec:
    return TensorMapSpec(**(GOOD | changes))


class Driver:
    """Stands for libcuda: keeps the arguments, and writes a pattern."""

    def __init__(self, status: int = 0) -> None:
        self.status = status
        self.arguments: tuple[Any, ...] = ()

    def cuTensorMapEncodeTiled(self, *arguments: Any) -> int:
        self.arguments = arguments
        ctypes.memmove(arguments[0].value, bytes(range(128)), 128)
        return self.status


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    fake = Driver()
    monkeypatch.setattr(tensor_map, "_driver", lambda: fake)
    return fake


def plain(argument: Any) -> Any:
    return list(argument) if isinstance(argument, ctypes.Array) else argument.value


def test_the_driver_gets_every_argument_in_its_type(driver: Driver) -> None:
    assert spec().encode(ExecutorName.DEVICE) == bytes(range(128))
    target, *rest = driver.arguments
    assert target.value % 64 == 0
    assert [plain(each) for each in rest] == [
        9, 5, 0x7F0000001000, [64, 1000, 2, 8, 3], [2048, 128, 256, 2048000], [64, 128, 2, 1, 1], [1] * 5, 0, 3, 2, 0,
    ]  # fmt: skip
    widths = [ctypes.sizeof(each) for each in rest]
    assert widths == [4, 4, 8, 5 * 8, 4 * 8, 5 * 4, 5 * 4, 4, 4, 4, 4]


@pytest.mark.parametrize(("element", "number"), [(DType.FLOAT16, 6), (DType.FLOAT32, 7), (DType.BFLOAT16, 9)])
def test_the_element_type_is_the_drivers_number(element: DType, number: int) -> None:
    assert spec(element=element, box=(32, 128, 2, 1, 1)).driver_arguments(0)[1].value == number


def test_missing_dimensions_have_extent_one_and_a_valid_stride() -> None:
    arguments = spec(dims=(80, 333), strides_bytes=(160,), box=(64, 64)).driver_arguments(0)
    assert [plain(each) for each in arguments[4:7]] == [[80, 333, 1, 1, 1], [160, 16, 16, 16], [64, 64, 1, 1, 1]]


def test_a_refusal_of_the_driver_is_a_launch_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_map, "_driver", lambda: Driver(1))
    with pytest.raises(LaunchError, match="CUDA error 1"):
        spec().for_device()


def test_a_machine_without_a_driver_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor_map._driver.cache_clear()
    monkeypatch.setattr(tensor_map, "_DRIVER", "libnowhere.so.1")
    with pytest.raises(MissingDependency, match=r"libnowhere\.so\.1 cannot be loaded"):
        spec().for_device()


def test_the_emulation_gets_the_same_numbers() -> None:
    data = spec().encode(ExecutorName.EMULATED)
    assert len(data) == MAP_BYTES
    assert struct.unpack_from("<IIQ5I5I4QI", data) == (
        tensor_map.EMULATED_MAGIC, 2, 0x7F0000001000, 64, 1000, 2, 8, 3, 64, 128, 2, 1, 1, 2048, 128, 256, 2048000, 3,
    )  # fmt: skip
    assert ctypes.sizeof(MapBytes) == MAP_BYTES


def test_a_box_counts_all_its_bytes() -> None:
    assert spec().box_bytes == 64 * 128 * 2 * 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"address": 0x1008}, "starts on a 16-byte boundary; got address 4104"),
        ({"address": 0}, "16-byte boundary"),
        ({"dims": (64, 0, 2, 8, 3)}, r"dims of 1 to 2\^32"),
        ({"strides_bytes": (2040, 128, 256, 2048000)}, "multiples of 16 bytes"),
        ({"strides_bytes": (0, 128, 256, 2048000)}, "multiples of 16 bytes"),
        ({"strides_bytes": (2**40, 128, 256, 2048000)}, r"below 2\^40"),
        ({"strides_bytes": (2048, 128, 256)}, "5 dims, 5 box extents and 3 strides"),
        ({"box": (64, 257, 2, 1, 1)}, "box extents of 1 to 256"),
        ({"box": (64, 0, 2, 1, 1)}, "box extents of 1 to 256"),
        ({"box": (4, 128, 2, 1, 1)}, "lines of a multiple of 16 bytes"),
        ({"box": (128, 128, 2, 1, 1)}, "A 128-byte swizzle takes lines of at most that many bytes; got 256"),
        ({"swizzle": Swizzle.BYTES_64}, "A 64-byte swizzle"),
        ({"dims": (1,) * 6, "strides_bytes": (16,) * 5, "box": (8,) * 6}, "1 to 5 dims"),
    ],
)
def test_what_the_hardware_cannot_address_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        spec(**changes)


def test_a_box_without_swizzle_may_be_wide() -> None:
    assert spec(box=(128, 1, 1, 1, 1), swizzle=Swizzle.NONE).box_bytes == 256
