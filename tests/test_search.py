"""The search, with simulated kernels: how it fails, stops and resumes, who wins, what enters the table."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from simulated_search import H200, PROBLEM, Simulated, bound, failing, luck, tune

from flashgen import search, table
from flashgen.errors import (
    CompileError,
    EmptySpace,
    InvalidProblem,
    InvalidTable,
    LaunchError,
    MissingDependency,
    UnsupportedProblem,
    WorkerLost,
)
from flashgen.evaluators import Decision, DeviceEvaluator, outcome_of
from flashgen.model import (
    CompileReport,
    ExecutorName,
    Measurement,
    Outcome,
    Problem,
    Trial,
    Variant,
    Verdict,
)
from flashgen.strategy import Strategy
from flashgen.study import read_study
from flashgen.trials import Event, TrialEnded, run_trials


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FLASHGEN_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


# ------------------------------------------------------------------------------------------------------------ the straight way


@pytest.mark.usefixtures("home")
def test_the_winner_lands_in_the_table_with_its_provenance() -> None:
    result, simulated = tune(budget=20, seed=3)
    assert result.entry is not None
    assert result.change is not None
    assert not result.partial
    best = min(simulated.ran, key=simulated.true_us)
    assert result.entry.variant == best
    assert table.read(result.change.path, strict=True, check=search.space_check).find(PROBLEM) == replace(
        result.entry, certificate=table.read(result.change.path, strict=True).entries[0].certificate
    )
    made = result.entry.provenance
    assert (made.seed, made.measured, made.sampler, made.nvrtc, made.driver) == (3, 20, "tpe", "13.0", "580.65")
    assert result.entry.measurement.source == "measured"
    assert simulated.closed


def test_every_finished_trial_is_on_disk_before_the_next_begins(home: Path) -> None:
    seen: list[int] = []

    def setup(simulated: Simulated) -> None:
        def look(number: int, _: Variant) -> None:
            (path,) = (home / "studies").glob("*.jsonl")
            seen.append(len(read_study(path).trials))

        simulated.fails = look

    tune(setup, budget=6)
    assert seen[:6] == [0, 1, 2, 3, 4, 5]


@pytest.mark.usefixtures("home")
def test_compilation_runs_ahead_of_measuring() -> None:
    ahead: list[int] = []

    def setup(simulated: Simulated) -> None:
        simulated.fails = lambda number, variant: ahead.append(len(simulated.prepared) - number)

    tune(setup, budget=20)
    assert max(ahead) >= 4
    assert min(ahead[:20]) >= 0


# ------------------------------------------------------------------------------------------------------------------ failures


@pytest.mark.usefixtures("home")
def test_failing_variants_cost_their_own_trial_and_are_never_retried() -> None:
    bad = {2: Outcome.COMPILE_FAILED, 3: Outcome.SPILLED, 5: Outcome.LAUNCH_FAILED, 7: Outcome.INEXACT, 11: Outcome.TIMED_OUT}
    result, simulated = tune(failing(bad), budget=20)
    assert result.outcomes() == dict.fromkeys(bad.values(), 1) | {Outcome.OK: 15}
    assert len(set(simulated.ran)) == len(simulated.ran) == 20
    assert result.entry is not None
    assert result.entry.variant == min((trial.variant for trial in result.trials if trial.outcome is Outcome.OK), key=simulated.true_us)


class BadChild:
    """A measuring child that is lost, as the real one reports it, at given trials."""

    def __init__(self, reasons: dict[int, Exception]) -> None:
        self.reasons, self.calls = reasons, list[str]()

    def call(self, culprit: str, task: object, *arguments: object, deadline_s: float | None = None) -> object:
        from flashgen.bench import Timed

        self.calls.append(culprit)
        if len(self.calls) in self.reasons:
            raise self.reasons[len(self.calls)]
        return Timed(None, Measurement(100.0, 99.0, 101.0, 50, 1.0))

    def kill(self) -> str:
        return ""


class TimingChild:
    """A measuring child that takes the time of a variant from its name, three times as much on wide scores, which may also break it."""

    def __init__(self, wide_breaks: bool) -> None:
        self.wide_breaks, self.spreads = wide_breaks, list[float]()

    def call(
        self, culprit: str, task: object, kernels: list[tuple[str, object, object]], problem: Problem, rounds: int, *rest: Any, **_: Any
    ) -> object:
        from flashgen.bench import Comparison

        std = rest[2] if len(rest) > 2 else 1.0
        self.spreads.append(std)
        if std > 1.0 and self.wide_breaks:
            raise WorkerLost("illegal address", "poisoned")
        factor = 3.0 if std > 1.0 else 1.0
        return Comparison({name: [factor * (100.0 + number)] * rounds for number, (name, _, _) in enumerate(kernels)}, None, (), {})

    def kill(self) -> str:
        return ""


@pytest.mark.parametrize("wide_breaks", [False, True])
def test_finalists_are_timed_on_wide_scores_too_and_chosen_by_ordinary_ones(monkeypatch: pytest.MonkeyPatch, wide_breaks: bool) -> None:
    spaces = [bound()]
    evaluator = DeviceEvaluator(spaces, PROBLEM, H200, 0)
    child = TimingChild(wide_breaks)
    evaluator.child = child  # type: ignore[assignment]
    monkeypatch.setattr(evaluator, "compiled", lambda variant: None)
    finalists = spaces[0].feasible()[:3]
    decision = evaluator.decide(finalists, [], {})
    evaluator.close()
    assert decision.winner == finalists[0] and child.spreads == [1.0, 16.0]
    wide = [decision.measurements[each].wide_scores_us for each in finalists]
    assert wide == ([None] * 3 if wide_breaks else [300.0, 303.0, 306.0])


def test_a_lost_child_is_blamed_on_the_variant_that_ran_and_on_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    lost: dict[int, Exception] = {
        5: WorkerLost("illegal address", "poisoned"), 10: WorkerLost("trap", "died"), 15: WorkerLost("hang", "timed_out"),
        20: LaunchError("out of memory"),
    }  # fmt: skip
    spaces = [bound()]
    evaluator = DeviceEvaluator(spaces, PROBLEM, H200, 0)
    child = BadChild(lost)
    evaluator.child = child  # type: ignore[assignment]
    monkeypatch.setattr(evaluator, "prepare", lambda variant: None)
    monkeypatch.setattr(evaluator, "compiled", lambda variant: type("Compiled", (), {"report": Simulated.report(None, variant)})())  # type: ignore[arg-type]
    trials = [trial for trial, _ in run_trials(Strategy(spaces, 50, 0), evaluator, None, 50, time.monotonic(), None)]
    evaluator.close()
    wrong = {number: trial.outcome for number, trial in enumerate(trials, 1) if trial.outcome is not Outcome.OK}
    assert wrong == {5: Outcome.LAUNCH_FAILED, 10: Outcome.LAUNCH_FAILED, 15: Outcome.TIMED_OUT, 20: Outcome.LAUNCH_FAILED}
    assert all(str(trials[number - 1].variant) == child.calls[number - 1] for number in wrong)
    assert sum(trial.outcome is Outcome.OK for trial in trials) == 46


@pytest.mark.parametrize("error", [WorkerLost("no start", "not_started"), MissingDependency("no NVRTC")])
def test_an_error_that_no_variant_caused_ends_the_search(error: Any) -> None:
    with pytest.raises(type(error)):
        outcome_of(error)
    assert outcome_of(CompileError("x")) is Outcome.COMPILE_FAILED


@pytest.mark.usefixtures("home")
def test_when_every_trial_fails_the_fallback_wins() -> None:
    def setup(simulated: Simulated) -> None:
        simulated.fails = lambda number, variant: Trial(variant, Outcome.COMPILE_FAILED, "error: no such instruction")

    result, _ = tune(setup, budget=5)
    assert result.entry is not None
    assert result.entry.variant == bound().fallback()


@pytest.mark.usefixtures("home")
def test_when_nothing_is_exact_one_error_says_why_and_nothing_is_written() -> None:
    def setup(simulated: Simulated) -> None:
        simulated.inexact = lambda variant: True

    with pytest.raises(LaunchError, match="rising-0"):
        tune(setup, budget=5)
    assert not list(table.table_path(H200).parent.glob("*.yaml"))


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize("limit", [{"seconds": 0.0}, {"budget": 0}])
def test_no_time_and_no_budget_still_give_the_fallback(limit: dict[str, Any]) -> None:
    result, simulated = tune(**limit)
    assert simulated.ran == []
    assert result.entry is not None
    assert result.entry.variant == bound().fallback()


def test_a_device_on_which_nothing_fits_is_named_with_limit_and_need() -> None:
    tiny = replace(H200, name="toy", shared_bytes_per_cta=1024, shared_bytes_per_sm=2048)
    with pytest.raises(EmptySpace, match=r"shared_bytes.*1024"):
        tune(limits=tiny)


def test_a_problem_that_no_family_computes_lists_the_reasons() -> None:
    with pytest.raises(UnsupportedProblem, match=r"ampere_forward: .*\n.*hopper_forward: .*\n.*simt_forward: .*head_dim"):
        tune(problem=replace(PROBLEM, head_dim=7), families=None)


def test_an_unknown_family_and_an_empty_problem_are_refused() -> None:
    with pytest.raises(UnsupportedProblem, match="There is no family magic"):
        tune(families=["magic"])
    with pytest.raises(InvalidProblem, match="nothing to time"):
        tune(problem=replace(PROBLEM, seqlen_q=0))


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_a_seed_that_no_generator_takes_is_refused_before_anything_runs(seed: int) -> None:
    with pytest.raises(InvalidProblem, match=f"from 0 to 4294967295; got {seed}"):
        search.tune(PROBLEM, H200, seed=seed)


def test_more_sequences_than_a_grid_counts_are_refused() -> None:
    with pytest.raises(InvalidProblem, match=r"batch x query heads must be below 2\^31.*Split the batch"):
        replace(PROBLEM, batch=2**16, heads_q=2**15, heads_kv=1)


def test_a_faulty_table_is_refused_before_anything_runs(home: Path) -> None:
    path = table.table_path(H200)
    path.parent.mkdir(parents=True)
    path.write_text("schema: flashgen.table/9\n")
    with pytest.raises(InvalidTable, match="only"):
        tune(table=path)
    assert path.read_text() == "schema: flashgen.table/9\n"
    assert not (home / "studies").exists()


# --------------------------------------------------------------------------------------------------------- the final round


@pytest.mark.usefixtures("home")
def test_an_inexact_finalist_never_wins_and_the_next_best_takes_its_place() -> None:
    def setup(simulated: Simulated) -> None:
        order: list[Variant] = []
        simulated.inexact = lambda variant: variant in (order or order.extend(sorted(simulated.ran, key=simulated.true_us)[:2]) or order)

    result, simulated = tune(setup)
    assert result.entry is not None
    ranked = sorted(simulated.ran, key=simulated.true_us)
    assert result.entry.variant == ranked[2]
    challengers = [finalist.variant for finalist in result.finalists if finalist.role == "challenger"]
    assert sorted(map(str, challengers)) == sorted(map(str, ranked[2:7])), "five exact ones"


@pytest.mark.usefixtures("home")
def test_proved_after_timing_the_same_wins_and_only_the_first_two_are_certified() -> None:
    proved: list[Variant] = []

    def setup(simulated: Simulated) -> None:
        simulated.proved, certify = 2, simulated.certify
        simulated.certify = lambda variant: proved.append(variant) or certify(variant)  # type: ignore[method-assign, func-returns-value]

    thorough, _ = tune()
    table.table_path(H200).unlink()  # its entry would defend itself
    result, simulated = tune(setup, fresh=True)
    assert result.entry is not None and thorough.entry is not None
    assert (result.entry.variant, result.entry.runner_up) == (thorough.entry.variant, thorough.entry.runner_up)
    assert proved == [finalist.variant for finalist in result.finalists] == sorted(simulated.ran, key=simulated.true_us)[:2]
    timed, incumbents = simulated.interleaved[0]
    assert len(timed) == 6 and incumbents == [bound().fallback()], "the fallback is timed beside the best five"


@pytest.mark.usefixtures("home")
def test_a_fallback_that_does_not_compile_is_not_timed() -> None:
    fallback = bound().fallback()

    def setup(simulated: Simulated) -> None:
        simulated.proved, report = 2, simulated.report

        def compiled(variant: Variant) -> CompileReport:
            if variant == fallback:
                raise CompileError("planted")
            return report(variant)

        simulated.report = compiled  # type: ignore[method-assign]

    result, simulated = tune(setup)
    assert result.entry is not None and fallback not in simulated.interleaved[0][0] and simulated.interleaved[0][1] == []


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize("inexact", [1, 2, 5], ids=["the winner", "the first two", "every finalist"])
def test_what_is_proved_after_timing_gives_way_to_the_next_that_is_exact(inexact: int) -> None:
    def setup(simulated: Simulated) -> None:
        simulated.proved, fallback = 2, bound().fallback()
        order: list[Variant] = []

        def is_inexact(variant: Variant) -> bool:
            if not order:
                order.extend(sorted(simulated.ran, key=simulated.true_us)[:inexact])
            return variant in order or (inexact == simulated.finalists and variant == fallback)

        simulated.inexact = is_inexact

    result, simulated = tune(setup)
    ranked = sorted(simulated.ran, key=simulated.true_us)
    assert result.entry is not None and result.entry.variant == ranked[inexact]
    assert result.finalists[0].certificate.verdict is Verdict.EXACT
    assert all(finalist.certificate.verdict is Verdict.EXACT for finalist in result.finalists)


@pytest.mark.usefixtures("home")
def test_where_a_winner_is_inexact_the_fallback_still_gives_way_to_what_is_clearly_faster_only() -> None:
    fallback = bound().fallback()

    def setup(simulated: Simulated) -> None:
        def is_first(variant: Variant) -> bool:
            return variant == next((each for each in simulated.ran if each != fallback), None)

        simulated.proved, simulated.noise, simulated.inexact = 2, 0.15, is_first
        simulated.true_us = lambda variant: 50.0 if is_first(variant) else 100.0 if variant == fallback else 99.0  # type: ignore[method-assign]

    result, _ = tune(setup)
    assert result.entry is not None and result.entry.variant == fallback


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize(("gain", "kept"), [(0.98, True), (0.5, False)], ids=["within the noise", "clearly faster"])
def test_a_challenger_replaces_the_table_entry_only_when_clearly_faster(gain: float, kept: bool) -> None:
    first, simulated = tune(budget=10)
    assert first.entry is not None
    holder, other = first.entry.variant, next(variant for variant in bound().feasible() if variant not in simulated.ran)

    def setup(simulated: Simulated) -> None:
        plain = simulated.true_us
        simulated.noise = 0.15
        simulated.true_us = lambda variant: plain(holder) * gain if variant == other else plain(variant)  # type: ignore[method-assign]

    second, simulated = tune(setup, budget=10_000, fresh=True)
    assert second.entry is not None
    assert simulated.interleaved[0][1][0] == holder
    assert (second.entry.variant == holder) is kept
    assert second.entry.variant in (holder, other)


def test_noise_and_a_throttle_do_not_make_the_choice_worse_than_the_default(home: Path) -> None:
    def setup(simulated: Simulated) -> None:
        def measured(us: float) -> Measurement:
            slow = 1.2 if len(simulated.ran) > 60 else 1.0
            return Simulated.measured(simulated, us * slow * (1.0 + 0.15 * (2 * luck(simulated.ran[-1], "noise") - 1)))

        simulated.measured = measured  # type: ignore[method-assign]
        simulated.true_us = lambda variant: 100.0 * (1.0 + 0.03 * luck(variant))  # type: ignore[method-assign]
        simulated.noise = 0.15

    winners = [tune(setup, budget=80, fresh=True, seed=seed, table=home / f"{seed}.yaml") for seed in range(3)]
    fallback = bound().fallback()
    for result, simulated in winners:
        assert result.entry is not None
        assert simulated.true_us(result.entry.variant) <= 1.02 * simulated.true_us(fallback)
    again, _ = tune(setup, budget=80, fresh=True, seed=0, table=home / "again.yaml")
    assert again.entry is not None
    assert winners[0][0].entry is not None
    assert again.entry.variant == winners[0][0].entry.variant


@pytest.mark.usefixtures("home")
def test_a_predicted_search_leaves_a_measured_entry_alone() -> None:
    measured, _ = tune()

    def setup(simulated: Simulated) -> None:
        simulated.executor = ExecutorName.EMULATED
        simulated.measured = lambda us: Measurement(us, us, us, 0, 1.0, source="predicted")  # type: ignore[method-assign]
        simulated.decide = lambda finalists, incumbents, trials: Decision(  # type: ignore[method-assign]
            finalists[0],
            {variant: trials[variant].measurement for variant in finalists},  # type: ignore[misc]
        )

    predicted, _ = tune(setup, executor=ExecutorName.EMULATED)
    assert predicted.change is not None
    assert not predicted.change.written
    assert "never replaced" in predicted.change.describe()
    assert predicted.entry is not None
    assert predicted.entry.provenance.measured == 0
    assert table.read(predicted.change.path, strict=True).entries[0].variant == measured.entry.variant  # type: ignore[union-attr]


# ----------------------------------------------------------------------------------------------------------- stop and resume


@pytest.mark.usefixtures("home")
def test_an_interrupt_gives_a_partial_result_and_the_next_start_finishes_it() -> None:
    def setup(simulated: Simulated) -> None:
        simulated.fails = lambda number, variant: KeyboardInterrupt() if number == 13 else None  # type: ignore[return-value]

    stopped, first = tune(setup, budget=20)
    assert stopped.partial
    assert stopped.entry is None
    assert stopped.best is not None
    assert stopped.best.variant == min(first.ran[:12], key=first.true_us)
    assert not table.table_path(H200).exists()
    assert first.closed
    events: list[Event] = []
    finished, second = tune(budget=20, progress=events.append)
    assert not finished.partial
    assert second.ran[0] == first.ran[12], "the trial that was cut off runs again"
    assert not set(second.ran) & set(first.ran[:12])
    assert len(finished.trials) == 20
    assert [event.from_record for event in events if isinstance(event, TrialEnded)] == [True] * 12 + [False] * 8
    uninterrupted, whole = tune(budget=20, fresh=True)
    assert [trial.variant for trial in uninterrupted.trials] == [trial.variant for trial in finished.trials], whole


@pytest.mark.usefixtures("home")
def test_a_trial_whose_source_has_changed_runs_again() -> None:
    tune(budget=8)

    def setup(simulated: Simulated) -> None:
        simulated.text = "a new template"

    _, changed = tune(setup, budget=8)
    assert len(changed.ran) == 8
    _, same = tune(setup, budget=8)
    assert same.ran == []


@pytest.mark.usefixtures("home")
def test_an_unusable_table_entry_is_no_incumbent() -> None:
    first, _ = tune()
    assert first.entry is not None
    assert first.change is not None
    broken = replace(first.entry, variant=Variant.of("simt_forward", first.entry.variant.as_dict() | {"block_q": 17}))
    table.merge(first.change.path, H200, broken)
    result, simulated = tune(fresh=True)
    assert result.entry is not None
    assert simulated.interleaved[0][1] == [bound().fallback()]
    assert search.space_check(broken) is not None


SLOW = """
import sys, time
from flashgen import search
from flashgen.trials import TrialEnded
from tests.simulated_search import H200, PROBLEM, SIMT, Simulated
class Slow(Simulated):
    def evaluate(self, variant, best_us):
        trial = super().evaluate(variant, best_us)
        time.sleep(0.03)
        return trial
def say(event):
    if isinstance(event, TrialEnded) and not event.from_record: print(event.trial.variant, flush=True)
result = search.tune(PROBLEM, H200, budget=200, families=SIMT, make_evaluator=Slow, progress=say)
print("partial" if result.partial else "complete", flush=True)
"""


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda sent: sent.name)
def test_a_signal_ends_the_search_within_two_seconds_and_loses_no_trial(home: Path, sent: signal.Signals) -> None:
    root = Path(__file__).resolve().parents[1]
    process = subprocess.Popen([sys.executable, "-c", SLOW], cwd=root, stdout=subprocess.PIPE, text=True, env=dict(os.environ))
    assert process.stdout is not None
    told = [process.stdout.readline().strip() for _ in range(6)]
    process.send_signal(sent)
    started = time.monotonic()
    rest = process.stdout.read().splitlines()
    process.wait(10)
    assert time.monotonic() - started < 2.0
    assert (rest[-1:] == ["partial"]) is (sent is not signal.SIGKILL)
    told += [line for line in rest if line.startswith("simt")]
    (path,) = (home / "studies").glob("*.jsonl")
    kept = [str(trial.variant) for trial in read_study(path).trials]
    assert kept[: len(told)] == told
    assert len(kept) <= len(told) + 1
