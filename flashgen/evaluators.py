"""How a proposed variant becomes a trial: on a GPU by the measuring child, without one by compiler and cost model, or from a recording.

All evaluators fulfil one protocol, so that the search neither knows nor cares whether anything is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from importlib import metadata
from typing import TYPE_CHECKING, Protocol, TypeVar

from flashgen import cost
from flashgen.errors import CompileError, EmulationFault, FlashgenError, LaunchError, StudyMismatch, WorkerLost
from flashgen.model import (
    Certificate,
    CompileReport,
    DeviceLimits,
    ExecutorName,
    Measurement,
    Op,
    Outcome,
    Problem,
    Source,
    Trial,
    Variant,
    Verdict,
)
from flashgen.render import render
from flashgen.space import BoundSpace, Space
from flashgen.study import RecordedStudy

if TYPE_CHECKING:
    from flashgen.bench import Comparison, MeasuringState
    from flashgen.compiler import CompilePool
    from flashgen.cubins import Compiled
    from flashgen.worker import MeasuringChild

_Found = TypeVar("_Found")
TRIAL_SECONDS = 60.0
CERTIFY_SECONDS = 300.0
INTERLEAVE_ROUNDS = 30
WIDE_ROUNDS, WIDE_SCORES = 8, 16.0
"""Finalists are also timed on scores of this standard deviation, in nats."""


@dataclass(frozen=True, slots=True)
class Toolchain:
    """Versions that an entry records; empty where not in use."""

    nvrtc: str = ""
    driver: str = ""
    cupy: str = ""


@dataclass(frozen=True, slots=True)
class Decision:
    """The winner among finalists, and the time of each one that could be timed."""

    winner: Variant
    measurements: dict[Variant, Measurement] = field(default_factory=dict)

    def ranked(self) -> list[Variant]:
        """The winner, then the others by time."""
        return sorted(self.measurements, key=lambda each: (each != self.winner, self.measurements[each].median_us))


class TrialRunner(Protocol):
    """What the loop over trials needs."""

    def prepare(self, variant: Variant) -> None:
        """Begin to compile a variant and return at once."""
        ...

    def expect(self, variants: Sequence[Variant]) -> None:
        """These may be asked for soon: compile them where nothing else is wanted."""
        ...

    def evaluate(self, variant: Variant, best_us: float | None) -> Trial:
        """Compile, certify quickly and time one variant. Whatever the variant does wrong is the trial's outcome, not an exception."""
        ...


class Evaluator(TrialRunner, Protocol):
    """What a whole search needs of an executor."""

    @property
    def executor(self) -> ExecutorName:
        """Who certifies."""
        ...

    @property
    def jobs(self) -> int:
        """Variants that can be compiled at once."""
        ...

    @property
    def finalists(self) -> int:
        """Variants that enter the final round."""
        ...

    @property
    def proved(self) -> int | None:
        """How many finalists run the whole suite, the fastest first, once they are timed side by side. None: each one, before that."""
        ...

    def nvrtc(self) -> str:
        """Version of the compiler. Raises MissingDependency and ConflictingInstall."""
        ...

    def toolchain(self) -> Toolchain:
        """Versions in use."""
        ...

    def source(self, variant: Variant) -> Source:
        """The text of a variant."""
        ...

    def report(self, variant: Variant) -> CompileReport:
        """What the compiler says about a variant. Raises CompileError."""
        ...

    def certify(self, variant: Variant) -> Certificate:
        """Run the whole suite; a variant that cannot be run gets an inexact certificate that says why."""
        ...

    def decide(self, finalists: Sequence[Variant], incumbents: Sequence[Variant], trials: dict[Variant, Trial]) -> Decision:
        """Choose among variants. `incumbents` come in the order of their claim."""
        ...

    def close(self) -> None:
        """End child processes and threads."""
        ...


