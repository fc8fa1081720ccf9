"""Tile sizes against shared-memory capacity: what fits, what it takes, what it moves, how long it should run and how long it ran.

Everything comes from the search's own space and cost model, so the picture and the search cannot disagree.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashgen import accounting, cost, limits, measured, search
from flashgen.errors import EmptySpace, InvalidProblem, MissingDependency, StudyMismatch
from flashgen.model import CompileReport, DeviceLimits, Problem, Variant
from flashgen.space import BoundSpace, load_space
from flashgen.tile_grid import KIB, LARGEST_CAPACITY, Best, Cell, Family, cells_of, with_length

if TYPE_CHECKING:
    from flashgen.exactness import Comparison

SCHEMA = "flashgen.explore/1"
DEFAULT_CAPACITIES = tuple(kib * KIB for kib in (48, 64, 99, 163, 227))
"""Shared memory per CTA without opt-in, and the opt-in maxima of sm_75, sm_86/89/120, sm_80 and sm_90/100."""
DEFAULT_LENGTHS = (128, 512, 2048, 4096, 8192, 32768)
BASELINE = "standard_forward"


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes of one problem: textbook attention beside tiled attention with the fastest variant of its family."""

    problem: Problem
    family: str
    variant: Variant
    tiled: accounting.Account
    standard: accounting.Account
    dram_bytes: int  # the cost model's estimate for the tiled kernel
    limit: limits.Limit
    prediction: cost.Prediction


@dataclass(frozen=True)
class Exploration:
    """What `explore` found. `cells` holds every family, capacity and tile for `problem`."""

    problem: Problem
    device: DeviceLimits
    capacities: tuple[int, ...]
    lengths: tuple[int, ...]
    cells: tuple[Cell, ...]
    traffic: tuple[Traffic, ...]  # one per length
    measured: tuple[measured.Measured, ...]
    reports: Mapping[Variant, CompileReport]
    families: tuple[Family, ...] = field(repr=False, default=())
    comparison: Comparison | None = None
    comparison_missing: str = ""

    def best(self, capacity_bytes: int | None = None) -> Cell | None:
        """The feasible cell with the shortest predicted time at a capacity (default: the device's); None when nothing fits."""
        wanted = self.device.shared_bytes_per_cta if capacity_bytes is None else capacity_bytes
        fitting = [cell for cell in self.cells if cell.feasible and cell.capacity_bytes == wanted]
        return min(fitting, key=_predicted, default=None)

    def here(self) -> Traffic:
        """The bytes and the binding limit of the problem itself."""
        return next(each for each in self.traffic if each.problem == self.problem)

    def rows(self) -> list[dict[str, Any]]:
        """One flat record per cell."""
        records = []
        for cell in self.cells:
            record = asdict(cell) | {"variant": str(cell.variant), "reasons": "; ".join(cell.reasons)}
            record["shared_parts"] = ", ".join(f"{name}={size}" for name, size in cell.shared_parts)
            records.append({"problem": str(self.problem), "device": self.device.name} | record)
        return records

    def frame(self) -> Any:
        """`rows` as a pandas DataFrame. Raises MissingDependency without pandas."""
        try:
            import pandas
        except ImportError as problem:
            raise MissingDependency(
                "Exploration.frame needs pandas: pip install pandas. `rows` gives the same as plain records."
            ) from problem
        return pandas.DataFrame(self.rows())


