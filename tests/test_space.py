"""Search spaces: files, enumeration, violations, what is bound into a kernel."""

from __future__ import annotations

import itertools
import os
import random
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashgen import device, paths
from flashgen.errors import EmptySpace, InfeasibleVariant, InvalidSpace, UnsupportedProblem
from flashgen.model import CompileReport, DeviceLimits, DType, Mask, Op, Problem, Variant
from flashgen.space import BoundSpace, load_space, load_spaces, parse_space
from flashgen.space_file import DEVICE_NAMES

TEXT = (Path(__file__).parent / "data" / "example_space.yaml").read_text()
EXAMPLE = parse_space(TEXT, "example_space.yaml")
SHIPPED = sorted(path.stem for path in paths.search_spaces().glob("*.yaml"))
POINT = {"block_q": 128, "block_kv": 64, "num_warps": 4, "num_stages": 2, "q_in_registers": False, "ctas_per_sm": 1}


def problem(head_dim: int = 128, seqlen: int = 4096, **changes: object) -> Problem:
    base = Problem(DType.BFLOAT16, head_dim, head_dim, 4, 16, 16, seqlen, seqlen)
    return replace(base, **changes)  # type: ignore[arg-type]


def bound(head_dim: int = 128, gpu: str = "h200", seqlen: int = 4096) -> BoundSpace:
    return EXAMPLE.bind(problem(head_dim, seqlen), device.preset(gpu))


def brute_force(at: BoundSpace) -> list[Variant]:
    choices = [parameter.choices for parameter in at.space.parameters]
    names = [parameter.name for parameter in at.space.parameters]
    variants = dict.fromkeys(at.variant(dict(zip(names, point, strict=True))) for point in itertools.product(*choices))
    return [variant for variant in variants if not any(at.violations(variant).values())]


def edited(old: str, new: str) -> str:
    assert TEXT.count(old) == 1, old
    return TEXT.replace(old, new)


# ---- enumeration and violations


@pytest.mark.parametrize(
    ("gpu", "head_dim", "count"),
    [("a100", 64, 349), ("a100", 128, 143), ("a100", 256, 19), ("rtx3090", 64, 279), ("rtx3090", 128, 78), ("rtx3090", 256, 5),
     ("h200", 64, 361), ("h200", 128, 168), ("h200", 256, 29)],
)  # fmt: skip
def test_the_example_has_the_counts_that_were_worked_out_by_hand(gpu: str, head_dim: int, count: int) -> None:
    assert len(bound(head_dim, gpu).feasible()) == count


@pytest.mark.parametrize("gpu", ["a100", "rtx3090", "h200"])
@pytest.mark.parametrize("head_dim", [64, 136, 256])
def test_enumeration_is_brute_force_in_the_same_order(gpu: str, head_dim: int) -> None:
    at = bound(head_dim, gpu)
    assert at.feasible() == brute_force(at)


@st.composite
def spaces(draw: st.DrawFn) -> str:
    """A small random space with conditions that read other parameters and constraints at every depth."""
    names = [f"p{index}" for index in range(draw(st.integers(1, 4)))]
    choices = {name: draw(st.lists(st.integers(0, 6), min_size=1, max_size=4, unique=True)) for name in names}
    conditional = draw(st.lists(st.sampled_from(names), unique=True, max_size=len(names) - 1))
    free = [name for name in names if name not in conditional]
    terms = st.sampled_from([*names, "1", "2", "problem.head_dim // 64", "device.sm // 30"])
    derived, known = {}, terms
    for index in range(draw(st.integers(0, 3))):
        left, operation, right = draw(known), draw(st.sampled_from(["+", "-", "*"])), draw(known)
        derived[f"d{index}"] = f"{left} {operation} {right}"
        known = st.one_of(terms, st.sampled_from(list(derived)))
    lines = [re.sub(r"\nparameters:.*", "", TEXT, flags=re.S), "parameters:"]
    lines += [f"  {name}: {{choices: {choices[name]}}}" for name in names]
    lines += ["conditions:" if conditional else "conditions: {}"]
    for name in conditional:
        reads, limit, otherwise = draw(st.sampled_from(free)), draw(st.integers(0, 5)), draw(st.integers(0, 6))
        lines.append(f'  {name}: {{when: "{reads} <= {limit}", else: {otherwise}}}')
    lines += ["derived:" if derived else "derived: {}", *(f'  {name}: "{text}"' for name, text in derived.items())]
    lines += ["constants: []", 'launches: [{entry: main, grid: "1", threads: 32, shared_bytes: 0}]', "constraints:", "  static:"]
    for index in range(draw(st.integers(1, 4))):
        lines.append(f'    c{index}: {{holds: "{draw(known)} <= {draw(known)} + {draw(st.integers(0, 3))}", why: x}}')
    first = ", ".join(f"{name}: {choices[name][0]}" for name in names)
    return "\n".join([*lines, "seeds: []", f"fallback: {{{first}}}"])


