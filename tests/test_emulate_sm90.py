"""The emulation of sm_90a: products, bulk copies and barriers give the documented values, and every planted fault is reported."""

from __future__ import annotations

import ctypes
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashgen import emulate, render
from flashgen.emulate import POLICIES, EmulationReport, Emulator, Memory, Policy, Schedule
from flashgen.model import DType
from flashgen.reference import decode, encode
from flashgen.tensor_map import MapBytes, Swizzle, TensorMapSpec

pytestmark = [
    pytest.mark.emulated,
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
]

KERNELS = Path(__file__).parent / "emulator"
ELEMENTS = {DType.FLOAT16: "Half", DType.BFLOAT16: "BFloat16"}
EARLY, LATE = POLICIES[0], POLICIES[1]
MORE_POLICIES = (
    *POLICIES,
    *(Policy(schedule, copies, late_products=products, seed=seed) for schedule in Schedule for copies in (False, True)
      for products in (False, True) for seed in (2, 5)),
    emulate.FAST,
)  # fmt: skip


@pytest.fixture(scope="session")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Emulator:
    return Emulator(tmp_path_factory.mktemp("emulated"))


def text_of(name: str, **macros: object) -> str:
    return "".join(f"#define {key} {value}\n" for key, value in macros.items()) + (KERNELS / name).read_text()


def map_bytes(spec: TensorMapSpec) -> MapBytes:
    return MapBytes((ctypes.c_ubyte * 128)(*spec.for_emulation()))


