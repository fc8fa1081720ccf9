"""The emulated executor: primitives give the documented values, and every planted fault is reported."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashgen import emulate, paths
from flashgen.emulate import POLICIES, EmulationReport, Emulator, Memory, Policy, Schedule
from flashgen.errors import CompileError, EmulationFault, HomeNotWritable, LaunchError, MissingDependency, NotWritable
from flashgen.model import DType
from flashgen.reference import decode, encode

pytestmark = [
    pytest.mark.emulated,
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
]

KERNELS = Path(__file__).parent / "emulator"
ALL_POLICIES = (
    *POLICIES,
    *(Policy(schedule, late, seed=seed) for schedule in Schedule for late in (False, True) for seed in (2, 3)),
    emulate.FAST,
)
EARLY = POLICIES[0]


class TwoArrays(ctypes.Structure):
    """Params of pipeline.cu and mistakes.cu."""

    _fields_ = [("in_", ctypes.c_void_p), ("out", ctypes.c_void_p), ("count", ctypes.c_int)]


class ProductParams(ctypes.Structure):
    """Params of product.cu."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("a", "b", "d", "fragments")]


@pytest.fixture(scope="session")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Emulator:
    return Emulator(tmp_path_factory.mktemp("libraries with spaces"))


def text_of(name: str, **macros: object) -> str:
    return "".join(f"#define {key} {value}\n" for key, value in macros.items()) + (KERNELS / name).read_text()


def run_pipeline(emulator: Emulator, fault: int, policy: Policy) -> tuple[EmulationReport, bool]:
    """The report, and whether the sums are right."""
    tiles = np.random.default_rng(0).integers(-8, 8, (5, 128, 4)).astype(np.float32)
    out = np.zeros(512, np.float32)
    memory = Memory.for_buffers([tiles.nbytes, out.nbytes])
    params = TwoArrays(memory.place(tiles.ravel(), False), memory.place(out, True), len(tiles))
    report = emulator.launch(text_of("pipeline.cu", FAULT=fault), "pipeline", 1, 128, 4096, params, memory, policy)
    memory.fetch()
    return report, bool(np.array_equal(out.reshape(128, 4), np.roll(tiles.sum(0), -37, axis=0)))


def run_mistake(emulator: Emulator, entry: str, grid: int = 1, policy: Policy = POLICIES[1], shared: int = 1024, **options: Any) -> Any:
    """(report, output) of one kernel of mistakes.cu."""
    source, out = np.arange(128, dtype=np.float32), np.zeros(max(128, grid), np.float32)
    memory = Memory.for_buffers([source.nbytes, out.nbytes])
    params = TwoArrays(memory.place(source, False), memory.place(out, True), len(source))
    report = emulator.launch(text_of("mistakes.cu"), entry, grid, 64, shared, params, memory, policy, **options)
    memory.fetch()
    return report, out


# Primitives -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ALL_POLICIES, ids=str)
def test_a_correct_pipeline_passes_every_policy(emulator: Emulator, policy: Policy) -> None:
    report, right = run_pipeline(emulator, 0, policy)
    assert report.faults == ()
    assert right


@pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.BFLOAT16], ids=str)
def test_matrix_loads_and_products_follow_the_documented_layout(emulator: Emulator, dtype: DType) -> None:
    rng = np.random.default_rng(1)
    a, b = (encode(rng.standard_normal((rows, 16)).astype(np.float32), dtype) for rows in (16, 8))
    d = rng.standard_normal((16, 8)).astype(np.float32)
    report, out, fragments = run_product(emulator, a, b, d, dtype, fault=0)
    assert report.faults == ()
    left, right, expected = decode(a, dtype), decode(b, dtype), np.zeros((16, 8), np.float32)
    for k in range(16):  # float32 products are exact for 16-bit factors; the order of the sum is that of k
        expected = (left[:, k, None] * right[None, :, k] + expected).astype(np.float32)
    assert np.array_equal(out, d + expected)
    assert report.counters.multiplies == 1
    assert report.counters.matrix_phases == 12
    lanes, pairs = np.arange(32)[:, None, None], np.arange(2)[None, None, :]
    matrices = np.arange(4)[None, :, None]
    rows = matrices % 2 * 8 + lanes % 4 * 2 + pairs
    columns = matrices // 2 * 8 + lanes // 4 + 0 * pairs
    assert np.array_equal(fragments.view(np.uint16).reshape(32, 4, 2), a.view(np.uint16)[rows, columns])


