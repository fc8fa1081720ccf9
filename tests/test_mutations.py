"""The gate rejects every planted fault and accepts every kernel without one. The counts are printed as killed / planted."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mutations import planted_model, planted_source
from mutations.planted import Planted, PlantedInSource

from flashgen import certify, device, render
from flashgen.emulate import FAST, POLICIES, EmulatedExecutor
from flashgen.model import Certificate, DType, Mask, MaskKind, Op, Problem, ProblemClass, Source, Variant, Verdict
from flashgen.space import Space, load_space

MODEL_TEXT = (Path(__file__).parent / "mutations" / "model_kernel.py").read_text(encoding="utf-8")


class ModelSpace:
    """The constants of the model kernel are its parameters."""

    def constants(self, klass: ProblemClass, variant: Variant) -> dict[str, int | bool]:
        return dict(variant.as_dict())


def model_certificate(text: str, mask: MaskKind, dtype: DType, *, quick: bool = False) -> Certificate:
    """The gate's judgement of the model kernel with this text."""
    module = types.ModuleType("model_kernel")
    exec(compile(text, "model_kernel.py", "exec"), module.__dict__)
    klass = ProblemClass(Op.FORWARD, dtype, 16, 24, mask)
    source = Source("model", klass, Variant.of("model", {"block_q": 32, "block_kv": 48}), "", "", (), 80)
    problem = Problem(dtype, 16, 24, 1, 1, 1, 64, 64, Mask(mask))
    with np.errstate(all="ignore"):
        return (certify.quick if quick else certify.full)(module.ModelKernel(), ModelSpace(), source, problem, seed=5)


@pytest.mark.parametrize("dtype", DType)
@pytest.mark.parametrize("mask", MaskKind)
def test_the_unmutated_model_kernel_is_exact(mask: MaskKind, dtype: DType) -> None:
    certificate = model_certificate(MODEL_TEXT, mask, dtype)
    assert certificate.verdict is Verdict.EXACT, certificate.failure


@pytest.mark.parametrize("fault", planted_model.PLANTED, ids=lambda fault: fault.name)
def test_a_fault_in_the_model_kernel_is_rejected(fault: Planted) -> None:
    certificate = model_certificate(fault.apply(MODEL_TEXT), fault.mask, fault.dtype)
    assert certificate.verdict is Verdict.INEXACT, f"{fault.name} passed all {certificate.cases} cases"
    assert "Repeat: flashgen certify" in certificate.failure


# Rendered sources -----------------------------------------------------------------------------------------------------

H200 = device.preset("h200")
USUAL = {
    "ampere_forward": {
        "block_q": 32,
        "block_kv": 32,
        "num_warps": 2,
        "num_stages": 2,
        "q_in_registers": 0,
        "ctas_per_sm": 1,
        "tile_order": 0,
    },
    "simt_forward": {"block_q": 32, "block_kv": 16, "rows_per_team": 2, "lanes_per_team": 8, "tile_order": 0},
}


def rendered(family: str, klass: ProblemClass, changes: Mapping[str, int]) -> tuple[Space, Source, Problem]:
    """The source of a small variant, with the space and a problem it may be certified for."""
    space = load_space(family)
    problem = Problem(klass.dtype, klass.head_dim, klass.head_dim_v, 1, 1, 1, 256, 256, Mask(klass.mask))
    bound = space.bind(problem, H200)
    params = {**bound.fallback().as_dict(), **USUAL[family], **changes}
    return space, render.render(space, klass, bound.variant(params)), problem


def rejection(space: Space, source: Source, problem: Problem, *, isolated: bool = True) -> str:
    """Why the gate rejects a source, or ''. The quick suite under every schedule, then the full one under the fastest schedule."""
    for policy, quick in [(FAST, True), *((policy, True) for policy in POLICIES), (FAST, False)]:
        executor = EmulatedExecutor(H200, policy, isolated, deadline_s=10.0)  # isolated, since a fault may crash or hang
        certificate = (certify.quick if quick else certify.full)(executor, space, source, problem, seed=5)
        if certificate.verdict is Verdict.INEXACT:
            return certificate.failure
    return ""


def klass_of(fault: PlantedInSource) -> ProblemClass:
    """The problem class in which the fault matters."""
    return ProblemClass(Op.FORWARD, fault.dtype, fault.head_dim, fault.head_dim_v, fault.mask)


SOURCE_FAULTS = [
    pytest.param(fault, id=f"{fault.family}: {fault.name}", marks=[pytest.mark.slow] if fault.slow else [])
    for fault in planted_source.PLANTED
]
SOURCES = sorted({(f.family, f.mask, f.head_dim, f.head_dim_v, *sorted((f.changes or {}).items())) for f in planted_source.PLANTED})


@pytest.mark.emulated
@pytest.mark.parametrize("fault", SOURCE_FAULTS)
def test_a_fault_in_a_rendered_source_is_rejected(fault: PlantedInSource) -> None:
    space, source, problem = rendered(fault.family, klass_of(fault), fault.changes or {})
    assert rejection(space, replace(source, text=fault.apply(source.text)), problem), f"{fault.name} passed the gate"


@pytest.mark.emulated
@pytest.mark.parametrize("case", SOURCES, ids=str)
def test_the_unmutated_sources_are_exact(case: tuple[Any, ...]) -> None:
    family, mask, head_dim, head_dim_v, *changes = case
    dtype = DType.FLOAT32 if family == "simt_forward" else DType.BFLOAT16
    klass = ProblemClass(Op.FORWARD, dtype, head_dim, head_dim_v, mask)
    assert rejection(*rendered(family, klass, dict(changes)), isolated=False) == ""


CLASSES = [
    (family, dtype, mask)
    for family, dtypes in (("ampere_forward", (DType.BFLOAT16, DType.FLOAT16)), ("simt_forward", tuple(DType)))
    for dtype in dtypes
    for mask in MaskKind
]


def shipped_certificates(family: str, dtype: DType, mask: MaskKind, head_dim: int, *, quick: bool) -> list[Certificate]:
    """Certificates of the fallback and of every seed, under the fastest schedule."""
    space = load_space(family)
    problem = Problem(dtype, head_dim, head_dim, 1, 1, 1, 256, 256, Mask(mask))
    bound = space.bind(problem, H200)
    executor = EmulatedExecutor(H200, FAST, isolated=False)
    judge = certify.quick if quick else certify.full
    variants = dict.fromkeys([bound.fallback(), *(bound.seeds()[:1] if quick else bound.seeds())])
    return [judge(executor, space, render.render(space, problem.klass(), variant), problem, 7) for variant in variants]


@pytest.mark.emulated
@pytest.mark.parametrize(("family", "dtype", "mask"), CLASSES, ids=str)
def test_the_unmutated_fallback_and_first_seed_pass_the_quick_suite(family: str, dtype: DType, mask: MaskKind) -> None:
    failures = [each.failure for each in shipped_certificates(family, dtype, mask, 64, quick=True)]
    assert not any(failures), failures


@pytest.mark.emulated
@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [40, 128, 256])
@pytest.mark.parametrize(("family", "dtype", "mask"), CLASSES, ids=str)
def test_the_unmutated_shipped_variants_pass_the_full_suite(family: str, dtype: DType, mask: MaskKind, head_dim: int) -> None:
    failures = [each.failure for each in shipped_certificates(family, dtype, mask, head_dim, quick=False)]
    assert not any(failures), failures
