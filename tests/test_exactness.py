"""Exact against approximate, on one input."""

from __future__ import annotations

import pytest

from flashgen import accounting, device, exactness
from flashgen.model import DType, Mask, Problem
from flashgen.space import load_space

pytestmark = pytest.mark.emulated
H200 = device.preset("h200")


@pytest.fixture(scope="module")
def compared() -> exactness.Comparison:
    return exactness.compare_methods(Problem(DType.BFLOAT16, 64, 64, 4, 16, 16, 4096, 4096, Mask()), H200)


def test_exact_methods_err_by_rounding_and_approximations_by_orders_of_magnitude(compared: exactness.Comparison) -> None:
    exact = [each.max_error for each in compared.methods if each.kind == "exact"]
    approximate = [each.max_error for each in compared.methods if each.kind == "approximate"]
    assert len(exact) == 2 and len(approximate) == 3
    assert max(exact) <= 4 * compared.plain_error
    assert min(approximate) > 20 * max(exact)


def test_tiled_attention_is_within_twice_the_plain_error(compared: exactness.Comparison) -> None:
    tiled = next(each for each in compared.methods if each.name.startswith("tiled"))
    assert tiled.max_error <= 2 * compared.plain_error


def test_histograms_hold_every_element(compared: exactness.Comparison) -> None:
    elements = compared.problem.seqlen_q * compared.problem.head_dim_v
    assert {sum(count for *_, count in each.histogram) for each in compared.methods} == {elements}


def test_bytes_of_the_exact_methods_are_counted_and_equal_the_accounting(compared: exactness.Comparison) -> None:
    textbook, tiled = compared.methods[:2]
    for method, family in ((textbook, "standard_forward"), (tiled, "ampere_forward")):
        at = load_space(family).bind(compared.problem, H200)
        assert method.bytes_from == "counted"
        assert method.bytes == accounting.account(at, at.fallback()).total_bytes