def run_product(emulator: Emulator, a: Any, b: Any, d: Any, dtype: DType, fault: int) -> tuple[EmulationReport, Any, Any]:
    element = "fg::Half" if dtype is DType.FLOAT16 else "fg::BFloat16"
    out, fragments = d.ravel().copy(), np.zeros(128, np.uint32)
    memory = Memory.for_buffers([a.nbytes, b.nbytes, out.nbytes, fragments.nbytes])
    addresses = [memory.place(a.ravel(), False), memory.place(b.ravel(), False), memory.place(out, True), memory.place(fragments, True)]
    text = text_of("product.cu", FAULT=fault, ELEMENT=element)
    report = emulator.launch(text, "product", 1, 32, 768, ProductParams(*addresses), memory, EARLY)
    memory.fetch()
    return report, out.reshape(16, 8), fragments


def test_arithmetic_rounds_as_the_device_does(emulator: Emulator) -> None:
    bits = np.random.default_rng(2).integers(0, 2**32, 40000, dtype=np.uint32)
    halves = np.arange(2**16, dtype=np.uint32) << 16
    ties = ((np.arange(2**16, dtype=np.uint32) % 0x7C00) * 0x2000 + 0x38000000 - 0x1000).astype(np.uint32)
    special = np.array(
        [0.0, -0.0, np.inf, -np.inf, np.nan, -126.5, -125.9, 65519.9, 65520.0, 2.0**-25, 2.0**-24, 2.9e-8, -200.0], np.float32
    )
    small = np.random.default_rng(3).uniform(-20, 20, 20000).astype(np.float32) * np.float32(2.0) ** -18
    x = np.concatenate([bits.view(np.float32), halves.view(np.float32), ties.view(np.float32), special, small])
    out = np.zeros(4 * len(x), np.float32)
    memory = Memory.for_buffers([x.nbytes, out.nbytes])
    params = TwoArrays(memory.place(x, False), memory.place(out, True), len(x))
    report = emulator.launch(text_of("mistakes.cu"), "arithmetic", -(-len(x) // 64), 64, 0, params, memory, emulate.FAST)
    memory.fetch()
    assert report.faults == ()
    exponential, packed_half, packed_bfloat, unpacked = out.reshape(4, -1)
    with np.errstate(all="ignore"):
        exact = np.exp2(x.astype(np.float64))
        expected = np.where(exact < 2.0**-126, 0.0, exact).astype(np.float32)
        np.testing.assert_allclose(exponential, expected, rtol=3e-7, atol=0)
        assert not np.any((exponential != 0) & (np.abs(exponential) < 2.0**-126))
    for packed, dtype in ((packed_half, DType.FLOAT16), (packed_bfloat, DType.BFLOAT16)):
        words = packed.view(np.uint32)
        for part, values in ((words & 0xFFFF, x), (words >> 16, -x)):
            want = encode(values, dtype).view(np.uint16)
            assert np.array_equal(part[~np.isnan(x)], want[~np.isnan(x)])
            assert np.all(part[np.isnan(x)] == 0x7FFF)
    np.testing.assert_array_equal(unpacked, (x.view(np.uint32) >> 16).astype(np.uint16).view(np.float16).astype(np.float32))
    assert report.counters.exponentials == len(x)


def test_many_small_blocks_run_quickly(emulator: Emulator) -> None:
    blocks = 65536
    begin = time.perf_counter()
    report, out = run_mistake(emulator, "block_numbers", grid=blocks, policy=EARLY)
    assert report.faults == ()
    assert np.array_equal(out, np.arange(blocks, dtype=np.float32) + 63)
    assert time.perf_counter() - begin < 20


@pytest.mark.parametrize("live", [1, 3, emulate.ALL_CTAS])
def test_any_number_of_blocks_may_be_alive(emulator: Emulator, live: int) -> None:
    report, out = run_mistake(emulator, "block_numbers", grid=50, live_ctas=live)
    assert report.faults == ()
    assert np.array_equal(out[:50], np.arange(50, dtype=np.float32) + 63)


def test_counters_follow_the_accesses(emulator: Emulator) -> None:
    counters = run_pipeline(emulator, 0, EARLY)[0].counters
    assert counters.copy_bytes == 5 * 128 * 16
    assert counters.global_bytes_read == counters.copy_bytes
    assert counters.global_bytes_written == 128 * 16
    assert counters.shared_bytes_read == 5 * 128 * 16
    assert counters.shared_bytes_written == 6 * 128 * 16
    assert counters.block_barriers == 10


def test_bank_conflicts_are_counted_per_warp(emulator: Emulator) -> None:
    counters = run_mistake(emulator, "bank_conflicts", shared=4096, policy=replace(EARLY, races=False))[0].counters
    per_warp = 31 + 0 + 4 * 7  # one bank; all banks; eight rows of 16 bytes in the same four banks, four times
    assert counters.shared_conflicts == 2 * per_warp


# Planted faults -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize(
    ("fault", "message"),
    [(1, "no wait has covered"), (2, "race: "), (3, "race: ")],
    ids=["missing-wait", "no-barrier-after-wait", "no-barrier-before-overwrite"],
)
def test_the_race_checker_finds_pipeline_faults_under_every_policy(emulator: Emulator, fault: int, message: str, policy: Policy) -> None:
    report, _ = run_pipeline(emulator, fault, policy)
    assert re.search(message, "\n".join(report.faults))


@pytest.mark.parametrize(
    ("fault", "policy"),
    [
        (1, Policy(Schedule.LOCKSTEP, late_copies=True, races=False)),
        (2, Policy(Schedule.GREEDY, late_copies=True, races=False)),
        (3, Policy(Schedule.GREEDY, late_copies=False, races=False)),
    ],
    ids=["missing-wait", "no-barrier-after-wait", "no-barrier-before-overwrite"],
)
def test_pipeline_faults_change_values_without_the_race_checker(emulator: Emulator, fault: int, policy: Policy) -> None:
    report, right = run_pipeline(emulator, fault, policy)
    assert report.faults == ()
    assert not right


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("shared_overrun", r"bounds: store_shared touches shared 0x6\w\w\.\.0x\w+; valid is 0x400\.\.0x600 \[CTA 0, thread [3-6]\d\]"),
        ("shared_underrun", r"bounds: load_shared touches shared 0x3fc"),
        ("shared_misaligned", r"alignment: store_shared touches shared 0x404.* 16 \[CTA 0, thread \d*[13579]\]"),
        ("copy_misaligned", r"alignment: copy_async_16 touches global"),
        ("global_overrun", r"bounds: load_global touches global memory outside every tensor: 4 bytes .*thread 63\]"),
        ("global_overrun_of_copy", r"bounds: copy_async_16 touches global memory outside every tensor: 16 bytes .*thread 5\]"),
        ("global_misaligned", r"alignment: load_global"),
        ("writes_input", r"bounds: store_global writes to an input tensor"),
        ("divergent_barrier", r"divergence: block_sync of CTA 0 was reached by 40 of 64 threads"),
        (
            "divergent_barrier",
            r"deadlock: .*\n  CTA 0 warp 0: all lanes wait in block_sync\n.*warp 1: lanes 8-31 returned; lanes 0-7 wait in block_sync",
        ),
        ("barrier_against_collective", r"warp 1: lanes 0-15 wait in block_sync; lanes 16-31 wait in warp_sync"),
        (
            "different_collectives",
            r"collective: lanes of warp \d meet in different collectives: lane \d+ in (warp_sync|shuffle_xor), .* in \w+",
        ),
        ("neighbours_unordered", r"race: load_shared of shared 0x4\w\w is not ordered after a write by thread"),
        ("neighbours_after_shuffle", r"race: load_shared of shared 0x4\w\w is not ordered after a write by thread"),
        ("warps_unordered", r"race: "),
        ("write_after_read", r"race: "),
        ("own_copy_overwritten", r"race: store_shared of shared 0x\w+, the target of a copy by thread \d+ that no wait has covered yet"),
    ],
)
@pytest.mark.parametrize("isolated", [True, False], ids=["isolated", "in-process"])
def test_a_mistake_is_reported_with_its_place(emulator: Emulator, entry: str, message: str, isolated: bool) -> None:
    report, _ = run_mistake(emulator, entry, shared=512, isolated=isolated)
    assert re.search(message, "\n".join(report.faults), re.DOTALL), report.faults


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("entry", ["neighbours_unordered", "neighbours_after_shuffle", "warps_unordered", "write_after_read"])
def test_races_are_found_under_every_schedule(emulator: Emulator, entry: str, policy: Policy) -> None:
    assert any("race: " in fault for fault in run_mistake(emulator, entry, policy=policy)[0].faults)