@settings(max_examples=80, deadline=None)
@given(spaces(), st.sampled_from([64, 128, 256]), st.sampled_from(["a100", "h200"]))
def test_enumeration_is_brute_force_on_random_spaces(text: str, head_dim: int, gpu: str) -> None:
    at = parse_space(text).bind(problem(head_dim), device.preset(gpu))
    found = at.feasible()
    assert sorted(found, key=str) == sorted(brute_force(at), key=str)
    assert len(set(found)) == len(found)


def test_violations_are_graded_and_explained() -> None:
    at = bound(256, "rtx4090")
    variant = at.variant(POINT)  # 64 KiB of queries, 2 × 64 KiB of keys and values
    assert at.violations(variant)["fits_shared"] == pytest.approx((196608 - 101376) / 101376)
    assert at.violations(variant)["whole_mma_rows"] == 0.0
    explained = at.explain(variant)
    assert "fits_shared: shared_bytes <= device.shared_bytes_per_cta fails, 196608 > 101376 (opt-in limit of one CTA)" in explained


def test_a_feasible_variant_has_no_violation_and_nothing_to_explain() -> None:
    at = bound()
    for variant in at.feasible():
        assert set(at.violations(variant).values()) == {0.0}
        assert at.explain(variant) == []


def test_compiled_constraints_read_the_report() -> None:
    at = bound()
    variant = at.variant(POINT)
    report = CompileReport("sha256:0", 255, 48, 64, 0, (), 0.3, "13.0", ())
    assert at.compiled_violations(variant, report) == {"no_spills": 48.0}
    assert at.explain(variant, report) == ["no_spills: kernel.spill_bytes <= 0 fails, 48 > 0 (a spilled variant never wins)"]
    assert at.compiled_violations(variant, replace(report, spill_bytes=0)) == {"no_spills": 0.0}


def test_a_compiled_constraint_on_shared_memory_counts_static_and_dynamic_bytes() -> None:
    text = edited('"kernel.spill_bytes <= 0"', '"kernel.shared_bytes <= 98304"')
    at = parse_space(text).bind(problem(), device.preset("h200"))
    report = CompileReport("sha256:0", 255, 0, 0, 16, (), 0.3, "13.0", ())
    assert at.compiled_violations(at.variant(POINT), report) == {"no_spills": pytest.approx(16 / 98304)}


def test_checking_and_enumerating_are_fast() -> None:
    at = bound(64)
    start = time.perf_counter()
    at.feasible()
    assert time.perf_counter() - start < 0.5  # 1,280 points; 0.02 s on a quiet machine
    variant = at.variant(POINT)
    start = time.perf_counter()
    for _ in range(100):
        at.violations(variant)
    assert time.perf_counter() - start < 0.1


# ---- variants


def test_a_parameter_that_means_nothing_takes_its_else_value() -> None:
    at = bound(256)
    assert at.variant(POINT | {"q_in_registers": True}) == at.variant(POINT)
    assert bound(128).variant(POINT | {"q_in_registers": True}) != bound(128).variant(POINT)


