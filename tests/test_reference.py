"""The yardstick itself: conversions against NumPy and torch, attention against a loop, visibility by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashgen import reference
from flashgen.model import Alignment, DType, Mask, Problem

FLOAT32_BITS = st.integers(0, 2**32 - 1)


def as_float32(bits: int) -> np.ndarray:
    return np.array([bits], dtype=np.uint32).view(np.float32)


@settings(deadline=None)  # the first call imports torch
@given(FLOAT32_BITS)
def test_bfloat16_rounding_of_float32_is_to_nearest_even(bits: int) -> None:
    torch = pytest.importorskip("torch")
    value = as_float32(bits)
    ours = reference.encode(value, DType.BFLOAT16)
    theirs = torch.from_numpy(value.copy()).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    assert np.isnan(value[0]) or ours[0] == theirs[0]


@given(st.integers(0, 2**16 - 1))
def test_every_bfloat16_survives_a_round_trip(bits: int) -> None:
    element = np.array([bits], dtype=np.uint16)
    value = reference.decode(element, DType.BFLOAT16)
    assert np.isnan(value[0]) or reference.encode(value, DType.BFLOAT16)[0] == bits


def test_float64_is_rounded_to_bfloat16_once_not_twice() -> None:
    halfway = 1 + 2.0**-8  # between two bfloat16, even one below
    assert reference.round_to(np.array([halfway]), DType.BFLOAT16)[0] == 1.0
    assert reference.round_to(np.array([halfway + 2.0**-40]), DType.BFLOAT16)[0] == 1.0 + 2.0**-7  # float32 would drop the last bit
    assert reference.round_to(np.array([halfway - 2.0**-40]), DType.BFLOAT16)[0] == 1.0


def test_nan_and_infinity_convert_to_themselves() -> None:
    values = np.array([np.nan, np.inf, -np.inf, 3.4e38], dtype=np.float32)
    assert np.isnan(reference.round_to(values, DType.BFLOAT16)[0])
    assert list(reference.round_to(values, DType.BFLOAT16)[1:]) == [np.inf, -np.inf, np.inf]


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.FLOAT16])
@pytest.mark.parametrize("magnitude", [1.0, 1.5, 3.0, 1000.0, 6e-8, 0.0])
def test_ulp_is_numpys_spacing(dtype: DType, magnitude: float) -> None:
    element = reference.storage(dtype).type(magnitude)
    assert reference.ulp(float(element), dtype) == np.spacing(element)


def test_ulp_of_bfloat16() -> None:
    assert reference.ulp(1.0, DType.BFLOAT16) == 2.0**-7
    assert reference.ulp(-200.0, DType.BFLOAT16) == 1.0
    assert reference.ulp(0.0, DType.BFLOAT16) == 2.0**-133


def test_ulp_distance_counts_steps_across_zero_and_marks_nan() -> None:
    tiny = np.float32(1e-45)
    left = np.array([1.0, -tiny, 0.0, np.nan, np.nan], dtype=np.float32)
    right = np.array([np.nextafter(np.float32(1), np.float32(2)), tiny, -0.0, 1.0, np.nan], dtype=np.float32)
    assert list(reference.ulp_distance(left, right, DType.FLOAT32)) == [1, 2, 0, reference.NAN_DISTANCE, 0]
    assert list(reference.ulp_distance(np.array([0x3F80], np.uint16), np.array([0xBF80], np.uint16), DType.BFLOAT16)) == [2 * 0x3F80]


@pytest.mark.parametrize(
    ("mask", "counts"),
    [
        (Mask(), [5, 5]),
        (Mask.causal(), [4, 5]),
        (Mask.causal(Alignment.TOP_LEFT), [1, 2]),
        (Mask.window(1, 0), [2, 2]),
        (Mask.window(0, -1, Alignment.TOP_LEFT), [5, 4]),
        (Mask.window(-1, 0), [4, 5]),
    ],
    ids=str,
)
def test_visible_keys_of_two_queries_and_five_keys(mask: Mask, counts: list[int]) -> None:
    assert reference.visible(mask, 2, 5).sum(axis=1).tolist() == counts


@given(st.integers(0, 9), st.integers(0, 9), st.integers(-1, 9), st.integers(-1, 9), st.sampled_from(Alignment), st.booleans())
def test_visible_counts_agree_with_the_matrix(q: int, kv: int, left: int, right: int, alignment: Alignment, causal: bool) -> None:
    mask = Mask.causal(alignment) if causal else Mask.window(left, right, alignment)
    assert reference.visible_counts(mask, q, kv).tolist() == reference.visible(mask, q, kv).sum(axis=1).tolist()


def example(mask: Mask, **changes: int) -> tuple[Problem, tuple[np.ndarray, ...]]:
    shape = {"batch": 2, "heads_q": 6, "heads_kv": 2, "seqlen_q": 5, "seqlen_kv": 7, **changes}
    problem = Problem(DType.FLOAT32, 8, 16, **shape, mask=mask)
    rng = np.random.default_rng(1)
    kv = (problem.batch, problem.heads_kv, problem.seqlen_kv)
    return problem, tuple(
        rng.standard_normal(s).astype(np.float32) for s in ((problem.batch, problem.heads_q, problem.seqlen_q, 8), (*kv, 8), (*kv, 16))
    )


def by_element(problem: Problem, q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """Attention written out element by element, from the definition of the mask."""
    o, lse = np.zeros((*q.shape[:3], v.shape[3])), np.full(q.shape[:3], -np.inf)
    for b, h, i in np.ndindex(*q.shape[:3]):
        at = i + problem.diagonal
        kind, left, right = problem.mask.kind.value, problem.mask.left, problem.mask.right
        keys = [
            j
            for j in range(problem.seqlen_kv)
            if kind == "none" or (kind == "causal" and j <= at)
            or (kind == "window" and (left < 0 or j >= at - left) and (right < 0 or j <= at + right))
        ]  # fmt: skip
        scores = np.array([float(q[b, h, i].astype(np.float64) @ k[b, h // 3, j].astype(np.float64)) * scale for j in keys])
        if keys:
            lse[b, h, i] = np.log(np.exp(scores).sum())
            o[b, h, i] = sum(np.exp(s - lse[b, h, i]) * v[b, h // 3, j].astype(np.float64) for s, j in zip(scores, keys, strict=True))
    return o, lse


@pytest.mark.parametrize(
    "mask", [Mask(), Mask.causal(), Mask.causal(Alignment.TOP_LEFT), Mask.window(1, 1), Mask.window(0, 3, Alignment.TOP_LEFT)], ids=str
)
def test_attention_equals_its_definition(mask: Mask) -> None:
    problem, (q, k, v) = example(mask, seqlen_q=8)
    result = reference.attention(q, k, v, problem, 0.4)
    o, lse = by_element(problem, q, k, v, 0.4)
    np.testing.assert_allclose(result.o, o, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(result.lse, lse, rtol=1e-12, atol=1e-14)


def test_rows_without_keys_are_zero_and_minus_infinity() -> None:
    problem, (q, k, v) = example(Mask.causal(), seqlen_q=9)
    result = reference.attention(q, k, v, problem, 0.5)
    assert (result.o[:, :, :2] == 0).all()
    assert np.isneginf(result.lse[:, :, :2]).all()
    assert np.isfinite(result.lse[:, :, 2:]).all()


@pytest.mark.parametrize(("seqlen_q", "seqlen_kv"), [(0, 4), (4, 0), (0, 0)])
def test_empty_lengths_give_empty_or_zero_results(seqlen_q: int, seqlen_kv: int) -> None:
    problem, (q, k, v) = example(Mask(), seqlen_q=seqlen_q, seqlen_kv=seqlen_kv)
    result = reference.attention(q, k, v, problem, 0.5)
    assert result.o.shape == (2, 6, seqlen_q, 16)
    assert (result.o == 0).all()
    assert reference.plain_error(q, k, v, problem, 0.5, result.o) == 0.0


def test_nan_in_keys_that_no_row_sees_changes_nothing() -> None:
    problem, (q, k, v) = example(Mask.causal(Alignment.TOP_LEFT))
    clean = reference.attention(q, k, v, problem, 0.5)
    k[:, :, 5:], v[:, :, 5:] = np.nan, np.nan
    dirty = reference.attention(q, k, v, problem, 0.5)
    assert np.array_equal(clean.o, dirty.o)
    assert np.array_equal(clean.lse, dirty.lse)


@pytest.mark.parametrize(("dtype", "low", "high"), [(DType.BFLOAT16, 5e-4, 5e-2), (DType.FLOAT16, 5e-5, 5e-3), (DType.FLOAT32, 1e-8, 1e-6)])
def test_the_plain_computation_errs_by_the_precision_of_its_type(dtype: DType, low: float, high: float) -> None:
    problem, operands = example(Mask(), seqlen_q=32, seqlen_kv=100)
    q, k, v = (reference.round_to(x, dtype) for x in operands)
    problem = Problem(dtype, 8, 16, 2, 6, 2, 32, 100)
    exact = reference.attention(q, k, v, problem, 0.5)
    assert low < reference.plain_error(q, k, v, problem, 0.5, exact.o) < high
