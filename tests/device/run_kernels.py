"""Runs one variant of each family on small problems; started under compute-sanitizer by test_sanitizer_on_device.py."""

from __future__ import annotations

import sys

from flashgen import certify
from flashgen.device import present
from flashgen.gpu import Gpu
from flashgen.model import DType, Mask, Problem, Verdict
from flashgen.render import render
from flashgen.runtime import DeviceExecutor
from flashgen.space import load_space


def main(families: list[str]) -> int:
    executor, limits = DeviceExecutor(Gpu(0)), present()
    for family in families:
        space = load_space(family)
        for mask in (Mask(), Mask.causal(), Mask.window(40, 9)):
            dtype = DType.FLOAT32 if family.startswith("standard") else DType.BFLOAT16
            problem = Problem(dtype, 72, 64, 1, 2, 1, 150, 170, mask)
            bound = space.bind(problem, limits)
            source = render(space, problem.klass(), (bound.seeds() or [bound.fallback()])[0])
            certificate = certify.quick(executor, space, source, problem, 3)
            print(f"{source.variant} {mask}: {certificate.verdict}", flush=True)
            if certificate.verdict is not Verdict.EXACT and not space.definition.baseline:
                print(certificate.failure)
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
