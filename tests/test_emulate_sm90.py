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
from flashgen.model import DType, EntryPoint, MaskKind, Op, ProblemClass, Source, Variant
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
        start = self.accumulator(np.tile(np.arange(columns // 2, dtype=np.float32), 128), columns)[:, : self.head_dim_v]
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
@pytest.mark.parametrize(
    ("head_dim", "head_dim_v"), [(16, 16), (80, 80), (96, 96), (128, 128), (160, 96), (192, 128), (256, 256), (72, 64)]
)
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


def test_the_text_that_the_device_compiles_is_the_one_that_is_emulated(emulator: Emulator) -> None:
    case = Warpgroup(64, 64, 80, DType.FLOAT16)
    text = render.expand(case.text(), "Half", {"block_kv": 64, "head_dim": 64, "head_dim_v": 80})
    assert re.findall(r'^\s*#include "([^"]+)"', text, re.MULTILINE) == ["emu/common.hpp", "emu/sm80.hpp", "emu/sm90.hpp"]
    case.run(emulator, LATE, text)
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
SPECIALISED_SHARED = 2 * (operand_bytes(64 + BLOCK_KV, HEAD_DIM) + operand_bytes(64 + BLOCK_KV, HEAD_DIM_V)) + 16 + 8 * 16


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
    scores = scores * np.float32(0.5) ** (kv_tiles - 1 - np.arange(rows_kv) // BLOCK_KV).astype(np.float32)
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


# Planted faults -------------------------------------------------------------------------------------------------------

PRODUCT_BEFORE_LOAD = r"race: a product's read of shared 0x\w+ is not ordered after a write by the bulk loads of mbarrier #"
LOAD_BEFORE_PRODUCT = r"race: tma_load of shared 0x\w+ is not ordered after a read by the products of warp"
EITHER_ORDER = f"{LOAD_BEFORE_PRODUCT}|{PRODUCT_BEFORE_LOAD}"  # the schedule decides which of the two comes too early
ALWAYS = {
    "EXPECTS_HALF": r"mbarrier: #0 at 0x\w+ got \d+ bytes more than its phase expects",
    "EXPECTS_MORE": r"deadlock: .*mbarrier_wait for parity \d of #\d+, which is in phase \d and lacks 0 of 1 arrivals and 128 bytes",
    "V_NEVER_RELEASED": r"deadlock: .*lane 0 wait in mbarrier_wait for parity 0 of #3, .* lacks 8 of 8 arrivals",
    "K_EMPTY_NOT_WAITED": r"race: tma_load|mbarrier: mbarrier_expect: #0 at 0x\w+ has had all its 1 arrivals",
    "K_EMPTY_WRONG_PARITY": r"deadlock: ",
    "K_FULL_OLD_PARITY": f"deadlock: |{PRODUCT_BEFORE_LOAD}",
    "V_FULL_NOT_WAITED": PRODUCT_BEFORE_LOAD,
    "EMPTY_COUNT_TOO_SMALL": EITHER_ORDER,
    "K_RELEASED_EARLY": EITHER_ORDER,
    "V_RELEASED_EARLY": EITHER_ORDER,
    "WEIGHTS_REPACKED_EARLY": r"product: registers of the left operand changed while the product was pending",
    "NO_PROXY_FENCE": r"proxy: tma_store of shared 0x\w+, which thread \d+ wrote without fence_proxy_async since",
    "NO_BARRIER_BEFORE_STORE": r"race: tma_store of shared 0x\w+ is not ordered after a write by thread",
    "O_REUSED_EARLY": r"race: store_matrix_x4 of shared 0x\w+ is not ordered after a read by the bulk stores of warp",
    "NO_WAIT_BEFORE_EXIT": r"exit: the block ends with \d+ bulk stores that nobody has waited for",
    "RELEASE_WITHOUT_WARP_SYNC": r"race: phase \d+ of mbarrier #\d+ at 0x\w+ ends, not ordered after the wait of thread \d+",
    "BARRIER_COUNT": r"deadlock: .*barrier_sync \d, where 128 of 160 threads have arrived",
    "TOO_MANY_REGISTERS": r"deadlock: .*registers_increase to 248 per thread; the pool has \d+ per thread",
    "NO_FENCE_AFTER_INIT": r"mbarrier: a bulk load completes on #\d+ at 0x\w+, whose init was not followed by fence_mbarrier_init",
    "NO_BARRIER_AFTER_INIT": r"mbarrier: mbarrier_\w+ on 0x\w+, which is not initialised",
    "Q_RELEASED_EARLY": EITHER_ORDER,
    "Q_FULL_NOT_WAITED": PRODUCT_BEFORE_LOAD,
    "LAST_PRODUCT_NOT_WAITED": r"exit: the block ends with \d products that nobody has waited for",
}
BY_VALUE = ("SCORES_READ_EARLY", "OUTPUT_SCALED_EARLY", "WRONG_LEADING_DISTANCE", "COUNTER_NOT_RESET", "WRONG_SWIZZLE_PHASE")
BY_SOME_POLICY = ("BARRIER_SHARED",)


def test_every_fault_of_the_kernel_is_tried() -> None:
    listed = re.search(r"enum Fault \{(.*?)\}", (KERNELS / "specialised.cu").read_text(), re.DOTALL)
    assert listed is not None
    names = set(re.findall(r"\w+", listed[1])) - {"NO_FAULT"}
    assert names == {*ALWAYS, *BY_VALUE, *BY_SOME_POLICY}


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("fault", sorted(ALWAYS))
def test_a_broken_protocol_is_reported_under_every_policy(emulator: Emulator, fault: str, policy: Policy) -> None:
    report, _ = run_specialised(emulator, fault, policy)
    assert re.search(ALWAYS[fault], "\n".join(report.faults), re.DOTALL), report.faults


@pytest.mark.parametrize("fault", [*BY_VALUE, *BY_SOME_POLICY])
def test_other_faults_are_caught_by_the_policies_of_a_certificate(emulator: Emulator, fault: str) -> None:
    runs = [run_specialised(emulator, fault, policy) for policy in POLICIES]
    assert any(report.faults or not right for report, right in runs)


@pytest.mark.parametrize("fault", ["K_RELEASED_EARLY", "V_RELEASED_EARLY", "O_REUSED_EARLY", "OUTPUT_SCALED_EARLY", "NO_WAIT_BEFORE_EXIT"])
def test_late_effects_change_values_without_the_race_checker(emulator: Emulator, fault: str) -> None:
    policies = [Policy(schedule, copies, races=False, late_products=True) for schedule in Schedule for copies in (False, True)]
    assert not all(run_specialised(emulator, fault, policy)[1] for policy in policies)


# Single mistakes ------------------------------------------------------------------------------------------------------


class MistakeParams(ctypes.Structure):
    """Params of mistakes_sm90.cu, padded to the alignment of its maps."""

    _fields_ = [
        ("map", MapBytes),
        ("narrow", MapBytes),
        ("out", ctypes.c_void_p),
        ("box_bytes", ctypes.c_int),
        ("padding", ctypes.c_ubyte * 116),
    ]


def run_mistake(emulator: Emulator, entry: str, policy: Policy = LATE, swizzle: Swizzle = Swizzle.BYTES_128) -> tuple[EmulationReport, Any]:
    source, out = np.arange(64 * 64, dtype=np.float32), np.zeros(64 * 64, np.float32)
    memory = Memory.for_buffers([source.nbytes, out.nbytes])
    address, target = memory.place(source, False), memory.place(out, True)
    columns = swizzle.width // 4 if swizzle else 32
    specs = [
        TensorMapSpec(address, DType.FLOAT32, (64, 64), (256,), (columns, 8), swizzle),
        TensorMapSpec(target, DType.FLOAT32, (64, 64), (256,), (columns, 8), swizzle),
    ]
    params = MistakeParams(*map(map_bytes, specs), target, specs[0].box_bytes)
    report = emulator.launch(text_of("mistakes_sm90.cu"), entry, 1, 256, 16384, params, memory, policy, deadline_s=20)
    memory.fetch()
    return report, out


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("initialised_twice", r"mbarrier: 0x\w+ is initialised twice"),
        ("initialised_for_nobody", r"mbarrier: 0x\w+ is initialised for 0 arrivals"),
        ("never_initialised", r"mbarrier: mbarrier_arrive on 0x\w+, which is not initialised"),
        ("mbarrier_overwritten", r"mbarrier: store_shared overwrites the mbarrier at 0x404"),
        ("too_many_arrivals", r"mbarrier: mbarrier_arrive: #0 at 0x400 has had all its 2 arrivals"),
        ("load_misaligned", r"alignment: tma_load at shared 0x\w+, which is not a multiple of 128"),
        ("load_out_of_bounds", r"bounds: tma_load touches shared 0x4400"),
        ("load_onto_mbarrier", r"mbarrier: tma_load overwrites the mbarrier at 0x400"),
        ("load_never_expected", r"mbarrier: .* more than its phase expects|exit: the block ends with 1 bulk loads|and -1024 bytes"),
        ("map_copied", r"bulk: tma_load with a copy of a tensor map"),
        ("map_not_encoded", r"bulk: tma_load with a tensor map that was not encoded"),
        ("store_to_input", r"bounds: tma_store writes to an input tensor"),
        (
            "store_of_unordered",
            r"race: tma_store of shared 0x\w+ is not ordered after a write by|race: store_shared .* after a read by the bulk",
        ),
        ("barrier_of_block_sync", r"barrier: barrier_sync\(0, 64\): ids are 1 to 15"),
        ("barrier_of_half_a_warp", r"barrier: barrier_sync\(1, 48\)"),
        ("barrier_counts_differ", r"barrier: barrier_\w+\(1, \d+\) meets threads that count on"),
        ("registers_in_the_wrong_direction", r"registers: registers_decrease from \d+ to 256"),
        ("registers_not_by_eights", r"registers: registers_decrease<100>: a multiple of 8"),
        ("registers_of_one_warp", r"registers: the warps of warpgroup 0 end with different numbers"),
        ("lanes_disagree", r"product: lanes of warpgroup [01] disagree about the operands of product 0"),
        ("operand_out_of_bounds", r"bounds: the right operand of a product touches shared"),
        ("operand_not_ordered", r"race: a product's read of shared 0x\w+ is not ordered after a write by thread"),
        ("operand_not_fenced", r"proxy: a product's read of shared 0x\w+, which thread \d+ wrote without fence_proxy_async"),
        ("product_of_three_warps", r"deadlock: .*wait in wgmma_wait for product 0"),
        ("not_uniform", r"collective: warp_uniform of a value that differs between lanes"),
        ("matrix_store_unordered", r"race: load_shared of shared 0x\w+ is not ordered after a write by thread"),
    ],
)
def test_a_mistake_is_reported(emulator: Emulator, entry: str, message: str, policy: Policy) -> None:
    report, _ = run_mistake(emulator, entry, policy)
    assert re.search(message, "\n".join(report.faults), re.DOTALL), report.faults


@pytest.mark.parametrize("schedule", [Schedule.LOCKSTEP, Schedule.GREEDY], ids=str)
def test_a_waiter_that_two_phases_overtake_is_reported(emulator: Emulator, schedule: Schedule) -> None:
    report, _ = run_mistake(emulator, "waiter_overtaken", Policy(schedule))
    assert re.search(r"mbarrier: #1 at 0x400 went on by two phases while a thread waited for one", "\n".join(report.faults))


@pytest.mark.parametrize("policy", MORE_POLICIES, ids=str)
@pytest.mark.parametrize("entry", ["ordered_by_arrive_of_every_lane", "ordered_by_named_barriers", "matrix_store_in_order"])
def test_ordered_accesses_raise_no_alarm(emulator: Emulator, entry: str, policy: Policy) -> None:
    assert run_mistake(emulator, entry, policy)[0].faults == ()


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("swizzle", list(Swizzle), ids=str)
def test_a_box_comes_back_from_shared_memory_under_every_swizzle(emulator: Emulator, swizzle: Swizzle, policy: Policy) -> None:
    report, out = run_mistake(emulator, "round_trip", policy, swizzle)
    assert report.faults == ()
    columns = swizzle.width // 4 if swizzle else 32
    expected = np.zeros((64, 64), np.float32)
    expected[5:13, 4 : 4 + columns] = np.arange(64 * 64, dtype=np.float32).reshape(64, 64)[5:13, 4 : 4 + columns]
    np.testing.assert_array_equal(out.reshape(64, 64), expected)


def test_matrix_stores_are_the_inverse_of_matrix_loads(emulator: Emulator) -> None:
    report, out = run_mistake(emulator, "matrix_round_trip")
    assert report.faults == ()
    words = out.view(np.uint32)[: 256 * 8].reshape(256, 2, 4)
    expected = np.arange(256, dtype=np.uint32)[:, None] * 16 + np.arange(4, dtype=np.uint32)
    np.testing.assert_array_equal(words, np.broadcast_to(expected[:, None], words.shape))


# Layouts of operands --------------------------------------------------------------------------------------------------


class LayoutParams(ctypes.Structure):
    """Params of layouts.cu."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("a", "b", "d")]


def operand_image(matrix: Any, width: int, by_columns: bool) -> tuple[Any, int, int]:
    """A (lines, 16) operand as it lies in shared memory, and its leading and stride distances in bytes.

    `width` is that of the swizzle in bytes, or 0 for none. Lines are rows of the tile, or its columns when the depth runs over rows.
    """
    tile = matrix.T if by_columns else matrix
    rows, columns = tile.shape
    line, column = np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij")
    if not width:  # blocks of eight rows of 16 bytes, one after the other
        offset = (column // 8 * (rows // 8) + line // 8) * 128 + line % 8 * 16 + column % 8 * 2
        leading, stride = (rows // 8 * 128, 128)
        if by_columns:  # the stride goes along the lines of the operand, which are columns of the tile
            leading, stride = stride, leading
    else:
        chunk, inside = column * 2 // width, column * 2 % width
        offset = chunk * (rows * width) + line * width + inside
        offset ^= (offset >> 7 & (width // 16 - 1)) << 4
        leading, stride = (rows * width, 8 * width) if by_columns else (16, 8 * width)
    image = np.zeros(-(-(int(offset.max()) + 2) // 1024) * 512, matrix.dtype)
    image[offset // 2] = tile
    return image, leading, stride


@pytest.mark.parametrize(("columns", "dtype"), [(8, DType.BFLOAT16), (96, DType.FLOAT16), (256, DType.BFLOAT16)])
@pytest.mark.parametrize("b_by_columns", [False, True], ids=["b-by-rows", "b-by-columns"])
@pytest.mark.parametrize("a_by_columns", [False, True, None], ids=["a-by-rows", "a-by-columns", "a-in-registers"])
@pytest.mark.parametrize("width", [0, 32, 64, 128])
def test_every_layout_of_operands_gives_the_matrix_product(
    emulator: Emulator, width: int, a_by_columns: bool | None, b_by_columns: bool, columns: int, dtype: DType
) -> None:
    lines = columns if not b_by_columns or not width else -(-columns * 2 // width) * width // 2  # whole chunks
    rng = np.random.default_rng(columns)
    a, b = (encode(rng.standard_normal((count, 16)).astype(np.float32), dtype) for count in (64, lines))
    (a_image, a_leading, a_stride), (b_image, b_leading, b_stride) = (
        operand_image(a, width, bool(a_by_columns)),
        operand_image(b, width, b_by_columns),
    )
    d = rng.standard_normal(128 * columns // 2).astype(np.float32)
    before = d.copy()
    fragments = a_fragments(a)
    source = fragments if a_by_columns is None else a_image
    memory = Memory.for_buffers([source.nbytes, b_image.nbytes, d.nbytes])
    params = LayoutParams(*(memory.place(each.reshape(-1), each is d) for each in (source, b_image, d)))
    text = text_of(
        "layouts.cu", COLUMNS=columns, IN_REGISTERS=int(a_by_columns is None), A_BY_COLUMNS=int(bool(a_by_columns)),
        B_BY_COLUMNS=int(b_by_columns), IS_HALF=int(dtype is DType.FLOAT16), A_BYTES=a_image.nbytes, B_BYTES=b_image.nbytes,
        LAYOUT={0: 0, 128: 1, 64: 2, 32: 3}[width], A_LEADING=a_leading, A_STRIDE=a_stride, B_LEADING=b_leading, B_STRIDE=b_stride,
    )  # fmt: skip
    report = emulator.launch(text, "layouts", 1, 128, a_image.nbytes + b_image.nbytes, params, memory, LATE)
    memory.fetch()
    assert report.faults == ()
    product = decode(a, dtype).astype(np.float64) @ decode(b[:columns], dtype).astype(np.float64).T
    np.testing.assert_allclose(Warpgroup.accumulator(d, columns), Warpgroup.accumulator(before, columns) + product, rtol=1e-5, atol=1e-5)


def a_fragments(a: Any) -> Any:
    """The left operand as the four registers of 128 threads."""
    thread, part, half = np.meshgrid(np.arange(128), np.arange(4), np.arange(2), indexing="ij")
    rows = thread // 32 * 16 + thread % 32 // 4 + part % 2 * 8
    return np.ascontiguousarray(a[rows, thread % 4 * 2 + part // 2 * 8 + half])


# The same texts on the device's compiler ------------------------------------------------------------------------------


@pytest.mark.compiled
@pytest.mark.parametrize("dtype", list(ELEMENTS), ids=str)
def test_a_specialised_kernel_compiles_without_spills_or_serialised_products(dtype: DType) -> None:
    values = {"block_kv": BLOCK_KV, "head_dim": HEAD_DIM, "head_dim_v": HEAD_DIM_V}
    report = compiled(specialised_text("NO_FAULT", dtype), "specialised", dtype, values)
    assert report.warnings == ()
    assert report.spill_bytes == 0


@pytest.mark.compiled
@pytest.mark.parametrize("dtype", list(ELEMENTS), ids=str)
@pytest.mark.parametrize(
    ("block_kv", "head_dim", "head_dim_v"), [(128, 128, 128), (64, 256, 256), (80, 80, 96), (16, 16, 8), (256, 64, 64)]
)
def test_products_of_every_shape_compile(block_kv: int, head_dim: int, head_dim_v: int, dtype: DType) -> None:
    case = Warpgroup(block_kv, head_dim, head_dim_v, dtype)
    values = {"block_kv": block_kv, "head_dim": head_dim, "head_dim_v": head_dim_v}
    report = compiled(case.text(), "warpgroup", dtype, values)
    assert report.warnings == ()
    assert report.spill_bytes == 0


def compiled(text: str, entry: str, dtype: DType, values: dict[str, int | bool]) -> Any:
    from flashgen import compiler

    klass = ProblemClass(Op.FORWARD, dtype, int(values["head_dim"]), int(values["head_dim_v"]), MaskKind.NONE)
    whole = render.expand(text, ELEMENTS[dtype], values)
    source = Source("hopper", klass, Variant("hopper", ()), whole, entry, (EntryPoint(entry, 128, 0),), 90)
    return compiler.read_log(compiler._run_nvrtc(source, compiler.options_for("sm_90a"))[1], "", 0.0, "", ())