@pytest.mark.parametrize("policy", ALL_POLICIES, ids=str)
@pytest.mark.parametrize("entry", ["harmless", "neighbours_in_order"])
def test_ordered_accesses_raise_no_alarm(emulator: Emulator, entry: str, policy: Policy) -> None:
    assert run_mistake(emulator, entry, policy=policy)[0].faults == ()


def test_a_wrong_matrix_row_reads_other_data(emulator: Emulator) -> None:
    rng = np.random.default_rng(4)
    a, b = (encode(rng.standard_normal((rows, 16)).astype(np.float32), DType.FLOAT16) for rows in (16, 8))
    d = np.zeros((16, 8), np.float32)
    _, right, _ = run_product(emulator, a, b, d, DType.FLOAT16, fault=0)
    report, out, _ = run_product(emulator, a, b, d, DType.FLOAT16, fault=1)
    assert report.faults or not np.array_equal(out, right, equal_nan=True)
    assert any("bounds: load_matrix_x4" in fault for fault in report.faults)


def test_a_matrix_load_needs_a_warp_barrier_after_the_writes(emulator: Emulator) -> None:
    rng = np.random.default_rng(4)
    a, b = (encode(rng.standard_normal((rows, 16)).astype(np.float32), DType.FLOAT16) for rows in (16, 8))
    report, _, _ = run_product(emulator, a, b, np.zeros((16, 8), np.float32), DType.FLOAT16, fault=2)
    assert any("race: load_matrix_x4" in fault for fault in report.faults)


