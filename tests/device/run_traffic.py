"""Runs one family on one problem a few times; started under Nsight Compute by test_traffic_on_device.py.

python run_traffic.py FAMILY BATCH HEADS SEQLEN HEAD_DIM MASK
"""

from __future__ import annotations

import sys

import numpy as np

from flashgen import cases
from flashgen.cases import Layout
from flashgen.device import present
from flashgen.gpu import Gpu
from flashgen.model import DType, Mask, Problem, Variant
from flashgen.render import render
from flashgen.runtime import DeviceExecutor
from flashgen.space import BoundSpace, load_space


def variant_of(bound: BoundSpace) -> Variant:
    """The variant that is measured and modelled: the first seed."""
    return (bound.seeds() or [bound.fallback()])[0]


def problem_of(words: list[str]) -> Problem:
    """The problem that the arguments describe, in fp16."""
    batch, heads, seqlen, head_dim = map(int, words[:4])
    mask = Mask.causal() if words[4] == "causal" else Mask()
    return Problem(DType.FLOAT16, head_dim, head_dim, batch, heads, heads, seqlen, seqlen, mask)


def main(words: list[str]) -> int:
    problem = problem_of(words[1:])
    bound = load_space(words[0]).bind(problem, present())
    source = render(bound.space, problem.klass(), variant_of(bound))
    inputs = cases.normal(problem, np.random.default_rng(0))
    tensors = cases.operands(problem, inputs, Layout.CONTIGUOUS)
    DeviceExecutor(Gpu(0)).forward(source, problem, tensors, problem.scale)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
