"""What the search proposes: with simulated kernels, and on times recorded on a GPU."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import median

import pytest
from simulated_search import H200, PROBLEM, RECORDED, SMALL, Simulated, bound, drive, luck

from flashgen import cost
from flashgen.errors import (
    StudyMismatch,
)
from flashgen.evaluators import RecordedSpace, ReplayEvaluator
from flashgen.model import (
    ExecutorName,
    Op,
    Outcome,
    Problem,
    Trial,
    Variant,
)
from flashgen.space import load_spaces, parse_space
from flashgen.strategy import CLIMB_AFTER, Strategy
from flashgen.study import RecordedStudy, read_study
from flashgen.trials import run_trials


def test_a_feasible_set_within_the_budget_is_enumerated_once_and_then_the_search_ends() -> None:
    spaces = [bound()]
    strategy, simulated = Strategy(spaces, 10_000, 0), Simulated(spaces, PROBLEM, H200, 0)
    drive(strategy, simulated, 10_000)
    assert strategy.sampler == "enumeration"
    assert sorted(map(str, simulated.ran)) == sorted(map(str, spaces[0].feasible()))
    assert strategy.next() is None


@pytest.mark.parametrize("outcome", [Outcome.OK, Outcome.COMPILE_FAILED])
def test_no_variant_is_proposed_twice_even_if_all_fail(outcome: Outcome) -> None:
    spaces = [bound(limits=SMALL)]
    feasible = len(spaces[0].feasible())
    assert 20 < feasible < 80
    strategy, simulated = Strategy(spaces, feasible - 1, 1), Simulated(spaces, PROBLEM, H200, 0)
    if outcome is not Outcome.OK:
        simulated.fails = lambda number, variant: Trial(variant, outcome)
    drive(strategy, simulated, feasible + 50)
    assert strategy.sampler == "tpe"
    assert len(simulated.ran) == len(set(simulated.ran)) == feasible
    assert strategy.next() is None


def test_seeds_come_first_then_the_cost_models_best() -> None:
    spaces = [bound()]
    ranked = sorted(spaces[0].feasible(), key=lambda variant: cost.roofline_us(spaces[0], variant))
    strategy = Strategy(spaces, 30, 0)
    proposed = [strategy.next() for _ in range(14)]
    seeds = spaces[0].seeds()
    assert proposed[: len(seeds)] == seeds
    assert proposed[len(seeds) :][:5] == [variant for variant in ranked if variant not in seeds][:5]


def test_what_won_nearby_comes_first_then_the_head_of_its_family_and_no_other_family() -> None:
    spaces = [space.bind(PROBLEM, H200) for space in load_spaces(PROBLEM.op)]
    mine = next(each for each in spaces if each.space.family == "ampere_forward")
    start = mine.feasible()[5:300:100]
    strategy = Strategy(spaces, 12, 0, start=[*start, Variant.of("ampere_forward", {"block_q": 7})])
    assert strategy.foreseen == 6
    proposed = [strategy.next() for _ in range(6)]
    assert proposed[:3] == start and proposed[3:] == [each for each in mine.seeds() if each not in start][:3]


def test_where_something_won_nearby_a_family_that_promises_more_gets_nothing_unless_that_fails() -> None:
    spaces = [space.bind(PROBLEM, H200) for space in load_spaces(PROBLEM.op)]
    families = {each.space.family: each for each in spaces}
    slow = families["simt_forward"].feasible()[::5][:8]
    assert len(families["simt_forward"].feasible()) > 16

    def tried(outcome: Outcome) -> list[str]:
        strategy, simulated = Strategy(spaces, 12, 0, start=slow), Simulated(spaces, PROBLEM, H200, 0)
        if outcome is not Outcome.OK:
            simulated.fails = lambda number, variant: Trial(variant, outcome) if variant.family == "simt_forward" else None
        drive(strategy, simulated, 12)
        assert simulated.ran[:8] == slow  # all of it, though it is more than half of the budget
        return [variant.family for variant in simulated.ran[8:]]

    assert set(tried(Outcome.OK)) == {"simt_forward"}
    assert "simt_forward" not in tried(Outcome.LAUNCH_FAILED)[-2:], "what was proposed before the failures were known still runs"


def test_a_start_of_which_nothing_is_feasible_is_no_start() -> None:
    spaces = [bound()]
    plain, other = Strategy(spaces, 30, 0), Strategy(spaces, 30, 0, start=[Variant.of("simt_forward", {"block_q": 7})])
    assert plain.opening() == other.opening()
    spaces = [space.bind(PROBLEM, H200) for space in load_spaces(PROBLEM.op)]
    feasible = next(each for each in spaces if each.space.family == "ampere_forward").feasible()[5:300:100]
    for start, same in (([], []), (feasible, feasible)):
        odd = [Variant.of("simt_forward", {"block_q": 7}), *start, Variant.of("hopper_forward", {"block_kv": 7}), Variant.of("none", {})]
        ran = []
        for each in (odd, same):
            simulated = Simulated(spaces, PROBLEM, H200, 0)
            drive(Strategy(spaces, 24, 0, start=each), simulated, 24)
            ran.append(simulated.ran)
        assert ran[0] == ran[1], "what is dropped decides nothing"


def test_a_start_is_what_it_is_for_the_problem() -> None:
    """A variant that is none here is taken as the space's conditions make it, and tried once."""
    problem = replace(PROBLEM, head_dim=128, head_dim_v=128, op=Op.BACKWARD)
    (space,) = (each for each in load_spaces(Op.BACKWARD) if each.family == "hopper_backward")
    mine = space.bind(problem, H200)
    plain = mine.fallback()
    odd = Variant.of(plain.family, plain.as_dict() | {"clear_ahead": 32})
    assert mine.adapted(odd) == plain and mine.altered(odd) == "clear_ahead 32 → 0" and not mine.altered(plain)
    assert Strategy([mine], 24, 0, start=[odd, plain]).opening()[0] == plain
    assert Strategy([mine], 24, 0, start=[odd, plain]).opening() == Strategy([mine], 24, 0, start=[plain]).opening()


