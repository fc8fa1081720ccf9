"""Backward families with tensor cores on the GPU: every two values offered together are exact, designs are clean under compute-sanitizer.

`test_backward_on_device.py` judges random variants by the whole suite, and the bits of 30 repetitions.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from covering import covering

from flashgen import device, gate, gradient_gate
from flashgen.gpu import Gpu
from flashgen.gradient_suite import full_suite
from flashgen.model import DType, Mask, Op, Problem, Source, Verdict
from flashgen.render import render
from flashgen.runtime import DeviceExecutor
from flashgen.space import Space, load_space

pytestmark = pytest.mark.device
FAMILIES = ("ampere_backward", "hopper_backward")
ENTRIES = "deltas|prepare|key_gradients|query_gradients"
CLASSES = (
    (DType.FLOAT16, (128, 128), Mask.causal()),
    (DType.BFLOAT16, (64, 64), Mask.window(100, 20)),
    (DType.BFLOAT16, (256, 256), Mask()),
)
SANITIZED, SANITIZED_CASES = 6, ("group", "ragged", "repeated", "crowd")


def problem_of(dtype: DType, dims: tuple[int, int], mask: Mask) -> Problem:
    return Problem(dtype, *dims, batch=1, heads_q=4, heads_kv=2, seqlen_q=300, seqlen_kv=500, mask=mask, op=Op.BACKWARD)


def sources_of(space: Space, problem: Problem) -> list[Source]:
    bound = space.bind(problem, device.present())
    return [render(space, problem.klass(), variant) for variant in covering(bound.feasible(), 1)]


def space_for_present(family: str) -> Space:
    """Skips where the family does not run."""
    space = load_space(family)
    if reason := space.unsupported(problem_of(*CLASSES[0]), device.present()):
        pytest.skip(reason)
    return space


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("dtype", "dims", "mask"), CLASSES, ids=str)
def test_every_two_values_that_are_offered_together_are_exact_on_the_gpu(
    family: str, dtype: DType, dims: tuple[int, int], mask: Mask
) -> None:
    space, problem, executor, wrong = space_for_present(family), problem_of(dtype, dims, mask), DeviceExecutor(Gpu(0)), list[str]()
    sources = sources_of(space, problem)
    executor.prepare(sources)
    for source in sources:
        found = gate.quick(executor, space, source, problem, 5)
        failure = found.failure or gradient_gate.spot_check(executor, source, problem, 5).failure
        wrong += [f"{source.variant}: {failure}"] if failure or found.verdict is not Verdict.EXACT else []
    assert not wrong, f"{len(wrong)} of {len(sources)}:\n" + "\n".join(wrong)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_designs_are_clean_under_compute_sanitizer(tool: str, family: str) -> None:
    space_for_present(family)
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("needs compute-sanitizer")
    command = [sanitizer, "--tool", tool, "--error-exitcode", "9", "--kernel-regex", f"kns=^({ENTRIES})$"]
    result = subprocess.run([*command, sys.executable, __file__, family], capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-1000:]
    assert "0 errors" in result.stdout or "0 hazards" in result.stdout, result.stdout[-2000:]


def main(family: str) -> int:
    """A few seeds that differ in much, on a few of their cases; started under compute-sanitizer."""
    space, executor, failures = load_space(family), DeviceExecutor(Gpu(0)), list[str]()
    problem = problem_of(*CLASSES[0])
    variants = covering(space.bind(problem, device.present()).seeds(), 1)[:SANITIZED]
    sources = [render(space, problem.klass(), variant) for variant in variants]
    executor.prepare(sources)
    for source in sources:
        print(source.variant)
        for case in full_suite(source.klass, *gradient_gate.sizes_of(space, source)):
            if case.name in SANITIZED_CASES:
                result = gradient_gate.run_case(executor, source, case, 7, space.deterministic(source.klass, source.variant))
                failures += [result.failure] if result.failure else []
    print("\n".join(failures))
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
