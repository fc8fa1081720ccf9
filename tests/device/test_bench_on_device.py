"""The measuring child and the measurement protocol on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import device_tasks
import numpy as np
import pytest
from small_kernels import HANG, ILLEGAL, TRAP, copy_source, small_problem, small_source

from flashgen import bench, certify, gpu, peers, timing
from flashgen.bench import DeviceStopwatch, KernelLaunch, MeasuringState
from flashgen.errors import LaunchError, WorkerLost
from flashgen.model import DType, Mask, Problem, Source, Verdict
from flashgen.render import render
from flashgen.space import load_space
from flashgen.worker import MeasuringChild

pytestmark = [pytest.mark.device, pytest.mark.skipif(gpu.device_count() == 0, reason="needs a GPU")]

CAUSAL = Problem(DType.BFLOAT16, 128, 128, 2, 8, 2, 1024, 1024, Mask.causal())
FULL = Problem(DType.BFLOAT16, 64, 64, 2, 4, 4, 777, 777)

# Sums the rows of q that one CTA owns, again and again by the grid: 16 MiB that fit in the L2 of every big GPU.
READ = """
extern "C" __global__ void read(const __grid_constant__ Params p) {
  float sum = 0.0f;
  for (long i = threadIdx.x + (long)blockIdx.x * blockDim.x; i < 4194304; i += (long)gridDim.x * blockDim.x) sum += p.q[i];
  if (sum == 12345.0f) p.lse[0] = sum;
}
"""


# Keeps the GPU busy for about 100 µs without touching memory, so that the host can enqueue what follows.
SPIN = """
extern "C" __global__ void spin(const __grid_constant__ Params p) {
  const long long begin = clock64();
  while (clock64() - begin < 200000) {}
}
"""


@pytest.fixture(scope="module")
def state() -> MeasuringState:
    return MeasuringState(0)


@pytest.fixture(scope="module")
def child() -> Iterator[MeasuringChild]:
    with MeasuringChild(bench.open_device, 0, deadline_s=300) as child:
        yield child


def seed_source(state: MeasuringState, family: str, problem: Problem) -> Source:
    from flashgen.runtime import present_limits

    space = load_space(family)
    return render(space, problem.klass(), space.bind(problem, present_limits(state.gpu)).seeds()[0])


def test_fifty_trials_with_four_faults_leave_46_results_and_the_callers_context() -> None:
    problem, huge = small_problem(), Problem(DType.FLOAT32, 64, 64, 64, 64, 64, 2**20, 2**20)
    faults = {5: ("illegal", ILLEGAL), 10: ("trap", TRAP), 15: ("hang", HANG)}
    torch = pytest.importorskip("torch")
    mine = torch.arange(1000, device="cuda")
    good, blamed = [], {}
    with MeasuringChild(device_tasks.open_small_device, deadline_s=60) as child:
        for trial in range(50):
            try:
                if trial == 20:
                    child.call(f"trial {trial}", device_tasks.exhaust_memory, huge)
                elif trial in faults:
                    name, body = faults[trial]
                    child.call(f"trial {trial}", device_tasks.run_small, small_source(body, (name, 32, 0)), problem, deadline_s=8.0)
                else:
                    good.append(child.call(f"trial {trial}", device_tasks.run_small, copy_source(), problem))
            except (WorkerLost, LaunchError) as error:
                blamed[trial] = getattr(error, "reason", "launch error")
                assert trial == 20 or str(error).startswith(f"trial {trial}: ")
        assert child.started == 4
    assert blamed == {5: "poisoned", 10: "poisoned", 15: "timed_out", 20: "launch error"}
    assert len(good) == 46 and len(set(good)) == 1 and good[0] > 0
    assert int(mine.sum()) == 499500, "the caller's context is untouched"


def test_an_abort_that_shows_late_is_blamed_on_its_own_task() -> None:
    with MeasuringChild(device_tasks.open_small_device, deadline_s=60) as child:
        with pytest.raises(WorkerLost, match=r"^guilty: .*(?i:illegal)") as caught:
            child.call("guilty", device_tasks.launch_only, small_source(ILLEGAL, ("illegal", 1, 0)), small_problem())
        assert caught.value.reason == "poisoned"
        assert child.call("innocent", device_tasks.run_small, copy_source(), small_problem()) > 0


@pytest.mark.parametrize("family", ["simt_forward", "ampere_forward"])
def test_a_seed_variant_is_certified_and_timed_in_the_child(state: MeasuringState, child: MeasuringChild, family: str) -> None:
    source = seed_source(state, family, CAUSAL)
    timed = child.call(family, bench.measure_task, source, None, CAUSAL, certify.quick)
    assert timed.certificate.verdict is Verdict.EXACT, timed.certificate.failure
    assert timed.measurement.median_us > 0 and timed.measurement.tflops > 0.5
    assert timed.measurement.p10_us <= timed.measurement.median_us <= timed.measurement.p90_us


def small_launch(state: MeasuringState, body: str, name: str, threads: int, grid: int) -> KernelLaunch:
    problem = Problem(DType.FLOAT32, 64, 64, 1, 16, 16, 4096, 4096)  # q has 4,194,304 elements
    made = state.operands(problem, 0)
    kernel = state.executor.load(small_source(body, (name, threads, 0)))
    return KernelLaunch(name, kernel, (grid,), made.params(state.executor.workspace(0)), (made,))


def warm_us(state: MeasuringState, each: KernelLaunch, spin: KernelLaunch) -> float:
    """Time of a launch right after the same launch, with nothing in between that touches memory."""
    events = [(state.gpu.event(), state.gpu.event()) for _ in range(50)]
    with state.gpu.current():
        for start, end in events:
            each()
            spin()
            state.gpu.record_event(start)
            each()
            state.gpu.record_event(end)
    state.gpu.synchronize("warm")
    return float(np.median([state.gpu.elapsed_us(start, end) for start, end in events]))


def test_the_flush_makes_the_l2_cold(state: MeasuringState) -> None:
    if state.gpu.l2_bytes < 32 << 20:
        pytest.skip("the L2 does not hold 16 MiB with room to spare")
    each, spin = small_launch(state, READ, "read", 256, 1056), small_launch(state, SPIN, "spin", 1, 1)
    warm = warm_us(state, each, spin)
    cold = float(np.median(DeviceStopwatch(state.gpu).run([each] * 50)))
    print(f"cold {cold:.2f} µs, warm {warm:.2f} µs")
    assert cold > 1.15 * warm, f"cold {cold:.2f} µs, warm {warm:.2f} µs"


def test_one_kernel_under_two_names_is_equally_fast(state: MeasuringState) -> None:
    source = seed_source(state, "ampere_forward", CAUSAL)
    found = bench.interleave_task(state, [("first", source, None), ("second", source, None)], CAUSAL, rounds=40)
    assert found.ratio("first", "second").median == pytest.approx(1.0, abs=0.02)
    assert timing.choose(found.samples, ["second"]) == "second"


def test_a_longer_problem_is_measured_as_longer(state: MeasuringState) -> None:
    times = []
    for seqlen in (1024, 2048, 4096):
        problem = Problem(DType.BFLOAT16, 64, 64, 1, 16, 16, seqlen, seqlen)
        source = seed_source(state, "ampere_forward", problem)
        measured = bench.measure_task(state, source, None, problem).measurement
        assert measured is not None
        times.append(measured.median_us)
    assert all(2.0 < longer / shorter < 6.0 for shorter, longer in pairwise(times)), times


@pytest.mark.parametrize("name", list(peers.PEERS))
@pytest.mark.parametrize(
    "problem",
    [
        FULL,
        CAUSAL,
        Problem(DType.FLOAT16, 64, 64, 2, 4, 4, 300, 500, Mask.causal()),
        Problem(DType.BFLOAT16, 64, 64, 2, 4, 2, 512, 512, Mask.window(100, 0)),
    ],
    ids=str,
)
def test_a_peer_computes_the_same_attention_on_the_same_operands(state: MeasuringState, name: str, problem: Problem) -> None:
    made = state.operands(problem, 3)
    try:
        peer = peers.prepare(name, made.for_peers(state.gpu))
    except peers.PeerUnavailable as error:
        pytest.skip(str(error))
    import torch

    state.launchable("ours", seed_source(state, "ampere_forward", problem), None, problem, 3)()
    state.gpu.synchronize()
    where = peers.DeviceArray(made.operands["o"].address, bench.memory_shapes(problem)["o"], problem.dtype)
    ours = peers.as_torch(torch, where, state.gpu.index).float()
    output: Any = peer.run()
    output = output[0] if isinstance(output, tuple) else output
    theirs = (output.transpose(1, 2) if name.startswith("sdpa") else output).float()
    visible = torch.isfinite(theirs)
    assert float((ours - theirs)[visible].abs().max()) < 0.03
    assert float(ours.abs().max()) > 0.1


def test_the_clock_is_read_where_nvml_answers(state: MeasuringState) -> None:
    if not state.telemetry.available:
        pytest.skip("no NVML")
    measured = bench.measure_task(state, seed_source(state, "ampere_forward", FULL), None, FULL).measurement
    assert measured is not None and measured.clock_mhz is not None and min(measured.clock_mhz) > 100


def test_all_installed_peers_are_compared_in_one_run(child: MeasuringChild, state: MeasuringState) -> None:
    source = seed_source(state, "ampere_forward", CAUSAL)
    found = child.call("compare", bench.interleave_task, [("ours", source, None)], CAUSAL, 10, 0, list(peers.PEERS))
    assert set(found.samples) | set(found.missing) == {"ours", *peers.PEERS}
    for name in set(found.samples) - {"ours"}:
        print(f"{name} / ours: {found.ratio(name, 'ours')}")
    for name, reason in found.missing.items():
        print(f"{name}: {reason}")