class _Compiling:
    """The part that all evaluators with a compiler share: sources, compilation ahead, compiled constraints."""

    proved: int | None = None

    def __init__(
        self, bounds: Iterable[BoundSpace], problem: Problem, device: DeviceLimits, seed: int, pool: CompilePool | None = None
    ) -> None:
        """Compiles in `pool`, which the caller closes, or in one of its own."""
        from flashgen.compiler import CompilePool, usable_processors

        self.problem, self.device, self.seed = problem, device, seed
        self.bounds = {bound.space.family: bound for bound in bounds}
        self.jobs = usable_processors()
        self._owns_pool = pool is None
        self._pool: CompilePool = CompilePool(self.jobs) if pool is None else pool
        self._sources: dict[Variant, Source] = {}
        self._compiled: dict[Variant, Future[Compiled]] = {}
        self._expected: dict[Variant, Future[Compiled]] = {}

    def nvrtc(self) -> str:
        from flashgen.compiler import nvrtc_version

        return nvrtc_version()

    def toolchain(self) -> Toolchain:
        return Toolchain(self.nvrtc(), "", _cupy_version())

    def source(self, variant: Variant) -> Source:
        if variant not in self._sources:
            self._sources[variant] = render(self.bounds[variant.family].space, self.problem.klass(), variant)
        return self._sources[variant]

    def prepare(self, variant: Variant) -> None:
        from flashgen.compiler import architecture

        if variant not in self._compiled:
            source = self.source(variant)
            self._compiled[variant] = self._pool.submit(source, architecture(source, self.device.sm))

    def expect(self, variants: Sequence[Variant]) -> None:
        from flashgen.compiler import Urgency, architecture

        for variant in variants:
            if variant not in self._compiled and variant not in self._expected:
                source = self.source(variant)
                self._expected[variant] = self._pool.submit(source, architecture(source, self.device.sm), Urgency.SOON)

    def compiled(self, variant: Variant) -> Compiled:
        self.prepare(variant)
        return self._compiled[variant].result()

    def report(self, variant: Variant) -> CompileReport:
        return self.compiled(variant).report

    def close(self) -> None:
        for future in (*self._compiled.values(), *self._expected.values()):
            self._pool.withdraw(future)
        if self._owns_pool:
            self._pool.close()

    def _built(self, variant: Variant) -> Trial:
        """A trial after compilation: OK without a time, or why it ends here."""
        digest = self.source(variant).digest
        try:
            report = self.report(variant)
        except CompileError as problem:
            return Trial(variant, Outcome.COMPILE_FAILED, str(problem), source_digest=digest)
        bound = self.bounds[variant.family]
        if any(bound.compiled_violations(variant, report).values()):
            reason = "; ".join(bound.explain(variant, report))
            return Trial(variant, Outcome.SPILLED, reason, report=report, source_digest=digest)
        return Trial(variant, Outcome.OK, report=report, source_digest=digest)


def measuring_child(index: int = 0) -> MeasuringChild:
    """A child that measures on GPU `index`, as the driver counts what is visible. Starts when first used."""
    from flashgen.bench import open_device
    from flashgen.worker import MeasuringChild

    # A certificate multiplies many small matrices; on a big host, BLAS threads that wait for each other make it several times slower.
    one_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    return MeasuringChild(open_device, index, deadline_s=TRIAL_SECONDS, environment=one_thread)


