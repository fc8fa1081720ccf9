"""Results as Kernel Tuner's tools read them: the T4 results format, version 1.0.0. Times are in milliseconds there.

One result is one configuration of one problem. Fields that T4 does not know (problem, device, family, source) stand beside its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from flashgen.model import CompileReport, DeviceLimits, Measurement, Outcome, Problem, TableEntry, Trial, Variant
from flashgen.study import RecordedStudy
from flashgen.table import Table

VERSION = "1.0.0"
_INVALIDITY = {
    Outcome.OK: "correct", Outcome.INFEASIBLE: "constraints", Outcome.SPILLED: "constraints", Outcome.COMPILE_FAILED: "compile",
    Outcome.LAUNCH_FAILED: "runtime", Outcome.INEXACT: "correctness", Outcome.TIMED_OUT: "timeout",
}  # fmt: skip


def of_tables(tables: Iterable[Table]) -> dict[str, Any]:
    """The winners of tables, and what they were chosen over where it is known."""
    return _document(result for table in tables for entry in table.entries for result in _entry(entry, table.device.name))


def of_study(study: RecordedStudy) -> dict[str, Any]:
    """Every trial of a search, good and bad."""
    return _document(_trial(trial, took, study) for trial, took in zip(study.trials, study.seconds, strict=True))


def _document(results: Iterable[dict[str, Any]]) -> dict[str, Any]:
    return {"schema_version": VERSION, "results": list(results)}


def _entry(entry: TableEntry, device: str) -> list[dict[str, Any]]:
    times = _times(entry.measurement)
    measurements = [*_taken(entry.measurement), _value("worst_error_ratio", entry.certificate.worst_error_ratio, "")]
    about = _about(entry.problem, device, entry.measurement.source)
    results = [_result(entry.variant, about, Outcome.OK, times, measurements, entry.provenance.created)]
    if entry.runner_up is not None:
        variant, median_us = entry.runner_up
        time = [_value("time", _ms(median_us), "ms")]
        results.append(_result(variant, about, Outcome.OK, {"runtimes": [_ms(median_us)]}, time, entry.provenance.created))
    return results


def _trial(trial: Trial, took: float, study: RecordedStudy) -> dict[str, Any]:
    header, taken = study.header, trial.measurement
    limits: DeviceLimits = header.device
    times = {**(_times(taken) if taken else {"runtimes": []}), "framework": round(took * 1e3, 3)}
    if trial.report is not None:
        times["compilation_time"] = round(trial.report.seconds * 1e3, 3)
    about = _about(header.problem, limits.name, taken.source if taken else "none") | ({"detail": trial.detail} if trial.detail else {})
    return _result(trial.variant, about, trial.outcome, times, [*(_taken(taken) if taken else ()), *_compiled(trial.report)], "")


def _result(
    variant: Variant, about: dict[str, Any], outcome: Outcome, times: dict[str, Any], measurements: list[dict[str, Any]], created: str
) -> dict[str, Any]:
    return {
        "timestamp": created, "configuration": {name: int(value) for name, value in variant.params}, "objectives": ["time"],
        "times": times, "invalidity": _INVALIDITY[outcome], "correctness": float(outcome is not Outcome.INEXACT),
        "measurements": measurements, "family": variant.family, **about,
    }  # fmt: skip


def _about(problem: Problem, device: str, source: str) -> dict[str, Any]:
    return {"problem": str(problem), "device": device, "source": source}


def _times(taken: Measurement) -> dict[str, Any]:
    return {"runtimes": [_ms(taken.median_us)]}


def _taken(taken: Measurement) -> list[dict[str, Any]]:
    times = (("time", taken.median_us), ("time_p10", taken.p10_us), ("time_p90", taken.p90_us))
    return [*(_value(name, _ms(us), "ms") for name, us in times), _value("throughput", taken.tflops, "TFLOP/s")]


def _compiled(report: CompileReport | None) -> list[dict[str, Any]]:
    return [] if report is None else [_value("registers", report.registers, ""), _value("spill_bytes", report.spill_bytes, "B")]


def _value(name: str, value: float, unit: str) -> dict[str, Any]:
    return {"name": name, "value": value, "unit": unit}


def _ms(us: float) -> float:
    return round(us / 1e3, 6)