def test_one_failure_of_what_won_nearby_lets_no_other_family_in_while_the_rest_of_it_waits() -> None:
    spaces = [space.bind(PROBLEM, H200) for space in load_spaces(PROBLEM.op)]
    slow = next(each for each in spaces if each.space.family == "simt_forward").feasible()[::5][:8]
    simulated = Simulated(spaces, PROBLEM, H200, 0)
    simulated.fails = lambda number, variant: Trial(variant, Outcome.SPILLED) if number == 1 else None
    trials = [trial for trial, _ in run_trials(Strategy(spaces, 12, 0, start=slow), simulated, None, 12, time.monotonic(), None)]
    assert len(trials) == 12 and {trial.variant.family for trial in trials} == {"simt_forward"}


@pytest.mark.parametrize("op", list(Op))
def test_a_ranking_of_all_variants_holds_what_predicting_each_alone_gives(op: Op) -> None:
    problem = replace(PROBLEM, head_dim=128, head_dim_v=128, op=op)
    for space in load_spaces(op):
        ranked = Strategy([space.bind(problem, H200)], 30, 0).families[space.family]
        order = {variant: number for number, variant in enumerate(ranked.bound.feasible())}
        assert ranked.ranked == sorted(order, key=lambda variant: (ranked.predicted[variant], order[variant]))
        for variant in ranked.ranked[::199]:
            assert ranked.predicted[variant] == cost.roofline_us(space.bind(problem, H200), variant)


def test_what_is_likely_is_what_comes_when_nothing_better_turns_up() -> None:
    budget, spaces = 30, [bound(problem=replace(PROBLEM, head_dim=128, head_dim_v=128))]
    strategy, simulated = Strategy(spaces, budget, 0), Simulated(spaces, PROBLEM, H200, 0)
    order: list[Variant] = []
    simulated.true_us = lambda variant: 100.0 + [*order, variant].index(variant)  # type: ignore[method-assign]
    guessed: list[Variant] = []
    while len(order) < budget:
        if len(order) == int(budget * CLIMB_AFTER):
            guessed = strategy.likely()
        variant = strategy.next()
        assert variant is not None
        order.append(variant)
        strategy.tell(simulated.evaluate(variant, None))
    assert len(guessed) == budget - int(budget * CLIMB_AFTER) and order[-len(guessed) :] == guessed