def test_unwritten_shared_memory_reads_as_nan(emulator: Emulator) -> None:
    report, out = run_mistake(emulator, "unwritten_shared")
    assert report.faults == ()
    assert np.all(np.isnan(out[:64]))


def test_a_refused_access_is_not_performed(emulator: Emulator) -> None:
    _, out = run_mistake(emulator, "global_overrun")
    assert np.isnan(out[63])
    assert np.array_equal(out[:63], np.arange(65, 128))


# Isolation ------------------------------------------------------------------------------------------------------------


def test_a_hang_costs_one_run(emulator: Emulator) -> None:
    report, _ = run_mistake(emulator, "endless", deadline_s=0.3)
    assert report.faults == ("timeout: the run was still going after 0.3 s (a loop without end, or a deadline too short)",)
    assert 0.3 <= report.seconds < 5


@pytest.mark.parametrize(("entry", "place"), [("wild_pointer", r"CTA 0, thread 33"), ("deep_recursion", r"CTA 0, thread \d+")])
def test_a_crash_costs_one_run(emulator: Emulator, entry: str, place: str) -> None:
    report, _ = run_mistake(emulator, entry)
    assert len(report.faults) == 1
    assert re.search(r"crash: signal 11 .*\[" + place, report.faults[0])
    assert run_mistake(emulator, "harmless")[0].faults == ()


def test_many_faults_are_counted_and_few_are_told(emulator: Emulator) -> None:
    report, _ = run_mistake(emulator, "global_misaligned")
    assert report.num_faults == 64
    assert len(report.faults) == 3
    with pytest.raises(EmulationFault, match=r"(?s)the run broke 64 rules:\nalignment: .*\(61 more of the same kinds\)"):
        report.check("the run")


def test_an_isolated_run_costs_little(emulator: Emulator) -> None:
    run_mistake(emulator, "harmless")
    seconds = min(run_mistake(emulator, "harmless")[0].seconds for _ in range(5))
    assert seconds < 0.05  # a few ms on an idle machine


# Building -------------------------------------------------------------------------------------------------------------


def test_a_refused_source_shows_the_compilers_log(emulator: Emulator) -> None:
    with pytest.raises(CompileError, match="nonsense"):
        emulator.build("nonsense;\n")
    assert not list(Path(emulator.build(text_of("mistakes.cu"))).parent.glob("*.tmp"))