class DeviceEvaluator(_Compiling):
    """Compiles in this process, certifies and times in the measuring child, whose death costs one trial."""

    executor = ExecutorName.DEVICE
    finalists = 8

    def __init__(
        self,
        bounds: Iterable[BoundSpace],
        problem: Problem,
        device: DeviceLimits,
        seed: int,
        child: MeasuringChild | None = None,
        pool: CompilePool | None = None,
    ) -> None:
        """Measures in `child` and compiles in `pool`, which the caller ends, or in some of its own."""
        super().__init__(bounds, problem, device, seed, pool)
        self._owns_child = child is None
        self.child: MeasuringChild = measuring_child() if child is None else child
        self.comparison: Comparison | None = None

    def toolchain(self) -> Toolchain:
        """Versions in use, the driver's by the measuring child."""
        return replace(super().toolchain(), driver=str(self.child.call("Reading the driver's version", driver_task)))

    def evaluate(self, variant: Variant, best_us: float | None) -> Trial:
        """One trial in the child."""
        from flashgen import bench, gate

        trial = self._built(variant)
        if trial.outcome is not Outcome.OK:
            return trial
        arguments = (self.source(variant), self.compiled(variant), self.problem, gate.quick, self.seed, None, best_us)
        try:
            timed = self.child.call(str(variant), bench.measure_task, *arguments)
        except FlashgenError as problem:
            return replace(trial, outcome=outcome_of(problem), detail=str(problem))
        if timed.certificate is not None and timed.certificate.verdict is not Verdict.EXACT:
            return replace(trial, outcome=Outcome.INEXACT, detail=timed.certificate.failure)
        return replace(trial, measurement=timed.measurement)

    def decide(self, finalists: Sequence[Variant], incumbents: Sequence[Variant], trials: dict[Variant, Trial]) -> Decision:
        """Interleaved times in random order. A finalist that breaks the run is left out and the rest run again."""
        from flashgen import bench, timing

        running = list(finalists)
        while len(running) > 1:
            kernels = [(str(variant), self.source(variant), self.compiled(variant)) for variant in running]
            names = ", ".join(name for name, _, _ in kernels)
            try:
                found: Comparison = self.child.call(
                    f"Comparing {names}",
                    bench.interleave_task,
                    kernels,
                    self.problem,
                    self.rounds(len(kernels)),
                    self.seed,
                    deadline_s=CERTIFY_SECONDS,
                )
            except (WorkerLost, LaunchError):
                running = self._sound(running)
                continue
            self.comparison = found
            measured = {variant: found.measurement(str(variant), self.problem) for variant in running}
            measured = self._on_wide_scores(measured, kernels)
            winner = timing.choose(found.samples, [str(variant) for variant in incumbents if variant in running])
            return Decision(next(variant for variant in running if str(variant) == winner), measured)
        survivor = (running or list(finalists))[0]
        again = self.evaluate(survivor, None)
        if again.measurement is None:
            raise LaunchError(f"None of the finalists could be timed; {survivor} last: {again.detail}. Run again; the trials are kept.")
        return Decision(survivor, {survivor: again.measurement})

    def rounds(self, kernels: int) -> int:
        """How often each of so many kernels runs in a comparison."""
        return INTERLEAVE_ROUNDS

    def _on_wide_scores(
        self, measured: dict[Variant, Measurement], kernels: list[tuple[str, Source, Compiled]]
    ) -> dict[Variant, Measurement]:
        """The same with a second time each: a softmax that skips work on ordinary scores may pay for it on wide ones."""
        from flashgen import bench

        if self.problem.op is not Op.FORWARD:
            return measured
        names = ", ".join(name for name, _, _ in kernels)
        arguments = kernels, self.problem, WIDE_ROUNDS, self.seed, (), WIDE_SCORES
        try:
            found: Comparison = self.child.call(f"Comparing {names}", bench.interleave_task, *arguments, deadline_s=CERTIFY_SECONDS)
        except (WorkerLost, LaunchError):
            return measured  # the times on ordinary scores stand
        wide = {variant: found.measurement(str(variant), self.problem).median_us for variant in measured}
        return {variant: replace(each, wide_scores_us=wide[variant]) for variant, each in measured.items()}

    def close(self) -> None:
        """End its own child at once."""
        if self._owns_child:
            self.child.kill()
        super().close()

    def certify(self, variant: Variant) -> Certificate:
        """The whole suite on the GPU."""
        found = self._in_the_child(variant, certify_task)
        return _refused(self.problem.op, self.executor, found) if isinstance(found, str) else found

    def at_real_size(self, variant: Variant, proven: Certificate) -> Certificate:
        """`proven`, of the same machine code on another problem of its class, if one launch of this problem's own size is right too."""
        failure = self._in_the_child(variant, real_size_task)
        return _refused(self.problem.op, self.executor, failure) if failure else proven

    def _in_the_child(self, variant: Variant, task: Callable[..., _Found]) -> _Found | str:
        """What a task finds out about a compiled variant, or in words why it could not."""
        try:
            arguments = self.source(variant), self.compiled(variant), self.problem, self.seed
            found: _Found = self.child.call(f"Certifying {variant}", task, *arguments, deadline_s=CERTIFY_SECONDS)
            return found
        except (CompileError, LaunchError, WorkerLost) as problem:
            if isinstance(problem, WorkerLost) and problem.reason == "not_started":
                raise
            return str(problem)

    def _sound(self, variants: Sequence[Variant]) -> list[Variant]:
        """Those that still run alone; at least one fewer than given."""
        sound = [variant for variant in variants if self.evaluate(variant, None).outcome is Outcome.OK]
        return sound if len(sound) < len(variants) else sound[:-1]


class PredictedEvaluator(_Compiling):
    """No GPU: compiles for the named one, ranks by the cost model with the compiler's registers, certifies on the emulated executor."""

    executor = ExecutorName.EMULATED
    finalists = 3

    def evaluate(self, variant: Variant, best_us: float | None) -> Trial:
        """Compile and predict. `best_us` is of no use here."""
        trial = self._built(variant)
        if trial.outcome is not Outcome.OK:
            return trial
        us = round(cost.roofline_us(self.bounds[variant.family], variant, trial.report), 3)
        if us == float("inf"):
            return replace(trial, outcome=Outcome.LAUNCH_FAILED, detail="not even one CTA fits an SM with the compiler's registers")
        tflops = round(cost.flops(self.problem) / us / 1e6, 2)
        return replace(trial, measurement=Measurement(us, us, us, 0, tflops, source="predicted"))

    def decide(self, finalists: Sequence[Variant], incumbents: Sequence[Variant], trials: dict[Variant, Trial]) -> Decision:
        """The least predicted time; ties by name."""
        known = {variant: trials.get(variant) or self.evaluate(variant, None) for variant in finalists}
        predicted = {variant: trial.measurement for variant, trial in known.items() if trial.measurement}
        if not predicted:
            raise LaunchError(f"{finalists[0]} cannot run: {known[finalists[0]].detail}. Name another device with --gpu.")
        winner = min(predicted, key=lambda variant: (predicted[variant].median_us, str(variant)))
        return Decision(winner, predicted)

    def certify(self, variant: Variant) -> Certificate:
        """The whole suite on the CPU."""
        from flashgen import gate
        from flashgen.emulate import EmulatedExecutor

        try:
            return gate.full(
                EmulatedExecutor(self.device), self.bounds[variant.family].space, self.source(variant), self.problem, self.seed
            )
        except (CompileError, LaunchError, EmulationFault) as problem:
            return _refused(self.problem.op, self.executor, str(problem))


