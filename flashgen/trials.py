"""The loop over trials: propose, compile ahead, run, journal, tell; and the events by which a caller follows a search."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from flashgen.evaluators import TrialRunner
from flashgen.model import Certificate, DeviceLimits, ExecutorName, Outcome, Problem, Trial, Variant
from flashgen.strategy import Strategy
from flashgen.study import Journal

IN_FLIGHT = 8  # proposals that may run ahead of results; more would blind the sampler
GUESS_AFTER = 1 / 3  # of the budget: from here on, what stands beside the best is compiled where nothing else is wanted


@dataclass(frozen=True, slots=True)
class SearchBegan:
    """Before the first trial. `resumed` counts trials that are known from an earlier, stopped search."""

    problem: Problem
    device: DeviceLimits
    executor: ExecutorName
    feasible: dict[str, int]
    budget: int
    resumed: int
    journal: Path | None


@dataclass(frozen=True, slots=True)
class TrialEnded:
    """After each trial. `best` is the best so far, `remaining_s` the time left of --seconds."""

    number: int
    budget: int
    trial: Trial
    best: Trial | None
    from_record: bool
    elapsed_s: float
    remaining_s: float | None


@dataclass(frozen=True, slots=True)
class FinalRound:
    """Before certification and comparison of the finalists."""

    variants: tuple[Variant, ...]


@dataclass(frozen=True, slots=True)
class FinalistCertified:
    """One finalist went through the whole suite."""

    variant: Variant
    certificate: Certificate


Event = SearchBegan | TrialEnded | FinalRound | FinalistCertified
Progress = Callable[[Event], None]


def run_trials(
    strategy: Strategy,
    runner: TrialRunner,
    journal: Journal | None,
    budget: int,
    started: float,
    seconds: float | None,
    progress: Progress = lambda _: None,
    jobs: int = IN_FLIGHT,
    in_flight: int = IN_FLIGHT,
) -> Iterator[tuple[Trial, bool]]:
    """Run up to `budget` trials, compiling ahead of measuring; yields each with whether it came from the journal.

    Infeasible ones do not count. Ends when the budget, the time or the space is used up.
    """
    queue: deque[Variant] = deque()
    best: Trial | None = None
    done = 0
    while seconds is None or time.monotonic() - started < seconds:
        while len(queue) < (max(jobs, in_flight) if strategy.foreseen else in_flight) and done + len(queue) < budget:
            variant = strategy.next()
            if variant is None:
                break
            queue.append(variant)
            if journal is None or variant not in journal.trials:
                runner.prepare(variant)
        if not queue:
            return
        trial, recorded = _one_trial(queue.popleft(), runner, journal, best)
        strategy.tell(trial)
        done += trial.outcome is not Outcome.INFEASIBLE
        best = better(best, trial)
        if not strategy.foreseen and done < budget - len(queue):
            runner.expect(strategy.likely(beside=done >= GUESS_AFTER * budget))
        elapsed = time.monotonic() - started
        progress(TrialEnded(done, budget, trial, best, recorded, elapsed, None if seconds is None else max(0.0, seconds - elapsed)))
        yield trial, recorded


def _one_trial(variant: Variant, runner: TrialRunner, journal: Journal | None, best: Trial | None) -> tuple[Trial, bool]:
    best_us = best.measurement.median_us if best and best.measurement else None
    if journal is None:
        return runner.evaluate(variant, best_us), False
    if variant in journal.trials:
        return journal.trials[variant], True
    if journal.lost(variant):
        trial = Trial(
            variant, Outcome.LAUNCH_FAILED, "the whole search ended, more than once, while this variant ran; use --fresh to try again"
        )
    else:
        journal.start(variant)
        trial = runner.evaluate(variant, best_us)
    journal.end(trial)
    return trial, False


def better(best: Trial | None, trial: Trial) -> Trial | None:
    """The faster of two trials; equal times go by name, so that the order of trials does not matter."""
    if trial.outcome is not Outcome.OK or trial.measurement is None:
        return best
    return trial if best is None or speed(trial) < speed(best) else best


def speed(trial: Trial) -> tuple[float, str]:
    """Sort key: fastest first, equal times by name."""
    return (trial.measurement.median_us if trial.measurement else float("inf"), str(trial.variant))
