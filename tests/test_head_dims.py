"""Every head dim of the Limits: a quick certificate on the emulated executor for each multiple of 8 from 8 to 256."""

from __future__ import annotations

import pytest

from flashgen import certify, device
from flashgen.emulate import FAST, EmulatedExecutor
from flashgen.model import DType, Mask, Problem, Verdict
from flashgen.render import render
from flashgen.space import load_space

pytestmark = pytest.mark.emulated

HEAD_DIMS = range(8, 257, 8)
UNEQUAL = [(8, 256), (256, 8), (64, 128), (128, 64), (72, 40), (192, 128), (40, 200), (248, 56)]
"""(head_dim, head_dim_v)"""


def assert_exact(family: str, dtype: DType, head_dim: int, head_dim_v: int) -> None:
    limits = device.preset("h200")
    mask = Mask() if head_dim % 16 else Mask.causal()
    problem = Problem(dtype, head_dim, head_dim_v, 1, 1, 1, 512, 512, mask)
    space = load_space(family)
    source = render(space, problem.klass(), space.bind(problem, limits).fallback())
    certificate = certify.quick(EmulatedExecutor(limits, FAST, isolated=False), space, source, problem, seed=head_dim)
    assert certificate.verdict is Verdict.EXACT, certificate.failure


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(("family", "dtype"), [("ampere_forward", DType.BFLOAT16), ("simt_forward", DType.FLOAT32)])
def test_the_fallback_is_exact_at_every_head_dim(family: str, dtype: DType, head_dim: int) -> None:
    assert_exact(family, dtype, head_dim, head_dim)


@pytest.mark.slow
@pytest.mark.parametrize(("head_dim", "head_dim_v"), UNEQUAL)
@pytest.mark.parametrize(("family", "dtype"), [("ampere_forward", DType.FLOAT16), ("simt_forward", DType.FLOAT16)])
def test_the_fallback_is_exact_where_v_has_another_width(family: str, dtype: DType, head_dim: int, head_dim_v: int) -> None:
    assert_exact(family, dtype, head_dim, head_dim_v)