def explore(
    problem: Problem, device: DeviceLimits, *, families: Sequence[str] = (), capacities: Sequence[int] = (), lengths: Sequence[int] = (),
    measured_from: Sequence[Path] = (), compile_best: int = 0, compare: bool = True,
) -> Exploration:  # fmt: skip
    """Every tile of every family at every capacity (bytes of shared memory per CTA), and where the bytes go at every length.

    Raises UnsupportedProblem, EmptySpace for a capacity that not even the smallest variant fits, StudyMismatch for times of something else.
    """
    _check(capacities, lengths)
    comparison = _Comparison(problem, device) if compare else None  # the host compiler works meanwhile
    evidence = measured.read(measured_from, device) if measured_from else measured.known_tables(device)
    offered = [evidence.space(each.space.family).bind(problem, device) for each in search.bind_families(problem, device, families or None)]
    times = _times_of(problem, evidence, explicit=bool(measured_from))
    reports = {each.variant: each.report for each in times if each.report is not None and each.problem.klass() == problem.klass()}
    found = tuple(Family(bound, reports) for bound in offered)
    _refuse_tiny(found, capacities)
    if compiled := compiled_reports(found, compile_best):  # known registers change predictions, so nothing predicted before may stay
        reports |= compiled
        found = tuple(Family(each.bound, reports, each.shapes) for each in found)
    wanted = tuple(sorted({*(capacities or DEFAULT_CAPACITIES), device.shared_bytes_per_cta}))
    steps = tuple(sorted({*(lengths or DEFAULT_LENGTHS), problem.seqlen_kv}))
    at_hand = {each.variant: each.median_us for each in times if each.problem == problem}
    cells = tuple(cell for family in found for capacity in wanted for cell in cells_of(family, problem, capacity, at_hand))
    traffic = tuple(_traffic(found, length) for length in steps)
    compared, missing = comparison.result() if comparison else (None, "not asked for")
    return Exploration(problem, device, wanted, steps, cells, traffic, times, reports, found, compared, missing)


def _check(capacities: Sequence[int], lengths: Sequence[int]) -> None:
    if wrong := [each for each in capacities if not KIB <= each <= 2**24]:
        raise InvalidProblem(f"A capacity of shared memory lies between 1 KiB and 16 MiB per CTA; got {wrong[0]} bytes. Write 48K, 227K.")
    if wrong := [each for each in lengths if each < 1]:
        raise InvalidProblem(f"Sequence lengths must be at least 1 to explore; got {wrong[0]}.")


def _times_of(problem: Problem, evidence: measured.Evidence, explicit: bool) -> tuple[measured.Measured, ...]:
    """The times of the problem at any length. Raises StudyMismatch when times were named and none belongs here."""

    def shape(each: Problem) -> Problem:
        return replace(each, seqlen_q=1, seqlen_kv=1, batch=1)

    times = tuple(each for each in evidence.times if shape(each.problem) == shape(problem))
    if explicit and not times:
        others = sorted({str(each.problem) for each in evidence.times}) or ["nothing"]
        raise StudyMismatch(f"No measured time belongs to {problem}; they are of {'; '.join(others[:4])}. Ask for one of those problems.")
    return times


def _refuse_tiny(families: Sequence[Family], capacities: Sequence[int]) -> None:
    for capacity in capacities:
        if not any(family.at(family.bound.problem.seqlen_kv, capacity).feasible() for family in families):
            reasons = "\n".join(f"  {_smallest(family, capacity)}" for family in families)
            raise EmptySpace(
                f"With {capacity / KIB:g} KiB of shared memory per CTA nothing fits {families[0].bound.problem}:\n{reasons}\n"
                "Ask for a larger --sram, a smaller head dim, or another family."
            )


def _smallest(family: Family, capacity: int) -> str:
    """Which variant needs least, and what it misses at a capacity."""
    roomy = family.at(family.bound.problem.seqlen_kv, max(LARGEST_CAPACITY, capacity))
    least = min(roomy.feasible(), key=lambda each: cost.resources(roomy, each).shared_bytes)
    why = family.at(family.bound.problem.seqlen_kv, capacity).explain(least)
    return f"{least} needs {cost.resources(roomy, least).shared_bytes:,} bytes; {'; '.join(why)}"


def _predicted(cell: Cell) -> float:
    return math.inf if cell.predicted_us is None else cell.predicted_us


# Compiled registers ---------------------------------------------------------------------------------------------------


def compiled_reports(families: Sequence[Family], compile_best: int) -> dict[Variant, CompileReport]:
    """Registers and spills of the fastest variants by prediction: from the cubin store, compiled now for the `compile_best` first.

    Without NVRTC nothing is known, and asking for compilation raises MissingDependency.
    """
    from flashgen import compiler
    from flashgen.render import render

    try:
        version = compiler.nvrtc_version()
    except MissingDependency:
        if compile_best:
            raise
        return {}
    found: dict[Variant, CompileReport] = {}
    ranked = _ranked(families)
    sources = [render(bound.space, bound.problem.klass(), variant) for bound, variant in ranked[: max(compile_best, 64)]]
    sm = families[0].bound.device.sm
    if compile_best:
        compiler.compile_many(sources[:compile_best], sm=sm)
    for source in sources:
        options = compiler.options_for(compiler.architecture(source, sm))
        stored = compiler.default_store().get(compiler.key_of(source, options, version))
        if stored is not None:
            found[source.variant] = stored.report
    return found


