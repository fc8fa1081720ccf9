"""The gate of backward kernels, on gradients computed in NumPy: it accepts the plain computation and rejects every fault planted in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import ampere_backward_faults
import backward_faults
import hopper_backward_faults
import numpy as np
import pytest

from flashgen import cases, certify, gate, gradient_gate, gradient_suite, gradients, reference
from flashgen.errors import InvalidProblem, UnsupportedProblem
from flashgen.gradients import Gradients, Saved
from flashgen.model import (
    BackwardTensors,
    DType,
    ExecutorName,
    ForwardTensors,
    Mask,
    MaskKind,
    Op,
    Problem,
    ProblemClass,
    Source,
    Variant,
    Verdict,
)
from flashgen.suite import Tiles

Compute = Callable[[dict[str, np.ndarray], Saved, Problem, float], Gradients]
VARIANT = Variant.of("model", {"block_q": 16, "block_kv": 8})
PROBLEM = Problem(DType.BFLOAT16, 16, 24, 1, 2, 1, 40, 56, Mask.causal(), Op.BACKWARD)


@dataclass(frozen=True)
class ModelSpace:
    """A space without a file; `promised` is what its variants say of their determinism."""

    promised: bool = True

    def constants(self, klass: ProblemClass, variant: Variant) -> dict[str, int | bool]:
        return dict(variant.params)

    def deterministic(self, klass: ProblemClass, variant: Variant) -> bool:
        return self.promised


def source(mask: MaskKind = MaskKind.CAUSAL, dtype: DType = DType.BFLOAT16, deterministic: bool = False) -> Source:
    klass = ProblemClass(Op.BACKWARD, dtype, 16, 24, mask, deterministic)
    return Source("model", klass, VARIANT, "", "", (), 80)


def plain(inputs: dict[str, np.ndarray], given: Saved, problem: Problem, scale: float) -> Gradients:
    return gradients.plain(inputs["q"], inputs["k"], inputs["v"], given, problem, scale)


class Model:
    """An executor that computes on the host; results go to the tensors as a kernel's would."""

    name = ExecutorName.EMULATED

    def __init__(self, compute: Compute = plain) -> None:
        self.compute = compute

    def prepare(self, sources: Sequence[Source]) -> None: ...

    def forward(self, source: Source, problem: Problem, tensors: ForwardTensors, scale: float) -> None:
        raise AssertionError("only gradients")

    def backward(self, source: Source, problem: Problem, tensors: BackwardTensors, scale: float) -> None:
        decoded = {name: reference.decode(each.view(), problem.dtype) for name, each in tensors.named()[:4]}
        lse = tensors.lse.view()[..., 0]
        dlse = np.zeros_like(lse) if tensors.dlse is None else tensors.dlse.view()[..., 0]
        given = Saved(decoded["o"], lse, reference.decode(tensors.dout.view(), problem.dtype), dlse)
        for (_, values), tensor in zip(
            self.compute(decoded, given, problem, scale).named(), (tensors.dq, tensors.dk, tensors.dv), strict=True
        ):
            tensor.view()[...] = reference.encode(values, problem.dtype)


@pytest.mark.parametrize("dtype", list(DType))
@pytest.mark.parametrize("mask", list(MaskKind))
def test_the_plain_computation_is_exact(mask: MaskKind, dtype: DType) -> None:
    found = gradient_gate.full(Model(), ModelSpace(), source(mask, dtype), PROBLEM, 0)
    assert found.verdict is Verdict.EXACT, found.failure
    assert found.deterministic is True and found.suite == "attention-backward/1" and found.bitwise_cases >= 15
    assert found.worst_error_ratio < 2.0


