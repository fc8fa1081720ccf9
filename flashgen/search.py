"""The search for the fastest exact variant of one problem: trials, final round, table entry.

`tune` is the whole story. Trials are journalled one by one; a search that was stopped, by whatever means, goes on where it ended.
"""

from __future__ import annotations

import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from flashgen import table as tables
from flashgen.errors import CompileError, EmptySpace, InfeasibleVariant, InvalidProblem, InvalidSpace, LaunchError, UnsupportedProblem
from flashgen.evaluators import DeviceEvaluator, Evaluator, PredictedEvaluator
from flashgen.model import (
    LARGEST_SEED,
    Certificate,
    DeviceLimits,
    ExecutorName,
    Measurement,
    Outcome,
    Problem,
    Provenance,
    TableEntry,
    Trial,
    Variant,
    Verdict,
)
from flashgen.near import fallback_of, refusal
from flashgen.space import BoundSpace, load_space, load_spaces
from flashgen.strategy import Predicted, Strategy
from flashgen.study import Header, Journal
from flashgen.trials import FinalistCertified, FinalRound, Progress, SearchBegan, better, run_trials, speed

DEFAULT_BUDGET = {ExecutorName.DEVICE: 60, ExecutorName.EMULATED: 12}
CERTIFY_EXTRA = 10  # further candidates to certify when finalists turn out inexact


@dataclass(frozen=True, slots=True)
class Finalist:
    """A variant of the final round. `role` is challenger, table entry or fallback."""

    variant: Variant
    role: str
    certificate: Certificate
    measurement: Measurement | None


@dataclass(frozen=True, slots=True)
class TuneResult:
    """What a search found. A stopped search is `partial`: `best` is its best trial, certified quickly only, and nothing was written."""

    problem: Problem
    device: DeviceLimits
    executor: ExecutorName
    entry: TableEntry | None
    change: tables.Change | None
    trials: tuple[Trial, ...]
    finalists: tuple[Finalist, ...]
    best: Trial | None
    partial: bool
    seconds: float
    journal: Path | None

    def outcomes(self) -> dict[Outcome, int]:
        """Number of trials by outcome."""
        return dict(Counter(trial.outcome for trial in self.trials))


EvaluatorFactory = Callable[[Sequence[BoundSpace], Problem, DeviceLimits, int], Evaluator]


def tune(
    problem: Problem,
    device: DeviceLimits,
    *,
    budget: int | None = None,
    seconds: float | None = None,
    seed: int = 0,
    executor: ExecutorName = ExecutorName.DEVICE,
    fresh: bool = False,
    table: Path | None = None,
    families: Sequence[str] | None = None,
    progress: Progress = lambda _: None,
    make_evaluator: EvaluatorFactory | None = None,
    predicted: Predicted | None = None,
    start: Sequence[Variant] = (),
) -> TuneResult:
    """Search the fastest exact variant of `problem` on `device` and put it into the table.

    `budget` counts trials, `seconds` limits the time of the trials (the final round comes on top); `fresh` forgets an earlier search. With
    the emulated executor nothing is timed and everything is marked predicted. `predicted` spares the ranking, where it was made before for
    the same problem and device; `start` is tried first, best first, where not all is tried anyway and something is timed. Ctrl-C and
    SIGTERM end the search with a partial result. Raises InvalidProblem, UnsupportedProblem, EmptySpace, InvalidTable, NotWritable,
    MissingDependency before anything runs, and LaunchError when nothing that ran could be used.
    """
    if not 0 <= seed <= LARGEST_SEED:
        raise InvalidProblem(f"The seed must be from 0 to {LARGEST_SEED}; got {seed}.")
    started = time.monotonic()
    path = table or tables.table_path(device)
    old = tables.read(path, strict=True).find(problem) if path.exists() else None
    bounds = bind_families(problem, device, families)
    budget = DEFAULT_BUDGET[executor] if budget is None else budget
    strategy = Strategy(bounds, budget, seed, by_cost_only=executor is ExecutorName.EMULATED, predicted=predicted, start=start)
    evaluator = (make_evaluator or evaluator_for(executor))(bounds, problem, device, seed)
    journal = None
    try:
        journal = Journal.open(_header(problem, device, evaluator, bounds), fresh=fresh)
        run = _Run(problem, device, bounds, strategy, evaluator, journal, budget, started, seconds, progress)
        return run.to_result(path, old, seed)
    finally:
        evaluator.close()
        if journal is not None:
            journal.close()


