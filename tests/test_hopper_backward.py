"""`hopper_backward`: gradients within the bound on the emulated executor, planted faults rejected, accepted by the compiler."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import hopper_backward_faults as faults
import numpy as np
import pytest
from backward_kernels import Case, Run, backward_source, cases_of, emulated, expect, first_failure, operands, outputs_of

from flashgen import cases
from flashgen.device import preset
from flashgen.emulate import POLICIES, Policy, Schedule
from flashgen.errors import EmulationFault
from flashgen.model import DType, Mask, Op, Problem, Source
from flashgen.space import BoundSpace, Space, load_space

FEW_SMS = replace(preset("h200"), sm_count=3)  # several tiles per CTA already in small problems
SPLIT = {
    "fused": False, "block_q": 32, "num_stages": 3, "key_stages": 1, "block_kv": 32, "kv_stages": 2, "order": 0, "turned": False,
    "direct": False, "ordered": False, "clear_ahead": 0, "ping_pong": False, "keys_in_registers": False,
    "keys_from_shared": False, "rotate": False, "pin": False, "head_section": 1,
}  # fmt: skip
OVERLAPPED = SPLIT | {"fused": True, "block_q": 64, "num_stages": 2, "block_kv": 64, "ping_pong": True}
SERIAL = SPLIT | {"fused": True, "num_stages": 2, "block_kv": 64, "order": 1, "turned": True}
CLEARING = SERIAL | {"direct": True, "clear_ahead": 32}
ORDERED = SERIAL | {"ordered": True, "head_section": 8}
MASKS = (Mask(), Mask.causal(), Mask.window(-1, -1))
VARIANTS = {
    faults.SPLIT: (SPLIT, (64, 64)), faults.OVERLAPPED: (OVERLAPPED, (64, 64)), faults.SERIAL: (SERIAL, (128, 128)),
    faults.ORDERED: (ORDERED, (64, 64)), faults.CLEARING: (CLEARING, (64, 64)),
    "overlapped in turn": (OVERLAPPED | {"ordered": True}, (64, 64)),
}  # fmt: skip
SLOW = pytest.mark.slow
ASKED = ((POLICIES[0], 1), (POLICIES[0], 5), (POLICIES[1], 3), (POLICIES[2], 5), (POLICIES[3], 4))  # policies, CTAs alive


@pytest.fixture(scope="module")
def hopper() -> Space:
    return load_space("hopper_backward")


def problem_of(dtype: DType, dims: tuple[int, int], mask: Mask) -> Problem:
    return Problem(dtype, *dims, batch=1, heads_q=2, heads_kv=1, seqlen_q=256, seqlen_kv=256, mask=mask, op=Op.BACKWARD)


def of(hopper: Space, values: dict[str, int], dims: tuple[int, int], mask: Mask, dtype: DType) -> tuple[Problem, Source]:
    problem = problem_of(dtype, dims, mask)
    return problem, backward_source(hopper, problem, hopper.bind(problem, FEW_SMS).variant(values))


def planted(source: Source, what: str, old: str, new: str) -> Source:
    """The source with a mistake in it."""
    pattern = re.compile(r"\s+".join(re.escape(word) for word in old.split()))
    assert len(pattern.findall(source.text)) == 1, f"the text of the kernel has changed; renew the fault {what!r}"
    return replace(source, text=pattern.sub(lambda _: new, source.text), digest=what)


@pytest.mark.emulated
@pytest.mark.parametrize("mask", [*MASKS[:2], pytest.param(MASKS[2], marks=SLOW)], ids=str)
@pytest.mark.parametrize("name", [faults.SPLIT, *(pytest.param(name, marks=SLOW) for name in list(VARIANTS)[1:])])
def test_gradients_are_within_the_bound(hopper: Space, name: str, mask: Mask) -> None:
    values, dims = VARIANTS[name]
    problem, source = of(hopper, values, dims, mask, DType.BFLOAT16)
    chosen = cases_of(problem, values["block_q"], values["block_kv"], values["clear_ahead"])
    assert not first_failure(hopper, source, FEW_SMS, chosen, [emulated()])


@pytest.mark.emulated
@pytest.mark.parametrize(
    ("what", "old", "new", "mask", "name"),
    [
        pytest.param(*fault, id=fault[0].replace(" ", "-"), marks=() if n % 8 == 7 else SLOW) for n, fault in enumerate(faults.FAULTS)
    ],
)  # fmt: skip
def test_a_planted_fault_is_rejected(hopper: Space, what: str, old: str, new: str, mask: Mask, name: str) -> None:
    values, dims = VARIANTS[name]
    problem, source = of(hopper, values, dims, mask, DType.BFLOAT16)
    broken = planted(source, what, old, new)
    chosen = cases_of(problem, values["block_q"], values["block_kv"], values["clear_ahead"])
    runs = [emulated(policy, deadline_s=20) for policy in POLICIES]
    assert first_failure(hopper, broken, FEW_SMS, chosen, runs), f"{what}: accepted"


# Sums cleared ahead ---------------------------------------------------------------------------------------------------


# Starves the warp that clears: the others then run as far ahead as tiles can be drawn.
CLEARED_LATE = ((Policy(Schedule.STARVE, seed=2), 24), *ASKED)


def cleared_ahead(hopper: Space, mask: Mask, values: dict[str, int]) -> tuple[Source, BoundSpace, Case]:
    """Sections of 3 or 24 tiles of keys, each with two heads of two whole blocks of rows; the last section is smaller."""
    mask = Mask.window(60, 40) if mask == MASKS[2] else mask
    problem = replace(problem_of(DType.BFLOAT16, (64, 64), mask), batch=10, heads_q=4, heads_kv=2, seqlen_q=64, seqlen_kv=300)
    bound = hopper.bind(problem, replace(FEW_SMS, sm_count=24))
    like = next(case for case in cases_of(problem, values["block_q"], 128) if case.name == "group")
    return backward_source(hopper, problem, bound.variant(values)), bound, replace(like, problem=problem)


@pytest.mark.emulated
@pytest.mark.parametrize("mask", [MASKS[0], pytest.param(MASKS[1], marks=SLOW), pytest.param(MASKS[2], marks=SLOW)], ids=str)
@pytest.mark.parametrize("how", [{}, pytest.param({"direct": False}, marks=SLOW), pytest.param({"head_section": 8}, marks=SLOW)], ids=str)
def test_sums_cleared_ahead_are_zero_in_every_schedule(hopper: Space, how: dict[str, int], mask: Mask) -> None:
    values = CLEARING | how
    values |= {"head_section": 1} if mask == MASKS[0] else {}
    source, bound, case = cleared_ahead(hopper, mask, values)
    runs = [emulated(policy, live, 20) for policy, live in CLEARED_LATE]
    assert not first_failure(hopper, source, bound.device, [case], runs)


@pytest.mark.emulated
@pytest.mark.parametrize(
    ("what", "old", "new"),
    [pytest.param(*fault, id=fault[0].replace(" ", "-"), marks=SLOW if n else ()) for n, fault in enumerate(faults.IN_CLEARING)],
)
def test_a_fault_in_clearing_ahead_is_rejected(hopper: Space, what: str, old: str, new: str) -> None:
    source, bound, case = cleared_ahead(hopper, MASKS[0], CLEARING)
    runs = [emulated(policy, live, 20) for policy, live in CLEARED_LATE]
    assert first_failure(hopper, planted(source, what, old, new), bound.device, [case], runs), f"{what}: accepted"


# Sums in turn ---------------------------------------------------------------------------------------------------------


def turns_of(hopper: Space, mask: Mask, name: str = faults.ORDERED) -> tuple[Source, BoundSpace, Case]:
    """Five tiles of keys, four blocks of rows, the last of each partial, two heads for each of two heads of keys.

    In float16, which shows other orders of the sums eight times as often as bfloat16."""
    values, dims = VARIANTS[name]
    mask = Mask.window(60, 40) if mask == MASKS[2] else mask
    problem = replace(problem_of(DType.FLOAT16, dims, mask), batch=1, heads_q=4, heads_kv=2, seqlen_q=100, seqlen_kv=520)
    bound = hopper.bind(problem, replace(FEW_SMS, sm_count=5))
    like = next(case for case in cases_of(problem, values["block_q"], 128) if case.name == "group")
    return backward_source(hopper, problem, bound.variant(values)), bound, replace(like, problem=problem)


def gradient_bits(source: Source, bound: BoundSpace, case: Case, run: Run) -> bytes:
    tensors = operands(case, expect(case))
    run(source, bound, case, tensors)
    return b"".join(cases.bits_of(tensor.view()).tobytes() for tensor in outputs_of(tensors).values())


def bits_of_runs(hopper: Space, source: Source, bound: BoundSpace, case: Case) -> set[bytes]:
    return {gradient_bits(source, bound, case, emulated(policy, live, 20)) for policy, live in ASKED}


@pytest.mark.emulated
@pytest.mark.parametrize("mask", [pytest.param(MASKS[0], marks=SLOW), MASKS[1], pytest.param(MASKS[2], marks=SLOW)], ids=str)
@pytest.mark.parametrize("name", [faults.ORDERED, pytest.param("overlapped in turn", marks=SLOW)])
def test_sums_in_turn_have_the_same_bits_in_every_schedule(hopper: Space, name: str, mask: Mask) -> None:
    source, bound, case = turns_of(hopper, mask, name)
    assert hopper.deterministic(source.klass, source.variant)
    assert len(bits_of_runs(hopper, source, bound, case)) == 1


@pytest.mark.parametrize(("name", "promised"), [(faults.SPLIT, True), (faults.SERIAL, False), (faults.ORDERED, True)])
def test_variants_that_do_not_sum_in_any_order_promise_the_same_bits(hopper: Space, name: str, promised: bool) -> None:
    problem, source = of(hopper, *VARIANTS[name], Mask(), DType.BFLOAT16)
    asked = hopper.bind(replace(problem, deterministic=True), FEW_SMS)
    assert hopper.deterministic(source.klass, source.variant) is promised
    assert any(asked.violations(source.variant).values()) is not promised


@pytest.mark.emulated
def test_sums_in_turn_have_the_same_bits_in_every_batch(hopper: Space) -> None:
    source, bound, both = turns_of(hopper, MASKS[1])
    both = replace(both, problem=replace(both.problem, batch=2))
    whole, given = expect(both), expect(both).given

    def alone(problem: Problem, rng: np.random.Generator) -> cases.Inputs:
        return cases.Inputs(*(x[1:] for x in (whole.inputs.q, whole.inputs.k, whole.inputs.v)))

    one = replace(both, name="alone", problem=replace(both.problem, batch=1), make=alone)
    single = replace(expect(one), given=type(given)(given.o[1:], given.lse[1:], given.dout[1:], given.dlse[1:]))
    pair = (both, operands(both, whole)), (one, operands(one, single))
    for case, tensors in pair:
        emulated(POLICIES[0], 5)(source, hopper.bind(case.problem, bound.device), case, tensors)
    for name, tensor in outputs_of(pair[0][1]).items():
        assert np.array_equal(cases.bits_of(tensor.view()[1:]), cases.bits_of(outputs_of(pair[1][1])[name].view())), name


@pytest.mark.emulated
@pytest.mark.parametrize(
    ("what", "old", "new", "mask", "name"),
    [pytest.param(*fault, id=fault[0].replace(" ", "-"), marks=() if n % 4 == 0 else SLOW) for n, fault in enumerate(faults.ORDER_FAULTS)],
)
def test_a_fault_in_the_order_of_sums_is_rejected(hopper: Space, what: str, old: str, new: str, mask: Mask, name: str) -> None:
    source, bound, case = turns_of(hopper, mask, name)
    broken = planted(source, what, old, new)
    try:
        assert len(bits_of_runs(hopper, broken, bound, case)) > 1, f"{what}: accepted"
    except EmulationFault as fault:
        assert str(fault)


def sampled(hopper: Space, seed: int) -> tuple[Problem, Source, Policy]:
    chosen = random.Random(seed)
    dims = chosen.choice([(64, 64), (128, 128), (80, 72), (40, 96), (128, 64), (256, 256), (8, 16), (192, 128)])
    problem = problem_of(chosen.choice([DType.BFLOAT16, DType.FLOAT16]), dims, MASKS[seed % 3])
    variant = chosen.choice(hopper.bind(problem, FEW_SMS).feasible())
    return problem, backward_source(hopper, problem, variant), POLICIES[seed % len(POLICIES)]


@pytest.mark.emulated
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(24))
def test_a_sampled_variant_passes_every_case(hopper: Space, seed: int) -> None:
    problem, source, policy = sampled(hopper, seed)
    tiles = source.variant.as_dict()
    chosen = cases_of(problem, tiles["block_q"], tiles["block_kv"], tiles["clear_ahead"])
    assert not first_failure(hopper, source, FEW_SMS, chosen, [emulated(policy, live_ctas=1 + seed % 3, deadline_s=300)])


@pytest.mark.compiled
@pytest.mark.parametrize("head_dim", [64, *(pytest.param(dim, marks=SLOW) for dim in (128, 256))])
@pytest.mark.parametrize("mask", [Mask(), pytest.param(Mask.causal(), marks=SLOW)], ids=str)
def test_the_compiler_serialises_no_product_of_a_seed_and_spills_little(hopper: Space, head_dim: int, mask: Mask) -> None:
    from flashgen.compiler import compile_many
    from flashgen.cubins import Compiled

    problem = replace(problem_of(DType.BFLOAT16, (head_dim, head_dim), mask), batch=4, heads_q=8, heads_kv=8, seqlen_q=2048, seqlen_kv=2048)
    bound = hopper.bind(problem, preset("h200"))
    variants = [*bound.seeds()[:2], bound.fallback()]
    for variant, found in zip(variants, compile_many([backward_source(hopper, problem, each) for each in variants], sm=90), strict=True):
        assert isinstance(found, Compiled), f"{variant}: {found}"
        assert not [line for line in found.report.warnings if "C75" in line], variant
        assert not any(bound.compiled_violations(variant, found.report).values()), (variant, found.report.spill_bytes)