def test_a_variant_has_the_order_of_the_file_and_bools_stay_bools() -> None:
    variant = bound().variant(dict(reversed(POINT.items())) | {"q_in_registers": 1})
    assert [name for name, _ in variant.params] == list(POINT)
    assert variant.as_dict()["q_in_registers"] is True


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_q": 100}, r"block_q = 100 is not among its choices 128, 64, 192, 256"),
        ({"block_q": True}, r"block_q = True is not an integer"),
        ({"block_q": 128.0}, r"block_q = 128.0 is not an integer"),
        ({"block_q": "128; asm"}, r"block_q = '128; asm' is not an integer"),
        ({"q_in_registers": 2}, r"q_in_registers = 2 is not true or false"),
        ({"block_m": 64}, r"no parameter 'block_m'"),
    ],
)
def test_a_wrong_parameter_is_refused_by_name_and_value(change: dict[str, int], message: str) -> None:
    with pytest.raises(InfeasibleVariant, match=message):
        bound().variant(POINT | change)


def test_a_missing_parameter_is_refused_by_name() -> None:
    with pytest.raises(InfeasibleVariant, match=r"'ctas_per_sm' has no value; its choices are 1, 2"):
        bound().variant({name: value for name, value in POINT.items() if name != "ctas_per_sm"})


def test_an_else_value_outside_the_choices_is_read_back_only_where_the_condition_is_false() -> None:
    old, new = 'q_in_registers: {when: "problem.head_dim <= 128", else: false}', 'num_stages: {when: "num_warps <= 4", else: 0}'
    text = edited(old, new)
    at = parse_space(text).bind(problem(), device.preset("h200"))
    variant = at.variant(POINT | {"num_warps": 8})
    assert variant.as_dict()["num_stages"] == 0
    assert at.variant(variant.as_dict()) == variant
    assert sorted(at.feasible(), key=str) == sorted(brute_force(at), key=str)
    with pytest.raises(InfeasibleVariant, match="num_stages = 0 stands only where 'num_warps <= 4' is false"):
        at.variant(POINT | {"num_stages": 0})


def test_seeds_that_do_not_fit_are_skipped_in_order() -> None:
    assert [dict(variant.params)["num_stages"] for variant in bound(64, "h200").seeds()] == [2, 3]
    assert bound(256, "rtx4090").seeds() == []


@pytest.mark.parametrize("family", SHIPPED)
def test_a_walk_meets_the_feasible_variants_and_knows_what_asking_for_each_alone_gives(family: str) -> None:
    space, limits = load_space(family), device.preset("h200")
    at = space.bind(problem(64, mask=Mask.causal(), op=space.ops[0]), limits)
    met = dict[Variant, dict[str, int]]()
    for number, each in enumerate(at.walked()):
        met[each] = at.names(each) if number % 499 == 0 else {}
    assert set(met) == set(at.feasible()) and len(met) > 1
    ordinals = at.steps(met)
    for each, names in met.items():
        if names:
            alone = space.bind(at.problem, limits)
            assert names == alone.names(each) == at.names(each)
            assert alone.entry_points(each) == space.entry_points(at.problem.klass(), each)
            assert ordinals[each] == tuple(alone.ordinals(each).values())


def test_an_infeasible_fallback_says_which_limit_is_hit() -> None:
    small = device.preset("h200").with_shared_bytes(16384)
    with pytest.raises(EmptySpace, match=r"(?s)fallback of example_space.*fits_shared: .* 49152 > 16384"):
        EXAMPLE.bind(problem(128), small).fallback()


class Trial:
    """Answers from a list, and notes what was asked."""

    def __init__(self, answers: dict[str, int] | None = None, seed: int = 0) -> None:
        self.answers, self.asked, self.random = answers, {}, random.Random(seed)  # type: ignore[var-annotated]

    def suggest_int(self, name: str, low: int, high: int) -> int:
        self.asked[name] = (low, high)
        return self.answers[name] if self.answers is not None else self.random.randint(low, high)


