"""What the device executor refuses before it touches a device, and that it needs CuPy only when used."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from small_kernels import copy_source, small_problem, small_source, tensors

from flashgen.errors import LaunchError, MissingDependency
from flashgen.gpu import DeviceBuffer
from flashgen.runtime import MAX_GRID, check_entry, check_grids, needs_opt_in, operand

H200 = 232448


@pytest.mark.parametrize(
    ("static", "dynamic", "needed"),
    [
        (0, 49151, False),
        (0, 49152, True),
        (0, 49153, True),
        (16, 49151, True),
        (16, 49135, False),
        (16, 49136, True),
        (0, H200, True),
        (49152, 0, False),
    ],
)
def test_opting_in_happens_whenever_static_plus_dynamic_could_exceed_the_default(static: int, dynamic: int, needed: bool) -> None:
    assert needs_opt_in(static, dynamic) is needed


@pytest.mark.parametrize("static", [0, 16])
@pytest.mark.parametrize("maximum", [101376, H200])
def test_the_maximum_is_allowed_and_one_byte_more_is_refused(static: int, maximum: int) -> None:
    def check(total: int) -> None:
        source = copy_source(total - static)
        check_entry(source, source.entry_points[0], static, maximum)

    check(maximum)
    with pytest.raises(LaunchError, match=f"needs {maximum + 1} bytes .*maximum per CTA is {maximum}"):
        check(maximum + 1)


@pytest.mark.parametrize("threads", [0, 1025])
def test_a_block_that_no_device_runs_is_refused(threads: int) -> None:
    source = small_source("", ("k", threads, 0))
    with pytest.raises(LaunchError, match=f"{threads} threads"):
        check_entry(source, source.entry_points[0], 0, H200)


@pytest.mark.parametrize("grid", [-1, MAX_GRID + 1])
def test_a_grid_that_the_driver_cannot_take_is_refused(grid: int) -> None:
    with pytest.raises(LaunchError, match=f"{grid} CTAs"):
        check_grids(copy_source(), (grid,))


@pytest.mark.parametrize("grid", [0, 65536, MAX_GRID])
def test_grids_up_to_the_drivers_limit_are_allowed(grid: int) -> None:
    check_grids(copy_source(), (grid,))


def test_an_operand_keeps_offset_and_strides_of_its_host_tensor() -> None:
    data = tensors(small_problem(), guard=32)
    found = operand(data.q, DeviceBuffer(4096, data.q.buffer.nbytes, None))
    assert found.address == 4096 + 32 * 4 and found.strides == data.q.strides[:3]


def test_importing_the_modules_needs_neither_cupy_nor_torch() -> None:
    code = "import sys, flashgen.bench, flashgen.worker; print(sorted({'cupy', 'torch', 'optuna', 'pynvml'} & set(sys.modules)))"
    root = str(Path(__file__).parents[1])
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=True).stdout.strip() == "[]"


def test_without_cupy_the_executor_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    from flashgen import gpu

    gpu.cupy.cache_clear()
    monkeypatch.setitem(sys.modules, "cupy", None)
    try:
        with pytest.raises(MissingDependency, match=r"flashgen\[cuda13\]"):
            gpu.Gpu(0)
        assert gpu.device_count() == 0
    finally:
        gpu.cupy.cache_clear()


def test_without_a_gpu_the_next_step_is_told() -> None:
    pytest.importorskip("cupy")
    from flashgen import gpu

    if gpu.device_count():
        pytest.skip("there is a GPU here")
    with pytest.raises(MissingDependency, match="emulated executor"):
        gpu.Gpu(0)


DRIVER = "launchKernel ctxGetCurrent ctxSetCurrent funcGetAttribute funcSetAttribute CUDADriverError CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES"
RUNTIME = (
    "getDeviceCount deviceGetAttribute getDeviceProperties free memcpy memcpyAsync memsetAsync deviceSynchronize "
    "eventRecord CUDARuntimeError"
)
NVRTC = "createProgram compileProgram getProgramLog getCUBIN destroyProgram getVersion getSupportedArchs NVRTCError"
CUDA = "Module Device Event get_elapsed_time alloc memory.OutOfMemoryError nvrtc.getVersion driver.launchKernel runtime.memcpy"


def test_the_installed_cupy_has_every_name_that_is_called() -> None:
    cupy = pytest.importorskip("cupy")
    from cupy.cuda import nvrtc

    assert callable(cupy.get_default_memory_pool)
    for owner, names in ((cupy.cuda.driver, DRIVER), (cupy.cuda.runtime, RUNTIME), (nvrtc, NVRTC), (cupy.cuda, CUDA)):
        for name in names.split():
            found = owner
            for part in name.split("."):
                found = getattr(found, part)
