"""The gate: what it demands, what it reports, and that approximations do not pass it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from mutations.model_kernel import ModelKernel

from flashgen import cases, certify, compare, reference, suite
from flashgen.approximate import APPROXIMATIONS, Approximation
from flashgen.cases import Layout
from flashgen.errors import EmulationFault, InvalidProblem
from flashgen.model import (
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
from flashgen.suite import Check, Tiles, Twin

CLASSES = [ProblemClass(Op.FORWARD, dtype, 16, 24, mask) for dtype in DType for mask in MaskKind]


class ModelSpace:
    def constants(self, klass: ProblemClass, variant: Variant) -> dict[str, int | bool]:
        return dict(variant.as_dict())


def source_of(klass: ProblemClass, family: str = "model") -> Source:
    return Source(family, klass, Variant.of(family, {"block_q": 32, "block_kv": 48}), "", "", (), 80)


def problem_of(klass: ProblemClass, length: int = 64) -> Problem:
    return Problem(klass.dtype, klass.head_dim, klass.head_dim_v, 1, 2, 1, length, length, Mask(klass.mask))


KLASS = ProblemClass(Op.FORWARD, DType.BFLOAT16, 16, 24, MaskKind.NONE)


class Changed(ModelKernel):
    """The model kernel, and afterwards something done to the tensors."""

    def __init__(self, change: Callable[[ForwardTensors], None]) -> None:
        self.change = change

    def forward(self, source: Source, problem: Problem, tensors: ForwardTensors, scale: float) -> None:
        super().forward(source, problem, tensors, scale)
        self.change(tensors)


def one(executor: ModelKernel, name: str = "ragged-9") -> certify.CaseResult:
    return certify.single(executor, ModelSpace(), source_of(KLASS), name, seed=3)


# The suite ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("klass", CLASSES, ids=lambda klass: f"{klass.dtype}-{klass.mask}")
def test_the_suite_holds_every_topic_and_names_are_unique(klass: ProblemClass) -> None:
    full = suite.full_suite(klass, Tiles(64, 64))
    names = [case.name for case in full]
    assert len(set(names)) == len(names) >= 55
    assert {case.check for case in full} == set(Check)
    assert {case.twin for case in full} == set(Twin)
    assert {case.layout for case in full} == set(Layout)


@pytest.mark.parametrize("klass", CLASSES, ids=lambda klass: f"{klass.dtype}-{klass.mask}")
def test_the_quick_suite_has_eight_cases_of_the_full_one(klass: ProblemClass) -> None:
    assert [case.name for case in suite.quick_suite(klass, Tiles(128, 32))] and len(suite.quick_suite(klass, Tiles(128, 32))) == 8


def test_all_cases_are_of_the_class_that_was_compiled() -> None:
    klass = ProblemClass(Op.FORWARD, DType.FLOAT16, 72, 40, MaskKind.WINDOW)
    assert {case.problem.klass() for case in suite.full_suite(klass, Tiles())} == {klass}


@pytest.mark.parametrize("dtype", DType)
@pytest.mark.parametrize("head_dim", [8, 64, 256])
@pytest.mark.parametrize("length", [5, 300])
def test_selection_makes_one_key_win_by_200_log2_units(dtype: DType, head_dim: int, length: int) -> None:
    problem = Problem(dtype, head_dim, 8, 1, 1, 1, 40, length)
    winners = cases.border_winners(problem, 64)
    inputs = cases.selection(problem, np.random.default_rng(0), winners, problem.scale)
    scores = inputs.q[0, 0].astype(np.float64) @ inputs.k[0, 0].astype(np.float64).T * problem.scale * cases.LOG2_E
    assert (scores[np.arange(40), winners] == 0).all()
    scores[np.arange(40), winners] = -np.inf
    assert scores.max() <= -200


def test_winners_stand_on_both_sides_of_every_tile_border() -> None:
    problem = Problem(DType.FLOAT16, 8, 8, 1, 1, 1, 40, 131)
    assert set(cases.border_winners(problem, 64)) == {0, 63, 64, 127, 128, 130}


def test_seeds_give_fresh_inputs_and_repeat() -> None:
    case = suite.full_suite(KLASS, Tiles())[10]
    first, second = certify.expect(case, 1).inputs, certify.expect(case, 2).inputs
    certify.expect.cache_clear()
    assert not np.array_equal(first.q, second.q)
    assert np.array_equal(first.q, certify.expect(case, 1).inputs.q)


def test_the_suite_digest_ignores_comments_but_not_code(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:  # noqa: ANN001
    texts = {name: f"# {name}\nx = 1\n" for name in ("cases", "suite", "reference", "certify")}

    def digest_of(changed: dict[str, str]) -> str:
        for name, text in {**texts, **changed}.items():
            (tmp_path / f"{name}.py").write_text(text)
        certify.suite_digest.cache_clear()
        return certify.suite_digest()

    monkeypatch.setattr(certify, "__file__", str(tmp_path / "certify.py"))
    plain = digest_of({})
    assert digest_of({"suite": "\n# another comment\nx = 1\n"}) == plain
    assert digest_of({"suite": "# suite\nx = 2\n"}) != plain
    certify.suite_digest.cache_clear()


# Memory ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("dtype", DType)
def test_a_layout_keeps_its_values_and_surrounds_them_with_poison(layout: Layout, dtype: DType) -> None:
    tensor = cases.allocate((2, 3, 5, 8), dtype, layout, fused_heads=7, first_head=3)
    values = np.arange(8 * 5 * 3 * 2, dtype=np.float32).reshape(2, 3, 5, 8) % 97
    if layout is Layout.EXPANDED:
        values = np.broadcast_to(values[:, :1], values.shape)
    tensor.view()[...] = reference.encode(values, dtype)
    assert np.array_equal(reference.decode(tensor.view(), dtype), values)
    own = cases.owned(tensor)
    assert own.sum() == (values[:, :1] if layout is Layout.EXPANDED else values).size
    assert cases.is_poison(tensor.buffer, dtype)[~own].all()
    assert not cases.is_poison(tensor.buffer, dtype)[own].any()
    assert layout is Layout.TIGHT or (own[:512].sum(), own[-512:].sum()) == (0, 0)


@pytest.mark.parametrize(
    ("layout", "aligned"), [(Layout.CONTIGUOUS, True), (Layout.FUSED, True), (Layout.UNALIGNED, False), (Layout.ODD_ROWS, False)]
)
def test_layouts_are_aligned_or_not_as_their_names_say(layout: Layout, aligned: bool) -> None:
    tensor = cases.allocate((1, 2, 5, 8), DType.BFLOAT16, layout, fused_heads=4, first_head=1)
    address = tensor.buffer.ctypes.data + 2 * tensor.offset
    assert (address % 16 == 0 and all(stride * 2 % 16 == 0 for stride in tensor.strides[:3])) is aligned


def test_the_poison_is_nan_in_every_type() -> None:
    for dtype in DType:
        assert np.isnan(reference.decode(cases.poisoned(5, dtype), dtype)).all()


# Judgement ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("klass", CLASSES, ids=lambda klass: f"{klass.dtype}-{klass.mask}")
def test_a_right_kernel_gets_a_certificate(klass: ProblemClass) -> None:
    with np.errstate(all="ignore"):
        certificate = certify.full(ModelKernel(), ModelSpace(), source_of(klass), problem_of(klass), seed=11)
    assert certificate.verdict is Verdict.EXACT, certificate.failure
    assert certificate.cases == len(suite.full_suite(klass, Tiles(32, 48)))
    assert certificate.bitwise_cases >= 20
    assert 0 < certificate.worst_error_ratio <= 2
    assert certificate.lse_abs_error <= 1e-5
    assert certificate.executor is ExecutorName.EMULATED
    assert certificate.suite == "attention-forward/1"


def test_an_error_just_above_the_bound_fails_and_one_just_below_passes() -> None:
    expected = certify.expect(next(c for c in suite.full_suite(KLASS, Tiles(32, 48)) if c.name == "ragged-9"), 3)
    exact = reference.encode(expected.o, DType.BFLOAT16)
    place = np.unravel_index(np.abs(expected.o).argmin(), expected.o.shape)  # bfloat16 is finest there

    def shifted(factor: float) -> Callable[[ForwardTensors], None]:
        def change(tensors: ForwardTensors) -> None:
            tensors.o.view()[...] = exact
            tensors.o.view()[place] = reference.encode(np.array(expected.o[place] + factor * certify.BOUND * expected.unit), DType.BFLOAT16)

        return change

    assert one(Changed(shifted(0.97))).failure == ""
    assert "allowed" in one(Changed(shifted(1.03))).failure


def test_a_single_wrong_element_is_named_with_value_and_expectation() -> None:
    def change(tensors: ForwardTensors) -> None:
        tensors.o.view()[0, 0, 3, 5] = reference.encode(np.array(77.0), DType.BFLOAT16)

    failure = one(Changed(change)).failure
    assert "o[0, 0, 3, 5] = 77" in failure
    assert "flashgen certify --family model --params block_q=32,block_kv=48" in failure
    assert "--case ragged-9 --seed 3" in failure


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_writing_into_an_input_or_its_guard_is_rejected(name: str) -> None:
    def inside(tensors: ForwardTensors) -> None:
        getattr(tensors, name).view()[0, 0, 0, 0] = 1

    def before(tensors: ForwardTensors) -> None:
        tensor = getattr(tensors, name)
        tensor.buffer[tensor.offset - 1] = 1

    for change in (inside, before):
        assert f"changed its input {name}" in one(Changed(change)).failure


@pytest.mark.parametrize("name", ["o", "lse"])
def test_writing_around_an_output_is_rejected(name: str) -> None:
    def change(tensors: ForwardTensors) -> None:
        tensor = getattr(tensors, name)
        tensor.buffer[tensor.offset - 1] = 1

    assert f"wrote outside {name}" in one(Changed(change)).failure


def test_the_kernel_that_does_nothing_is_rejected_after_a_right_one_used_the_same_shapes() -> None:
    class Nothing(ModelKernel):
        def forward(self, source: Source, problem: Problem, tensors: ForwardTensors, scale: float) -> None:
            pass

    assert one(ModelKernel()).failure == ""
    assert "never written" in one(Nothing()).failure


def test_a_broken_emulation_rule_is_a_failure_of_the_kernel() -> None:
    class Racing(ModelKernel):
        def forward(self, source: Source, problem: Problem, tensors: ForwardTensors, scale: float) -> None:
            raise EmulationFault("race: two threads write one word")

    certificate = certify.quick(Racing(), ModelSpace(), source_of(KLASS), problem_of(KLASS), seed=1)
    assert certificate.verdict is Verdict.INEXACT
    assert "race: two threads" in certificate.failure


def test_an_unknown_case_lists_the_known_ones() -> None:
    with pytest.raises(InvalidProblem, match=r"no case 'nonsense'.*selection-0"):
        one(ModelKernel(), "nonsense")


# Real size ------------------------------------------------------------------------------------------------------------


class OnDevice(Changed):
    name = ExecutorName.DEVICE


def test_on_the_device_the_full_suite_also_runs_the_real_size() -> None:
    klass = ProblemClass(Op.FORWARD, DType.BFLOAT16, 16, 24, MaskKind.CAUSAL)
    problem = problem_of(klass, 300)
    cases_of_suite = len(suite.full_suite(klass, Tiles(32, 48)))
    with np.errstate(all="ignore"):
        certificate = certify.full(OnDevice(lambda _: None), ModelSpace(), source_of(klass), problem, seed=2)
    assert (certificate.verdict, certificate.cases) == (Verdict.EXACT, cases_of_suite + 1)


def test_a_fault_at_the_real_size_alone_is_rejected() -> None:
    def change(tensors: ForwardTensors) -> None:
        tensors.o.view()[:, :, 128:, 3] = reference.encode(np.array(0.0), DType.BFLOAT16)

    result = certify.spot_check(OnDevice(change), source_of(KLASS), problem_of(KLASS, 300), seed=2)
    assert "is off by" in result.failure


def test_the_real_size_is_cut_to_what_fits_in_memory() -> None:
    problem = Problem(DType.BFLOAT16, 128, 128, 64, 32, 8, 65536, 65536)
    small = suite.real_size(problem)
    assert (small.seqlen_q, small.seqlen_kv, small.gqa_group) == (65536, 65536, 4)
    assert small.batch * small.heads_q * small.seqlen_q * 128 <= 1 << 25, "one KV head of its group is the least"
    assert suite.real_size(problem_of(KLASS)) == problem_of(KLASS)


# Approximations and comparisons ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", MaskKind)
@pytest.mark.parametrize("approximation", APPROXIMATIONS, ids=lambda approximation: approximation.title)
def test_an_approximation_is_rejected_and_reported_with_its_error(approximation: Approximation, mask: MaskKind) -> None:
    klass = ProblemClass(Op.FORWARD, DType.BFLOAT16, 16, 24, mask)
    quick = certify.quick(approximation, ModelSpace(), source_of(klass), problem_of(klass), seed=1)
    assert quick.verdict is Verdict.INEXACT
    report = certify.describe(certify.errors(approximation, ModelSpace(), source_of(klass), seed=1))
    assert report.startswith("approximation with error: ")


def test_an_exact_kernel_is_described_as_exact() -> None:
    with np.errstate(all="ignore"):
        assert certify.describe(certify.errors(ModelKernel(), ModelSpace(), source_of(KLASS), seed=1)).startswith("exact in ")


def test_a_kernel_compared_with_itself_is_zero_ulp_apart() -> None:
    with np.errstate(all="ignore"):
        histogram = compare.against(ModelKernel(), ModelSpace(), source_of(KLASS), source_of(KLASS), seed=1)
    assert (histogram.largest, histogram.repeats) == (0, (True, True))
    assert histogram.buckets[0][2] == sum(count for _, _, count in histogram.buckets) > 10_000


def test_two_tile_sizes_differ_but_mostly_by_one_ulp_or_less() -> None:
    other = Source("model", KLASS, Variant.of("model", {"block_q": 16, "block_kv": 16}), "", "", (), 80)
    with np.errstate(all="ignore"):
        histogram = compare.against(ModelKernel(), ModelSpace(), source_of(KLASS), other, seed=1)
    near = sum(count for low, high, count in histogram.buckets if high <= 1)
    assert histogram.largest > 0
    assert near / sum(count for _, _, count in histogram.buckets) > 0.9
    assert len(histogram.lines()) == len(histogram.buckets)


def test_kernels_of_different_classes_are_not_compared() -> None:
    other = ProblemClass(Op.FORWARD, DType.FLOAT16, 16, 24, MaskKind.NONE)
    with pytest.raises(InvalidProblem, match="one problem class"):
        compare.against(ModelKernel(), ModelSpace(), source_of(KLASS), source_of(other), seed=1)
