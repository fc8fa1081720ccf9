"""Simulated kernels for tests of the search: times, failures and verdicts without a GPU, and a whole search over them."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from flashgen import cost, device, search, timing
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
from flashgen.strategy import Strategy
from flashgen.trials import run_trials

H200 = device.preset("h200")
PROBLEM = Problem(DType.FLOAT16, 64, 64, 2, 4, 4, 1024, 1024, Mask.causal())
RECORDED = Path(__file__).parent / "recorded"
SIMT = ["simt_forward"]
SMALL = replace(H200, name="a GPU with little shared memory", shared_bytes_per_cta=20 * 1024, shared_bytes_per_sm=21 * 1024)


def luck(variant: Variant, salt: str = "") -> float:
    """A number in [0, 1) that belongs to the variant."""
    return int(hashlib.sha256(f"{salt}{variant}".encode()).hexdigest()[:8], 16) / 2**32


class Simulated:
    """An evaluator whose kernels exist in the imagination only. Times are the cost model's, disturbed per variant and family trait."""

    executor = ExecutorName.DEVICE
    jobs = 4
    finalists = 5
    proved: int | None = None

    def __init__(self, bounds: Sequence[BoundSpace], problem: Problem, limits: DeviceLimits, seed: int) -> None:
        self.bounds = {bound.space.family: bound for bound in bounds}
        self.problem, self.seed = problem, seed
        self.ran: list[Variant] = []
        self.prepared: list[Variant] = []
        self.closed = False
        self.fails: Callable[[int, Variant], Exception | Trial | None] = lambda number, variant: None
        self.inexact: Callable[[Variant], bool] = lambda variant: False
        self.noise = 0.0
        self.text = ""
        self.interleaved: list[tuple[list[Variant], list[Variant]]] = []

    def true_us(self, variant: Variant) -> float:
        params = variant.as_dict()
        trait = 1.0 + 0.4 * (params.get("rows_per_team", 4) != 4) + 0.3 * (params.get("lanes_per_team", 16) != 16)
        return cost.roofline_us(self.bounds[variant.family], variant) * trait * (1.0 + 0.2 * luck(variant))

    def nvrtc(self) -> str:
        return "13.0"

    def toolchain(self) -> Toolchain:
        return Toolchain("13.0", "580.65", "14.2.0")

    def source(self, variant: Variant) -> Source:
        digest = hashlib.sha256(f"{variant}{self.text}".encode()).hexdigest()
        return Source(variant.family, self.problem.klass(), variant, "", digest, (), 50)

    def expect(self, variants: Sequence[Variant]) -> None:
        self.expected = list(variants)

    def prepare(self, variant: Variant) -> None:
        self.prepared.append(variant)

    def report(self, variant: Variant) -> CompileReport:
        return CompileReport("ab" * 32, 128, 0, 0, 0, (), 0.1, "13.0", ("--gpu-architecture=sm_90",))

    def evaluate(self, variant: Variant, best_us: float | None) -> Trial:
        self.ran.append(variant)
        failure = self.fails(len(self.ran), variant)
        if isinstance(failure, BaseException):
            raise failure
        if failure is not None:
            return replace(failure, source_digest=self.source(variant).digest)
        us = self.true_us(variant)
        return Trial(variant, Outcome.OK, "", self.measured(us), self.report(variant), self.source(variant).digest)

    def measured(self, us: float) -> Measurement:
        return Measurement(us, us * 0.99, us * 1.01, 50, 100.0)

    def certify(self, variant: Variant) -> Certificate:
        verdict = Verdict.INEXACT if self.inexact(variant) else Verdict.EXACT
        failure = "rising-0: o[0, 0, 3, 1] is off" if verdict is Verdict.INEXACT else ""
        return Certificate(verdict, "attention-forward/1", "cd" * 32, self.executor, 61, 21, 0.7, "ragged-0", 1e-7, failure)

    def decide(self, finalists: Sequence[Variant], incumbents: Sequence[Variant], trials: dict[Variant, Trial]) -> Decision:
        self.interleaved.append((list(finalists), list(incumbents)))
        rng = random.Random(self.seed)
        samples = {
            str(variant): [self.true_us(variant) * (1.0 + self.noise * rng.uniform(-1, 1)) for _ in range(20)] for variant in finalists
        }
        winner = timing.choose(samples, [str(variant) for variant in incumbents])
        times = {variant: timing.measurement(samples[str(variant)], 1e9) for variant in finalists}
        return Decision(next(variant for variant in finalists if str(variant) == winner), times)

    def close(self) -> None:
        self.closed = True


Setup = Callable[[Simulated], None]


def tune(
    setup: Setup = lambda _: None, problem: Problem = PROBLEM, limits: DeviceLimits = H200, **options: Any
) -> tuple[search.TuneResult, Simulated]:
    """A search with a simulated evaluator; returns both."""
    made: list[Simulated] = []

    def make(*arguments: Any) -> Simulated:
        made.append(Simulated(*arguments))
        setup(made[0])
        return made[0]

    options = {"budget": 20, "families": SIMT, "make_evaluator": make} | options
    return search.tune(problem, limits, **options), made[0]


def failing(outcomes: dict[int, Outcome]) -> Setup:
    def setup(simulated: Simulated) -> None:
        simulated.fails = lambda number, variant: Trial(variant, outcomes[number], f"trial {number}") if number in outcomes else None

    return setup


def drive(strategy: Strategy, simulated: Simulated, budget: int) -> list[Trial]:
    return [trial for trial, _ in run_trials(strategy, simulated, None, budget, time.monotonic(), None)]


def bound(family: str = "simt_forward", problem: Problem = PROBLEM, limits: DeviceLimits = H200) -> BoundSpace:
    return load_space(family).bind(problem, limits)
