"""The ampere backward candidate on the GPU: every gradient within the bound, a second pass the same bits, clean under compute-sanitizer."""

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
sys.path.insert(0, str(Path(__file__).resolve().parent))

from backward_kernels import (
    Case,
    backward_source,
    candidate_space,
    cases_of,
    expect,
    first_failure,
    operands,
    outputs_of,
    templates_with_candidates,
)
from trial_ampere_backward import FAMILY, OnDevice

from flashgen import cases, device
from flashgen.gpu import Gpu
from flashgen.model import DType, Mask, Op, Problem, Source
from flashgen.runtime import DeviceExecutor
from flashgen.space import BoundSpace, Space

pytestmark = pytest.mark.device
MASKS = (Mask(), Mask.causal(), Mask.window(-1, -1))
DIMS = ((64, 64), (128, 128), (40, 96), (256, 256), (8, 16), (192, 128))
REPETITIONS = 30


@pytest.fixture(scope="module")
def space(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Space]:
    with templates_with_candidates(tmp_path_factory.mktemp("templates with candidates")):
        yield candidate_space(FAMILY)


def run_on_device() -> OnDevice:
    def bind(source: Source, problem: Problem) -> BoundSpace:
        return candidate_space(source.family).bind(problem, device.present())

    return OnDevice(DeviceExecutor(Gpu(0), bind=bind))


def sampled(space: Space, seed: int, two_pass: bool) -> tuple[Problem, Source, list[Case]]:
    chosen = random.Random(seed)
    dtype, mask, dims = (DType.BFLOAT16, DType.FLOAT16)[seed % 2], MASKS[seed % 3], DIMS[seed % len(DIMS)]
    problem = Problem(dtype, *dims, batch=1, heads_q=4, heads_kv=2, seqlen_q=300, seqlen_kv=500, mask=mask, op=Op.BACKWARD)
    feasible = space.bind(problem, device.present()).feasible()
    variant = chosen.choice([each for each in feasible if each.as_dict()["two_pass"] == two_pass])
    tiles = variant.as_dict()
    return problem, backward_source(space, problem, variant), cases_of(problem, int(tiles["block_q"]), int(tiles["block_kv"]))


@pytest.mark.parametrize("two_pass", [False, True], ids=["sums", "second_pass"])
@pytest.mark.parametrize("seed", range(12))
def test_a_sampled_variant_passes_every_case_on_the_gpu(space: Space, seed: int, two_pass: bool) -> None:
    problem, source, chosen = sampled(space, seed, two_pass)
    assert not first_failure(space, source, device.present(), [*chosen, Case("real_size", problem, dlse=True)], [run_on_device()])


def test_thirty_repetitions_of_a_second_pass_give_the_same_bits(space: Space) -> None:
    problem, source, _ = sampled(space, 1, True)
    case, run, bits = Case("repeated", problem, dlse=True), run_on_device(), []
    for _ in range(REPETITIONS):
        tensors = operands(case, expect(case))
        run(source, space.bind(problem, device.present()), case, tensors)
        bits.append([cases.bits_of(tensor.view()) for tensor in outputs_of(tensors).values()])
    assert all(np.array_equal(left, right) for again in bits[1:] for left, right in zip(bits[0], again, strict=True))


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_the_ampere_backward_candidate_is_clean_under_compute_sanitizer(tool: str) -> None:
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
        space, failures = candidate_space(FAMILY), list[str]()
        for seed, two_pass in ((0, False), (2, True), (4, False)):
            _, source, chosen = sampled(space, seed, two_pass)
            failures.append(first_failure(space, source, device.present(), chosen[:8], [run_on_device()]))
    print("\n".join(filter(None, failures)))
    return int(any(failures))


if __name__ == "__main__":
    sys.exit(main())
