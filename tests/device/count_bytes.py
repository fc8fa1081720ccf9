"""What the matrix of scores costs in memory traffic, three ways: by formula, counted by the emulated executor, counted by a GPU.

    python tests/device/count_bytes.py

The formula is for 8192 query and key rows in fp16. The emulator runs the textbook kernels at 512, where a matrix is 256 times smaller. The
third part needs a GPU and Nsight Compute (ncu), and says so where they are missing; it runs 16 heads, so that what L2 keeps of a matrix
does not matter.
"""

from __future__ import annotations

from collections.abc import Callable

import counters
import numpy as np
from run_traffic import problem_of, variant_of

from flashgen import accounting, cases, device
from flashgen.cases import Layout
from flashgen.emulate import FAST, EmulatedExecutor
from flashgen.render import render
from flashgen.space import load_space

FAMILY, HEADS, MIB = "standard_forward", 16, 2**20
LARGE, SMALL = f"1 {HEADS} 8192 128 full", "1 1 512 16 full"


def by_formula() -> list[str]:
    """Bytes of one matrix of one head, and how often the textbook kernels walk over it."""
    asked = problem_of(LARGE)
    bound = load_space(FAMILY).bind(asked, device.preset("h200"))
    size = accounting.matrix_bytes(asked)
    walks = [each for each in accounting.account(bound, variant_of(bound)).passes if each.is_matrix]
    lines = [f"{size / MIB:.1f} MiB per matrix and head"]
    return lines + [f"{each.action} {each.operand}: {each.once / HEADS / MIB:.1f} MiB per head once" for each in walks]


def by_emulator() -> list[str]:
    """What the threads of the same kernels request at 512; requests for q, k, v, o and lse are taken off."""
    asked, target = problem_of(SMALL), device.preset("h200")
    bound = load_space(FAMILY).bind(asked, target)
    variant = variant_of(bound)
    executor = EmulatedExecutor(target, FAST)
    tensors = cases.operands(asked, cases.normal(asked, np.random.default_rng(0)), Layout.CONTIGUOUS)
    executor.forward(render(bound.space, asked.klass(), variant), asked, tensors, asked.scale)
    passes = accounting.account(bound, variant).passes
    found = executor.last_report.counters
    requested = found.global_bytes_read + found.global_bytes_written - sum(each.bytes for each in passes if not each.is_matrix)
    walks = sum(each.bytes for each in passes if each.is_matrix) / accounting.matrix_bytes(asked)
    one, times = requested / walks, (8192 // 512) ** 2
    return [
        f"{requested / MIB:.2f} MiB in {walks:g} walks over a matrix: {one / MIB:.2f} MiB each; times {times}: {one * times / MIB:.1f} MiB"
    ]


def by_gpu() -> list[str]:
    """DRAM bytes of each kernel, per head. Raises NoCounters."""
    if not device.is_present():
        raise counters.NoCounters("there is no GPU")
    ((counted,),) = counters.moved_bytes(FAMILY, [LARGE], launches=1)
    return [
        f"kernel {name}: {each[counters.READ] / HEADS / MIB:.1f} MiB read, {each[counters.WRITTEN] / HEADS / MIB:.1f} MiB written per head"
        for name, each in counted.items()
    ]


def section(title: str, lines: Callable[[], list[str]]) -> None:
    """One of the three ways, or why it is missing."""
    print(title)
    try:
        found = lines()
    except counters.NoCounters as error:
        found = [f"not counted: {error}"]
    for line in found:
        print(f"  {line}")


if __name__ == "__main__":
    section("formula, n = 8192, fp16", by_formula)
    section("emulated executor, n = 512", by_emulator)
    section(f"GPU, n = 8192, {HEADS} heads", by_gpu)