def changed(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Compute:
    return lambda inputs, given, problem, scale: replace(
        (found := plain(inputs, given, problem, scale)), **{name: change(np.array(getattr(found, name)))}
    )


def without_delta(inputs: dict[str, np.ndarray], given: Saved, problem: Problem, scale: float) -> Gradients:
    return plain(inputs, replace(given, o=np.zeros_like(given.o)), problem, scale)


def without_dlse(inputs: dict[str, np.ndarray], given: Saved, problem: Problem, scale: float) -> Gradients:
    return plain(inputs, replace(given, dlse=np.zeros_like(given.dlse)), problem, scale)


def stale_lse(inputs: dict[str, np.ndarray], given: Saved, problem: Problem, scale: float) -> Gradients:
    return plain(inputs, replace(given, lse=np.roll(given.lse, 1, axis=-1)), problem, scale)


def mask_of_one_loop(inputs: dict[str, np.ndarray], given: Saved, problem: Problem, scale: float) -> Gradients:
    """dq sees one key more than dk and dv do."""
    shifted = replace(problem, mask=Mask.window(-1, 1, problem.mask.alignment))
    return replace(plain(inputs, given, problem, scale), dq=plain(inputs, given, shifted, scale).dq)


def last_head_of_the_group_is_missing(inputs: dict[str, np.ndarray], given: Saved, problem: Problem, scale: float) -> Gradients:
    dout, dlse = given.dout.copy(), given.dlse.copy()
    last = slice(problem.gqa_group - 1, None, problem.gqa_group) if problem.gqa_group > 1 else slice(0, 0)
    dout[:, last], dlse[:, last] = 0, 0
    partial = plain(inputs, replace(given, dout=dout, dlse=dlse), problem, scale)
    return replace(plain(inputs, given, problem, scale), dk=partial.dk, dv=partial.dv)


FAULTS: dict[str, Compute] = {
    "only dq is wrong": changed("dq", lambda x: x * 1.03),
    "only dk is wrong": changed("dk", lambda x: x * 1.03),
    "only dv is wrong": changed("dv", lambda x: x * 1.03),
    "dq lacks the scale": lambda i, g, p, s: replace(plain(i, g, p, s), dq=plain(i, g, p, s).dq / s),
    "dk has the scale twice": lambda i, g, p, s: replace(plain(i, g, p, s), dk=plain(i, g, p, s).dk * s),
    "delta is missing": without_delta,
    "the gradient of lse is missing": without_dlse,
    "lse of the row before": stale_lse,
    "a mask edge in one loop only": mask_of_one_loop,
    "a head of the group is missing": last_head_of_the_group_is_missing,
    "the last row of dq is missing": changed("dq", lambda x: np.concatenate([x[..., :-1, :], 0 * x[..., -1:, :]], axis=-2)),
    "the last key of dv is the one before": changed("dv", lambda x: np.concatenate([x[..., :-1, :], x[..., -2:-1, :]], axis=-2)),
    "keys nobody sees get a tiny gradient": changed("dk", lambda x: np.where(x == 0, np.float32(1e-30), x)),
    "one element in a thousand": changed("dk", lambda x: x * (1 + 0.1 * (np.arange(x.size).reshape(x.shape) % 997 == 5))),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_rejected(fault: str) -> None:
    found = gradient_gate.full(Model(FAULTS[fault]), ModelSpace(), source(), PROBLEM, 0)
    assert found.verdict is Verdict.INEXACT, f"{fault}: accepted"
    assert "Repeat: flashgen certify" in found.failure and "--op backward" in found.failure


def test_the_docs_count_the_planted_faults() -> None:
    text = " ".join((Path(__file__).parents[1] / "docs" / "backward.md").read_text().split())
    hopper = len(hopper_backward_faults.FAULTS) + len(hopper_backward_faults.ORDER_FAULTS) + len(hopper_backward_faults.IN_CLEARING)
    assert f"{len(FAULTS)} in gradients computed in NumPy" in text
    assert f"{len(backward_faults.FAULTS)} in the text of `simt_backward`" in text
    assert f"{len(ampere_backward_faults.FAULTS)} in that of `ampere_backward`" in text
    assert f"{hopper} in that of `hopper_backward`" in text


class Unsteady:
    """The plain computation whose dq is off by an ulp here and there, differently every time, as sums in any order are."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(1)

    def __call__(self, inputs: dict[str, np.ndarray], given: Saved, problem: Problem, scale: float) -> Gradients:
        found = plain(inputs, given, problem, scale)
        return replace(found, dq=found.dq * (1 + 2.0**-8 * self.rng.integers(0, 2, found.dq.shape)))


def test_a_variant_that_promises_determinism_must_keep_its_word() -> None:
    found = gradient_gate.full(Model(Unsteady()), ModelSpace(promised=True), source(), PROBLEM, 0)
    assert found.verdict is Verdict.INEXACT and "changed" in found.failure


def test_a_variant_that_promises_nothing_is_held_to_the_bound_and_its_certificate_says_so() -> None:
    found = gradient_gate.full(Model(Unsteady()), ModelSpace(promised=False), source(), PROBLEM, 0)
    assert found.verdict is Verdict.EXACT, found.failure
    assert found.deterministic is False
    steady = gradient_gate.full(Model(), ModelSpace(), source(), PROBLEM, 0)
    assert found.bitwise_cases < steady.bitwise_cases


def test_the_quick_suite_is_a_part_of_the_full_one_and_names_are_unique() -> None:
    for mask in MaskKind:
        klass = source(mask).klass
        full, quick = (each(klass, Tiles(16, 8), 32) for each in (gradient_suite.full_suite, gradient_suite.quick_suite))
        assert len({case.name for case in full}) == len(full)
        assert {case.name for case in quick} == set(gradient_suite.QUICK_TOPICS)


def test_a_kernel_that_looks_ahead_has_a_case_with_more_tiles_than_that() -> None:
    klass = source().klass
    without, added = (gradient_suite.full_suite(klass, Tiles(64, 64), ahead) for ahead in (0, 128))
    assert [case.name for case in added[len(without) :]] == ["crowd"]
    crowd = added[-1].problem
    assert crowd.batch * crowd.heads_kv * -(-crowd.seqlen_kv // 128) >= 2 * 128 + 32  # a section of heads more


def test_a_case_runs_by_its_name_and_an_unknown_name_is_refused() -> None:
    assert not gradient_gate.single(Model(), ModelSpace(), source(), "group", 3).failure
    with pytest.raises(InvalidProblem, match="no case 'nonsense'"):
        gradient_gate.single(Model(), ModelSpace(), source(), "nonsense", 3)


def test_keys_that_no_row_sees_may_hold_large_numbers() -> None:
    case = next(each for each in gradient_suite.full_suite(source().klass, Tiles(16, 8)) if each.name == "unseen")
    assert not gradient_gate.run_case(Model(), source(), case, 0).failure

    def scale_by_all_keys(inputs: dict[str, np.ndarray], given: Saved, problem: Problem, scale: float) -> Gradients:
        found = plain(inputs, given, problem, scale)
        return replace(found, dq=found.dq * np.float32(1 + min(1.0, float(np.abs(inputs["v"]).max()) * 1e-9)))

    assert "other numbers in keys" in gradient_gate.run_case(Model(scale_by_all_keys), source(), case, 0).failure


@pytest.mark.parametrize("mask", [Mask(), Mask.causal(), Mask.window(9, 3)], ids=str)
def test_the_real_size_is_checked_on_sampled_rows_and_keys(mask: Mask) -> None:
    problem = replace(PROBLEM, mask=mask, seqlen_q=70, seqlen_kv=90, heads_q=4, heads_kv=2)
    assert not gradient_gate.spot_check(Model(), source(mask.kind), problem, 0).failure
    for name in ("dq", "dk", "dv"):
        broken = gradient_gate.spot_check(Model(changed(name, lambda x: x * 1.05)), source(mask.kind), problem, 0)
        assert f"sampled {name}" in broken.failure


def test_each_operation_has_a_gate_of_its_own() -> None:
    assert gate.suite_name(Op.FORWARD) != gate.suite_name(Op.BACKWARD)
    assert gate.suite_digest(Op.FORWARD) == certify.suite_digest() != gate.suite_digest(Op.BACKWARD)


def test_backward_kernels_are_not_compared_by_outputs() -> None:
    from flashgen import compare

    with pytest.raises(UnsupportedProblem, match="op must be forward"):
        compare.against(Model(), ModelSpace(), source(), source(), 0)


def test_gradients_from_any_saved_numbers_are_those_of_a_forward_pass_where_they_are_its_own() -> None:
    rng, problem = np.random.default_rng(0), replace(PROBLEM, heads_q=1, heads_kv=1)
    inputs = cases.normal(problem, rng)
    dout, dlse = rng.standard_normal((1, 1, 40, 24)), rng.standard_normal((1, 1, 40))
    exact = reference.attention(inputs.q, inputs.k, inputs.v, problem, problem.scale)
    seen = reference.visible(problem.mask, 40, 56)
    head = (inputs.q[0, 0], inputs.k[0, 0], inputs.v[0, 0])
    given = Saved(exact.o[0, 0], exact.lse[0, 0], dout[0, 0], dlse[0, 0])
    found = gradients.from_saved(*head, given, seen, problem.scale)
    right = gradients.head(*head, dout[0, 0], dlse[0, 0], seen, problem.scale)
    for (_, left), (_, values) in zip(found.named(), right.named(), strict=True):
        np.testing.assert_allclose(left, values, rtol=1e-12, atol=1e-12)
