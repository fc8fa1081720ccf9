"""Runs variants of backward families on small problems; started under compute-sanitizer by test_backward_on_device.py."""

from __future__ import annotations

import sys

from flashgen import gate
from flashgen.device import present
from flashgen.errors import UnsupportedProblem
from flashgen.gpu import Gpu
from flashgen.model import DType, Mask, Op, Problem, Verdict
from flashgen.render import render
from flashgen.runtime import DeviceExecutor
from flashgen.space import load_space


def main(families: list[str]) -> int:
    executor, limits = DeviceExecutor(Gpu(0)), present()
    for family in families:
        space = load_space(family)
        for mask in (Mask(), Mask.causal(), Mask.window(40, 9)):
            problem = Problem(DType.BFLOAT16, 72, 64, 1, 2, 1, 150, 170, mask, Op.BACKWARD)
            try:
                bound = space.bind(problem, limits)
            except UnsupportedProblem as reason:
                print(reason)
                return 0
            for variant in dict.fromkeys([*bound.seeds()[:1], bound.fallback()]):
                source = render(space, problem.klass(), variant)
                certificate = gate.quick(executor, space, source, problem, 3)
                print(f"{source.variant} {mask}: {certificate.verdict}", flush=True)
                if certificate.verdict is not Verdict.EXACT:
                    print(certificate.failure)
                    return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
