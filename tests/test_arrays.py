"""flashgen.attention on arrays of other libraries; on the CPU these are NumPy's, and a foreign kind that speaks DLPack."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import flashgen
from flashgen import arguments, dispatch, reference
from flashgen.errors import InvalidProblem, UnsupportedProblem
from flashgen.model import DType, Mask, Problem
from flashgen.testing import emulated

pytestmark = [pytest.mark.emulated, pytest.mark.filterwarnings("ignore::flashgen.errors.UntunedProblemWarning")]


@pytest.fixture(scope="module", autouse=True)
def _emulated() -> Iterator[None]:
    with emulated():
        yield


class Foreign:
    """An array of another library: DLPack is all that one knows of it."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def __dlpack__(self, **options: Any) -> Any:
        return self.held.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.held.__dlpack_device__()

    @classmethod
    def from_dlpack(cls, other: Any) -> Foreign:
        return cls(np.from_dlpack(other))


def operands(dtype: Any = np.float32) -> list[np.ndarray[Any, Any]]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape).astype(dtype) for shape in ((1, 4, 9, 16), (1, 2, 13, 16), (1, 2, 13, 16))]


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_numpy_arrays_come_back_as_numpy_arrays_with_the_right_values(dtype: Any) -> None:
    q, k, v = operands(dtype)
    o, lse = flashgen.attention(q, k, v, causal=True, return_lse=True)
    problem = Problem(DType(np.dtype(dtype).name), 16, 16, 1, 4, 2, 9, 13, Mask.causal())
    right = reference.attention(q.astype(np.float64), k.astype(np.float64), v.astype(np.float64), problem, 0.25)
    assert isinstance(o, np.ndarray) and o.dtype == dtype and lse.dtype == np.float32
    assert np.abs(o - right.o).max() < (2e-6 if dtype is np.float32 else 2e-3) and np.abs(lse - right.lse).max() < 1e-5


def test_another_librarys_arrays_come_back_as_its_own_kind() -> None:
    arrays = operands()
    found = flashgen.attention(*(Foreign(each) for each in arrays))
    assert isinstance(found, Foreign) and np.array_equal(found.held, flashgen.attention(*arrays))


def test_layouts_and_strides_do_not_change_a_bit() -> None:
    arrays = operands()
    wanted = flashgen.attention(*arrays)
    swapped = flashgen.attention(*(np.ascontiguousarray(each.swapaxes(1, 2)) for each in arrays), layout="bshd")
    every_other = [np.repeat(each, 2, axis=3)[..., ::2] for each in arrays]
    assert np.array_equal(swapped.swapaxes(1, 2), wanted) and np.array_equal(flashgen.attention(*every_other), wanted)


def test_explain_names_the_kernel_without_running_it() -> None:
    assert "simt_forward" in str(flashgen.explain(*operands(), causal=True))


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda q, k, v: (q.astype(np.float64),) * 3, "got float64"),
        (lambda q, k, v: (q, k.astype(np.float16), v), "same dtype; got float32, float16"),
        (lambda q, k, v: (q[0], k, v), "q must have 4 dimensions"),
        (lambda q, k, v: (q, Foreign(k), v), "q, k and v must be of one kind"),
        (lambda q, k, v: ([1.0],) * 3, "speaks DLPack; got builtins.list"),
    ],
)
def test_a_bad_array_is_named_with_rule_and_value(change: Any, words: str) -> None:
    with pytest.raises((InvalidProblem, UnsupportedProblem), match=words):
        flashgen.attention(*change(*operands()))


def test_host_memory_is_refused_outside_the_emulation() -> None:
    before = dispatch.set_emulated(None)
    try:
        with pytest.raises(UnsupportedProblem, match="q must be on a CUDA device"):
            flashgen.attention(*operands())
    finally:
        dispatch.set_emulated(before)


def test_explain_says_what_is_copied_first_and_why() -> None:
    arrays = operands()
    every_other = np.repeat(arrays[1], 2, axis=3)[..., ::2]
    assert flashgen.explain(*arrays).copies == ()
    assert flashgen.explain(arrays[0], every_other, arrays[2]).copies == (
        "k is copied first: its last stride is 2 elements, and kernels read whole rows.",
    )


@pytest.mark.parametrize(
    ("address", "shape", "strides", "mapped", "said"),
    [
        (4096, (2, 4, 9, 16), (576, 144, 16, 1), True, ""),
        (4096, (2, 4, 9, 16), (576, 144, 20, 1), False, ""),
        (4098, (2, 4, 9, 16), (576, 144, 16, 1), True, "starts 2 bytes after a multiple of 16"),
        (4096, (2, 4, 9, 16), (576, 144, 20, 1), True, "row stride is 20 elements"),
        (4096, (2, 4, 9, 16), (576, 0, 16, 1), True, "head stride is 0 elements"),
        (4096, (1, 4, 9, 16), (7, 144, 16, 1), True, ""),  # the stride of an extent of 1 is never used
        (4096, (2, 4, 9, 16), (576, 144, 32, 2), False, "last stride is 2 elements"),
        (4096, (2, 4, 9, 1), (576, 144, 16, 2), True, ""),
    ],
)
def test_the_reason_of_a_copy_names_what_is_wrong(
    address: int, shape: tuple[int, ...], strides: tuple[int, ...], mapped: bool, said: str
) -> None:
    found = arguments.why_copied("v", address, shape, strides, 2, mapped)
    assert said in found if said else found == ""
    assert not found or found.startswith("v is copied first: ")


def test_a_view_into_records_is_copied_since_its_strides_are_no_whole_elements() -> None:
    q, k, v = operands()
    record = np.dtype([("row", np.float32, 16), ("odd", np.uint8)])
    held = np.zeros(k.shape[:3], record)
    held["row"] = k
    assert held["row"].strides[2] % 4
    assert np.array_equal(flashgen.attention(q, held["row"], v), flashgen.attention(q, k, v))
    (reason,) = flashgen.explain(q, held["row"], v).copies
    assert reason.startswith("k is copied first: its strides (") and "no whole numbers of elements" in reason