def test_suggestions_are_ordinals_over_sorted_choices_with_fixed_ranges() -> None:
    at = bound()
    asked = set()
    for seed in range(20):
        trial = Trial(seed=seed)
        at.suggest(trial)
        asked.add(tuple(trial.asked.items()))
    assert asked == {(("block_q", (0, 3)), ("block_kv", (0, 4)), ("num_warps", (0, 3)), ("num_stages", (0, 3)),
                      ("q_in_registers", (0, 1)), ("ctas_per_sm", (0, 1)))}  # fmt: skip
    suggested = at.suggest(Trial({"block_q": 1, "block_kv": 0, "num_warps": 3, "num_stages": 2, "q_in_registers": 1, "ctas_per_sm": 0}))
    chosen = {"block_q": 128, "block_kv": 32, "num_warps": 16, "num_stages": 3, "q_in_registers": True, "ctas_per_sm": 1}
    assert suggested == at.variant(chosen)


@pytest.mark.parametrize("head_dim", [64, 256])
def test_every_feasible_variant_can_be_enqueued_and_comes_back(head_dim: int) -> None:
    at = bound(head_dim)
    for variant in at.feasible():
        assert at.suggest(Trial(at.ordinals(variant))) == variant


def test_a_parameter_that_can_never_matter_is_not_asked() -> None:
    trial = Trial()
    bound(256).suggest(trial)
    assert "q_in_registers" not in trial.asked


# ---- what reaches a kernel and its launch


def test_names_hold_every_parameter_derived_problem_and_device_value() -> None:
    at = EXAMPLE.bind(problem(64, 1000, mask=Mask.causal(), heads_kv=4), device.preset("l4"))
    names = at.names(at.variant(POINT))
    assert names["shared_bytes"] == 128 * 64 * 2 + 2 * (2 * 64 * 64 * 2)
    assert names["problem.gqa_group"] == 4
    assert names["problem.batch_heads"] == 64
    assert (names["problem.mask_none"], names["problem.mask_causal"], names["problem.mask_window"]) == (0, 1, 0)
    assert names["device.sm_count"] == 58
    assert set(POINT) | set(EXAMPLE.definition.derived) < set(names)


def test_constants_are_sorted_and_hold_what_the_file_lists_and_the_head_dims() -> None:
    constants = EXAMPLE.constants(problem(64).klass(), bound(64).variant(POINT))
    assert constants == {"block_kv": 64, "block_q": 128, "ctas_per_sm": 1, "head_dim": 64, "head_dim_v": 64, "num_stages": 2,
                         "num_warps": 4, "q_in_registers": False, "shared_bytes": 49152, "threads": 128}  # fmt: skip
    assert list(constants) == sorted(constants)
    assert constants["q_in_registers"] is False


def test_grids_cover_the_problem_and_empty_problems_have_empty_grids() -> None:
    at = EXAMPLE.bind(problem(64, 1000), device.preset("h200"))
    assert at.grids(at.variant(POINT)) == (8 * 64,)
    empty = EXAMPLE.bind(problem(64, 0), device.preset("h200"))
    assert empty.grids(empty.variant(POINT)) == (0,)
    assert at.workspace_bytes(at.variant(POINT)) == 0


def test_entry_points_hold_threads_and_dynamic_shared_bytes() -> None:
    (entry,) = EXAMPLE.entry_points(problem(64).klass(), bound(64).variant(POINT))
    assert (entry.name, entry.threads, entry.shared_bytes) == ("forward", 128, 49152)


def test_a_variant_of_another_family_is_refused() -> None:
    with pytest.raises(InfeasibleVariant, match="belongs to the family other"):
        EXAMPLE.constants(problem().klass(), Variant.of("other", POINT))


