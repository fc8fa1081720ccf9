"""The Hopper family on the emulated executor: sampled variants are exact, planted faults are rejected; and what the compiler says of it."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest
from hopper_faults import FAULTS

from flashgen import certify
from flashgen.device import preset
from flashgen.emulate import POLICIES, EmulatedExecutor, Policy
from flashgen.errors import CompileError
from flashgen.model import DType, Mask, Problem, Source, Variant, Verdict
from flashgen.render import render
from flashgen.space import Space, load_space

FEW_SMS = replace(preset("h200"), sm_count=3)  # several query tiles per CTA already in small problems


@pytest.fixture(scope="module")
def hopper() -> Space:
    return load_space("hopper_forward")


def problem_of(dtype: DType, dims: tuple[int, int], mask: Mask) -> Problem:
    return Problem(dtype, *dims, batch=1, heads_q=4, heads_kv=2, seqlen_q=256, seqlen_kv=256, mask=mask)


def sampled(space: Space, seed: int) -> tuple[Problem, Source, Policy]:
    chosen = random.Random(seed)
    mask = chosen.choice([Mask(), Mask.causal(), Mask.window(31, 5)])
    problem = problem_of(chosen.choice([DType.BFLOAT16, DType.FLOAT16]), chosen.choice([(64, 64), (128, 128), (80, 72), (40, 96)]), mask)
    variants = [variant for variant in space.bind(problem, FEW_SMS).feasible() if variant.as_dict()["block_kv"] <= 96]
    return problem, render(space, problem.klass(), chosen.choice(variants)), POLICIES[seed % len(POLICIES)]


@pytest.mark.emulated
@pytest.mark.parametrize("seed", range(1, 4))
def test_a_sampled_variant_is_exact_on_the_emulated_executor(hopper: Space, seed: int) -> None:
    problem, source, policy = sampled(hopper, seed)
    certificate = certify.quick(EmulatedExecutor(FEW_SMS, policy), hopper, source, problem, seed)
    assert certificate.verdict is Verdict.EXACT, certificate.failure


@pytest.mark.emulated
@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *range(4, 30)])
def test_a_sampled_variant_passes_the_whole_suite(hopper: Space, seed: int) -> None:
    problem, source, policy = sampled(hopper, seed)
    certificate = certify.full(EmulatedExecutor(FEW_SMS, policy, live_ctas=1 + seed % 3), hopper, source, problem, seed)
    assert certificate.verdict is Verdict.EXACT, certificate.failure


UNSEEN = {
    "consumer_warpgroups": 2, "block_kv": 32, "num_stages": 2, "query_slots": 2, "ping_pong": True, "epilogue": 1, "scheduler": 2,
    "softmax_mode": 1, "head_section": 1, "group_pack": 1, "rescale_threshold": 8,
}  # fmt: skip


def unseen_source(space: Space, dtype: DType) -> tuple[Problem, Source]:
    problem = problem_of(dtype, (64, 64), Mask())
    return problem, render(space, problem.klass(), space.bind(problem, FEW_SMS).variant(UNSEEN))


@pytest.mark.emulated
@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT16])
def test_a_softmax_that_looks_at_sums_only_passes_the_whole_suite(hopper: Space, dtype: DType) -> None:
    """The suite's needles exceed everything before them by more than float32 can hold, so scores are computed again."""
    problem, source = unseen_source(hopper, dtype)
    certificate = certify.full(EmulatedExecutor(FEW_SMS, POLICIES[1]), hopper, source, problem, 3)
    assert certificate.verdict is Verdict.EXACT, certificate.failure


@pytest.mark.emulated
@pytest.mark.parametrize("mask", [Mask(), Mask.causal()], ids=lambda mask: str(mask.kind))
def test_float16_loses_no_low_weights_to_a_reference_above_the_maximum(hopper: Space, mask: Mask) -> None:
    problem = problem_of(DType.FLOAT16, (64, 64), mask)
    source = render(hopper, problem.klass(), hopper.bind(problem, FEW_SMS).variant(UNSEEN))
    above = replace(source, text=source.text.replace("log2_sum - 6.0f", "log2_sum"), digest="above")
    assert above.text != source.text
    found = [certify.full(EmulatedExecutor(FEW_SMS, POLICIES[1]), hopper, each, problem, 3) for each in (source, above)]
    assert found[0].verdict is Verdict.EXACT, found[0].failure
    assert found[1].verdict is Verdict.INEXACT and "cluster" in found[1].failure


