"""Standard lists of problems: that they can be stopped and resumed, and how what is not searched is filled."""

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

from flashgen import cli, device, evaluators, near, paths, search, standard, table, wishes
from flashgen.cli.standard import Pace
from flashgen.evaluators import Decision, Toolchain
from flashgen.model import (
    Certificate,
    CompileReport,
    DeviceLimits,
    DType,
    ExecutorName,
    Mask,
    Measurement,
    Op,
    Outcome,
    Problem,
    Source,
    Trial,
    Variant,
    Verdict,
)
from flashgen.shelf import WRITE_SECONDS, Shelf
from flashgen.space import BoundSpace, load_space
from flashgen.staleness import Tools

TOOLS = Tools(NVRTC, "580.65")


class Imagined:
    """An evaluator of a GPU that is not there. Counts what is asked of it; times grow with block_q."""

    executor = ExecutorName.DEVICE
    jobs = 2
    finalists = 2
    proved: int | None = None

    def __init__(self, bounds: Sequence[BoundSpace], asked: Problem, limits: DeviceLimits, seed: int) -> None:
        self.problem = asked
        self.calls: Counter[str] = Counter()
        CREATED.append(self)

    def nvrtc(self) -> str:
        return NVRTC

    def toolchain(self) -> Toolchain:
        return Toolchain(NVRTC, "580.65", "14.2.0")

    def expect(self, variants: Sequence[Variant]) -> None:
        self.expected = list(variants)

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
        self.defended = list(incumbents)
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


def run(asked_for: list[wishes.Wish], path: Path, **options: object) -> list[standard.Done]:
    options = {"budget": 3, "make_evaluator": Imagined} | options
    return list(standard.tune(asked_for, H200, ExecutorName.DEVICE, TOOLS, path=path, **options))  # type: ignore[arg-type]


# Tuning ---------------------------------------------------------------------------------------------------------------


def test_a_list_is_searched_filled_and_then_kept(tmp_path: Path) -> None:
    asked = problem(head_dim=64, mask=Mask())
    asked_for = [wishes.Wish(asked), wishes.Wish(replace(asked, dtype=DType.FLOAT16), searched=False)]
    path = tmp_path / "t.yaml"
    assert [each.how for each in run(asked_for, path)] == ["searched", "filled"]
    entries = table.read(path, strict=True).entries
    assert {each.provenance.sampler for each in entries} >= {"neighbours"}
    CREATED.clear()
    assert [each.how for each in run(asked_for, path)] == ["kept", "kept"]
    assert not CREATED, "nothing runs for what is current"


def test_a_stopped_list_goes_on_where_it_ended(tmp_path: Path) -> None:
    asked_for = [wishes.Wish(problem(length, mask=Mask())) for length in (256, 512, 1024)]
    path = tmp_path / "t.yaml"
    running = standard.tune(asked_for, H200, ExecutorName.DEVICE, TOOLS, path=path, budget=3, make_evaluator=Imagined)
    assert next(running).how == "searched"
    running.close()
    assert [each.how for each in run(asked_for, path)] == ["kept", "searched", "searched"]


def test_a_filled_problem_is_in_the_table_when_the_list_is_left(tmp_path: Path) -> None:
    asked = problem(mask=Mask())
    asked_for = [wishes.Wish(asked), *(wishes.Wish(replace(asked, batch=batch), searched=False) for batch in (3, 4, 5))]
    path = tmp_path / "t.yaml"
    running = standard.tune(asked_for, H200, ExecutorName.DEVICE, TOOLS, path=path, budget=3, make_evaluator=Imagined)
    assert [next(running).how for _ in range(3)] == ["searched", "filled", "filled"]
    running.close()
    assert {each.problem.batch for each in table.read(path, strict=True).entries} == {2, 3, 4}
    assert [each.how for each in run(asked_for, path)] == ["kept", "kept", "kept", "filled"]


def test_nothing_begins_that_would_hardly_end_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked_for = [wishes.Wish(problem(length, mask=Mask())) for length in (256, 512, 1024)]
    path = tmp_path / "t.yaml"
    monkeypatch.setattr(standard, "expected", lambda wish: 1000.0 if wish.problem.seqlen_q == 512 else 0.0)
    assert [each.how for each in run(asked_for, path, within=500.0)] == ["searched"]
    assert [each.how for each in run(asked_for, path, within=1500.0)] == ["kept", "searched", "searched"]