def test_what_is_foreseeable_is_what_comes_when_the_family_that_begins_is_the_best() -> None:
    problem = replace(PROBLEM, head_dim=128, head_dim_v=128, seqlen_q=4096, seqlen_kv=4096)
    spaces = [space.bind(problem, H200) for space in load_spaces(problem.op)]
    strategy, simulated = Strategy(spaces, 32, 0), Simulated(spaces, problem, H200, 0)
    simulated.true_us = lambda variant: 1.0 if variant.family == "hopper_forward" else 2.0  # type: ignore[method-assign]
    foreseen, opening = strategy.foreseeable(), strategy.opening()
    assert len(opening) < len(foreseen) <= 32 and foreseen[: len(opening)] == opening
    while strategy.foreseen:
        variant = strategy.next()
        assert variant is not None
        strategy.tell(simulated.evaluate(variant, None))
    following = foreseen[len(opening) :]
    assert strategy.likely(beside=False) == following
    drive(strategy, simulated, len(following))
    assert simulated.ran[-len(following) :] == following
    assert not strategy.likely(beside=False) and strategy.likely()


def test_where_nothing_is_climbed_nothing_is_likely() -> None:
    spaces = [bound()]
    for strategy in (Strategy(spaces, 10_000, 0), Strategy(spaces, 12, 0, by_cost_only=True)):
        strategy.tell(Simulated(spaces, PROBLEM, H200, 0).evaluate(spaces[0].seeds()[0], None))
        assert not strategy.likely()


def test_a_search_says_what_may_come_from_a_third_of_its_budget_on() -> None:
    spaces = [bound(problem=replace(PROBLEM, head_dim=128, head_dim_v=128))]
    strategy, simulated = Strategy(spaces, 30, 0), Simulated(spaces, PROBLEM, H200, 0)
    told = list[int]()
    simulated.expect = lambda variants: told.append(len(variants))  # type: ignore[method-assign]
    ran = drive(strategy, simulated, 30)
    assert len(ran) == 30 and 10 <= len(told) <= 20 and max(told) == 10


@pytest.mark.parametrize("in_flight", [1, 8])
@pytest.mark.parametrize("seed", range(2))
def test_the_sampler_comes_near_the_optimum_where_the_cost_model_is_wrong(seed: int, in_flight: int) -> None:
    problem = replace(PROBLEM, head_dim=128, head_dim_v=128)
    spaces = [bound("ampere_forward", problem)]
    feasible = spaces[0].feasible()
    assert len(feasible) > 500

    def hidden_us(variant: Variant) -> float:  # what wins is far from what the model likes
        params = variant.as_dict()
        misses = abs(params["block_q"] - 64) / 64 + abs(params["block_kv"] - 32) / 32 + (params["num_stages"] != 2) + params["tile_order"]
        return 100.0 * (1.0 + 0.25 * misses) * (1.0 + 0.05 * luck(variant))

    simulated = Simulated(spaces, problem, H200, 0)
    simulated.true_us = hidden_us  # type: ignore[method-assign]
    strategy = Strategy(spaces, 60, seed)
    started = time.monotonic()
    trials = [trial for trial, _ in run_trials(strategy, simulated, None, 60, started, None, in_flight=in_flight)]
    optimum = min(map(hidden_us, feasible))
    assert min(trial.measurement.median_us for trial in trials if trial.measurement) <= 1.05 * optimum
    head = min(hidden_us(variant) for variant in simulated.ran[:13])
    assert head > 1.2 * optimum, "otherwise the sampler had nothing to do"


def test_the_same_seed_and_results_give_the_same_proposals() -> None:
    def proposals(seed: int) -> list[Variant]:
        spaces = [bound()]
        simulated = Simulated(spaces, PROBLEM, H200, 0)
        drive(Strategy(spaces, 40, seed), simulated, 40)
        return simulated.ran

    assert proposals(1) == proposals(1)
    assert proposals(1) != proposals(2)


def test_a_family_predicted_hopeless_gets_one_trial() -> None:
    problem = replace(PROBLEM, head_dim=128, head_dim_v=128, seqlen_q=4096, seqlen_kv=4096)
    spaces = [bound("ampere_forward", problem), bound("simt_forward", problem)]
    simulated = Simulated(spaces, problem, H200, 0)
    drive(Strategy(spaces, 30, 0), simulated, 30)
    assert sum(variant.family == "simt_forward" for variant in simulated.ran) == 1


def families_tried(us: Callable[[Variant], float | None], problem: Problem, budget: int = 32) -> list[str]:
    """Of all families on an H200, which got each trial; None is a launch that fails."""
    spaces = [space.bind(problem, H200) for space in load_spaces(problem.op)]
    simulated = Simulated(spaces, problem, H200, 0)
    simulated.true_us = lambda variant: us(variant) or 0.0  # type: ignore[method-assign]
    simulated.fails = lambda number, variant: Trial(variant, Outcome.LAUNCH_FAILED) if us(variant) is None else None
    drive(Strategy(spaces, budget, 0), simulated, budget)
    return [variant.family for variant in simulated.ran]


