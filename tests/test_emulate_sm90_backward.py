"""The primitives of backward kernels on the emulated sm_90a: products of every form give plain matrix products, bulk sums add."""

from __future__ import annotations

import ctypes
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from flashgen import paths
from flashgen.emulate import POLICIES, EmulationReport, Emulator, Memory, Policy
from flashgen.model import DType
from flashgen.reference import encode
from flashgen.tensor_map import MapBytes, TensorMapSpec

pytestmark = [pytest.mark.emulated, pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")]

KERNELS = Path(__file__).parent / "emulator"
FORMS = paths.templates() / "include" / "backward_products.cuh"
ELEMENTS = {DType.FLOAT16: "Half", DType.BFLOAT16: "BFloat16"}

# Form, left tile, right tile, whether the tiles enter transposed, and whether the left one goes through registers.
PRODUCTS = (
    ("RowsByRows<80, 64, 48>", (64, 80), (48, 80), (False, True), False),
    ("RegistersByRows<64, 48>", (64, 64), (48, 64), (False, True), True),
    ("RegistersByColumns<48, 72>", (64, 48), (48, 72), (False, False), True),
    ("RowsByColumns<128, 64, 64>", (64, 128), (128, 64), (False, False), False),
    ("ColumnsByColumns<48, 72>", (48, 64), (48, 72), (True, False), False),
    ("ColumnsByRows<128, 80, 80>", (128, 64), (80, 128), (True, True), False),
)


@pytest.fixture(scope="session")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Emulator:
    return Emulator(tmp_path_factory.mktemp("emulated"))


class ProductParams(ctypes.Structure):
    """Params of backward_products.cu, padded to the alignment of its maps."""

    _fields_ = [("left", MapBytes), ("right", MapBytes), ("result", ctypes.c_void_p), ("padding", ctypes.c_ubyte * 120)]


def operand_bytes(rows: int, columns: int) -> int:
    return -(-columns // 64) * rows * 128


@pytest.mark.parametrize("policy", POLICIES[:2], ids=str)
@pytest.mark.parametrize("dtype", ELEMENTS, ids=str)
@pytest.mark.parametrize(("form", "left_shape", "right_shape", "transposed", "in_registers"), PRODUCTS, ids=[each[0] for each in PRODUCTS])
def test_a_product_is_the_plain_matrix_product(
    emulator: Emulator, form: str, left_shape: tuple[int, int], right_shape: tuple[int, int], transposed: tuple[bool, bool],
    in_registers: bool, dtype: DType, policy: Policy,
) -> None:  # fmt: skip
    macros = {
        "ELEMENT": ELEMENTS[dtype], "LEFT_IN_REGISTERS": int(in_registers), "LEFT_ROWS": left_shape[0], "LEFT_COLUMNS": left_shape[1],
        "RIGHT_ROWS": right_shape[0], "RIGHT_COLUMNS": right_shape[1],
    }  # fmt: skip
    defines = "".join(f"#define {name} {value}\n" for name, value in macros.items())
    text = f"{FORMS.read_text()}using Product = fg::{form};\n{defines}{(KERNELS / 'backward_products.cu').read_text()}"
    rng = np.random.default_rng(1)
    left, right = (rng.integers(-3, 4, shape).astype(np.float32) for shape in (left_shape, right_shape))
    expected = 2 * (left.T if transposed[0] else left) @ (right.T if transposed[1] else right)
    coded, result = [encode(x, dtype) for x in (left, right)], np.zeros(expected.size, np.float32)
    memory = Memory.for_buffers([each.nbytes for each in (*coded, result)])
    addresses = [memory.place(each.reshape(-1), False) for each in coded]
    params = ProductParams(
        *(MapBytes.from_buffer_copy(TensorMapSpec(address, dtype, (shape[1], shape[0]), (shape[1] * 2,), (64, shape[0])).for_emulation())
          for address, shape in zip(addresses, (left_shape, right_shape), strict=True)),
        memory.place(result, True),
    )  # fmt: skip
    report = emulator.launch(
        text, "backward_product", 1, 128, operand_bytes(*left_shape) + operand_bytes(*right_shape) + 8, params, memory, policy
    )
    memory.fetch()
    assert report.faults == ()
    np.testing.assert_array_equal(in_rows(result, expected.shape[1]), expected)


def in_rows(registers: np.ndarray, columns: int) -> np.ndarray:
    """Accumulators of 128 threads as a matrix of 64 rows."""
    at = registers.reshape(4, 8, 4, columns // 8, 2, 2)  # warp, row, pair of columns, tile, eight rows further, column
    return at.transpose(0, 4, 1, 3, 2, 5).reshape(64, columns)


class SumParams(ctypes.Structure):
    """Params of sums.cu."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("source", "bulk_sums", "sums", "stored")]


def summed(emulator: Emulator, policy: Policy, fence: str, wait: str) -> tuple[EmulationReport, list[np.ndarray]]:
    text = (KERNELS / "sums.cu").read_text().replace("FENCE", fence).replace("WAIT", wait)
    buffers = [
        np.arange(512, dtype=np.float32),
        np.full(512, 0.5, np.float32),
        np.full(512, 0.25, np.float32),
        np.full(3 * 512, 9.0, np.float32),
    ]
    memory = Memory.for_buffers([each.nbytes for each in buffers])
    params = SumParams(*(memory.place(each, index > 0) for index, each in enumerate(buffers)))
    report = emulator.launch(text, "sums", 3, 128, 2056, params, memory, policy)
    memory.fetch()
    return report, buffers


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_bulk_sums_and_atomics_add_up_and_bulk_stores_replace(emulator: Emulator, policy: Policy) -> None:
    report, (source, bulk_sums, sums, stored) = summed(emulator, policy, "fence_proxy_async();", "bulk_wait<0>();")
    assert report.faults == ()
    np.testing.assert_array_equal(bulk_sums, 0.5 + 3 * source * np.where(np.arange(512) < 256, 4, 2))
    np.testing.assert_array_equal(sums, 0.25 + 6 * source)
    np.testing.assert_array_equal(stored, np.tile(2 * source, 3))


@pytest.mark.parametrize(
    ("fence", "wait", "message"),
    [
        ("", "bulk_wait<0>();", r"proxy: bulk_store of shared 0x\w+"),
        ("fence_proxy_async();", "", r"exit: .* bulk stores that nobody has waited"),
    ],
)
def test_a_bulk_sum_needs_its_fence_and_its_wait(emulator: Emulator, fence: str, wait: str, message: str) -> None:
    report, _ = summed(emulator, POLICIES[1], fence, wait)
    assert re.search(message, "\n".join(report.faults))


class WordParams(ctypes.Structure):
    """Params of words.cu."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("sums", "word")]


TURN, FINISH = "await_word(params.word, own);", "bulk_wait<0>();"


def in_turn(
    emulator: Emulator, policy: Policy, live_ctas: int, turn: str = TURN, finish: str = FINISH, first: int = 0
) -> tuple[EmulationReport, np.ndarray]:
    text = (KERNELS / "words.cu").read_text().replace("TAKE_TURN", turn).replace("FINISH", finish)
    sums, word = np.zeros(128, np.float32), np.full(1, first, np.uint32)
    memory = Memory.for_buffers([sums.nbytes, word.nbytes])
    params = WordParams(memory.place(sums, True), memory.place(word, True))
    report = emulator.launch(text, "words", 9, 32, 512, params, memory, policy, live_ctas)
    memory.fetch()
    return report, sums


SUM_IN_TURN = np.float32(0)
for _number in range(9):
    SUM_IN_TURN += np.float32(1) / np.float32(7 * _number + 3)


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("live_ctas", [1, 4, 9])
def test_ctas_that_wait_for_each_others_words_add_in_their_order(emulator: Emulator, live_ctas: int, policy: Policy) -> None:
    report, sums = in_turn(emulator, policy, live_ctas)
    assert report.faults == ()
    np.testing.assert_array_equal(sums, SUM_IN_TURN)


def test_without_waiting_the_order_is_the_schedules(emulator: Emulator) -> None:
    found = [in_turn(emulator, Policy(seed=seed), 9, turn="")[1][0] for seed in range(8)]
    assert len(set(found)) > 1


def test_a_word_that_nobody_publishes_is_a_deadlock_that_tells_both_values(emulator: Emulator) -> None:
    report, _ = in_turn(emulator, POLICIES[1], 9, first=1)
    assert re.search(r"deadlock: (.|\n)*CTA 0 .* lane 0 wait in await_word for 0 where 9 stands", "\n".join(report.faults))


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("finish", ["", "bulk_wait_read<0>();"], ids=["not-waited", "only-read"])
def test_a_word_is_published_after_the_sum_is_in_global_memory(emulator: Emulator, finish: str, policy: Policy) -> None:
    report, _ = in_turn(emulator, policy, 9, finish=finish)
    assert re.search(r"order: publish_word by a thread of which 1 bulk stores", "\n".join(report.faults))