@pytest.mark.parametrize(
    ("changed", "gpu", "reason"),
    [
        ({"dtype": DType.FLOAT32}, "h200", "its element types are float16, bfloat16; got float32"),
        ({"head_dim": 12}, "h200", "head_dim must be a multiple of 8 from 8 to 256; got 12"),
        ({"head_dim_v": 264}, "h200", "head_dim_v must be a multiple of 8 from 8 to 256; got 264"),
        ({}, "t4", "it needs sm_80 or newer; Tesla T4 is sm_75"),
    ],
)
def test_an_unsupported_problem_is_refused_in_words(changed: dict[str, object], gpu: str, reason: str) -> None:
    asked = problem(**changed)  # type: ignore[arg-type]
    assert EXAMPLE.unsupported(asked, device.preset(gpu)) == reason
    with pytest.raises(UnsupportedProblem, match=re.escape(reason)):
        EXAMPLE.bind(asked, device.preset(gpu))


def test_the_digest_ignores_comments_and_layout_but_no_value() -> None:
    assert parse_space("# remark\n" + TEXT.replace("block_q:        {", "block_q: {")).digest == EXAMPLE.digest
    assert parse_space(edited("[1, 2], note", "[2, 1], note")).digest != EXAMPLE.digest


# ---- files that are refused

# fmt: off
BAD_FILES = {
    "newer schema": ("flashgen.space/1", "flashgen.space/2", "schema: this flashgen reads .*space/1; .* says 'flashgen.space/2'"),
    "unknown field": ("workspace_bytes: 0", "workspace: 0", "unknown field `workspace`"),
    "unknown nested field": ("unit: rows}\n  block_kv", "units: rows}\n  block_kv", "parameters.block_q.*unknown field `units`"),
    "wrong type": ("min_sm: 80", "min_sm: '80'", r"requires.min_sm: Expected `int`, got `str`"),
    "bool for int": ("min_sm: 80", "min_sm: true", r"requires.min_sm: Expected `int`, got `bool`"),
    "float choice": ("[4, 8, 12, 16]", "[4, 8.0]", r"parameters.num_warps.choices\[1\]"),
    "yaml 1.1 octal": ("[4, 8, 12, 16]", "[4, 017]", r"parameters.num_warps.choices\[1\]"),
    "yaml 1.1 word": ("[false, true]", "[no, yes]", r"parameters.q_in_registers.choices\[0\]"),
    "mixed choices": ("[4, 8, 12, 16]", "[4, true]", "choices are all integers or all true/false"),
    "no choices": ("[4, 8, 12, 16]", "[]", "parameters.num_warps.choices"),
    "repeated choice": ("[4, 8, 12, 16]", "[4, 8, 4]", "a choice stands twice"),
    "huge choice": ("[4, 8, 12, 16]", "[4, 99999999999]", r"parameters.num_warps.choices\[1\]"),
    "30 digits": ("[4, 8, 12, 16]", f"[4, {'9' * 30}]", "30 digits"),
    "5000 digits": ("[4, 8, 12, 16]", f"[4, {'9' * 5000}]", "5000 digits"),
    "duplicate key": ("  num_warps:  ", "  block_q: 1\n  num_warps:  ", r":15: key 'block_q' again \(first on line 13\)"),
    "python tag": ("why: opt-in limit of one CTA", "why: !!python/object/apply:os.system ['touch /tmp/marker']", "tag"),
    "alias": ("workspace_bytes: 0", "workspace_bytes: &a 0\nderived_bytes: *a", "anchor|alias"),
    "bad family": ("family: example_space", "family: ../example", "family: '../example' is not a name"),
    "path escape": ("template: ampere/forward.cuh", "template: ../secrets.cuh", "template: .* is not a file below templates/"),
    "unknown op": ("op: forward", "op: sideways", "op: Invalid enum value 'sideways'"),
    "unknown mask": ("[none, causal, window]", "[none, diagonal]", r"requires.masks\[1\]: Invalid enum value 'diagonal'"),
    "unknown name": ('"32 * num_warps"', '"32 * warps"', r"derived.threads: undefined or circular name warps in '32 \* warps'"),
    "circular": ('"32 * num_warps"', '"threads + 1"', "derived.threads: undefined or circular name threads"),
    "forward reference": ('"32 * num_warps"', '"32 * rows_per_warp"', "derived.threads: undefined or circular name rows_per_warp"),
    "unknown device name": ('"32 * num_warps"', '"device.name"', "undefined or circular name device.name"),
    "kernel name too early": ('"block_kv % 16 <= 0"', '"kernel.registers <= 255"', "constraints.static.whole_mma_cols.holds: undefined"),
    "grammar": ('"32 * num_warps"', '"32 ** num_warps"', "derived.threads: .* is outside the grammar"),
    "code": ('"32 * num_warps"', "\"__import__('os').system('true')\"", "derived.threads: .*calls something other than"),
    "two relations": ('"block_kv % 16 <= 0"', '"0 <= block_kv <= 16"', "whole_mma_cols.holds: .* must be one relation"),
    "condition on nothing": ('  q_in_registers: {when: "problem', '  block_m: {when: "problem', "conditions.block_m: there is no"),
    "condition on itself": ('"problem.head_dim <= 128"', '"q_in_registers == 1"', "conditions.q_in_registers.when: undefined or circular"),
    "condition of another kind": ("else: false}", "else: 0}", "conditions.q_in_registers.else: 0 is not of the kind"),
    "reserved name": ("\n  threads: ", "\n  min: ", "derived.min: 'min' cannot be a name here"),
    "name twice": ("\n  threads: ", "\n  block_q: ", "derived.block_q: 'block_q' already names something above"),
    "unknown constant": ("threads, shared_bytes]", "depth]", "constants: 'depth' is neither a parameter nor"),
    "run-time constant": ('"32 * num_warps"', '"32 * problem.seqlen_q"', "constants: 'threads' depends on more than problem class"),
    "device constant": ('"32 * num_warps"', '"32 + device.sm"', "constants: 'threads' depends on more than problem class"),
    "run-time threads": ("    threads: threads", "    threads: min(problem.batch, 32)", "launches.0..threads: .* through problem.batch"),
    "run-time shared": ("    shared_bytes: shared_bytes", "    shared_bytes: device.sm", "launches.0..shared_bytes: .* through device.sm"),
    "incomplete seed": ("  - {block_q: 64, block_kv: 64,", "  - {block_q: 64,", r"seeds\[1\]: the parameter 'block_kv' has no value"),
    "wrong seed": ("  - {block_q: 64, block_kv: 64,", "  - {block_q: 65, block_kv: 64,", r"seeds\[1\]: block_q = 65 is not among"),
    "wrong fallback": ("fallback: {block_q: 64", "fallback: {block_q: 1", "fallback: block_q = 1 is not among"),
    "shared part": ("[q_or_o_bytes, ring_bytes]", "[threads]", "shared_parts: 'threads' is not a derived quantity whose"),
    "cost word": ("cost: {mma: true}", "cost: {mma: fast}", "cost.mma: Expected"),
}
# fmt: on


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_bad_file_is_refused_with_file_field_and_rule(case: str) -> None:
    old, new, message = BAD_FILES[case]
    with pytest.raises(InvalidSpace, match=r"(?s)^example\.yaml.*" + message):
        parse_space(edited(old, new), "example.yaml")