@pytest.mark.parametrize("op", list(Op))
def test_a_family_that_is_not_predicted_best_gets_a_few_trials_and_all_the_others_if_it_is(op: Op) -> None:
    problem = replace(PROBLEM, head_dim=128, head_dim_v=128, seqlen_q=4096, seqlen_kv=4096, op=op)
    pair = {f"hopper_{op}", f"ampere_{op}"}
    first, second = 0, 0
    for best in pair:
        tried = families_tried(lambda variant, best=best: 1.0 if variant.family == best else 2.0, problem)
        (other,) = pair - {best}
        assert set(tried) == pair, "a family that is predicted ten times slower is lost"
        assert set(tried[-16:]) == {best}
        first += tried[0] == best and tried.count(other) == 3
        second += tried[0] == other and tried.count(other) == 8
    assert (first, second) == (1, 1), "whichever is predicted best, and whether it is"


@pytest.mark.parametrize("op", list(Op))
def test_a_lost_family_is_tried_when_all_others_fail(op: Op) -> None:
    problem = replace(PROBLEM, head_dim=128, head_dim_v=128, seqlen_q=4096, seqlen_kv=4096, op=op)
    tried = families_tried(lambda variant: 1.0 if variant.family == f"simt_{op}" else None, problem)
    assert set(tried[-10:]) == {f"simt_{op}"}


# ------------------------------------------------------------------------------------------------------------------- replay


@dataclass
class Replay:
    """A recorded study with the search-space files that it was recorded with."""

    folder: Path

    @cached_property
    def study(self) -> RecordedStudy:
        return read_study(self.folder / "study.jsonl")

    def space(self, *, seeds: bool) -> RecordedSpace:
        file = self.folder / "ampere_forward.yaml"
        return RecordedSpace(parse_space(file.read_text(), str(file)), self.study, seeds=seeds)

    def best_of(self, strategy: Strategy, budget: int) -> float:
        """Best time found with that many trials over the best of the recording."""
        runner = ReplayEvaluator(self.study)
        trials = [trial for trial, _ in run_trials(strategy, runner, None, budget, time.monotonic(), None)]
        return min(trial.measurement.median_us for trial in trials if trial.measurement) / runner.best_us


STUDIES = sorted(path.parent for path in RECORDED.glob("*/study.jsonl"))


def test_there_is_a_study_recorded_on_a_gpu() -> None:
    assert any(Replay(folder).study.header.executor is ExecutorName.DEVICE for folder in STUDIES)


@pytest.mark.parametrize("folder", STUDIES, ids=lambda folder: folder.name)
def test_the_sampler_alone_beats_chance_on_real_times(folder: Path) -> None:
    """Seeds are hidden and the cost model is blind: what is left is the sampler."""
    replay, budget = Replay(folder), 40
    space = replay.space(seeds=False)
    found = [replay.best_of(Strategy([space], budget, seed, cost=lambda bound, variant: 1.0), budget) for seed in range(6)]
    runner, feasible = ReplayEvaluator(replay.study), space.feasible()
    times = {trial.variant: trial.measurement.median_us / runner.best_us for trial in runner.recorded.values() if trial.measurement}
    drawn = [min(times.get(variant, 9.0) for variant in random.Random(seed).sample(feasible, budget)) for seed in range(200)]
    assert median(found) <= 1.01, found
    assert median(found) < median(drawn)


@pytest.mark.parametrize("folder", STUDIES, ids=lambda folder: folder.name)
@pytest.mark.parametrize("seeds", [True, False], ids=["with seeds", "without seeds"])
def test_seeds_or_the_cost_model_find_the_best_of_a_recorded_study_early(folder: Path, seeds: bool) -> None:
    replay = Replay(folder)
    assert replay.best_of(Strategy([replay.space(seeds=seeds)], 20, 0), 20) <= 1.02


def test_a_study_of_another_space_is_refused(tmp_path: Path) -> None:
    shutil.copytree(STUDIES[0], tmp_path / "copy")
    file = tmp_path / "copy" / "ampere_forward.yaml"
    file.write_text(file.read_text().replace("seeds:", "seeds:\n", 1).replace("block_q", "block_r"))
    with pytest.raises(StudyMismatch, match="another ampere_forward space"):
        Replay(tmp_path / "copy").space(seeds=True)