def test_a_disk_that_fills_while_building_is_told_as_such(tmp_path: Path) -> None:
    compiler = tmp_path / "full-g++"
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] && exit\necho "ld: final link failed: No space left on device" >&2; exit 1\n')
    compiler.chmod(0o755)
    with pytest.raises(NotWritable, match=f"no space left in {re.escape(str(tmp_path))}.*TMPDIR"):
        Emulator(tmp_path, str(compiler)).build("// nothing\n")
    assert not list(tmp_path.rglob("*.tmp"))


def test_libraries_are_found_again_by_another_emulator(emulator: Emulator) -> None:
    library = emulator.build(text_of("mistakes.cu"))
    again = Emulator(library.parent.parent)
    before = library.stat().st_mtime_ns
    assert again.build(text_of("mistakes.cu")) == library
    assert library.stat().st_mtime_ns == before


def test_two_processes_may_build_at_once(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from flashgen.emulate import Emulator\n"
        "print(Emulator(Path(sys.argv[1])).build('// nothing\\n').stat().st_size)"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    root = Path(emulate.__file__).parents[1]
    children = [subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(2)]
    outputs = [child.communicate() for child in children]
    assert [child.returncode for child in children] == [0, 0], outputs
    assert not list(tmp_path.rglob("*.tmp"))


def test_two_stores_share_the_runtime_of_the_process(emulator: Emulator, tmp_path: Path) -> None:
    run_mistake(emulator, "harmless")
    assert run_mistake(Emulator(tmp_path), "harmless")[0].faults == ()


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes anywhere")
def test_a_read_only_home_falls_back_with_a_warning(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.warns(HomeNotWritable, match="temporary directory"):
        Emulator(tmp_path / "emulated")


def test_a_home_that_is_no_directory_falls_back_with_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.warns(HomeNotWritable, match="temporary directory"):
        fallback = Emulator(tmp_path / "file" / "emulated")
    assert fallback.build("// nothing\n").exists()


def test_a_missing_compiler_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingDependency, match=r"apt-get install g\+\+"):
        Emulator(tmp_path)


def test_too_many_threads_are_refused(emulator: Emulator) -> None:
    memory = Memory.for_buffers([])
    with pytest.raises(LaunchError, match="at most 64 threads"):
        emulator.launch(text_of("mistakes.cu"), "harmless", 1, 128, 1024, TwoArrays(), memory)


# Twins ----------------------------------------------------------------------------------------------------------------


def declarations(file: Path) -> list[str]:
    """Signatures of the primitives of a header, without their bodies."""
    text = re.sub(r"//[^\n]*", "", file.read_text())
    text = re.sub(r"template <>\nFG_DEVICE void (score_product|output_product|wgmma_wait)<[^{]*\{", "", text)  # shapes of one primitive
    found = re.findall(r"((?:template\s*<[^>]*>\s*)?)^FG_DEVICE\s+([^{;]+)[{;]", text, re.MULTILINE)
    return sorted(" ".join(f"{template} {signature}".split()) for template, signature in found)


@pytest.mark.parametrize(
    ("device", "host"),
    [("ptx/common.cuh", "emu/common.hpp"), ("ptx/sm80.cuh", "emu/sm80.hpp"), ("ptx/sm90.cuh.j2", "emu/sm90.hpp")],
)
def test_every_primitive_exists_twice_with_one_signature(device: str, host: str) -> None:
    include = paths.templates() / "include"
    assert declarations(include / device) == declarations(include / host)


def test_structs_of_the_interface_have_equal_sizes(emulator: Emulator) -> None:
    names = ("Counters", "Range", "Launch", "Result")
    sizes = ", ".join(f"sizeof(fg::emu::{name})" for name in names)
    text = f'#include "emu/runtime.hpp"\nextern "C" __attribute__((visibility("default"))) const unsigned long sizes[] = {{{sizes}}};\n'
    emulator._runtime()
    library = ctypes.CDLL(str(emulator.build(text)))
    twins = tuple(ctypes.sizeof(getattr(emulate, f"_{name}")) for name in names)
    assert tuple((ctypes.c_ulong * 4).in_dll(library, "sizes")) == twins


def test_portable_fibers_work_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulate, "RUNTIME_OPTIONS", (*emulate.RUNTIME_OPTIONS, "-DFG_PORTABLE_FIBERS"))
    report, right = run_pipeline(Emulator(tmp_path), 0, POLICIES[1])
    assert report.faults == ()
    assert right