def _ranked(families: Sequence[Family]) -> list[tuple[BoundSpace, Variant]]:
    """The fastest twin of every feasible shape, by predicted time."""
    runs = []
    for family in families:
        for best in _runs(family, family.bound.problem.seqlen_kv):
            runs.append((best.prediction.us, family.bound, best.variant))
    return [(bound, variant) for _, bound, variant in sorted(runs, key=lambda run: (run[0], str(run[2])))]


# Bytes and limits -----------------------------------------------------------------------------------------------------


def _traffic(families: Sequence[Family], length: int) -> Traffic:
    """The fastest variant of any family at a length, its bytes beside textbook attention's, and what binds it."""
    runs = [(best, family) for family in families for best in _runs(family, length)]
    if not runs:
        raise EmptySpace(f"No variant fits {with_length(families[0].bound.problem, length)} on {families[0].bound.device.name}.")
    best, family = min(runs, key=lambda run: run[0].prediction.us)
    bound = family.at(length)
    baseline = load_space(BASELINE).bind(bound.problem, bound.device)
    return Traffic(
        bound.problem, family.name, best.variant, accounting.account(bound, best.variant),
        accounting.account(baseline, baseline.fallback()), best.traffic.dram_bytes,
        limits.explain(bound, best.variant, family.reports.get(best.variant)), best.prediction,
    )  # fmt: skip


def _runs(family: Family, length: int) -> list[Best]:
    """The fastest twin of every feasible shape on the device at a length."""
    residents = [(shape, family.taken(shape).ctas_per_sm) for shape in family.fitting(length)]
    return [family.best(shape, length, resident) for shape, resident in residents if resident]


class _Comparison(threading.Thread):
    """The comparison of exact and approximate methods, made while the grid is computed."""

    def __init__(self, problem: Problem, device: DeviceLimits) -> None:
        super().__init__(daemon=True)
        self._problem, self._device = problem, device
        self._found: Comparison | None = None
        self._error: Exception | None = None
        self.start()

    def run(self) -> None:
        """Compare; what goes wrong is told by `result`."""
        from flashgen import exactness

        try:
            self._found = exactness.compare_methods(self._problem, self._device)
        except Exception as problem:
            self._error = problem

    def result(self) -> tuple[Comparison | None, str]:
        """The comparison, or why there is none. Raises what is no missing tool."""
        self.join()
        if self._error is not None and not isinstance(self._error, MissingDependency):
            raise self._error
        return self._found, str(self._error or "")


def record(found: Exploration) -> dict[str, Any]:
    """An exploration as plain data: every cell, the bytes and limits of every length, the comparison."""
    lengths = [
        {
            "problem": str(each.problem), "family": each.family, "params": each.variant.as_dict(), "predicted_us": each.prediction.us,
            "waves": each.prediction.waves, "limit": each.limit.key, "evidence": each.limit.evidence, "remedy": each.limit.remedy,
            "dram_bytes": each.dram_bytes, "standard": _account(each.standard), "tiled": _account(each.tiled),
        }
        for each in found.traffic
    ]  # fmt: skip
    return {
        "schema": SCHEMA, "problem": str(found.problem), "device": found.device.name, "capacities": list(found.capacities),
        "matrix_bytes_per_head": accounting.matrix_bytes(found.problem), "cells": found.rows(), "lengths": lengths,
        "measured": [{"problem": str(each.problem), "variant": str(each.variant), "us": each.median_us} for each in found.measured],
        "comparison": asdict(found.comparison) if found.comparison else {"missing": found.comparison_missing},
    }  # fmt: skip


def _account(account: accounting.Account) -> dict[str, Any]:
    totals = {"read_bytes": account.read_bytes, "written_bytes": account.written_bytes, "once_bytes": account.once_bytes}
    return totals | {"passes": [asdict(each) for each in account.passes]}
