"""The backward candidate on the GPU: every gradient within the bound, the same bits every time, and clean under compute-sanitizer."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from backward_kernels import (
    BackwardTensors,
    Case,
    backward_source,
    candidate_space,
    cases_of,
    expect,
    first_failure,
    operands,
    params_of,
    templates_with_candidates,
)

from flashgen import cases, device, runtime
from flashgen.gpu import Gpu
from flashgen.model import DType, Mask, Problem, Source
from flashgen.runtime import DeviceExecutor
from flashgen.space import BoundSpace, Space

pytestmark = pytest.mark.device
MASKS = (Mask(), Mask.causal(), Mask.window(-1, -1))
DIMS = ((64, 64), (128, 128), (40, 96), (256, 256), (8, 16))
REPETITIONS = 30


class OnDevice:
    """Runs a source on GPU 0; fulfils `backward_kernels.Run`."""

    def __init__(self) -> None:
        self.executor = DeviceExecutor(Gpu(0))

    def __call__(self, source: Source, bound: BoundSpace, case: Case, tensors: BackwardTensors) -> None:
        gpu, grids = self.executor.gpu, bound.grids(source.variant)
        kernel, named = self.executor.load(source), tensors.inputs | tensors.outputs
        copies = {name: gpu.upload(tensor.buffer) for name, tensor in named.items()}
        workspace = self.executor.workspace(bound.workspace_bytes(source.variant))
        at = {name: runtime.operand(tensor, copies[name]) for name, tensor in named.items()}
        kernel.launch(grids, params_of(case, at, workspace.address))
        gpu.synchronize(f"{source.variant} on {case.problem}")
        for name, tensor in named.items():
            gpu.download(copies[name], tensor.buffer)


@pytest.fixture(scope="module")
def space(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Space]:
    with templates_with_candidates(tmp_path_factory.mktemp("templates with candidates")):
        yield candidate_space("simt_backward")


def sampled(space: Space, seed: int) -> tuple[Problem, Source, list[Case]]:
    chosen = random.Random(seed)
    dtype, mask, dims = list(DType)[seed % 3], MASKS[seed // 3 % 3], DIMS[seed % len(DIMS)]
    problem = Problem(dtype, *dims, batch=1, heads_q=4, heads_kv=2, seqlen_q=300, seqlen_kv=500, mask=mask)
    variant = chosen.choice(space.bind(problem, device.present()).feasible())
    tiles = variant.as_dict()
    return problem, backward_source(space, problem, variant), cases_of(problem, tiles["block_q"], tiles["block_kv"])


@pytest.mark.parametrize("seed", range(18))
def test_a_sampled_variant_passes_every_case_on_the_gpu(space: Space, seed: int) -> None:
    problem, source, chosen = sampled(space, seed)
    assert not first_failure(space, source, device.present(), [*chosen, Case("real_size", problem, dlse=True)], [OnDevice()])


def test_thirty_repetitions_give_the_same_bits(space: Space) -> None:
    problem, source, _ = sampled(space, 2)
    case, run, bits = Case("repeated", problem, dlse=True), OnDevice(), []
    for _ in range(REPETITIONS):
        tensors = operands(case, expect(case))
        run(source, space.bind(problem, device.present()), case, tensors)
        bits.append([cases.bits_of(tensor.view()) for tensor in tensors.outputs.values()])
    assert all(np.array_equal(left, right) for again in bits[1:] for left, right in zip(bits[0], again, strict=True))


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_the_backward_candidate_is_clean_under_compute_sanitizer(tool: str) -> None:
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("needs compute-sanitizer")
    command = [sanitizer, "--tool", tool, "--error-exitcode", "9", "--kernel-regex", "kns=^(deltas|key_gradients|query_gradients)$"]
    result = subprocess.run([*command, sys.executable, __file__], capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-1000:]
    assert "0 errors" in result.stdout or "0 hazards" in result.stdout, result.stdout[-2000:]


def main() -> int:
    """Three variants on their cases; started under compute-sanitizer."""
    import tempfile

    with tempfile.TemporaryDirectory() as root, templates_with_candidates(Path(root)):
        space, failures = candidate_space("simt_backward"), list[str]()
        for seed in (0, 4, 8):
            _, source, chosen = sampled(space, seed)
            failures.append(first_failure(space, source, device.present(), chosen, [OnDevice()]))
    print("\n".join(filter(None, failures)))
    return int(any(failures))


if __name__ == "__main__":
    sys.exit(main())