@pytest.mark.emulated
@pytest.mark.parametrize("epilogue", [0, 1])
def test_packed_query_heads_pass_the_whole_suite(hopper: Space, epilogue: int) -> None:
    """Rows of several heads share a tile: 16 of each of four heads here."""
    problem = replace(problem_of(DType.BFLOAT16, (64, 72), Mask.causal()), heads_kv=1)
    variant = hopper.bind(problem, FEW_SMS).variant(UNSEEN | {"group_pack": 4, "epilogue": epilogue, "query_slots": 1})
    certificate = certify.full(EmulatedExecutor(FEW_SMS, POLICIES[1]), hopper, render(hopper, problem.klass(), variant), problem, 3)
    assert certificate.verdict is Verdict.EXACT, certificate.failure


NEEDS_A_CAUSAL_MASK = {"passing by takes no turn"}
NEEDS_A_PACK = {"all heads of a pack have the first one's queries", "heads of a pack are stored one after the other in the wrong place"}
NEEDS_TWO_CHUNKS = {"values lie a chunk apart that is none"}


@pytest.mark.emulated
@pytest.mark.parametrize(("what", "old", "new"), FAULTS, ids=[fault[0].replace(" ", "-") for fault in FAULTS])
def test_a_fault_in_the_kernel_is_rejected(hopper: Space, what: str, old: str, new: str) -> None:
    mask = Mask.causal() if what in NEEDS_A_CAUSAL_MASK else Mask()
    problem = problem_of(DType.BFLOAT16, (128, 128) if what in NEEDS_TWO_CHUNKS else (64, 64), mask)
    pack = {"group_pack": 2} if what in NEEDS_A_PACK else {}
    source = render(hopper, problem.klass(), hopper.bind(problem, FEW_SMS).variant(UNSEEN | pack))
    pattern = re.compile(r"\s+".join(re.escape(word) for word in old.split()))
    assert pattern.search(source.text), f"the text of the kernel has changed; renew the fault {what!r}"
    broken = replace(source, text=pattern.sub(lambda _: new, source.text), digest=f"{what}")
    verdicts = []
    for policy in POLICIES:
        try:
            verdicts.append(certify.full(EmulatedExecutor(FEW_SMS, policy, deadline_s=20), hopper, broken, problem, 5).verdict)
        except CompileError as problem_of_text:
            pytest.fail(str(problem_of_text))
        if verdicts[-1] is not Verdict.EXACT:
            return
    pytest.fail(f"{what}: accepted under every policy")


@pytest.mark.compiled
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_the_compiler_serialises_no_product_and_spills_little(hopper: Space, head_dim: int) -> None:
    from flashgen.compiler import compile_many
    from flashgen.cubins import Compiled

    problem = Problem(DType.BFLOAT16, head_dim, head_dim, 4, 16, 16, 4096, 4096, Mask.causal())
    bound = hopper.bind(problem, preset("h200"))
    variants: list[Variant] = [*bound.seeds(), bound.fallback()]
    for variant, found in zip(variants, compile_many([render(hopper, problem.klass(), each) for each in variants], sm=90), strict=True):
        assert isinstance(found, Compiled), f"{variant}: {found}"
        assert not [line for line in found.report.warnings if "C75" in line], variant
        assert not any(bound.compiled_violations(variant, found.report).values()), (variant, found.report.spill_bytes)


def test_a_kernel_whose_products_run_one_by_one_is_not_timed(hopper: Space) -> None:
    from flashgen.model import CompileReport

    bound = hopper.bind(problem_of(DType.BFLOAT16, (64, 64), Mask()), FEW_SMS)
    clean = CompileReport("", 168, 0, 0, 0, ("warning: unused",), 1.0, "13.0", ())
    serial = replace(clean, warnings=("ptxas info : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized",))
    variant = bound.variant(UNSEEN)
    assert not any(bound.compiled_violations(variant, clean).values())
    assert "one by one" in "; ".join(bound.explain(variant, serial))