def test_a_wish_says_how_many_trials_its_search_gets_unless_the_caller_does(tmp_path: Path) -> None:
    for number, (budget, trials) in enumerate([(None, 5), (2, 2)]):
        CREATED.clear()
        asked_for = [wishes.Wish(problem(256 + number, mask=Mask()), budget=5)]
        path = tmp_path / f"{number}.yaml"
        list(standard.tune(asked_for, H200, ExecutorName.DEVICE, TOOLS, path=path, budget=budget, make_evaluator=Imagined))
        assert CREATED[0].calls["evaluate"] == trials


def test_what_another_process_writes_meanwhile_is_seen_and_kept(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path / "t.yaml", H200)
    mine, theirs = entry(problem(mask=Mask())), entry(problem(2048, mask=Mask()))
    assert shelf.put(mine).written and not shelf.path.exists()
    table.merge(shelf.path, H200, theirs)
    assert {each.problem for each in shelf.entries()} == {mine.problem, theirs.problem}
    shelf.write()
    assert {each.problem for each in table.read(shelf.path, strict=True).entries} == {mine.problem, theirs.problem}


def test_a_shelf_replaces_no_measured_entry_by_a_predicted_one(tmp_path: Path) -> None:
    measured, predicted = entry(problem()), entry(problem(), kind="predicted", median=1.0)
    shelf = Shelf(table_of(tmp_path / "t.yaml", measured).path, H200)
    assert not shelf.put(predicted).written
    shelf.write()
    assert table.read(shelf.path, strict=True).entries == (measured,)


def test_a_shelf_writes_when_enough_time_has_gone_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("flashgen.shelf.time.monotonic", lambda: now[0])
    shelf = Shelf(tmp_path / "t.yaml", H200)
    shelf.put(entry(problem(256)))
    now[0] = WRITE_SECONDS + 1.0
    shelf.put(entry(problem(512)))
    assert len(table.read(shelf.path, strict=True).entries) == 2


def test_gradients_are_searched_and_filled_like_outputs(tmp_path: Path) -> None:
    asked = problem(256, head_dim=64, mask=Mask(), op=Op.BACKWARD)
    asked_for = [wishes.Wish(asked), wishes.Wish(replace(asked, seqlen_q=512, seqlen_kv=512), searched=False)]
    path = tmp_path / "t.yaml"
    assert [each.how for each in run(asked_for, path)] == ["searched", "filled"]
    assert {each.problem.op for each in table.read(path, strict=True).entries} == {Op.BACKWARD}
    assert [each.how for each in run(asked_for, path)] == ["kept", "kept"]


def test_a_stale_entry_of_the_list_is_made_anew(tmp_path: Path) -> None:
    from shipping import stale

    asked = problem(mask=Mask())
    path = table_of(tmp_path / "t.yaml", stale(entry(asked)), entry(problem(512, mask=Mask()), kind="predicted")).path
    asked_for = [wishes.Wish(asked), wishes.Wish(problem(512, mask=Mask()))]
    assert [each.how for each in run(asked_for, path)] == ["searched", "searched"], "a GPU replaces predictions too"


def test_neighbours_are_the_nearest_winners_and_runners_up_each_once() -> None:
    near = entry(problem(2048, mask=Mask()), chosen=variant(problem(2048, mask=Mask()), block_kv=64))
    far = entry(problem(16384, mask=Mask()), chosen=variant(problem(16384, mask=Mask()), block_kv=96))
    second = variant(problem(2048, mask=Mask()), block_kv=48)
    entries = [far, replace(near, runner_up=(second, 110.0)), entry(problem(1024)), entry(problem(1024, head_dim=128, mask=Mask()))]
    half = replace(problem(1024, mask=Mask()), dtype=DType.FLOAT16)
    assert standard.neighbours(half, H200, entries) == [near.variant, second, far.variant]
    assert standard.neighbours(half, H200, entries, most=2) == [near.variant, second]


def test_neighbours_are_what_they_are_for_the_problem_and_so_is_what_is_filled_from_them() -> None:
    from shipping import gradients

    odd, known = gradients(clear_ahead=32), gradients()
    assert standard.neighbours(odd.problem, H200, [odd, known]) == [known.variant]
    made = standard.fill(odd.problem, H200, [odd.variant], (), Imagined, 0, [odd.variant])
    assert made.variant == known.variant and made.provenance.measured == 1, "the odd one, the defended and the fallback are one"


def test_neighbours_are_feasible_here() -> None:
    """What fits into shared memory there may not here: an L40S has less."""
    big = problem(head_dim=128, mask=Mask())
    roomy = variant(big, block_q=128, block_kv=64, num_warps=8, num_stages=3)
    entries = [entry(big, chosen=roomy), entry(replace(big, seqlen_q=512, seqlen_kv=512))]
    half = replace(big, dtype=DType.FLOAT16)
    assert roomy in standard.neighbours(half, H200, entries)
    assert standard.neighbours(half, device.preset("l40s"), entries) == [entries[1].variant]