def compile_ahead(
    problem: Problem, device: DeviceLimits, *, budget: int, families: Sequence[str] | None = None, progress: Progress = lambda _: None
) -> list[Trial]:
    """Compile the `budget` best variants by cost model into the cubin store, so that a GPU machine only has to measure."""
    bounds = bind_families(problem, device, families)
    strategy = Strategy(bounds, budget, 0, by_cost_only=True)
    evaluator = PredictedEvaluator(bounds, problem, device, 0)
    try:
        return [trial for trial, _ in run_trials(strategy, evaluator, None, budget, time.monotonic(), None, progress, evaluator.jobs)]
    finally:
        evaluator.close()


def bind_families(problem: Problem, device: DeviceLimits, families: Sequence[str] | None = None) -> list[BoundSpace]:
    """The spaces that offer at least one variant. Raises as `bind_supported`, and EmptySpace, which says why."""
    bounds = bind_supported(problem, device, families)
    offering = [bound for bound in bounds if bound.feasible()]
    if not offering:
        raise EmptySpace("\n".join(_why_empty(bound) for bound in bounds))
    return offering


def bind_supported(problem: Problem, device: DeviceLimits, families: Sequence[str] | None = None) -> list[BoundSpace]:
    """The spaces of families that compute the problem on the device, whether or not a variant fits: finding that out takes long.

    Raises InvalidProblem for an empty problem; UnsupportedProblem says why.
    """
    if not (problem.batch and problem.seqlen_q and problem.seqlen_kv):
        raise InvalidProblem(f"There is nothing to time in {problem}: batch and lengths must be at least 1 to tune.")
    spaces = load_spaces(problem.op)
    if unknown := sorted(set(families or ()) - {space.family for space in spaces}):
        known = ", ".join(space.family for space in spaces)
        raise UnsupportedProblem(f"There is no family {', '.join(unknown)} for {problem.op}; the families are {known}.")
    spaces = tuple(space for space in spaces if not families or space.family in families)
    reasons = {space.family: space.unsupported(problem, device) for space in spaces}
    bounds = [space.bind(problem, device) for space in spaces if reasons[space.family] is None]
    if not bounds:
        listed = "\n".join(f"  {family}: {reason}" for family, reason in reasons.items())
        raise UnsupportedProblem(
            f"No kernel family fits {problem} on {device.name} (sm_{device.sm}):\n{listed}\nChange what the reasons name, or the device."
        )
    return bounds


def space_check(entry: TableEntry) -> str | None:
    """Why an entry's variant is not one of its family's space, or None: the `check` of strict table reading."""
    try:
        load_space(entry.variant.family).checked(entry.variant.as_dict())
    except (InfeasibleVariant, InvalidSpace, UnsupportedProblem) as problem:
        return str(problem).rstrip(".")
    return None