@pytest.mark.parametrize("text", ["", "[]", "3", "a: [", "\t", "a: b: c", "---\na: 1\n---\nb: 2", "\x00", "[" * 5000, "? {a: 1}\n: 2"])
def test_a_file_that_is_no_mapping_is_refused(text: str) -> None:
    with pytest.raises(InvalidSpace, match=r"example\.yaml"):
        parse_space(text, "example.yaml")


def test_a_space_too_large_to_enumerate_is_refused() -> None:
    choices = str(list(range(1, 201)))
    text = edited("[4, 8, 12, 16]", choices).replace("[2, 1, 3, 4]", choices)
    with pytest.raises(InvalidSpace, match="parameters: a space has 1 to 2000000 points; this one has 3200000"):
        parse_space(text)


def test_a_missing_field_is_named() -> None:
    with pytest.raises(InvalidSpace, match="missing required field `fallback`"):
        parse_space(re.sub(r"\nfallback:.*", "", TEXT))


def test_division_by_zero_names_file_field_and_expression() -> None:
    text = edited('"block_kv <= max(64, problem.seqlen_kv)"', '"block_kv // problem.seqlen_kv <= 64"')
    at = parse_space(text, "example.yaml").bind(problem(64, 0), device.preset("h200"))
    message = r"example.yaml: constraints.static.not_oversized.holds: division by zero in 'block_kv // problem.seqlen_kv <= 64'"
    with pytest.raises(InvalidSpace, match=message):
        at.violations(at.variant(POINT))
    with pytest.raises(InvalidSpace, match=message):
        at.feasible()


