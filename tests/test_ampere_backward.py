"""ampere_backward: every gradient within the bound on the emulated executor, planted faults rejected, no bank conflicts."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import numpy as np
import pytest
from ampere_backward_faults import CAUSAL, FAULTS, NONE, WINDOW
from backward_kernels import (
    Case,
    backward_source,
    cases_of,
    emulated,
    expect,
    failure_of,
    first_failure,
    operands,
    outputs_of,
)
from covering import covering

from flashgen import cases
from flashgen.device import preset
from flashgen.emulate import POLICIES, EmulatedExecutor, Policy
from flashgen.errors import CompileError
from flashgen.model import Alignment, DType, Mask, Op, Problem, Source
from flashgen.space import Space, load_space

DEVICE = preset("h200")
MASKS = (NONE, CAUSAL, WINDOW)
SMALL = {
    "two_pass": False, "block_q": 32, "block_kv": 32, "num_warps": 4, "num_sides": 2, "warps_across": 1, "num_stages": 2,
    "keys_in_registers": False, "tile_order": 0, "dq_steps": 1, "delayed_dq": True, "staggered": True,
    "pass_block_q": 64, "pass_block_kv": 32, "pass_warps": 4, "pass_stages": 2,
}  # fmt: skip
PASS = {"two_pass": True, "pass_block_q": 32, "pass_block_kv": 16, "pass_warps": 2}
JOINT = {"num_sides": 1, "block_q": 64, "block_kv": 64, "dq_steps": 2, "delayed_dq": False}
ACROSS = {"delayed_dq": False, "warps_across": 2, "num_warps": 8, "block_kv": 64, "block_q": 64}


@pytest.fixture(scope="module")
def space() -> Space:
    return load_space("ampere_backward")


def problem_of(dtype: DType, mask: Mask, dims: tuple[int, int] = (16, 24)) -> Problem:
    return Problem(dtype, *dims, batch=1, heads_q=1, heads_kv=1, seqlen_q=64, seqlen_kv=64, mask=mask, op=Op.BACKWARD)


def made(
    space: Space, changes: dict[str, int | bool], mask: Mask, dtype: DType = DType.BFLOAT16, dims: tuple[int, int] = (16, 24)
) -> tuple[Source, list[Case]]:
    problem, values = problem_of(dtype, mask, dims), {**SMALL, **changes}
    source = backward_source(space, problem, space.bind(problem, DEVICE).variant(values))
    return source, cases_of(problem, values["block_q"], values["block_kv"])


DESIGNS: dict[str, dict[str, int | bool]] = {"sums": {}, "second_pass": PASS, "joint": JOINT, "pairs": {"dq_steps": 2}}
QUICK = {("sums", NONE), ("sums", CAUSAL), ("second_pass", WINDOW), ("joint", CAUSAL), ("pairs", NONE)}


@pytest.mark.emulated
@pytest.mark.parametrize(
    ("changes", "mask"),
    [
        pytest.param(changes, mask, id=f"{name}-{mask}", marks=() if (name, mask) in QUICK else pytest.mark.slow)
        for name, changes in DESIGNS.items()
        for mask in MASKS
    ],
)
def test_every_gradient_is_within_the_bound(space: Space, changes: dict[str, int | bool], mask: Mask) -> None:
    source, chosen = made(space, changes, mask, DType.FLOAT16 if mask == CAUSAL else DType.BFLOAT16)
    assert not first_failure(space, source, DEVICE, chosen, [emulated(live_ctas=3)])


@pytest.mark.emulated
@pytest.mark.slow
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("changes", [ACROSS, {**ACROSS, **PASS}], ids=["sums", "second_pass"])
def test_warps_that_share_keys_pass_every_case(space: Space, changes: dict[str, int | bool], mask: Mask) -> None:
    source, chosen = made(space, changes, mask, dims=(128, 128))
    assert not first_failure(space, source, DEVICE, chosen, [emulated(POLICIES[2])])


PAIRS = [
    pytest.param((128, 128), CAUSAL, DType.FLOAT16),
    pytest.param((64, 64), WINDOW, DType.BFLOAT16, marks=pytest.mark.slow),
    pytest.param((40, 24), NONE, DType.FLOAT16, marks=pytest.mark.slow),
]


@pytest.mark.emulated
@pytest.mark.parametrize(("dims", "mask", "dtype"), PAIRS, ids=str)
def test_every_two_values_that_are_offered_together_give_right_gradients(
    space: Space, dims: tuple[int, int], mask: Mask, dtype: DType
) -> None:
    problem = replace(problem_of(dtype, mask, dims), heads_q=2, seqlen_q=512, seqlen_kv=512)
    wrong = list[str]()
    for number, variant in enumerate(covering(space.bind(problem, DEVICE).feasible(), 1)):
        tiles = variant.as_dict()
        ragged = replace(problem, seqlen_q=tiles["block_q"] + 2, seqlen_kv=tiles["block_kv"] + 3)
        run = emulated(POLICIES[number % len(POLICIES)], live_ctas=2)
        failure = failure_of(space, backward_source(space, problem, variant), DEVICE, Case("pairs", ragged, dlse=True), run)
        wrong += [f"{variant}: {failure}"] if failure else []
    assert not wrong, "\n".join(wrong)


@pytest.mark.emulated
def test_one_side_is_given_no_query_tile_smaller_than_the_rows_it_takes_at_a_time(space: Space) -> None:
    problem = problem_of(DType.FLOAT16, CAUSAL)
    bound = space.bind(problem, DEVICE)
    variant = bound.variant({**SMALL, **JOINT, "block_q": 16})
    assert bound.violations(variant)["whole_parts"] > 0 and not [each for each in bound.feasible() if each == variant]
    # No warp would compute anything, so the kernel itself refuses to be built.
    with pytest.raises(CompileError, match="a warp takes whole parts of a query tile"):
        failure_of(space, backward_source(space, problem, variant), DEVICE, Case("group", problem), emulated())


@pytest.mark.emulated
@pytest.mark.parametrize("changes", [{}, JOINT], ids=["sums", "joint"])
def test_probabilities_rounded_before_the_gradients_of_scores_are_outside_the_bound(space: Space, changes: dict[str, int | bool]) -> None:
    source, chosen = made(space, {**changes, "block_kv": 128}, NONE)
    case = next(case for case in chosen if case.name == "constant")
    old = "probabilities.take(p, m, pair);"
    rounding = "for (float(&two)[4] : p) for (float& each : two) each = float_from_bits(pack_pair(0.0f, each, typename C::Element{}));"
    assert source.text.count(old) == 1, "the text of the kernel has changed; renew the fault"
    rounded = replace(source, text=source.text.replace(old, f"{old} {rounding}"), digest="rounded probabilities")
    assert not failure_of(space, source, DEVICE, case, emulated())
    assert "allowed" in failure_of(space, rounded, DEVICE, case, emulated())


def gradient_bits(space: Space, source: Source, case: Case, policy: Policy, live_ctas: int = 1) -> list[np.ndarray]:
    tensors = operands(case, expect(case))
    emulated(policy, live_ctas)(source, space.bind(case.problem, DEVICE), case, tensors)
    return [cases.bits_of(tensor.view()) for tensor in outputs_of(tensors).values()]


@pytest.mark.emulated
def test_every_schedule_gives_the_same_bits_with_a_second_pass(space: Space) -> None:
    source, chosen = made(space, PASS, CAUSAL)
    case = next(case for case in chosen if case.name == "group")
    first = gradient_bits(space, source, case, POLICIES[0])
    for number, policy in enumerate(POLICIES[1:]):
        again = gradient_bits(space, source, case, replace(policy, seed=policy.seed + number), live_ctas=2 + number)
        assert all(np.array_equal(left, right) for left, right in zip(first, again, strict=True)), policy


@pytest.mark.emulated
@pytest.mark.parametrize("changes", DESIGNS.values(), ids=DESIGNS)
def test_shared_accesses_meet_no_bank_conflict(space: Space, changes: dict[str, int | bool]) -> None:
    source, _ = made(space, {**changes, "block_q": 64}, NONE, dims=(64, 64))
    case = Case("conflicts", problem_of(DType.BFLOAT16, NONE, (64, 64)))
    bound = space.bind(case.problem, DEVICE)
    executor = EmulatedExecutor(
        DEVICE, replace(POLICIES[0], races=False), grids=lambda *_: (bound.grids(source.variant), bound.workspace_bytes(source.variant))
    )
    executor.backward(source, case.problem, operands(case, expect(case)), case.softmax_scale)
    counted = executor.last_report.counters
    assert counted.matrix_phases > 0 and counted.matrix_conflicts == counted.shared_conflicts == 0


@pytest.mark.emulated
@pytest.mark.parametrize("changes", [{}, PASS], ids=["sums", "second_pass"])
def test_large_numbers_in_keys_that_no_row_sees_change_no_bit(space: Space, changes: dict[str, int | bool]) -> None:
    source, _ = made(space, changes, CAUSAL)
    problem = replace(problem_of(DType.BFLOAT16, Mask.causal(Alignment.TOP_LEFT)), seqlen_q=11, seqlen_kv=41)

    def with_garbage(at: Problem, rng: np.random.Generator) -> cases.Inputs:
        clean = cases.normal(at, rng)
        unseen = (np.arange(at.seqlen_kv) >= at.seqlen_q)[:, None]
        return cases.rounded(at, clean.q, *(np.where(unseen, np.float32(3e38), x) for x in (clean.k, clean.v)))

    clean, dirty = (gradient_bits(space, source, Case("unseen", problem, make), POLICIES[1]) for make in (cases.normal, with_garbage))
    assert all(np.array_equal(left, right) for left, right in zip(clean, dirty, strict=True))


@pytest.mark.emulated
@pytest.mark.parametrize(
    ("what", "old", "new", "mask", "two_pass"),
    [pytest.param(*fault, id=fault[0].replace(" ", "-"), marks=() if n % 9 == 0 else pytest.mark.slow) for n, fault in enumerate(FAULTS)],
)
def test_a_fault_in_ampere_backward_is_rejected(space: Space, what: str, old: str, new: str, mask: Mask, two_pass: bool) -> None:
    source, chosen = made(space, PASS if two_pass else {}, mask)
    pattern = re.compile(r"\s+".join(re.escape(word) for word in old.split()))
    assert len(pattern.findall(source.text)) == 1, f"the text of the kernel has changed; renew the fault {what!r}"
    broken = replace(source, text=pattern.sub(lambda _: new, source.text), digest=what)
    assert first_failure(space, broken, DEVICE, chosen, [emulated(policy, 3) for policy in POLICIES]), f"{what}: accepted"


@pytest.mark.parametrize("device", ["a100", "l40s", "rtx4090", "h100", "h200"])
def test_the_fallback_fits_every_head_dim_and_is_deterministic(space: Space, device: str) -> None:
    for dims in ((8, 8), (64, 64), (128, 128), (200, 72), (256, 256), (256, 8), (8, 256)):
        bound = space.bind(replace(problem_of(DType.FLOAT16, WINDOW, dims), deterministic=True), preset(device))
        assert not {name: missed for name, missed in bound.violations(bound.fallback()).items() if missed}, dims


@pytest.mark.emulated
@pytest.mark.slow
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("dims", [(16, 24), (256, 256)], ids=str)
def test_the_fallback_passes_every_case(space: Space, dims: tuple[int, int], mask: Mask) -> None:
    fallback = space.bind(problem_of(DType.FLOAT16, mask, dims), DEVICE).fallback()
    source, chosen = made(space, fallback.as_dict(), mask, DType.FLOAT16, dims)  # type: ignore[arg-type]
    assert not first_failure(space, source, DEVICE, chosen, [emulated(POLICIES[3])])


@pytest.mark.emulated
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(24))
def test_a_sampled_variant_passes_every_case(space: Space, seed: int) -> None:
    chosen = random.Random(seed)
    dims = chosen.choice([(64, 64), (40, 96), (128, 72), (8, 16), (256, 256), (80, 8), (192, 128)])
    problem = problem_of(chosen.choice([DType.BFLOAT16, DType.FLOAT16]), MASKS[seed % 3], dims)
    feasible = space.bind(replace(problem, seqlen_q=512, seqlen_kv=512), DEVICE).feasible()
    variant = chosen.choice([each for each in feasible if each.as_dict()["two_pass"] == seed % 2])
    tiles = variant.as_dict()
    source, run = backward_source(space, problem, variant), emulated(POLICIES[seed % len(POLICIES)])
    some = chosen.sample(cases_of(problem, tiles["block_q"], tiles["block_kv"]), 12)
    assert not first_failure(space, source, DEVICE, some, [run])


@pytest.mark.compiled
@pytest.mark.parametrize("sm", [90, pytest.param(80, marks=pytest.mark.slow)])
@pytest.mark.parametrize("head_dim", [64, pytest.param(128, marks=pytest.mark.slow), pytest.param(256, marks=pytest.mark.slow)])
def test_the_compiler_spills_little_of_ampere_backward(space: Space, head_dim: int, sm: int) -> None:
    from flashgen.compiler import compile_many
    from flashgen.cubins import Compiled

    problem = replace(problem_of(DType.BFLOAT16, CAUSAL, (head_dim, head_dim)), seqlen_q=4096, seqlen_kv=4096)
    bound = space.bind(problem, preset({90: "h200", 80: "a100"}[sm]))
    variants = [*bound.seeds()[:1], bound.fallback()]
    for variant, found in zip(variants, compile_many([backward_source(space, problem, each) for each in variants], sm=sm), strict=True):
        assert isinstance(found, Compiled), f"{variant}: {found}"
        assert not any(bound.compiled_violations(variant, found.report).values()), (variant, found.report.spill_bytes)