class RecordedSpace(BoundSpace):
    """A bound space in which only what was recorded is feasible, so that strategies compete on real times."""

    def __init__(self, space: Space, recorded: RecordedStudy, *, seeds: bool = True) -> None:
        """`seeds=False` hides the seeds, which were chosen by people who knew times. Raises StudyMismatch for another space."""
        if recorded.header.spaces.get(space.family) != space.digest:
            raise StudyMismatch(f"The study was recorded with another {space.family} space. Keep the space's file beside the study.")
        super().__init__(space, recorded.header.problem, recorded.header.device)
        self._recorded = {trial.variant for trial in recorded.trials}
        self._with_seeds = seeds

    def feasible(self) -> list[Variant]:
        """What was recorded, in canonical order."""
        return [variant for variant in super().feasible() if variant in self._recorded]

    def seeds(self) -> list[Variant]:
        """The recorded seeds, or none."""
        return [variant for variant in super().seeds() if variant in self._recorded] if self._with_seeds else []

    def violations(self, variant: Variant) -> dict[str, float]:
        """The static constraints, and `recorded`."""
        return super().violations(variant) | {"recorded": float(variant not in self._recorded)}


class ReplayEvaluator:
    """Answers trials from a recorded study, in no time and with no GPU. What the recording lacks is infeasible here."""

    def __init__(self, recorded: RecordedStudy) -> None:
        """`recorded` as `study.read_study` returns it."""
        self.recorded = {trial.variant: trial for trial in recorded.trials}

    @property
    def best_us(self) -> float:
        """The best time in the recording. Raises StudyMismatch when nothing ran."""
        times = [trial.measurement.median_us for trial in self.recorded.values() if trial.outcome is Outcome.OK and trial.measurement]
        if not times:
            raise StudyMismatch("The recorded study has no trial that ran. Record another one.")
        return min(times)

    def prepare(self, variant: Variant) -> None:
        """Nothing to compile."""

    def expect(self, variants: Sequence[Variant]) -> None:
        """Nothing to compile."""

    def evaluate(self, variant: Variant, best_us: float | None) -> Trial:
        """The recorded trial."""
        return self.recorded.get(variant) or Trial(variant, Outcome.INFEASIBLE, "not in the recording")


def outcome_of(problem: FlashgenError) -> Outcome:
    """The outcome that an error of one trial means. Raises the error when it says nothing about the variant."""
    if isinstance(problem, WorkerLost) and problem.reason != "not_started":
        return Outcome.TIMED_OUT if problem.reason == "timed_out" else Outcome.LAUNCH_FAILED
    if isinstance(problem, LaunchError):
        return Outcome.LAUNCH_FAILED
    if isinstance(problem, CompileError):
        return Outcome.COMPILE_FAILED
    raise problem


def certify_task(state: MeasuringState, source: Source, compiled: Compiled, problem: Problem, seed: int) -> Certificate:
    """In the measuring child: the whole suite on one variant."""
    from flashgen import gate
    from flashgen.space import load_space

    state.executor.load(source, compiled)
    return gate.full(state.executor, load_space(source.family), source, problem, seed)


def real_size_task(state: MeasuringState, source: Source, compiled: Compiled, problem: Problem, seed: int) -> str:
    """In the measuring child: what is wrong with one launch of the problem's own size, or ''."""
    from flashgen import gate

    state.executor.load(source, compiled)
    return gate.real_size(state.executor, source, problem, seed).failure


def driver_task(state: MeasuringState) -> str:
    """In the measuring child: the driver's version; empty where NVML is absent."""
    return state.telemetry.driver_version()


def _refused(op: Op, executor: ExecutorName, failure: str) -> Certificate:
    from flashgen import gate

    return Certificate(Verdict.INEXACT, gate.suite_name(op), gate.suite_digest(op), executor, 0, 0, 0.0, "", 0.0, failure)


def _cupy_version() -> str:
    for name in ("cupy-cuda13x", "cupy-cuda12x", "cupy"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return ""
