"""`hopper_backward` on trial: gradients within the bound on the emulated executor, accepted by the compiler."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
from backward_kernels import cases_of, first_failure, templates_with_candidates
from hopper_backward_kernels import MASKS, HopperBackward, cases_for, emulated, hopper_space, problem_of

from flashgen.device import preset
from flashgen.emulate import POLICIES, Policy
from flashgen.model import DType, Mask, Problem, Source

FEW_SMS = replace(preset("h200"), sm_count=3)  # several tiles per CTA already in small problems
SPLIT = {
    "fused": False, "block_q": 32, "num_stages": 2, "key_stages": 1, "block_kv": 32, "kv_stages": 2, "order": 0, "turned": False, "direct": False, "ping_pong": False,
    "keys_in_registers": False, "keys_from_shared": False, "rotate": False, "pin": False, "rounds": False, "head_section": 1,
}  # fmt: skip
FUSED = SPLIT | {"fused": True, "block_q": 64, "ping_pong": True, "keys_from_shared": True}
SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def hopper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HopperBackward]:
    with templates_with_candidates(tmp_path_factory.mktemp("templates with candidates")):
        yield hopper_space()


def of(hopper: HopperBackward, values: dict[str, int], dims: tuple[int, int], mask: Mask, dtype: DType) -> tuple[Problem, Source]:
    problem = problem_of(dtype, dims, mask)
    return problem, hopper.source(problem, hopper.space.bind(problem, FEW_SMS).variant(values))


@pytest.mark.emulated
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_gradients_of_a_split_variant_are_within_the_bound(hopper: HopperBackward, mask: Mask) -> None:
    problem, source = of(hopper, SPLIT, (64, 64), mask, DType.BFLOAT16)
    chosen = cases_for(cases_of(problem, SPLIT["block_q"], SPLIT["block_kv"]))
    assert not first_failure(hopper.space, source, FEW_SMS, chosen, [emulated(hopper)])


@pytest.mark.emulated
@pytest.mark.parametrize(
    "mask", [MASKS[0], pytest.param(MASKS[1], marks=pytest.mark.slow), pytest.param(MASKS[2], marks=pytest.mark.slow)], ids=str
)
def test_gradients_of_a_fused_variant_are_within_the_bound(hopper: HopperBackward, mask: Mask) -> None:
    problem, source = of(hopper, FUSED, (128, 128), mask, DType.BFLOAT16)
    chosen = cases_for(cases_of(problem, FUSED["block_q"], FUSED["block_kv"]))
    assert not first_failure(hopper.space, source, FEW_SMS, chosen, [emulated(hopper)])


def sampled(hopper: HopperBackward, seed: int) -> tuple[Problem, Source, Policy]:
    chosen = random.Random(seed)
    dims = chosen.choice([(64, 64), (128, 128), (80, 72), (40, 96), (128, 64), (256, 256), (8, 16), (192, 128)])
    problem = problem_of(chosen.choice([DType.BFLOAT16, DType.FLOAT16]), dims, MASKS[seed % 3])
    variant = chosen.choice(hopper.space.bind(problem, FEW_SMS).feasible())
    return problem, hopper.source(problem, variant), POLICIES[seed % len(POLICIES)]


@pytest.mark.emulated
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(24))
def test_a_sampled_variant_passes_every_case(hopper: HopperBackward, seed: int) -> None:
    problem, source, policy = sampled(hopper, seed)
    tiles = source.variant.as_dict()
    chosen = cases_for(cases_of(problem, tiles["block_q"], tiles["block_kv"]))
    assert not first_failure(hopper.space, source, FEW_SMS, chosen, [emulated(hopper, policy, live_ctas=1 + seed % 3, deadline_s=300)])
