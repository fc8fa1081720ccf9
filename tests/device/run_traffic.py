"""Runs one family some times on each of some problems, in fp16; started under Nsight Compute by counters.py.

python run_traffic.py FAMILY LAUNCHES "BATCH HEADS SEQLEN HEAD_DIM MASK" …
"""

from __future__ import annotations

import sys

from flashgen.model import DType, Mask, Problem, Variant
from flashgen.space import BoundSpace, load_space


def variant_of(bound: BoundSpace) -> Variant:
    """The variant that is measured and modelled: the first seed."""
    return (bound.seeds() or [bound.fallback()])[0]


def problem_of(words: str) -> Problem:
    """The problem that the words describe, in fp16."""
    *sizes, mask = words.split()
    batch, heads, seqlen, head_dim = map(int, sizes)
    return Problem(DType.FLOAT16, head_dim, head_dim, batch, heads, heads, seqlen, seqlen, Mask.causal() if mask == "causal" else Mask())


def main(family: str, launches: int, problems: list[str]) -> int:
    """Operands are made on the device, so that no time goes into random numbers of the host."""
    from flashgen import bench, device
    from flashgen.render import render

    state, limits = bench.open_device(0), device.present()
    for problem in map(problem_of, problems):
        bound = load_space(family).bind(problem, limits)
        source = render(bound.space, problem.klass(), variant_of(bound))
        launch = state.launchable(family, source, None, problem, seed=0)
        for _ in range(launches):
            launch()
            state.settle()
        del launch
        state.forget_operands()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), sys.argv[3:]))
