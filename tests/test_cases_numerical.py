"""Numerical cases from public bug reports, with the values they are stated with. `cases.md` maps every case id to its tests."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from flashgen import cases, certify, device, reference, render, suite
from flashgen.cases import Inputs, Layout
from flashgen.emulate import FAST, POLICIES, EmulatedExecutor
from flashgen.errors import InvalidProblem
from flashgen.model import Alignment, DType, Executor, Mask, Problem, Source
from flashgen.space import load_space
from flashgen.suite import Case, Check, Twin

BF16, FP16, FP32 = DType.BFLOAT16, DType.FLOAT16, DType.FLOAT32
FAMILIES = ("ampere_forward", "simt_forward")
EXECUTORS = [pytest.param("emulated", marks=pytest.mark.emulated), pytest.param("device", marks=pytest.mark.device)]
H200 = device.preset("h200")
WHOLE = 1 << 40
"""More elements than any problem here has, so that its size is not cut."""


@dataclass(frozen=True)
class Result:
    """Output (batch, heads, rows, columns) and lse (batch, heads, rows) as float64."""

    o: NDArray[np.float64]
    lse: NDArray[np.float64]


@pytest.fixture(params=EXECUTORS)
def executor(request: pytest.FixtureRequest) -> Executor:
    if request.param == "emulated":
        return EmulatedExecutor(H200, FAST, isolated=False)
    from flashgen.runtime import DeviceExecutor

    return DeviceExecutor()


@lru_cache(maxsize=256)
def sources(problem: Problem, family: str) -> tuple[Source, ...]:
    """The fallback and the first seed of a family."""
    space = load_space(family)
    bound = space.bind(problem, H200)
    variants = dict.fromkeys([bound.fallback(), *bound.seeds()[:1]])
    return tuple(render.render(space, problem.klass(), variant) for variant in variants)


def source_of(problem: Problem, family: str) -> Source:
    return sources(replace(problem, batch=1, heads_q=1, heads_kv=1, seqlen_q=256, seqlen_kv=256, mask=Mask(problem.mask.kind)), family)[0]


def run(
    executor: Executor, source: Source, problem: Problem, inputs: Inputs, scale: float | None = None, layout: Layout = Layout.ROOMY
) -> Result:
    """One launch that passes the gate: guards, bound, empty rows, lse."""
    case = Case("here", problem, lambda *_: inputs, Check.BOUNDED, Twin.NONE, layout, scale or problem.scale)
    expected = certify.expect(case, 0)
    tensors, failure = certify.launch(executor, source, problem, inputs, layout, case.scale)
    failure = failure or certify.judge(case, expected, tensors).failure
    assert failure == "", f"{source.variant} on {problem}: {failure}"
    return Result(reference.decode(tensors.o.view(), problem.dtype).astype(np.float64), tensors.lse.view()[..., 0].astype(np.float64))


def randn(problem: Problem, seed: int = 0, spread: float = 1.0) -> Inputs:
    return cases.normal(problem, np.random.default_rng(seed), spread)


def problem_of(dtype: DType, head_dim: int, heads: tuple[int, int, int], lengths: tuple[int, int], mask: Mask | None = None) -> Problem:
    return Problem(dtype, head_dim, head_dim, *heads, *lengths, mask or Mask())


# N01, N02: rows without keys ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("family", FAMILIES)
def test_causal_rows_above_the_first_key_are_zero_with_lse_minus_infinity(executor: Executor, family: str, dtype: DType) -> None:
    problem = problem_of(dtype, 16, (1, 1, 1), (4, 2), Mask.causal())
    inputs = randn(problem)
    result = run(executor, source_of(problem, family), problem, inputs)
    assert (result.o[0, 0, :2] == 0).all() and np.isneginf(result.lse[0, 0, :2]).all()
    assert np.array_equal(result.o[0, 0, 2], inputs.v[0, 0, 0])
    score = float(inputs.q[0, 0, 2].astype(np.float64) @ inputs.k[0, 0, 0].astype(np.float64)) * problem.scale
    assert result.lse[0, 0, 2] == pytest.approx(score, rel=1e-5, abs=1e-5)


def test_float32_rows_without_keys_are_zero_and_the_others_right(executor: Executor) -> None:
    # Queries 0..3 see the keys from their own on, queries 4..7 see none.
    problem = problem_of(FP32, 8, (1, 1, 1), (8, 4), Mask.window(0, 3, Alignment.TOP_LEFT))
    result = run(executor, source_of(problem, "simt_forward"), problem, randn(problem))
    assert (result.o[0, 0, 4:] == 0).all() and np.isneginf(result.lse[0, 0, 4:]).all()
    assert np.isfinite(result.lse[0, 0, :4]).all()


# N04, N05: scores that a sentinel or a fused exponent cannot hold -------------------------------------------------------


@pytest.mark.parametrize("scale", [None, 1.0], ids=["default", "one"])
@pytest.mark.parametrize("family", FAMILIES)
def test_scores_below_any_finite_sentinel_keep_their_weights(executor: Executor, family: str, scale: float | None) -> None:
    problem = problem_of(BF16, 128, (1, 1, 1), (1, 64))
    result = run(executor, source_of(problem, family), problem, cases.strongly_negative(problem), scale)
    assert (result.o == 32.0).all()
    assert result.lse[0, 0, 0] == pytest.approx(-246396.53 if scale else -21775.423, rel=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_huge_single_score_returns_its_value(executor: Executor, family: str) -> None:
    problem = problem_of(BF16, 64, (1, 1, 1), (1, 1))
    result = run(executor, source_of(problem, family), problem, cases.huge_single_key(problem))
    assert (result.o == 133120).all()
    assert result.lse[0, 0, 0] == pytest.approx(1.417674752e11, rel=1e-5)


# N09, N25: masks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alignment", Alignment)
@pytest.mark.parametrize("family", FAMILIES)
def test_rectangular_causal_masks_follow_their_alignment_in_every_variant(executor: Executor, family: str, alignment: Alignment) -> None:
    for lengths in ((2, 5), (5, 6), (1, 228), (100, 164), (128, 64)):
        problem = problem_of(FP16, 64, (1, 2, 2), lengths, Mask.causal(alignment))
        for source in sources(problem_of(FP16, 64, (1, 1, 1), (256, 256), Mask.causal()), family):
            run(executor, source, problem, randn(problem))


def test_one_query_aligned_bottom_right_sees_every_key(executor: Executor) -> None:
    causal = problem_of(BF16, 64, (2, 2, 2), (1, 228), Mask.causal())
    everything = replace(causal, mask=Mask())
    inputs = randn(causal)
    masked = run(executor, source_of(causal, "ampere_forward"), causal, inputs)
    full = run(executor, source_of(everything, "ampere_forward"), everything, inputs)
    assert np.array_equal(masked.o, full.o)


def windowed(executor: Executor, lengths: tuple[int, int], left: int, right: int) -> tuple[Result, Inputs, Problem]:
    problem = problem_of(FP16, 64, (1, 2, 2), lengths, Mask.window(left, right))
    inputs = randn(problem)
    return run(executor, source_of(problem, "ampere_forward"), problem, inputs), inputs, problem


def test_a_window_over_everything_is_causal(executor: Executor) -> None:
    result, inputs, problem = windowed(executor, (256, 256), 255, 0)
    causal = replace(problem, mask=Mask.causal())
    assert np.array_equal(result.o, run(executor, source_of(causal, "ampere_forward"), causal, inputs).o)


def test_a_window_of_oneself_returns_v(executor: Executor) -> None:
    result, inputs, _ = windowed(executor, (256, 256), 0, 0)
    assert np.array_equal(result.o, inputs.v)


def test_a_huge_right_bound_drops_no_key_when_queries_outnumber_keys(executor: Executor) -> None:
    result, _, problem = windowed(executor, (6, 3), -1, 2147483647)
    assert np.isfinite(result.lse).all()
    assert reference.visible_counts(problem.mask, 6, 3).tolist() == [3] * 6


def test_rows_that_a_window_leaves_empty_are_zero(executor: Executor) -> None:
    result, _, _ = windowed(executor, (129, 32), 32, 64)
    assert (np.isneginf(result.lse).sum(axis=-1) == 33).all()


def test_negative_window_bounds_other_than_minus_one_are_refused() -> None:
    with pytest.raises(InvalidProblem, match="Only -1 means unlimited"):
        Mask.window(-1, -3)


# N10, N17: lengths and head dims ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("head_dim", "key"), [(32, -6.0), (64, -3.0), (128, -1.5)])
def test_strongly_negative_equal_scores_are_right_at_every_tail(executor: Executor, head_dim: int, key: float) -> None:
    for length in (64, 192, 320, 704, 705, 767, 640, 768) if executor.name == "device" else (64, 192, 704, 705):
        problem = problem_of(BF16, head_dim, (1, 1, 1), (length, length) if executor.name == "device" else (9, length))
        inputs = cases.constant_scores(problem, np.random.default_rng(0), 4.0, key)
        result = run(executor, source_of(problem, "ampere_forward"), problem, inputs, 0.125)
        assert result.lse == pytest.approx(-96 + math.log(length), rel=1e-5)


@pytest.mark.parametrize("head_dim", [40, 72, 80, 96, 104, 120, 136])
def test_head_dims_that_are_no_power_of_two_are_right_in_every_column(executor: Executor, head_dim: int) -> None:
    lengths = (512, 512) if executor.name == "device" else (70, 100)
    problem = problem_of(BF16, head_dim, (1, 2, 2), lengths)
    run(executor, source_of(problem, "ampere_forward"), problem, randn(problem))


@pytest.mark.parametrize("head_dim", [1, 33, 264])
def test_head_dims_that_no_family_takes_are_refused_by_name(head_dim: int) -> None:
    problem = problem_of(BF16, head_dim, (1, 8, 8), (512, 512))
    for family in FAMILIES:
        reason = load_space(family).unsupported(problem, H200)
        assert reason is not None and str(head_dim) in reason


# N12: what lies beyond the valid length ---------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("dtype", "length"), [(FP16, 1), (FP16, 3), (BF16, 48)])
def test_nan_after_the_valid_keys_of_a_cache_is_never_read(executor: Executor, family: str, dtype: DType, length: int) -> None:
    problem = problem_of(dtype, 64, (2, 2, 2), (3, length))
    inputs = randn(problem)
    # The roomy layout keeps 16 rows of NaN after the last key of every head.
    roomy = run(executor, source_of(problem, family), problem, inputs)
    tight = run(executor, source_of(problem, family), problem, inputs, layout=Layout.CONTIGUOUS)
    assert np.array_equal(roomy.o, tight.o)


# N18, N20: sizes --------------------------------------------------------------------------------------------------------


BEYOND_LIMITS = [(8300, 16, 1, 1, 128), (65536, 8, 4, 4, 64), (1, 65536, 10, 10, 16), (1, 1, 4194241, 16, 16)]
"""(batch, heads, seqlen_q, seqlen_kv, head_dim)"""


def beyond_limits(shape: tuple[int, ...]) -> Problem:
    batch, heads, seqlen_q, seqlen_kv, head_dim = shape
    return problem_of(FP16, head_dim, (batch, heads, heads), (seqlen_q, seqlen_kv))


@pytest.mark.parametrize("shape", BEYOND_LIMITS, ids=str)
def test_shapes_beyond_grid_and_index_limits_are_checked_at_their_size(shape: tuple[int, ...]) -> None:
    assert suite.real_size(beyond_limits(shape), WHOLE) == beyond_limits(shape)


@pytest.mark.device
@pytest.mark.parametrize("shape", BEYOND_LIMITS, ids=str)
def test_batches_heads_and_lengths_beyond_grid_and_index_limits(shape: tuple[int, ...]) -> None:
    from flashgen.runtime import DeviceExecutor

    problem = beyond_limits(shape)
    result = certify.spot_check(DeviceExecutor(), source_of(problem, "ampere_forward"), problem, seed=0, most_elements=WHOLE)
    assert result.failure == ""


@pytest.mark.parametrize("heads", [(65536, 1, 1), (1, 65536, 65536)], ids=["batch", "heads"])
def test_a_grid_is_one_dimensional_and_may_exceed_65535(heads: tuple[int, int, int]) -> None:
    problem = problem_of(FP16, 64, heads, (4, 4))
    for family in FAMILIES:
        bound = load_space(family).bind(problem, H200)
        assert bound.grids(bound.fallback()) == (65536,)


@pytest.mark.emulated
@pytest.mark.slow
def test_more_than_65535_heads_are_right_on_the_emulated_executor() -> None:
    problem = problem_of(FP16, 16, (1, 65536, 65536), (2, 2))
    executor = EmulatedExecutor(H200, FAST, isolated=False)
    assert certify.spot_check(executor, source_of(problem, "ampere_forward"), problem, seed=0, most_elements=WHOLE).failure == ""


def test_strides_that_exceed_31_bits_reach_the_kernel_whole() -> None:
    from flashgen.launch import Operand, forward_params

    problem = problem_of(BF16, 128, (400, 4, 4), (10496, 128))
    far = Operand(0, (4 * 10496 * 128 * 1000, 10496 * 128, 128))
    params: Any = forward_params(problem, 0.1, far, far, far, far, 0, 0)
    assert params.q_strides.batch == 4 * 10496 * 128 * 1000 > 2**31


# N21: layouts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [Layout.FUSED, Layout.TRANSPOSED, Layout.EXPANDED, Layout.UNALIGNED])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_strided_operands_give_the_bits_of_contiguous_ones(executor: Executor, head_dim: int, layout: Layout) -> None:
    problem = problem_of(BF16, head_dim, (1, 4, 4), (128, 128) if executor.name == "device" else (20, 40))
    inputs = cases.shared_heads(problem, np.random.default_rng(0)) if layout is Layout.EXPANDED else randn(problem)
    source = source_of(problem, "ampere_forward")
    strided = run(executor, source, problem, inputs, layout=layout)
    plain = run(executor, source, problem, inputs, layout=Layout.CONTIGUOUS)
    assert np.array_equal(strided.o, plain.o) and np.array_equal(strided.lse, plain.lse)


# N23: grouped heads -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_six_query_heads_over_two_kv_heads_map_by_threes(executor: Executor, family: str) -> None:
    problem = problem_of(BF16, 64, (1, 6, 2), (3, 4))
    base = randn(problem)
    v = np.broadcast_to(np.array([10.0, 20.0], dtype=np.float32)[None, :, None, None], base.v.shape)
    result = run(executor, source_of(problem, family), problem, Inputs(base.q, base.k, v))
    assert [set(np.unique(result.o[0, head])) for head in range(6)] == [{10.0}] * 3 + [{20.0}] * 3


@pytest.mark.parametrize(("query", "kv"), [(3, 2), (33, 2), (2, 4), (4, 0)])
def test_heads_that_do_not_divide_are_refused_with_both_counts(query: int, kv: int) -> None:
    with pytest.raises(InvalidProblem, match=f"{kv}"):
        problem_of(BF16, 64, (1, query, kv), (3, 4))


# N26: merging by lse ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", [0, 1, 100, 255])
def test_two_parts_merge_by_their_lse_into_the_whole(executor: Executor, split: int) -> None:
    problem = problem_of(BF16, 64, (1, 2, 2), (5, 256))
    inputs, source = randn(problem), source_of(problem, "ampere_forward")
    whole = run(executor, source, problem, inputs)
    parts = [
        run(
            executor,
            source,
            replace(problem, seqlen_kv=part.stop - part.start),
            Inputs(inputs.q, inputs.k[:, :, part], inputs.v[:, :, part]),
        )
        for part in (slice(0, split), slice(split, 256))
    ]
    lse = np.logaddexp(parts[0].lse, parts[1].lse)
    o = sum(np.exp(part.lse - lse)[..., None] * part.o for part in parts)
    assert split or np.isneginf(parts[0].lse).all()
    np.testing.assert_allclose(lse, whole.lse, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(o, whole.o, atol=2 * reference.ulp(float(np.abs(whole.o).max()), BF16))


# N33: repetition --------------------------------------------------------------------------------------------------------


@pytest.mark.emulated
def test_every_schedule_gives_the_same_bits() -> None:
    problem = problem_of(FP16, 128, (2, 1, 1), (70, 128))
    inputs = randn(problem, spread=3.0)
    source = source_of(problem, "ampere_forward")
    results = [run(EmulatedExecutor(H200, policy, isolated=False), source, problem, inputs) for policy in (FAST, *POLICIES)]
    assert all(np.array_equal(results[0].o, other.o) and np.array_equal(results[0].lse, other.lse) for other in results[1:])


@pytest.mark.device
def test_fifty_repetitions_give_the_same_bits() -> None:
    from flashgen.runtime import DeviceExecutor

    executor, problem = DeviceExecutor(), problem_of(FP16, 128, (300, 1, 1), (2048, 128))
    inputs, source = randn(problem, spread=3.0), source_of(problem, "ampere_forward")
    first, failure = certify.launch(executor, source, problem, inputs, Layout.CONTIGUOUS, problem.scale)
    assert failure == ""
    again = cases.operands(problem, inputs, Layout.CONTIGUOUS)
    for _ in range(50):
        again.o.buffer[:], again.lse.buffer[:] = np.nan, np.nan
        executor.forward(source, problem, again, problem.scale)
        assert np.array_equal(cases.bits_of(again.o.view()), cases.bits_of(first.o.view()))
        assert np.array_equal(cases.bits_of(again.lse.view()), cases.bits_of(first.lse.view()))


# N37: large values under a lagging reference ----------------------------------------------------------------------------


@pytest.mark.parametrize("mask", [Mask(), Mask.causal()], ids=str)
@pytest.mark.parametrize("size", [1e30, 1e33])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_huge_values_stay_finite_under_large_scores(executor: Executor, head_dim: int, size: float, mask: Mask) -> None:
    big = executor.name == "device"
    problem = problem_of(BF16, head_dim, (1, 4 if big else 1, 4 if big else 1), (1000, 1000) if big else (70, 300), mask)
    base = randn(problem)
    inputs = cases.rounded(problem, base.q * 8, base.k, base.v * np.float32(size))
    assert np.isfinite(run(executor, source_of(problem, "ampere_forward"), problem, inputs).o).all()


@pytest.mark.parametrize("height", [20.0, 40.0, 80.0])
@pytest.mark.parametrize("direction", ["rising", "falling"])
def test_scores_that_rise_or_fall_along_the_keys_keep_the_bound(executor: Executor, direction: str, height: float) -> None:
    problem = problem_of(BF16, 64, (1, 1, 1), (70, 300))
    inputs = cases.ramp(problem, np.random.default_rng(0), direction, height)
    huge = cases.rounded(problem, inputs.q, inputs.k, inputs.v * np.float32(1e30))
    for source in sources(problem_of(BF16, 64, (1, 1, 1), (256, 256)), "ampere_forward"):
        run(executor, source, problem, huge)


def test_the_map_has_every_case_and_names_tests_that_exist() -> None:
    text = (Path(__file__).parent / "cases.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("| ") and line[2] in "NTYE"]
    assert len(rows) == len(set(rows)) == 51
    for name in re.findall(r"`(test_\w+)\.py`: `(test_\w+)`", text):
        assert f"def {name[1]}(" in next(Path(__file__).parent.rglob(f"{name[0]}.py")).read_text(encoding="utf-8"), name