# ---- shipped files


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(paths, "search_spaces", lambda: tmp_path)
    return tmp_path


def test_spaces_are_found_by_family_and_by_op(folder: Path) -> None:
    (folder / "example_space.yaml").write_text(TEXT)
    assert load_space("example_space").family == "example_space"
    assert [found.family for found in load_spaces(Op.FORWARD)] == ["example_space"]
    with pytest.raises(InvalidSpace, match=r"no search space for the family '\.\./x'; the families in .* are example_space"):
        load_space("../x")


def test_a_baseline_is_loaded_by_name_and_never_offered(folder: Path) -> None:
    (folder / "example_space.yaml").write_text(TEXT + "\nbaseline: true\n")
    assert load_space("example_space").definition.baseline
    assert load_spaces(Op.FORWARD) == ()


def test_a_file_must_carry_its_family_as_name(folder: Path) -> None:
    (folder / "other.yaml").write_text(TEXT)
    with pytest.raises(InvalidSpace, match="must equal the name of the file, 'other'"):
        load_space("other")


def test_a_changed_file_is_read_again(folder: Path) -> None:
    path = folder / "example_space.yaml"
    path.write_text(TEXT)
    first = load_space("example_space").digest
    path.write_text(edited("[1, 2], note", "[2, 1], note"))
    stat = path.stat()
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 10**9))
    assert load_space("example_space").digest != first


def test_an_unreadable_file_is_an_invalid_space(folder: Path) -> None:
    (folder / "example_space.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidSpace, match="not readable"):
        load_space("example_space")


@pytest.mark.parametrize("family", SHIPPED)
def test_a_shipped_fallback_fits_every_supported_device_and_head_dim(family: str) -> None:
    offered = load_space(family)
    rule, rule_v = offered.head_dim, offered.head_dim_v
    for limits in device.PRESETS.values():
        for dtype, dim in itertools.product(offered.dtypes, range(rule.min, rule.max + 1, rule.multiple_of)):
            for asked in (problem(dim, dtype=dtype), problem(dim, 1, dtype=dtype), problem(dim, dtype=dtype, head_dim_v=rule_v.max)):
                if offered.unsupported(asked, limits) is None:
                    offered.bind(asked, limits).fallback()  # raises EmptySpace otherwise


@pytest.mark.parametrize("family", SHIPPED)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_shipped_space_enumerates_quickly(family: str, head_dim: int) -> None:
    offered = load_space(family)
    asked = problem(head_dim, dtype=offered.dtypes[-1])
    if offered.unsupported(asked, device.preset("h200")):
        pytest.skip("not offered")
    start = time.perf_counter()
    assert offered.bind(asked, device.preset("h200")).feasible()
    assert time.perf_counter() - start < 2.0


def test_importing_the_module_imports_no_heavy_library() -> None:
    code = "import sys; import flashgen.space, flashgen.cost; assert not {'cupy', 'torch', 'optuna', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": ":".join(sys.path)}, check=True)


def test_device_names_of_the_grammar_are_fields_of_device_limits() -> None:
    limits: DeviceLimits = device.preset("h200")
    assert all(isinstance(getattr(limits, name.partition(".")[2]), int) for name in DEVICE_NAMES)


def test_the_example_of_the_readme_is_a_valid_space() -> None:
    text = (paths.search_spaces() / "README.md").read_text()
    example = re.search(r"```yaml\n(.*?)```", text, re.S)
    assert example is not None
    at = parse_space(example.group(1)).bind(problem(64), device.preset("h200"))
    assert len(at.feasible()) == 4
