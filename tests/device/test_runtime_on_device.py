"""The device executor on a GPU, with kernels small enough to know every bit of their output."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from small_kernels import HEAD_DIM, POISON, RELAY, STATIC_16, STRAY, copy_source, one_cta_per_row, small_problem, small_source, tensors

from flashgen import gpu, launch
from flashgen.errors import LaunchError
from flashgen.launch_blocks import address_place
from flashgen.model import DType
from flashgen.runtime import DeviceExecutor
from flashgen.tensor_map import TensorMapSpec

pytestmark = [pytest.mark.device, pytest.mark.skipif(gpu.device_count() == 0, reason="needs a GPU")]


@pytest.fixture
def executor() -> DeviceExecutor:
    return DeviceExecutor(bind=one_cta_per_row)


def test_results_land_in_the_host_buffers_and_guards_stay(executor: DeviceExecutor) -> None:
    problem = small_problem()
    data = tensors(problem)
    executor.forward(copy_source(), problem, data, 0.5)
    scale_log2 = np.float32(0.5 * launch.LOG2_E)
    assert np.array_equal(data.o.view(), data.q.view() * scale_log2)
    assert np.array_equal(
        data.lse.view()[..., 0], np.broadcast_to(np.arange(problem.seqlen_q), (problem.batch, problem.heads_q, problem.seqlen_q))
    )
    for name, tensor in data.named():
        assert np.isnan(tensor.buffer[: tensor.offset]).all() and np.isnan(tensor.buffer[-tensor.offset :]).all(), name


def test_a_stray_write_into_a_guard_comes_back(executor: DeviceExecutor) -> None:
    problem = small_problem()
    data = tensors(problem)
    executor.forward(small_source(STRAY, ("stray", 1, 0)), problem, data, 1.0)
    assert data.q.buffer[data.q.offset - 1] == 1.0


def test_the_workspace_is_nan_before_the_launch(executor: DeviceExecutor) -> None:
    problem = small_problem()
    data = tensors(problem)
    data.lse.buffer[:] = 0.0
    executor.forward(small_source(POISON, ("poison", 1, 0)), problem, data, 1.0)
    assert np.isnan(data.lse.view()).all()


def test_entry_points_run_in_order_and_share_the_workspace(executor: DeviceExecutor) -> None:
    problem = small_problem(batch=1, heads=1, seqlen=50)
    data = tensors(problem)
    executor.forward(small_source(RELAY, ("leave", 1, 0), ("fetch", HEAD_DIM, 0)), problem, data, 1.0)
    assert np.array_equal(data.lse.view().ravel(), np.arange(50))
    assert np.array_equal(data.o.view()[0, 0], np.repeat(np.arange(50, dtype=np.float32)[:, None], HEAD_DIM, 1))


def test_an_empty_grid_launches_nothing(executor: DeviceExecutor) -> None:
    problem = small_problem(batch=0)
    data = tensors(problem)
    executor.forward(copy_source(), problem, data, 1.0)
    assert np.isnan(data.o.buffer).all()


@pytest.mark.parametrize("static", [0, 16])
@pytest.mark.parametrize("total", [49151, 49152, 49153, 98304, 101376, "maximum"])
def test_shared_memory_up_to_the_maximum_can_be_launched(executor: DeviceExecutor, static: int, total: int | str) -> None:
    most = executor.gpu.shared_bytes_per_cta
    wanted = most if isinstance(total, str) else total
    if wanted > most:
        pytest.skip(f"the device has {most} bytes per CTA")
    problem = small_problem()
    data = tensors(problem)
    source = small_source(STATIC_16, ("static_16", HEAD_DIM, wanted - static)) if static else copy_source(wanted)
    executor.forward(source, problem, data, 1.0)
    kernel = executor.load(source)
    assert kernel.static_shared_bytes[0] == static == kernel.compiled.report.static_shared_bytes
    assert np.isfinite(data.lse.view()).all()


@pytest.mark.parametrize("static", [0, 16])
def test_one_byte_above_the_maximum_is_refused_before_the_launch(executor: DeviceExecutor, static: int) -> None:
    most = executor.gpu.shared_bytes_per_cta
    source = small_source(STATIC_16, ("static_16", HEAD_DIM, most - static + 1)) if static else copy_source(most + 1)
    with pytest.raises(LaunchError, match=f"needs {most + 1} bytes"):
        executor.load(source)
    problem = small_problem()
    executor.forward(copy_source(), problem, tensors(problem), 1.0)  # the device is none the worse


def test_a_launch_follows_the_given_stream_and_is_captured_in_a_graph(executor: DeviceExecutor) -> None:
    cupy = gpu.cupy()
    problem = small_problem()
    data = tensors(problem)
    kernel = executor.load(copy_source())
    buffers = {name: executor.gpu.upload(tensor.buffer) for name, tensor in data.named()}
    at = {name: launch.Operand(buffers[name].address + tensor.offset * 4, tensor.strides[:3]) for name, tensor in data.named()}
    params = launch.forward_params(problem, 1.0, at["q"], at["k"], at["v"], at["o"], at["lse"].address, 0)
    stream = cupy.cuda.Stream(non_blocking=True)
    stream.begin_capture()
    kernel.launch(one_cta_per_row(kernel.source, problem).grids_, params, stream.ptr)
    graph = stream.end_capture()
    executor.gpu.synchronize()
    executor.gpu.download(buffers["o"], data.o.buffer)
    assert np.isnan(data.o.buffer).all(), "capturing runs nothing"
    ctypes.memset(ctypes.addressof(params), 0, ctypes.sizeof(params))  # the graph holds its own copy
    graph.launch(stream)
    stream.synchronize()
    executor.gpu.download(buffers["o"], data.o.buffer)
    assert np.array_equal(data.o.view(), data.q.view() * np.float32(launch.LOG2_E))


def test_a_missing_entry_point_is_named(executor: DeviceExecutor) -> None:
    with pytest.raises(LaunchError, match="Loading small"):
        executor.load(small_source('extern "C" __global__ void other() {}\n', ("absent", 32, 0)))


def test_a_second_device_gets_its_own_copy() -> None:
    if gpu.device_count() < 2:
        pytest.skip("needs two GPUs")
    problem = small_problem()
    for index in (0, 1):
        data = tensors(problem)
        DeviceExecutor(gpu.Gpu(index), bind=one_cta_per_row).forward(copy_source(232448 // 2), problem, data, 1.0)
        assert np.array_equal(data.o.view(), data.q.view() * np.float32(launch.LOG2_E))


def test_the_driver_s_tensor_maps_hold_their_address_in_one_place(executor: DeviceExecutor) -> None:
    """Else every call encodes its maps anew, which is right but slow."""
    spec = TensorMapSpec(16, DType.BFLOAT16, (64, 100, 4, 2), (8192, 128, 1 << 20), (64, 64, 1, 1))
    assert address_place(spec, TensorMapSpec.for_device) is not None