def test_neighbours_come_from_the_journals_of_searches_where_winners_are_few(tmp_path: Path) -> None:
    asked, path = problem(1024, mask=Mask()), tmp_path / "t.yaml"
    run([wishes.Wish(asked, budget=12)], path, budget=12)
    (found,) = table.read(path, strict=True).entries
    half = replace(asked, dtype=DType.FLOAT16)
    best = standard.neighbours(half, H200, [found])
    assert len(best) == standard.NEIGHBOURS and best[0] == found.variant and len(set(best)) == len(best)
    times = [CREATED[0].us(each) for each in best[2:]]
    assert times == sorted(times)
    (paths.study_store() / "torn.jsonl").write_text("{")
    for journal in paths.study_store().glob("*.jsonl"):
        journal.write_text(journal.read_text().replace(load_space("ampere_forward").digest, "0" * 64))
    assert len(standard.neighbours(half, H200, [found])) == 2, "variants of other spaces are no candidates"


def test_filling_takes_the_fastest_exact_candidate() -> None:
    asked = problem(mask=Mask())
    fast, slow = variant(asked, block_q=32, num_warps=2), variant(asked, block_q=128)
    made = standard.fill(asked, H200, [slow, fast], (), Imagined)
    assert made.variant == fast and made.runner_up is not None and made.provenance.measured == 3
    INEXACT.add(fast)
    assert standard.fill(asked, H200, [slow, fast], (), Imagined).variant != fast


def test_the_fallback_defends_a_filled_problem_and_with_query_groups_what_won_nearest() -> None:
    asked = replace(problem(mask=Mask()), heads_q=4, heads_kv=4)
    first, second = variant(asked, block_q=32, num_warps=2), variant(asked, block_q=128)
    fallback = near.fallback_of(search.bind_families(asked, H200))
    for heads_kv in (4, 2):
        same = replace(asked, heads_kv=heads_kv)
        standard.fill(same, H200, [first, second], (), Imagined, defended=standard._defended(same, [first, second]))
    assert [each.defended for each in CREATED] == [[fallback], [first, fallback]]


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


def test_a_refresh_makes_of_an_entry_what_runs(tmp_path: Path) -> None:
    from shipping import gradients

    found = table_of(tmp_path / "t.yaml", gradients(clear_ahead=32))
    ((_, outcome),) = standard.refresh(found, found.entries, H200, ExecutorName.DEVICE, make_evaluator=Imagined)
    assert isinstance(outcome, table.Change)
    (made,) = table.read(found.path, strict=True).entries
    assert made.variant == gradients().variant and made.source_digest == CREATED[-1].source(made.variant).digest


