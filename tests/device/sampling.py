"""Which variants the device tests run: a fixed random sample of every family, over types, head dims and masks."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

from flashgen.errors import EmptySpace, UnsupportedProblem
from flashgen.model import DeviceLimits, DType, Mask, Op, Problem, Source, Variant
from flashgen.render import render
from flashgen.space import Space, load_spaces

DTYPES = (DType.BFLOAT16, DType.FLOAT16, DType.FLOAT32)
HEAD_DIMS = ((64, 64), (128, 128), (256, 256), (80, 80), (192, 128), (72, 40), (8, 16))
MASKS = (Mask(), Mask.causal(), Mask.window(100, 20))


def problem(dtype: DType, dims: tuple[int, int], mask: Mask) -> Problem:
    return Problem(dtype, *dims, batch=1, heads_q=4, heads_kv=2, seqlen_q=300, seqlen_kv=300, mask=mask)


def sample(device: DeviceLimits, per_family: int, seed: int = 7, op: Op = Op.FORWARD) -> Iterator[tuple[Space, Source, Problem]]:
    """`per_family` feasible variants of each family, each with a problem of its class; the fallback is always among them."""
    for space in load_spaces(op):
        chosen = random.Random(seed)
        taken: set[tuple[Variant, object]] = set()
        while len(taken) < per_family:
            each = replace(problem(chosen.choice(DTYPES), chosen.choice(HEAD_DIMS), chosen.choice(MASKS)), op=op)
            try:
                bound = space.bind(each, device)
                variant = chosen.choice(bound.feasible()) if taken else bound.fallback()
            except (UnsupportedProblem, EmptySpace):
                continue
            if (variant, each.klass()) not in taken:
                taken.add((variant, each.klass()))
                yield space, render(space, each.klass(), variant), each
