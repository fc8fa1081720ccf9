"""Sampling, interleaving and choosing, with simulated clocks (case T10)."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from flashgen.timing import Launchable, Plan, choose, clearly_faster, interleaved, measurement, ranking, ratio, sample


@dataclass(frozen=True)
class Simulated:
    """A kernel with a true time in µs."""

    name: str
    true_us: float

    def __call__(self) -> None:
        """Nothing to enqueue."""


@dataclass
class SimulatedTimer:
    """Every measurement is off by up to `noise`; from the `throttle_after`th on everything is slower by `throttle`."""

    noise: float
    seed: int
    throttle_after: int = 10**9
    throttle: float = 0.2
    measured: int = 0
    order: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Noise repeats with the seed."""
        self.generator = random.Random(self.seed)

    def run(self, launches: Sequence[Launchable]) -> list[float]:
        """Times with noise."""
        return [self._one(each) for each in launches]

    def _one(self, each: Launchable) -> float:
        assert isinstance(each, Simulated)
        self.measured += 1
        self.order.append(each.name)
        slow = 1.0 + self.throttle if self.measured > self.throttle_after else 1.0
        return each.true_us * slow * (1.0 + self.generator.uniform(-self.noise, self.noise))


# T10: 15 configurations within 3 %, the default among the slower ones.
FIFTEEN = [Simulated(f"v{index:02d}", 100.0 * (1.0 + 0.03 * index / 14)) for index in range(15)]
TRUE = {each.name: each.true_us for each in FIFTEEN}
DEFAULT, ENTRY = "v11", "v06"


def tuned(seed: int, rounds: int = 12) -> tuple[str, dict[str, list[float]]]:
    samples = interleaved(FIFTEEN, rounds, SimulatedTimer(0.15, seed, throttle_after=60), seed)
    return choose(samples, [ENTRY, DEFAULT]), samples


@pytest.mark.parametrize("incumbent", [DEFAULT, ENTRY])
def test_under_noise_and_throttling_the_pick_is_never_slower_than_an_incumbent_by_more_than_the_spread(incumbent: str) -> None:
    for seed in range(100):
        pick, samples = tuned(seed)
        measured = ratio(samples[pick], samples[incumbent])
        spread = measured.high - measured.low
        assert TRUE[pick] / TRUE[incumbent] <= 1.0 + spread, f"seed {seed}: {pick} against {incumbent}"


def test_under_noise_five_times_the_differences_luck_rarely_replaces_an_incumbent() -> None:
    picks = [tuned(seed)[0] for seed in range(100)]
    kept = sum(pick in (ENTRY, DEFAULT) for pick in picks)
    naive = []
    for seed in range(100):
        timer = SimulatedTimer(0.15, seed, throttle_after=60)
        means = {each.name: float(np.median(timer.run([each] * 12))) for each in FIFTEEN}
        naive.append(min(means, key=means.__getitem__))
    assert kept >= 80
    assert sum(pick in (ENTRY, DEFAULT) for pick in naive) < 40, "the simulation is harmless: taking the least median would do as well"


def test_the_same_samples_always_give_the_same_winner_whatever_their_order() -> None:
    _, samples = tuned(7)
    names = list(samples)
    for seed in range(10):
        random.Random(seed).shuffle(names)
        assert choose({name: samples[name] for name in names}, [ENTRY, DEFAULT]) == tuned(7)[0]


def test_a_clearly_faster_challenger_wins_even_while_the_clock_drops() -> None:
    finalists = [Simulated("default", 100.0), Simulated("entry", 97.0), Simulated("challenger", 93.0)]
    for seed in range(50):
        samples = interleaved(finalists, 20, SimulatedTimer(0.02, seed, throttle_after=30), seed)
        assert choose(samples, ["entry", "default"]) == "challenger", f"seed {seed}"


def test_equal_kernels_leave_the_first_incumbent_in_place() -> None:
    finalists = [Simulated(name, 100.0) for name in ("a", "b", "entry", "default")]
    kept = [choose(interleaved(finalists, 12, SimulatedTimer(0.01, seed), seed), ["entry", "default"]) for seed in range(100)]
    assert kept.count("entry") >= 95


def test_an_entry_that_has_become_slower_than_the_default_gives_way_to_it() -> None:
    finalists = [Simulated("entry", 110.0), Simulated("default", 100.0), Simulated("other", 101.5)]
    for seed in range(50):
        samples = interleaved(finalists, 12, SimulatedTimer(0.01, seed), seed)
        assert choose(samples, ["entry", "default"]) == "default", f"seed {seed}"