def test_a_refresh_that_fails_keeps_the_old_entry_and_says_why(tmp_path: Path) -> None:
    base = entry(problem(mask=Mask()))
    found = table_of(tmp_path / "t.yaml", base)
    fallback = near.fallback_of(search.bind_families(base.problem, H200))
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
    asked_for = [wishes.Wish(problem(256, head_dim=16)), wishes.Wish(problem(512, head_dim=16), searched=False)]
    monkeypatch.setitem(wishes.LISTS, "small", lambda: asked_for)
    assert cli.run(["tune", "--standard", "small", "--compile-only", "--gpu", "h200", "--budget", "2", "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["kernels"] == 2 and "1/1 compiled" in captured.err


def test_the_command_does_the_operation_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    forward, backward = problem(256, mask=Mask()), problem(256, mask=Mask(), op=Op.BACKWARD)
    monkeypatch.setitem(wishes.LISTS, "full", lambda: [wishes.Wish(forward), wishes.Wish(backward)])
    seen = list[list[Problem]]()

    def tune(asked_for: Sequence[wishes.Wish], *_: object, **__: object) -> list[standard.Done]:
        seen.append([each.problem for each in asked_for])
        return [standard.Done(each, "kept") for each in asked_for]

    monkeypatch.setattr(standard, "tune", tune)
    arguments = ["tune", "--standard", "full", "--gpu", "h200", "--executor", "emulated", "--table", str(tmp_path / "t.yaml")]
    for more in ([], ["--op", "forward"], ["--op", "backward"], ["--deterministic"]):
        assert cli.run([*arguments, *more]) == 0
    same_bits = replace(backward, deterministic=True)
    assert seen == [[forward, backward], [forward], [backward], [same_bits]]
    assert cli.run(["tune", "--standard", "small", "--op", "backward", "--gpu", "h200", "--executor", "emulated"]) == 2
    assert "forward problems only" in " ".join(capsys.readouterr().err.split())


def test_the_command_tells_that_time_is_up_and_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked_for = [wishes.Wish(problem(length, mask=Mask())) for length in (256, 512)]
    monkeypatch.setitem(wishes.LISTS, "small", lambda: asked_for)
    monkeypatch.setattr(standard, "tune", lambda given, *_, **__: iter([standard.Done(given[0], "kept")]))
    arguments = ["tune", "--standard", "small", "--gpu", "h200", "--executor", "emulated", "--table", str(tmp_path / "t.yaml"), "--json"]
    assert cli.run([*arguments, "--within", "100"]) == 130
    captured = capsys.readouterr()
    assert json.loads(captured.out)["left"] == 1 and "1 problems are left" in captured.err
    assert cli.run(["tune", "--within", "100", "--head-dim", "64"]) == 2
    assert cli.run([*arguments, "--within", "0"]) == 2


def test_the_time_left_follows_the_pace_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("flashgen.cli.standard.time.monotonic", lambda: now[0])
    monkeypatch.setattr(wishes, "seconds", lambda wish: 30.0)
    asked_for = [wishes.Wish(problem(length)) for length in (256, 512, 1024, 2048)]
    pace = Pace(asked_for)
    assert pace.after(standard.Done(asked_for[0], "kept")) == ""
    now[0] = 60.0
    assert pace.after(standard.Done(asked_for[1], "searched")) == ", about 2 min 0 s left"


def test_a_problem_that_cannot_be_done_is_skipped_with_its_reason(tmp_path: Path) -> None:
    odd = replace(problem(mask=Mask()), head_dim=264, head_dim_v=264)
    done = run([wishes.Wish(odd), wishes.Wish(problem(mask=Mask()))], tmp_path / "t.yaml")
    assert [each.how for each in done] == ["skipped", "searched"] and "No kernel family fits" in done[0].why


def test_the_command_keeps_a_list_that_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked_for = [wishes.Wish(problem(mask=Mask()))]
    monkeypatch.setitem(wishes.LISTS, "small", lambda: asked_for)
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


def test_evaluators_of_a_list_compile_in_one_pool_and_close_only_what_is_theirs(child: ProvingChild) -> None:
    withdrawn = list[object]()

    class Pool:
        jobs, closed = 2, False

        def submit(self, source: Source, arch: str) -> object:
            return source.digest

        def withdraw(self, future: object) -> None:
            withdrawn.append(future)

        def close(self) -> None:
            self.closed = True

    of = problem()
    bounds = [load_space("ampere_forward").bind(of, H200)]
    with standard.evaluators(ExecutorName.DEVICE) as make:
        assert isinstance(make, standard.Together) and standard.ahead(make, H200).works
        shared = Pool()
        make.pool = shared  # type: ignore[assignment]
        one, other = make(bounds, of, H200, 0), make(bounds, of, H200, 0)
        one.prepare(bounds[0].fallback())
        other.close()
        assert not withdrawn
        one.close()
        assert withdrawn == [one.source(bounds[0].fallback()).digest] and not shared.closed
    assert shared.closed


def test_the_whole_suite_runs_once_per_machine_code_and_every_problem_at_its_own_size(child: ProvingChild) -> None:
    assert all(each.verdict is Verdict.EXACT for each in proofs(1024, 4096, 512))
    assert child.asked == [("certify_task", 1024), ("real_size_task", 4096), ("real_size_task", 512)]


def test_a_kernel_that_is_wrong_at_real_size_is_refused_there_and_there_only(child: ProvingChild) -> None:
    child.wrong = "real_size: o[0, 0, 3] is off"
    first, second = proofs(1024, 4096)
    assert first.verdict is Verdict.EXACT
    assert second.verdict is Verdict.INEXACT and second.failure == child.wrong


def test_long_kernels_run_fewer_rounds_in_a_list(child: ProvingChild) -> None:
    long = wishes.shaped(128, 128, 32_768, Mask(), op=Op.BACKWARD)
    with standard.evaluators(ExecutorName.DEVICE) as make:
        for of, expected in ((problem(), 30), (long, 8)):
            evaluator = make([], of, H200, 0)
            assert isinstance(evaluator, standard.Remembering) and evaluator.rounds(9) == expected
            evaluator.close()


def test_a_failed_proof_is_made_again(child: ProvingChild) -> None:
    child.verdict = Verdict.INEXACT
    proofs(1024, 4096)
    assert child.asked == [("certify_task", 1024), ("certify_task", 4096)]