@dataclass(frozen=True)
class _Run:
    """One search with everything that it needs."""

    problem: Problem
    device: DeviceLimits
    bounds: list[BoundSpace]
    strategy: Strategy
    evaluator: Evaluator
    journal: Journal
    budget: int
    started: float
    seconds: float | None
    progress: Progress

    def to_result(self, path: Path, old: TableEntry | None, seed: int) -> TuneResult:
        self._forget_changed_sources()
        feasible = {bound.space.family: len(bound.feasible()) for bound in self.bounds}
        resumed = len(self.journal.trials)
        self.progress(SearchBegan(self.problem, self.device, self.evaluator.executor, feasible, self.budget, resumed, self.journal.path))
        trials: list[Trial] = []
        try:
            with stopped_by_signals():
                for trial, _ in self._trials():
                    trials.append(trial)
                finalists = self._finalists(old)
                entry = self._entry(finalists, len(trials), seed)
        except KeyboardInterrupt:
            return self._result(trials, (), None, None, partial=True)
        change = tables.merge(path, self.device, entry)
        return self._result(trials, finalists, entry, change, partial=False)

    def _trials(self) -> Iterator[tuple[Trial, bool]]:
        return run_trials(
            self.strategy, self.evaluator, self.journal, self.budget, self.started, self.seconds, self.progress, self.evaluator.jobs
        )

    def _forget_changed_sources(self) -> None:
        """A trial of a text that is rendered otherwise by now says nothing. Failures before rendering have no digest and stay."""
        for trial in list(self.journal.trials.values()):
            known = trial.variant.family in {bound.space.family for bound in self.bounds}
            if not known or (trial.source_digest and self.evaluator.source(trial.variant).digest != trial.source_digest):
                self.journal.forget(trial.variant)

    def _finalists(self, old: TableEntry | None) -> tuple[Finalist, ...]:
        """The best and the incumbents that are exact, by times of one run; the winner comes first."""
        good = (trial for trial in self.journal.trials.values() if better(None, trial))
        ranked = [trial.variant for trial in sorted(good, key=speed)]
        incumbents = self._incumbents(old)
        best = list(dict.fromkeys((*ranked[: self.evaluator.finalists], *incumbents)))
        self.progress(FinalRound(tuple(best)))
        wanted = self.evaluator.proved
        proved_last = self._timed_first(best, incumbents, wanted) if wanted else ()
        return proved_last or self._certified_first(ranked, incumbents)

    def _timed_first(self, best: Sequence[Variant], incumbents: dict[Variant, str], wanted: int) -> tuple[Finalist, ...]:
        """Time all side by side, then certify the fastest until `wanted` are exact. Nothing where the winner is not."""
        running = [variant for variant in best if self._compiles(variant)]
        if not running:
            return ()
        decision = self.evaluator.decide(running, [variant for variant in incumbents if variant in running], self.journal.trials)
        certificates = self._exact(decision.ranked(), wanted)
        if certificates[decision.winner].verdict is not Verdict.EXACT:
            return ()
        return tuple(
            Finalist(variant, incumbents.get(variant, "challenger"), found, decision.measurements[variant])
            for variant, found in certificates.items()
            if found.verdict is Verdict.EXACT
        )

    def _compiles(self, variant: Variant) -> bool:
        try:
            self.evaluator.report(variant)
        except CompileError:
            return False
        return True

    def _certified_first(self, ranked: Sequence[Variant], incumbents: dict[Variant, str]) -> tuple[Finalist, ...]:
        """Certify the best and the incumbents, then time those that are exact side by side."""
        certificates = self._exact(ranked, self.evaluator.finalists)
        certificates |= self._certified([variant for variant in incumbents if variant not in certificates])
        exact = [variant for variant, found in certificates.items() if found.verdict is Verdict.EXACT]
        if not exact:
            raise LaunchError(self._why_nothing(certificates))
        decision = self.evaluator.decide(exact, [variant for variant in incumbents if variant in exact], self.journal.trials)
        found = [
            Finalist(variant, incumbents.get(variant, "challenger"), certificates[variant], decision.measurements.get(variant))
            for variant in exact
        ]
        return tuple(sorted(found, key=lambda finalist: (finalist.variant != decision.winner, _time(finalist), str(finalist.variant))))

    def _exact(self, ranked: Sequence[Variant], wanted: int) -> dict[Variant, Certificate]:
        """Certificates of the best until `wanted` of them are exact."""
        certificates: dict[Variant, Certificate] = {}
        remaining = deque(ranked[: wanted + CERTIFY_EXTRA])
        while remaining:
            missing = wanted - sum(found.verdict is Verdict.EXACT for found in certificates.values())
            if missing <= 0:
                break
            certificates |= self._certified([remaining.popleft() for _ in range(min(missing, len(remaining)))])
        return certificates

    def _certified(self, variants: Sequence[Variant]) -> dict[Variant, Certificate]:
        certificates = {}
        for variant in variants:
            certificates[variant] = self.evaluator.certify(variant)
            self.progress(FinalistCertified(variant, certificates[variant]))
        return certificates

    def _incumbents(self, old: TableEntry | None) -> dict[Variant, str]:
        """What a challenger must beat, in the order of the claim. Predictions defend nothing: they are made anew, the least one wins."""
        found: dict[Variant, str] = {}
        if self.evaluator.executor is ExecutorName.EMULATED and any(better(None, trial) for trial in self.journal.trials.values()):
            return found
        if old is not None and refusal(self.problem, self.device)(old) is None:
            bound = next((bound for bound in self.bounds if bound.space.family == old.variant.family), None)
            if bound is not None:
                found[bound.variant(old.variant.as_dict())] = "table entry"
        fallback = fallback_of(self.bounds)
        if fallback is not None:
            found.setdefault(fallback, "fallback")
        return found

    def _entry(self, finalists: Sequence[Finalist], asks: int, seed: int) -> TableEntry:
        winner = finalists[0]
        measurement = winner.measurement
        if measurement is None:
            raise LaunchError(f"{winner.variant} could not be timed. Run again; the trials are kept.")
        second = next((finalist for finalist in finalists[1:] if finalist.measurement), None)
        report = self.evaluator.report(winner.variant)
        return TableEntry(
            problem=self.problem,
            variant=winner.variant,
            source_digest=self.evaluator.source(winner.variant).digest,
            cubin_digest=report.cubin_digest,
            options=report.options,
            measurement=measurement,
            certificate=winner.certificate,
            provenance=self._provenance(winner.variant, asks, seed),
            runner_up=(second.variant, second.measurement.median_us) if second and second.measurement else None,
        )

    def _provenance(self, winner: Variant, trials: int, seed: int) -> Provenance:
        tools = self.evaluator.toolchain()
        digest = next(bound.space.digest for bound in self.bounds if bound.space.family == winner.family)
        return Provenance(
            created=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            flashgen=version(),
            sampler=self.strategy.sampler,
            seed=seed,
            asks=max(self.strategy.asks, trials),
            measured=sum(1 for t in self.journal.trials.values() if t.measurement and t.measurement.source == "measured"),
            space_digest=digest,
            nvrtc=tools.nvrtc,
            driver=tools.driver,
            cupy=tools.cupy,
            device=self.device.name,
        )

    def _why_nothing(self, certificates: dict[Variant, Certificate]) -> str:
        failed = [trial for trial in self.journal.trials.values() if trial.outcome is not Outcome.OK]
        counts = ", ".join(f"{count} {outcome}" for outcome, count in Counter(trial.outcome for trial in failed).items()) or "no trial"
        first = next((trial.detail for trial in failed), "") or next((found.failure for found in certificates.values()), "")
        return f"No variant of {self.problem} on {self.device.name} could be used ({counts}). First reason: {first}\nRun `flashgen doctor`."

    def _result(
        self, trials: list[Trial], finalists: tuple[Finalist, ...], entry: TableEntry | None, change: tables.Change | None, partial: bool
    ) -> TuneResult:
        best = None
        for trial in self.journal.trials.values():
            best = better(best, trial)
        return TuneResult(
            self.problem, self.device, self.evaluator.executor, entry, change, tuple(trials), finalists, best, partial,
            time.monotonic() - self.started, self.journal.path,
        )  # fmt: skip


@contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Let SIGTERM end the search like Ctrl-C does. In another thread than the main one signals are left alone."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def evaluator_for(executor: ExecutorName) -> EvaluatorFactory:
    """The evaluator that measures, or the one that predicts."""
    return DeviceEvaluator if executor is ExecutorName.DEVICE else PredictedEvaluator


def _header(problem: Problem, device: DeviceLimits, evaluator: Evaluator, bounds: Sequence[BoundSpace]) -> Header:
    spaces = {bound.space.family: bound.space.digest for bound in bounds}
    return Header(problem=problem, device=device, executor=evaluator.executor, spaces=spaces, nvrtc=evaluator.nvrtc(), flashgen=version())


def _why_empty(bound: BoundSpace) -> str:
    try:
        bound.fallback()
    except EmptySpace as problem:
        return str(problem)
    return f"{bound.space.family}: no variant is feasible."


def _time(finalist: Finalist) -> float:
    return finalist.measurement.median_us if finalist.measurement else float("inf")


def version() -> str:
    """The installed version of this package; `0+source` where it was never installed."""
    from importlib import metadata

    try:
        return metadata.version("flashgen")
    except metadata.PackageNotFoundError:
        return "0+source"
