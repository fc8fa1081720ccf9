"""Runs one variant of a family on small problems; started under compute-sanitizer by test_sanitizer_on_device.py.

python run_kernels.py FAMILY [HEAD_DIM …]: with head dims, one causal problem of each; without, every mask at an odd one.
"""

from __future__ import annotations

import sys

from flashgen import certify
from flashgen.device import present
from flashgen.gpu import Gpu
from flashgen.model import DType, Mask, Problem, Verdict
from flashgen.render import render
from flashgen.runtime import DeviceExecutor
from flashgen.space import load_space


def problems(family: str, head_dims: list[int]) -> list[Problem]:
    if head_dims:
        return [Problem(DType.BFLOAT16, dim, dim, 1, 2, 1, 150, 170, Mask.causal()) for dim in head_dims]
    dtype = DType.FLOAT32 if family.startswith("standard") else DType.BFLOAT16
    return [Problem(dtype, 72, 64, 1, 2, 1, 150, 170, mask) for mask in (Mask(), Mask.causal(), Mask.window(40, 9))]


def main(family: str, head_dims: list[int]) -> int:
    executor, limits = DeviceExecutor(Gpu(0)), present()
    space = load_space(family)
    for problem in problems(family, head_dims):
        bound = space.bind(problem, limits)
        source = render(space, problem.klass(), (bound.seeds() or [bound.fallback()])[0])
        certificate = certify.quick(executor, space, source, problem, 3)
        print(f"{source.variant} {problem}: {certificate.verdict}", flush=True)
        if certificate.verdict is not Verdict.EXACT and not space.definition.baseline:
            print(certificate.failure)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], list(map(int, sys.argv[2:]))))