def chunks(columns: int) -> int:
    return -(-columns // 64)


def operand_bytes(rows: int, columns: int) -> int:
    return chunks(columns) * rows * 128


# One warpgroup --------------------------------------------------------------------------------------------------------


class WarpgroupParams(ctypes.Structure):
    """Params of warpgroup.cu, padded to the alignment of its maps."""

    _fields_ = [(name, MapBytes) for name in ("q", "k", "v", "o")] + [
        ("scores", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
        ("row_q", ctypes.c_int),
        ("row_kv", ctypes.c_int),
        ("padding", ctypes.c_ubyte * 104),
    ]


@dataclass
class Warpgroup:
    """One run of warpgroup.cu on random operands, and what it should give."""

    block_kv: int
    head_dim: int
    head_dim_v: int
    dtype: DType
    row_q: int = 0
    row_kv: int = 0
    rows: int = 64  # of Q and O, and of K and V: loads beyond give zeros
    rows_kv: int = 256
    report: EmulationReport = field(default_factory=EmulationReport)

    def run(self, emulator: Emulator, policy: Policy = EARLY, text: str = "") -> None:
        rng = np.random.default_rng(self.block_kv + self.head_dim)
        heads = 2
        self.q, self.k = (
            encode(rng.standard_normal((rows, heads, self.head_dim)).astype(np.float32), self.dtype) for rows in (self.rows, self.rows_kv)
        )
        self.v = encode(rng.standard_normal((self.rows_kv, heads, self.head_dim_v)).astype(np.float32), self.dtype)
        self.o = encode(np.full((self.rows, heads, self.head_dim_v), 7.0, np.float32), self.dtype)
        columns_v = -(-self.head_dim_v // 8) * 8
        self.raw_scores = np.zeros(128 * self.block_kv // 2, np.float32)
        self.raw_output = np.zeros(128 * columns_v // 2, np.float32)
        arrays = [self.q, self.k, self.v, self.o, self.raw_scores, self.raw_output]
        memory = Memory.for_buffers([each.nbytes for each in arrays])
        q, k, v, o, scores, output = (memory.place(each.reshape(-1), index > 2) for index, each in enumerate(arrays))
        params = WarpgroupParams(
            self.load_map(q, self.rows, self.head_dim, 64), self.load_map(k, self.rows_kv, self.head_dim, self.block_kv),
            self.load_map(v, self.rows_kv, self.head_dim_v, self.block_kv), self.plain_map(o, self.rows, self.head_dim_v, 64),
            scores, output, self.row_q, self.row_kv,
        )  # fmt: skip
        shared = operand_bytes(64 + self.block_kv, self.head_dim) + operand_bytes(64 + self.block_kv, self.head_dim_v) + 8
        text = text or self.text()
        self.report = emulator.launch(text, "warpgroup", 1, 128, shared, params, memory, policy)
        memory.fetch()

    def text(self) -> str:
        return text_of(
            "warpgroup.cu", ELEMENT=ELEMENTS[self.dtype], BLOCK_KV=self.block_kv, HEAD_DIM=self.head_dim, HEAD_DIM_V=self.head_dim_v
        )

    def load_map(self, address: int, rows: int, columns: int, box_rows: int) -> MapBytes:
        """Whole rows of 64-column chunks in one copy where the head dim allows it."""
        if columns % 64:
            return self.plain_map(address, rows, columns, box_rows)
        row = 2 * columns * 2
        spec = TensorMapSpec(
            address, self.dtype, (64, rows, columns // 64, 2, 1), (row, 128, 2 * columns, row * rows), (64, box_rows, columns // 64, 1, 1)
        )
        return map_bytes(spec)

    def plain_map(self, address: int, rows: int, columns: int, box_rows: int) -> MapBytes:
        return map_bytes(TensorMapSpec(address, self.dtype, (columns, rows, 2), (4 * columns, 2 * columns), (64, box_rows, 1)))

    def expected(self) -> tuple[Any, Any]:
        """(scores, output) of head 1 in float64."""

        def padded(array: Any, first: int, count: int) -> Any:
            values = decode(array, self.dtype).astype(np.float64)[:, 1]
            rows = np.arange(first, first + count)
            inside = (rows >= 0) & (rows < len(values))
            return np.where(inside[:, None], values[np.clip(rows, 0, len(values) - 1)], 0.0)

        q, k = padded(self.q, self.row_q, 64), padded(self.k, self.row_kv, self.block_kv)
        scores = q @ k.T
        weights = decode(encode(self.accumulator(self.raw_scores, self.block_kv), self.dtype), self.dtype).astype(np.float64)
        columns = -(-self.head_dim_v // 8) * 8
        lanes, registers = np.meshgrid(np.arange(128), np.arange(columns // 2), indexing="ij")
        start = self.accumulator(registers.astype(np.float32).ravel(), columns)[:, : self.head_dim_v]
        return scores, start + weights @ padded(self.v, self.row_kv, self.block_kv)

    @staticmethod
    def accumulator(raw: Any, columns: int) -> Any:
        """Registers of 128 threads as a (64, columns) matrix."""
        thread, i = np.meshgrid(np.arange(128), np.arange(columns // 2), indexing="ij")
        matrix = np.full((64, columns), np.nan, np.float32)
        matrix[16 * (thread // 32) + thread % 32 // 4 + 8 * (i // 2 % 2), 8 * (i // 4) + 2 * (thread % 4) + i % 2] = raw.reshape(128, -1)
        return matrix

    def check(self) -> None:
        assert self.report.faults == ()
        scores, output = self.expected()
        got = self.accumulator(self.raw_output, -(-self.head_dim_v // 8) * 8)
        np.testing.assert_allclose(self.accumulator(self.raw_scores, self.block_kv), scores, rtol=2e-6, atol=2e-5)
        np.testing.assert_allclose(got[:, : self.head_dim_v], output, rtol=2e-6, atol=1e-4)
        first, count = max(0, -self.row_q), 64 - max(0, -self.row_q)
        stored = np.full_like(decode(self.o, self.dtype), 7.0)
        visible = min(count, self.rows - max(0, self.row_q))
        rounded = decode(encode(got, self.dtype), self.dtype)
        columns = self.head_dim_v // 16 * 16
        stored[max(0, self.row_q) : max(0, self.row_q) + visible, 1, :columns] = rounded[first : first + visible, :columns]
        np.testing.assert_array_equal(decode(self.o, self.dtype)[:, :, :columns], stored[:, :, :columns])


@pytest.mark.parametrize("dtype", list(ELEMENTS), ids=str)
@pytest.mark.parametrize("block_kv", [16, 48, 64, 80, 128, 176, 256])
def test_scores_of_every_width_are_the_matrix_product(emulator: Emulator, block_kv: int, dtype: DType) -> None:
    case = Warpgroup(block_kv, 64, 64, dtype)
    case.run(emulator)
    case.check()


@pytest.mark.parametrize("dtype", list(ELEMENTS), ids=str)
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(16, 16), (80, 80), (96, 96), (128, 128), (160, 96), (192, 128), (256, 256), (72, 64)])
def test_every_head_dim_is_the_matrix_product(emulator: Emulator, head_dim: int, head_dim_v: int, dtype: DType) -> None:
    case = Warpgroup(48, head_dim, head_dim_v, dtype)
    case.run(emulator, LATE)
    case.check()


@pytest.mark.parametrize(("row_q", "row_kv"), [(40, 230), (-8, -3), (63, 0), (0, 300)])
@pytest.mark.parametrize("head_dim", [80, 128])
def test_rows_outside_a_tensor_are_zeros_when_loaded_and_dropped_when_stored(
    emulator: Emulator, head_dim: int, row_q: int, row_kv: int
) -> None:
    case = Warpgroup(64, head_dim, head_dim, DType.BFLOAT16, row_q, row_kv)
    case.run(emulator)
    case.check()


@pytest.mark.parametrize("policy", MORE_POLICIES, ids=str)
def test_one_warpgroup_passes_every_policy(emulator: Emulator, policy: Policy) -> None:
    case = Warpgroup(64, 64, 80, DType.FLOAT16)
    case.run(emulator, policy)
    case.check()


# A producer and consumers ---------------------------------------------------------------------------------------------


class SpecialisedParams(ctypes.Structure):
    """Params of specialised.cu, padded to the alignment of its maps."""

    _fields_ = [(name, MapBytes) for name in ("q", "k", "v", "o")] + [
        ("counter", ctypes.c_void_p),
        ("tiles", ctypes.c_int),
        ("kv_tiles", ctypes.c_int),
        ("padding", ctypes.c_ubyte * 112),
    ]


BLOCK_KV, HEAD_DIM, HEAD_DIM_V = 64, 64, 80
SPECIALISED_SHARED = (
    2 * (operand_bytes(64, HEAD_DIM) + operand_bytes(64, HEAD_DIM_V) + operand_bytes(BLOCK_KV, HEAD_DIM) + operand_bytes(BLOCK_KV, HEAD_DIM_V))
    + 16 + 8 * 16
)  # fmt: skip


def specialised_text(fault: str, dtype: DType = DType.BFLOAT16) -> str:
    return text_of(
        "specialised.cu", ELEMENT=ELEMENTS[dtype], BLOCK_KV=BLOCK_KV, HEAD_DIM=HEAD_DIM, HEAD_DIM_V=HEAD_DIM_V, FAULT=fault,
        SHARED_BYTES=SPECIALISED_SHARED,
    )  # fmt: skip


def run_specialised(
    emulator: Emulator, fault: str, policy: Policy, tiles: int = 5, grid: int = 2, rows_short: int = 0, kv_tiles: int = 5
) -> tuple[EmulationReport, bool]:
    """The report, and whether output and counter are right. Small integers make every sum exact."""
    rng, dtype = np.random.default_rng(3), DType.BFLOAT16
    rows, rows_kv = tiles * 128 - rows_short, kv_tiles * BLOCK_KV - rows_short
    q, k = (encode(rng.integers(-2, 3, (count, HEAD_DIM)).astype(np.float32), dtype) for count in (rows, rows_kv))
    v = encode(rng.integers(-3, 4, (rows_kv, HEAD_DIM_V)).astype(np.float32), dtype)
    o, counter = encode(np.full((rows, HEAD_DIM_V), np.nan, np.float32), dtype), np.zeros(1, np.uint32)
    arrays = [q, k, v, o, counter]
    memory = Memory.for_buffers([each.nbytes for each in arrays])
    addresses = [memory.place(each.reshape(-1), index > 2) for index, each in enumerate(arrays)]
    maps = [
        map_bytes(TensorMapSpec(address, dtype, array.shape[::-1], (array.shape[1] * 2,), (64, box_rows)))
        for address, array, box_rows in zip(addresses, (q, k, v, o), (64, BLOCK_KV, BLOCK_KV, 64), strict=False)
    ]
    params = SpecialisedParams(*maps, addresses[4], tiles, kv_tiles)
    report = emulator.launch(
        specialised_text(fault), "specialised", grid, 384, SPECIALISED_SHARED, params, memory, policy, live_ctas=emulate.ALL_CTAS,
        deadline_s=30,
    )  # fmt: skip
    memory.fetch()
    scores = decode(encode(decode(q, dtype) @ decode(k, dtype).T, dtype), dtype)
    right = np.array_equal(decode(o, dtype), decode(encode(scores @ decode(v, dtype), dtype), dtype))
    return report, bool(right and counter[0] == 0)


@pytest.mark.parametrize("policy", MORE_POLICIES, ids=str)
def test_a_specialised_kernel_passes_every_policy(emulator: Emulator, policy: Policy) -> None:
    report, right = run_specialised(emulator, "NO_FAULT", policy)
    assert report.faults == ()
    assert right


@pytest.mark.parametrize(("tiles", "grid", "short"), [(1, 1, 0), (1, 3, 37), (8, 1, 5), (3, 3, 100), (7, 2, 1)])
def test_a_specialised_kernel_is_right_for_every_shape(emulator: Emulator, tiles: int, grid: int, short: int) -> None:
    report, right = run_specialised(emulator, "NO_FAULT", LATE, tiles, grid, short)
    assert report.faults == ()
    assert right
