"""Standard lists of problems: what they hold, that they can be divided, stopped and resumed, and how the rest is filled."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from shipping import H200, NVRTC, compiled, entry, problem, source_of, table_of, variant

from flashgen import cli, evaluators, paths, search, standard, table
from flashgen.errors import InvalidProblem
from flashgen.evaluators import Decision, Toolchain
from flashgen.model import (
    Certificate,
    CompileReport,
    DeviceLimits,
    DType,
    ExecutorName,
    Mask,
    Measurement,
    Outcome,
    Problem,
    Source,
    Trial,
    Variant,
    Verdict,
)
from flashgen.space import BoundSpace, load_space
from flashgen.staleness import Tools

TOOLS = Tools(NVRTC, "580.65")


class Imagined:
    """An evaluator of a GPU that is not there. Counts what is asked of it; times grow with block_q."""

    executor = ExecutorName.DEVICE
    jobs = 2
    finalists = 2

    def __init__(self, bounds: Sequence[BoundSpace], asked: Problem, limits: DeviceLimits, seed: int) -> None:
        self.problem = asked
        self.calls: Counter[str] = Counter()
        CREATED.append(self)

    def nvrtc(self) -> str:
        return NVRTC

    def toolchain(self) -> Toolchain:
        return Toolchain(NVRTC, "580.65", "14.2.0")

    def prepare(self, variant: Variant) -> None:
        pass

    def source(self, variant: Variant) -> Source:
        return source_of(self.problem, variant)

    def report(self, variant: Variant) -> CompileReport:
        return compiled(self.source(variant)).report

    def us(self, variant: Variant) -> float:
        at = variant.as_dict()
        return 100.0 + at.get("block_q", 64 * at.get("consumer_warpgroups", 1)) + 1e-3 * at["block_kv"]

    def evaluate(self, variant: Variant, best_us: float | None) -> Trial:
        self.calls["evaluate"] += 1
        us = self.us(variant)
        return Trial(variant, Outcome.OK, "", Measurement(us, us, us, 10, 1.0), self.report(variant), self.source(variant).digest)

    def certify(self, variant: Variant) -> Certificate:
        self.calls["certify"] += 1
        verdict = Verdict.INEXACT if variant in INEXACT else Verdict.EXACT
        return replace(entry().certificate, verdict=verdict, failure="planted" if variant in INEXACT else "")

    def decide(self, finalists: Sequence[Variant], incumbents: Sequence[Variant], trials: dict[Variant, Trial]) -> Decision:
        times = {each: Measurement(self.us(each), self.us(each), self.us(each), 30, 1.0) for each in finalists}
        return Decision(min(times, key=lambda each: times[each].median_us), times)

    def close(self) -> None:
        self.calls["close"] += 1


CREATED: list[Imagined] = []
INEXACT: set[Variant] = set()


@pytest.fixture(autouse=True)
def forgotten(home: Path) -> None:
    CREATED.clear()
    INEXACT.clear()


def run(wishes: list[standard.Wish], path: Path, **options: object) -> list[standard.Done]:
    return list(standard.tune(wishes, H200, ExecutorName.DEVICE, TOOLS, path=path, budget=3, make_evaluator=Imagined, **options))  # type: ignore[arg-type]


# Lists ----------------------------------------------------------------------------------------------------------------


def test_the_full_list_searches_each_head_dim_mask_and_length_and_fills_the_rest() -> None:
    wishes = standard.full()
    searched, filled = ([each.problem for each in wishes if each.searched is kind] for kind in (True, False))
    assert len(searched) == 7 * 2 * 7 and {each.dtype for each in searched} == {DType.BFLOAT16}
    assert {each.gqa_group for each in searched} == {1} and {each.gqa_group for each in filled} == {1, 4, 8}
    assert {each.dtype for each in filled} == {DType.BFLOAT16, DType.FLOAT16}
    assert {(each.head_dim, each.head_dim_v) for each in searched} == set(standard.DIMS)
    assert {each.seqlen_q for each in searched} == {512, 1024, 2048, 4096, 8192, 16384, 32768}
    keys = [table.full_key(each.problem) for each in wishes]
    assert len(set(keys)) == len(keys), "no entry is made twice"


@pytest.mark.parametrize("count", [1, 3, 4, 7])
def test_the_parts_of_a_list_make_up_the_whole(count: int) -> None:
    wishes = standard.full()
    parts = [standard.part_of(wishes, f"{number + 1}/{count}") for number in range(count)]
    assert sorted(map(str, (each for part in parts for each in part))) == sorted(map(str, wishes))
    for part in parts:
        assert [each.searched for each in part] == sorted((each.searched for each in part), reverse=True)


@pytest.mark.parametrize("part", ["0/4", "5/4", "2", "a/b", "-1/4", "1/0"])
def test_a_part_that_is_none_is_refused(part: str) -> None:
    with pytest.raises(InvalidProblem, match="2/4"):
        standard.part_of(standard.small(), part)


# Tuning ---------------------------------------------------------------------------------------------------------------


def test_a_list_is_searched_filled_and_then_kept(tmp_path: Path) -> None:
    asked = problem(head_dim=64, mask=Mask())
    wishes = [standard.Wish(asked), standard.Wish(replace(asked, dtype=DType.FLOAT16), searched=False)]
    path = tmp_path / "t.yaml"
    assert [each.how for each in run(wishes, path)] == ["searched", "filled"]
    entries = table.read(path, strict=True).entries
    assert {each.provenance.sampler for each in entries} >= {"neighbours"}
    CREATED.clear()
    assert [each.how for each in run(wishes, path)] == ["kept", "kept"]
    assert not CREATED, "nothing runs for what is current"


def test_a_stopped_list_goes_on_where_it_ended(tmp_path: Path) -> None:
    wishes = [standard.Wish(problem(length, mask=Mask())) for length in (256, 512, 1024)]
    path = tmp_path / "t.yaml"
    running = standard.tune(wishes, H200, ExecutorName.DEVICE, TOOLS, path=path, budget=3, make_evaluator=Imagined)
    assert next(running).how == "searched"
    running.close()
    assert [each.how for each in run(wishes, path)] == ["kept", "searched", "searched"]


def test_a_stale_entry_of_the_list_is_made_anew(tmp_path: Path) -> None:
    from shipping import stale

    asked = problem(mask=Mask())
    path = table_of(tmp_path / "t.yaml", stale(entry(asked)), entry(problem(512, mask=Mask()), kind="predicted")).path
    wishes = [standard.Wish(asked), standard.Wish(problem(512, mask=Mask()))]
    assert [each.how for each in run(wishes, path)] == ["searched", "searched"], "a GPU replaces predictions too"


def test_neighbours_are_the_nearest_winners_and_runners_up_each_once() -> None:
    near = entry(problem(2048, mask=Mask()), chosen=variant(problem(2048, mask=Mask()), block_kv=64))
    far = entry(problem(16384, mask=Mask()), chosen=variant(problem(16384, mask=Mask()), block_kv=96))
    second = variant(problem(2048, mask=Mask()), block_kv=48)
    entries = [far, replace(near, runner_up=(second, 110.0)), entry(problem(1024)), entry(problem(1024, head_dim=128, mask=Mask()))]
    half = replace(problem(1024, mask=Mask()), dtype=DType.FLOAT16)
    assert standard.neighbours(half, entries) == [near.variant, second, far.variant]
    assert standard.neighbours(half, entries, most=2) == [near.variant, second]


def test_filling_takes_the_fastest_exact_candidate() -> None:
    asked = problem(mask=Mask())
    fast, slow = variant(asked, block_q=32, num_warps=2), variant(asked, block_q=128)
    made = standard.fill(asked, H200, [slow, fast], (), Imagined)
    assert made.variant == fast and made.runner_up is not None and made.provenance.measured == 3
    INEXACT.add(fast)
    assert standard.fill(asked, H200, [slow, fast], (), Imagined).variant != fast


def test_a_text_is_certified_once_however_many_problems_it_serves() -> None:
    asked = problem(mask=Mask())
    known = standard.fill(asked, H200, [variant(asked)], (), Imagined)
    again = standard.fill(replace(asked, batch=8), H200, [variant(asked)], [known], Imagined)
    assert again.certificate == known.certificate
    assert [each.calls["certify"] for each in CREATED] == [1, 0]
    assert all(each.calls["close"] == 1 for each in CREATED)


def test_a_refresh_proves_and_times_anew_and_keeps_how_the_variant_was_found(tmp_path: Path) -> None:
    found = table_of(tmp_path / "t.yaml", entry(problem(mask=Mask())), entry())
    outcomes = list(standard.refresh(found, found.entries[:1], H200, ExecutorName.DEVICE, make_evaluator=Imagined))
    assert [type(each).__name__ for _, each in outcomes] == ["Change"]
    after = table.read(found.path, strict=True)
    assert len(after.entries) == 2
    fresh = next(each for each in after.entries if each.problem == found.entries[0].problem)
    assert fresh.provenance.sampler == "tpe" and fresh.provenance.created != found.entries[0].provenance.created
    assert fresh.measurement.median_us == 164.032


def test_a_refresh_that_fails_keeps_the_old_entry_and_says_why(tmp_path: Path) -> None:
    base = entry(problem(mask=Mask()))
    found = table_of(tmp_path / "t.yaml", base)
    fallback = search.fallback_of(search.bind_families(base.problem, H200))
    assert fallback is not None
    INEXACT.update((base.variant, fallback))
    ((_, outcome),) = standard.refresh(found, found.entries, H200, ExecutorName.DEVICE, make_evaluator=Imagined)
    assert "planted" in str(outcome)
    assert table.read(found.path, strict=True).entries == (base,)


# The command, and what is shipped -------------------------------------------------------------------------------------


def test_a_standard_list_names_its_problems_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["tune", "--standard", "small", "--head-dim", "64", "--gpu", "h200", "--executor", "emulated"]) == 2
    assert "leave out --head-dim" in " ".join(capsys.readouterr().err.split())
    assert cli.run(["tune", "--part", "1/2", "--head-dim", "64"]) == 2
    assert "add --standard" in " ".join(capsys.readouterr().err.split())


@pytest.mark.compiled
def test_a_list_is_compiled_ahead_without_a_gpu(home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    wishes = [standard.Wish(problem(256, head_dim=16)), standard.Wish(problem(512, head_dim=16), searched=False)]
    monkeypatch.setitem(standard.LISTS, "small", lambda: wishes)
    assert cli.run(["tune", "--standard", "small", "--compile-only", "--gpu", "h200", "--budget", "2", "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["kernels"] == 2 and "1/1 compiled" in captured.err


def test_a_problem_that_cannot_be_done_is_skipped_with_its_reason(tmp_path: Path) -> None:
    odd = replace(problem(mask=Mask()), head_dim=264, head_dim_v=264)
    done = run([standard.Wish(odd), standard.Wish(problem(mask=Mask()))], tmp_path / "t.yaml")
    assert [each.how for each in done] == ["skipped", "searched"] and "No kernel family fits" in done[0].why


def test_the_command_keeps_a_list_that_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    wishes = [standard.Wish(problem(mask=Mask()))]
    monkeypatch.setitem(standard.LISTS, "small", lambda: wishes)
    monkeypatch.setattr(standard, "evaluators", lambda executor: nullcontext(Imagined))
    monkeypatch.setattr("flashgen.staleness.tools_in_use", lambda: TOOLS)
    arguments = ["tune", "--standard", "small", "--gpu", "h200", "--executor", "emulated", "--table", str(tmp_path / "t.yaml"), "--json"]
    assert cli.run([*arguments, "--budget", "3"]) == 0
    assert json.loads(capsys.readouterr().out)["done"] == {"searched": 1}
    assert cli.run(arguments) == 0
    assert json.loads(capsys.readouterr().out)["done"] == {"kept": 1}


def test_shipped_tables_are_sound_and_named_after_their_devices() -> None:
    from flashgen.device import PRESETS, slug
    from flashgen.search import space_check
    from flashgen.table_tools import limits_of

    files = sorted(paths.shipped_tables().glob("*.yaml"))
    assert len(files) >= 4
    for path in files:
        found = table.read(path, strict=True, check=space_check)
        limits = limits_of(found.device)
        assert path.stem == slug(limits) and limits.name in {preset.name for preset in PRESETS.values()}
        for each in found.entries:
            predicted = each.measurement.source == "predicted"
            assert (each.certificate.executor is ExecutorName.EMULATED) == predicted
            assert limits.name != "NVIDIA H200" or not predicted


@pytest.mark.slow
@pytest.mark.compiled
@pytest.mark.emulated
def test_a_predicted_entry_is_refreshed_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from shipping import stale

    from flashgen import device

    monkeypatch.setattr(device, "is_present", lambda: False)
    path = table_of(tmp_path / "a.yaml", stale(entry(problem(256, head_dim=16), kind="predicted"))).path
    assert cli.run(["table", "check", str(path)]) == 1
    assert cli.run(["table", "refresh", str(path)]) == 0
    assert cli.run(["table", "check", "--compile", str(path)]) == 0
    (fresh,) = table.read(path, strict=True).entries
    assert fresh.measurement.source == "predicted" and fresh.certificate.executor is ExecutorName.EMULATED


# One proof per machine code ----------------------------------------------------------------------------------------------


class ProvingChild:
    """A measuring child that counts what it is asked to prove, and finds launches of real size wrong where it is told to."""

    def __init__(self) -> None:
        self.asked, self.wrong, self.verdict = list[tuple[str, int]](), "", Verdict.EXACT

    def call(self, culprit: str, task: Any, source: Source, compiled: object, problem: Problem, seed: int, **_: object) -> object:
        self.asked.append((task.__name__, problem.seqlen_q))
        if task is evaluators.real_size_task:
            return self.wrong
        return replace(entry().certificate, verdict=self.verdict, executor=ExecutorName.DEVICE)

    def kill(self) -> str:
        return ""


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> ProvingChild:
    made = ProvingChild()
    monkeypatch.setattr(standard, "measuring_child", lambda: made)
    monkeypatch.setattr(evaluators.DeviceEvaluator, "compiled", lambda self, variant: compiled(self.source(variant)))
    return made


def proofs(*lengths: int) -> list[Certificate]:
    """The same variant certified for problems of several lengths, as a list does it."""
    found = []
    with standard.evaluators(ExecutorName.DEVICE) as make:
        for length in lengths:
            of = problem(length)
            bounds = [load_space("ampere_forward").bind(of, H200)]
            evaluator = make(bounds, of, H200, 0)
            found.append(evaluator.certify(bounds[0].fallback()))
            evaluator.close()
    return found


def test_the_whole_suite_runs_once_per_machine_code_and_every_problem_at_its_own_size(child: ProvingChild) -> None:
    assert all(each.verdict is Verdict.EXACT for each in proofs(1024, 4096, 512))
    assert child.asked == [("certify_task", 1024), ("real_size_task", 4096), ("real_size_task", 512)]


def test_a_kernel_that_is_wrong_at_real_size_is_refused_there_and_there_only(child: ProvingChild) -> None:
    child.wrong = "real_size: o[0, 0, 3] is off"
    first, second = proofs(1024, 4096)
    assert first.verdict is Verdict.EXACT
    assert second.verdict is Verdict.INEXACT and second.failure == child.wrong


def test_a_failed_proof_is_made_again(child: ProvingChild) -> None:
    child.verdict = Verdict.INEXACT
    proofs(1024, 4096)
    assert child.asked == [("certify_task", 1024), ("certify_task", 4096)]
