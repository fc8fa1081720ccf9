"""The float64 gradients: equal to finite differences of the float64 forward pass, and 0 where nothing is seen."""

from __future__ import annotations

import numpy as np
import pytest

from flashgen import gradients, reference
from flashgen.model import Alignment, DType, Mask, Problem

MASKS = [
    Mask(),
    Mask.causal(),
    Mask.causal(Alignment.TOP_LEFT),
    Mask.window(1, 2),
    Mask.window(0, 0, Alignment.TOP_LEFT),
    Mask.window(-1, 1),
    Mask.window(2, -1, Alignment.TOP_LEFT),
]
SCALE = 0.4


def problem_of(mask: Mask, lengths: tuple[int, int] = (6, 5), dtype: DType = DType.FLOAT32) -> Problem:
    return Problem(dtype, 8, 16, batch=2, heads_q=4, heads_kv=2, seqlen_q=lengths[0], seqlen_kv=lengths[1], mask=mask)


def drawn(problem: Problem, seed: int = 1) -> tuple[np.ndarray, ...]:
    """q, k, v, dout, dlse whose values are elements of the problem's type."""
    rng = np.random.default_rng(seed)
    kv = (problem.batch, problem.heads_kv, problem.seqlen_kv)
    rows = (problem.batch, problem.heads_q, problem.seqlen_q)
    shapes = ((*rows, problem.head_dim), (*kv, problem.head_dim), (*kv, problem.head_dim_v), (*rows, problem.head_dim_v), rows)
    return tuple(reference.round_to(rng.standard_normal(shape), problem.dtype).astype(np.float64) for shape in shapes)


def loss(q: np.ndarray, k: np.ndarray, v: np.ndarray, dout: np.ndarray, dlse: np.ndarray, problem: Problem) -> float:
    result = reference.attention(q, k, v, problem, SCALE)
    return float((dout * result.o).sum() + (dlse * np.where(np.isneginf(result.lse), 0.0, result.lse)).sum())


@pytest.mark.parametrize("lengths", [(6, 5), (3, 7)], ids=["rows-without-keys", "keys-without-rows"])
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_gradients_are_the_differences_of_the_loss(mask: Mask, lengths: tuple[int, int]) -> None:
    """Central differences along three random directions of each operand; a direction sums every element's error."""
    problem = problem_of(mask, lengths)
    operands = drawn(problem)
    found = gradients.attention(*operands, problem, SCALE)
    rng, step = np.random.default_rng(2), 1e-5
    for index, (name, gradient) in enumerate(found.named()):
        for _ in range(3):
            direction = rng.standard_normal(operands[index].shape)
            up, down = (
                loss(*(x + sign * step * direction if i == index else x for i, x in enumerate(operands)), problem) for sign in (1, -1)
            )
            assert (gradient * direction).sum() == pytest.approx((up - down) / (2 * step), rel=1e-7, abs=1e-8), name


def test_every_single_element_is_a_difference_of_the_loss() -> None:
    problem = Problem(DType.FLOAT32, 8, 8, batch=1, heads_q=2, heads_kv=1, seqlen_q=4, seqlen_kv=3, mask=Mask.causal())
    operands = drawn(problem)
    found = gradients.attention(*operands, problem, SCALE)
    for index, (name, gradient) in enumerate(found.named()):
        for place in np.ndindex(gradient.shape):
            sides = []
            for change in (1e-5, -1e-5):
                moved = operands[index].copy()
                moved[place] += change
                sides.append(loss(*(moved if i == index else x for i, x in enumerate(operands)), problem))
            assert gradient[place] == pytest.approx((sides[0] - sides[1]) / 2e-5, rel=1e-6, abs=1e-8), (name, place)


def test_rows_without_keys_and_keys_without_rows_get_exactly_zero() -> None:
    rows = gradients.attention(*drawn(problem_of(Mask.causal(), (6, 4))), problem_of(Mask.causal(), (6, 4)), SCALE)
    assert (rows.dq[:, :, :2] == 0).all()
    assert (rows.dq[:, :, 3:] != 0).any()
    keys = gradients.attention(
        *drawn(problem_of(Mask.causal(Alignment.TOP_LEFT), (3, 5))), problem_of(Mask.causal(Alignment.TOP_LEFT), (3, 5)), SCALE
    )
    assert (keys.dk[:, :, 3:] == 0).all()
    assert (keys.dv[:, :, 3:] == 0).all()
    assert (keys.dv[:, :, :3] != 0).all()


@pytest.mark.parametrize("lengths", [(0, 4), (4, 0), (0, 0)])
def test_an_empty_side_gives_empty_or_zero_gradients(lengths: tuple[int, int]) -> None:
    problem = problem_of(Mask(), lengths)
    operands = drawn(problem)
    found = gradients.attention(*operands, problem, SCALE)
    for (_, gradient), operand in zip(found.named(), operands[:3], strict=True):
        assert gradient.shape == operand.shape
        assert (gradient == 0).all()


def test_whatever_lies_in_keys_that_no_row_sees_changes_nothing() -> None:
    problem = problem_of(Mask.causal(Alignment.TOP_LEFT), (3, 5))
    q, k, v, dout, dlse = drawn(problem)
    clean = gradients.attention(q, k, v, dout, dlse, problem, SCALE)
    k[:, :, 3:], v[:, :, 3:] = np.nan, np.inf
    dirty = gradients.attention(q, k, v, dout, dlse, problem, SCALE)
    for (_, left), (_, right) in zip(clean.named(), dirty.named(), strict=True):
        assert np.array_equal(left, right)


def test_a_group_sums_the_gradients_of_its_query_heads() -> None:
    problem = problem_of(Mask())
    q, k, v, dout, dlse = drawn(problem)
    found = gradients.attention(q, k, v, dout, dlse, problem, SCALE)
    seen = reference.visible(problem.mask, 6, 5)
    parts = [gradients.head(q[1, h], k[1, 1], v[1, 1], dout[1, h], dlse[1, h], seen, SCALE) for h in (2, 3)]
    np.testing.assert_allclose(found.dk[1, 1], parts[0].dk + parts[1].dk, rtol=1e-13)
    np.testing.assert_allclose(found.dv[1, 1], parts[0].dv + parts[1].dv, rtol=1e-13)


@pytest.mark.parametrize(("dtype", "low", "high"), [(DType.BFLOAT16, 2e-3, 1e-1), (DType.FLOAT16, 2e-4, 1e-2), (DType.FLOAT32, 1e-8, 5e-6)])
def test_the_plain_gradients_err_by_the_precision_of_their_type(dtype: DType, low: float, high: float) -> None:
    problem = problem_of(Mask.causal(), (32, 40), dtype)
    q, k, v, dout, dlse = drawn(problem)
    exact = gradients.attention(q, k, v, dout, dlse, problem, SCALE)
    given = gradients.saved(q, k, v, dout, dlse, problem, SCALE)
    errors = gradients.plain_errors(q, k, v, given, problem, SCALE, exact)
    assert all(low < error < high for error in errors.values()), errors


def test_plain_gradients_are_exactly_zero_where_nothing_is_seen() -> None:
    problem = problem_of(Mask.causal(), (6, 4), DType.BFLOAT16)
    q, k, v, dout, dlse = drawn(problem)
    found = gradients.plain(q, k, v, gradients.saved(q, k, v, dout, dlse, problem, SCALE), problem, SCALE)
    assert (found.dq[:, :, :2] == 0).all()
