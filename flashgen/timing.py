"""How kernels are timed and compared, whatever the clock: samples, interleaving in random order, and what counts as clearly faster.

Big GPUs are power-capped and drift, so two kernels are compared round by round, never by times from different minutes.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import comb
from typing import Protocol

import numpy as np

from flashgen.model import Measurement

CONFIDENCE = 0.95
LEAST_ROUNDS = 6
"""With fewer rounds no difference can be told from luck at the confidence above."""

TIE = 0.005
"""Finalists within this fraction of the fastest, and not clearly slower, count as equal; the order of their names then decides."""


class Launchable(Protocol):
    """Something that enqueues one computation on the default stream."""

    @property
    def name(self) -> str:
        """How results call it."""
        ...

    def __call__(self) -> None:
        """Enqueue it and return."""
        ...


class Stopwatch(Protocol):
    """Times launches: each with a cold L2, in the order given."""

    def run(self, launches: Sequence[Launchable]) -> list[float]:
        """Launch all, wait for the end, and return each one's time in µs."""
        ...


@dataclass(frozen=True, slots=True)
class Plan:
    """How long to measure one kernel: until `samples` or `seconds`, but at least `least` samples."""

    samples: int = 50
    seconds: float = 0.3
    least: int = 7
    warmup: int = 3
    give_up_ratio: float = 1.5

    @classmethod
    def thorough(cls) -> Plan:
        """For numbers that are published."""
        return cls(samples=200, seconds=2.0, least=20, warmup=5)


def sample(
    stopwatch: Stopwatch,
    launch: Launchable,
    plan: Plan,
    best_us: float | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Times of one kernel in µs. Stops early when even its fastest sample is hopelessly above `best_us`, the best median so far."""
    warm = stopwatch.run([launch] * plan.warmup)[-1] if plan.warmup else 0.0
    started, samples = clock(), list[float]()
    # Few enough per wait that the time limit is kept, many enough that the GPU does not idle between samples.
    chunk = max(1, min(plan.least, int(20_000.0 / max(warm, 1.0))))
    while len(samples) < plan.samples:
        samples += stopwatch.run([launch] * min(chunk, plan.samples - len(samples)))
        enough = len(samples) >= plan.least
        if enough and clock() - started >= plan.seconds:
            break
        if enough and best_us is not None and min(samples) > plan.give_up_ratio * best_us:
            break
    return samples


def measurement(
    samples: Sequence[float], flops: float, clock_mhz: tuple[int, int] | None = None, throttle: tuple[str, ...] = ()
) -> Measurement:
    """Median, p10 and p90 of samples in µs; TFLOP/s = `flops` / median."""
    p10, median, p90 = (float(value) for value in np.percentile(np.asarray(samples, np.float64), (10, 50, 90)))
    tflops = flops / median / 1e6 if median > 0 else 0.0
    return Measurement(
        median_us=round(median, 3),
        p10_us=round(p10, 3),
        p90_us=round(p90, 3),
        samples=len(samples),
        tflops=round(tflops, 2),
        clock_mhz=clock_mhz,
        throttle=throttle,
    )


def interleaved(launches: Sequence[Launchable], rounds: int, stopwatch: Stopwatch, seed: int) -> dict[str, list[float]]:
    """Time finalists side by side: every round runs each once, in a new random order, so that clock drift and heat touch all alike.

    Returns one time in µs per round and name. The first round warms up and is dropped.
    """
    names = [launch.name for launch in launches]
    if len(set(names)) != len(names):
        raise ValueError(f"Kernels that are compared need different names; got {', '.join(names)}.")
    order, generator = list(launches), random.Random(seed)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds + 1):
        generator.shuffle(order)
        times = stopwatch.run(order)
        if number:
            for launch, taken in zip(order, times, strict=True):
                samples[launch.name].append(taken)
    return samples


@dataclass(frozen=True, slots=True)
class Ratio:
    """Time of one kernel over time of another, round by round: the median, and the interval that holds the true median with 95 %."""

    median: float
    low: float
    high: float
    rounds: int

    def __str__(self) -> str:
        """As a report shows it."""
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


def ratio(left: Sequence[float], right: Sequence[float]) -> Ratio:
    """Left over right, paired by round.

    The interval runs between order statistics of the paired ratios: it assumes nothing about the shape of the noise, and the same samples
    always give it again. Below six rounds it is the whole range.
    """
    paired = np.sort(np.asarray(left, np.float64) / np.asarray(right, np.float64))
    rounds = len(paired)
    cut = _order_cut(rounds)
    return Ratio(float(np.median(paired)), float(paired[cut]), float(paired[rounds - 1 - cut]), rounds)


def _order_cut(rounds: int) -> int:
    """How many of the smallest (and largest) values may be dropped so that the rest still spans the true median at the confidence."""
    tail, cut = 0.0, 0
    for dropped in range(rounds // 2):
        tail += comb(rounds, dropped) / 2.0**rounds
        if tail > (1.0 - CONFIDENCE) / 2:
            break
        cut = dropped
    return cut


def clearly_faster(left: Sequence[float], right: Sequence[float]) -> bool:
    """Whether left beats right by more than the measured spread: the whole interval of their ratio lies below 1."""
    measured = ratio(left, right)
    return measured.rounds >= LEAST_ROUNDS and measured.high < 1.0


def ranking(samples: Mapping[str, Sequence[float]]) -> list[tuple[str, float]]:
    """Names with their relative time (median over rounds of time / that round's median), fastest first. Ties go by name."""
    names = sorted(samples)
    times = np.asarray([samples[name] for name in names], np.float64)
    relative = np.median(times / np.median(times, axis=0), axis=1)
    return sorted(zip(names, (float(value) for value in relative), strict=True), key=lambda pair: (pair[1], pair[0]))


def choose(samples: Mapping[str, Sequence[float]], incumbents: Sequence[str] = ()) -> str:
    """The winner among interleaved finalists. The same samples always give the same answer.

    `incumbents` are names in the order of their claim (the present table entry, then the fallback). A challenger replaces an incumbent only
    when it is clearly faster; an incumbent gives way to another incumbent by the same rule.
    """
    order = ranking(samples)
    fastest, least = order[0]
    level = [name for name, value in order if value <= least * (1.0 + TIE) and not clearly_faster(samples[fastest], samples[name])]
    held = [name for name in incumbents if name in samples]
    challenger = next((name for name in held if name in level), min(level))
    keepers = [name for name in held if not clearly_faster(samples[challenger], samples[name])]
    for name in keepers:
        if not any(clearly_faster(samples[other], samples[name]) for other in held):
            return name
    return challenger