def test_exact_ties_without_incumbents_go_by_name() -> None:
    assert choose({"b": [10.0] * 8, "a": [10.0] * 8, "c": [10.0] * 8}) == "a"


def test_every_round_runs_each_kernel_once_in_a_new_order() -> None:
    timer = SimulatedTimer(0.0, 0)
    interleaved(FIFTEEN, 10, timer, seed=3)
    rounds = [timer.order[first : first + 15] for first in range(0, len(timer.order), 15)]
    assert len(rounds) == 11 and all(sorted(each) == sorted(TRUE) for each in rounds)
    assert len({tuple(each) for each in rounds}) == 11
    assert len({each[0] for each in rounds}) > 4, "the same kernel always comes first, when the clock is highest"


def test_the_order_of_an_interleaving_repeats_with_its_seed() -> None:
    first, again = SimulatedTimer(0.0, 0), SimulatedTimer(0.0, 0)
    interleaved(FIFTEEN, 5, first, seed=9)
    interleaved(FIFTEEN, 5, again, seed=9)
    assert first.order == again.order


def test_two_finalists_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="different names"):
        interleaved([Simulated("a", 1.0), Simulated("a", 2.0)], 3, SimulatedTimer(0.0, 0), 0)


def test_the_interval_of_a_ratio_holds_the_true_median_as_often_as_it_says() -> None:
    generator = np.random.default_rng(0)
    for rounds in (6, 9, 12, 20, 31):
        held = 0
        for _ in range(1000):
            left, right = 97.0 * generator.lognormal(0, 0.1, rounds), 100.0 * generator.lognormal(0, 0.1, rounds)
            measured = ratio(list(left), list(right))
            held += measured.low <= 0.97 <= measured.high
        assert held >= 935, f"{rounds} rounds: {held} of 1000"


def test_more_rounds_narrow_the_interval() -> None:
    generator = np.random.default_rng(1)
    widths = []
    for rounds in (10, 40, 160):
        measured = ratio(list(generator.lognormal(0, 0.1, rounds)), [1.0] * rounds)
        widths.append(measured.high - measured.low)
    assert widths[0] > widths[1] > widths[2]


def test_five_rounds_are_too_few_for_any_verdict() -> None:
    assert not clearly_faster([1.0] * 5, [2.0] * 5)
    assert clearly_faster([1.0] * 6, [2.0] * 6)


def test_ranking_is_blind_to_a_drift_that_hits_all() -> None:
    drift = [1.0, 1.0, 1.3, 1.3, 2.0, 2.0]
    order = ranking({"slow": [101.0 * each for each in drift], "fast": [99.0 * each for each in drift]})
    assert [name for name, _ in order] == ["fast", "slow"]
    assert order[1][1] / order[0][1] == pytest.approx(101 / 99)


def test_a_measurement_holds_median_spread_count_rate_and_clocks() -> None:
    found = measurement([float(value) for value in range(1, 102)], 51e6, (1980, 1500), ("power_cap",))
    assert (found.median_us, found.p10_us, found.p90_us, found.samples) == (51.0, 11.0, 91.0, 101)
    assert found.tflops == 1.0 and found.clock_mhz == (1980, 1500) and found.throttle == ("power_cap",)


def steady(us: float) -> tuple[SimulatedTimer, Simulated]:
    return SimulatedTimer(0.0, 0), Simulated("k", us)


def ticking(step: float) -> Callable[[], float]:
    now = itertools.count()
    return lambda: next(now) * step


def test_sampling_ends_with_the_wanted_count() -> None:
    timer, kernel = steady(50.0)
    assert len(sample(timer, kernel, Plan(samples=23, warmup=3), clock=ticking(1e-4))) == 23
    assert timer.measured == 26, "warm-up launches are no samples"


def test_sampling_ends_with_the_time_but_not_below_the_least_count() -> None:
    timer, kernel = steady(50_000.0)
    assert len(sample(timer, kernel, Plan(samples=50, seconds=0.3, least=7), clock=ticking(10.0))) == 7


def test_a_hopeless_kernel_is_given_up_after_the_least_count() -> None:
    plan = Plan(samples=50, least=7, give_up_ratio=1.5)
    assert len(sample(*steady(151.0), plan, best_us=100.0, clock=ticking(1e-4))) == 7
    assert len(sample(*steady(149.0), plan, best_us=100.0, clock=ticking(1e-4))) == 50
