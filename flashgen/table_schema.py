"""The YAML form of a table entry: typed records, and the way from `TableEntry` to a record and back.

Only integers, booleans and words from closed lists can leave a record, so no text of a table can reach a template.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from flashgen.errors import InvalidTable
from flashgen.model import (
    Alignment,
    Certificate,
    DeviceLimits,
    DType,
    ExecutorName,
    Mask,
    MaskKind,
    Measurement,
    Op,
    Problem,
    Provenance,
    TableEntry,
    Variant,
    Verdict,
)
from flashgen.yaml_io import Flow

SCHEMA = "flashgen.table/1"
TIME_DIGITS = 3  # of a µs; finer digits are noise and would only make diffs longer

Count = Annotated[int, Meta(ge=0, lt=2**31)]
Positive = Annotated[int, Meta(ge=1, lt=2**31)]
HeadDim = Annotated[int, Meta(ge=1, le=1024)]
ParameterValue = Annotated[int, Meta(ge=0, le=65536)]
ParameterName = Annotated[str, Meta(pattern=r"^[a-z][a-z0-9_]{0,40}$")]
FamilyName = Annotated[str, Meta(pattern=r"^[a-z][a-z0-9_]{0,40}$")]
Digest = Annotated[str, Meta(pattern=r"^(sha256:)?[0-9a-f]{16,64}$")]
Option = Annotated[str, Meta(pattern=r"^--?[A-Za-z][A-Za-z0-9_.,:=+-]*$", max_length=100)]
Text = Annotated[str, Meta(max_length=400)]
Time = Annotated[float, Meta(gt=0.0, lt=1e12)]
Ratio = Annotated[float, Meta(ge=0.0, lt=1e300)]


class Record(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of all records: frozen, and an unknown field is an error."""


class DeviceRecord(Record, frozen=True):
    """What identifies a device: its limits. The name is for people."""

    name: Text
    sm: Annotated[int, Meta(ge=50, le=999)]
    sm_count: Positive
    shared_bytes_per_cta: Positive
    shared_bytes_per_sm: Positive
    registers_per_sm: Positive
    dram_gb_per_s: Annotated[float, Meta(gt=0.0, lt=1e6)]


class IntegrityRecord(Record, frozen=True):
    """Number of entries, digest over all of them, digest of the device's record (absent in the first tables)."""

    entries: Count
    digest: Digest
    device: Digest | None = None


class KeyRecord(Record, frozen=True):
    """The hard part of the key."""

    op: Op
    dtype: DType
    head_dim: HeadDim
    head_dim_v: HeadDim
    mask: MaskKind
    deterministic: bool


class ShapeRecord(Record, frozen=True):
    """The soft part of the key, as tuned. `window` is there for window masks only: (left, right), -1 for unlimited."""

    seqlen_q: Positive
    seqlen_kv: Positive
    batch_heads: Positive
    gqa_group: Positive
    window: tuple[int, int] | None = None


class VariantRecord(Record, frozen=True):
    """Family and parameter values."""

    family: FamilyName
    params: dict[ParameterName, bool | ParameterValue]


class SourceRecord(Record, frozen=True):
    """What the certificate was given for. The cubin digest is empty when nothing was compiled for a device."""

    digest: Digest
    cubin_digest: Digest | Literal[""]
    options: list[Option]


class RunnerUpRecord(Record, frozen=True):
    """The second best."""

    median_us: Time
    family: FamilyName
    params: dict[ParameterName, bool | ParameterValue]


class ConditionsRecord(Record, frozen=True):
    """How the time was taken, with the run-time values of the problem that are not in the key."""

    batch: Positive
    alignment: Alignment
    l2: Literal["flushed", "none"]
    interleaved: bool
    clock_mhz: tuple[Count, Count] | None = None
    throttle: list[Text] = []


class MeasurementRecord(Record, frozen=True):
    """Times in µs. `predicted` times come from the cost model and were never measured."""

    source: Literal["measured", "predicted"]
    median_us: Time
    p10_us: Time
    p90_us: Time
    samples: Count
    tflops: Ratio
    conditions: ConditionsRecord
    wide_scores_us: Time | None = None
    runner_up: RunnerUpRecord | None = None


class CertificateRecord(Record, frozen=True):
    """Proof of exactness."""

    verdict: Literal["exact"]
    suite: Text
    suite_digest: Digest
    executor: ExecutorName
    cases: Positive
    bitwise_cases: Count
    worst_error_ratio: Ratio
    worst_case: Text
    lse_abs_error: Ratio
    deterministic: bool | None = None


class SearchRecord(Record, frozen=True):
    """How the variant was found."""

    sampler: Text
    seed: Annotated[int, Meta(ge=-(2**62), lt=2**62)]
    asks: Count
    measured: Count
    space_digest: Digest


class ProvenanceRecord(Record, frozen=True):
    """Where the entry comes from."""

    created: Text
    flashgen: Text
    search: SearchRecord
    nvrtc: Text
    driver: Text
    cupy: Text
    device: Text


class EntryRecord(Record, frozen=True):
    """One entry of a table."""

    key: KeyRecord
    shape: ShapeRecord
    variant: VariantRecord
    source: SourceRecord
    measurement: MeasurementRecord
    certificate: CertificateRecord
    provenance: ProvenanceRecord


def entries_digest(entries: list[Any]) -> str:
    """sha256 over the canonical JSON of the raw entries."""
    return canonical_digest(entries)


def canonical_digest(value: Any) -> str:
    """sha256 over the canonical JSON of any value."""
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return "sha256:" + hashlib.sha256(canonical.encode()).hexdigest()


def convert(raw: Any, kind: type[Any], where: str) -> Any:
    """`raw` as a record. Raises InvalidTable with place, path, rule and value."""
    try:
        return msgspec.convert(raw, kind, strict=True)
    except msgspec.ValidationError as problem:
        rule, _, path = str(problem).partition(" - at ")
        raise InvalidTable(f"{where}: {_field(path)}{rule}{_found(raw, path)}. Correct the value or remove the entry.") from None


def device_record(device: DeviceLimits) -> DeviceRecord:
    """The identifying part of a device."""
    return DeviceRecord(**{name: getattr(device, name) for name in DeviceRecord.__struct_fields__})


def to_entry(record: EntryRecord, where: str) -> TableEntry:
    """The entry of a record. Raises InvalidTable for head counts or masks that contradict each other."""
    measured, certificate, found = record.measurement, record.certificate, record.provenance
    runner_up = measured.runner_up
    return TableEntry(
        problem=_problem(record, where),
        variant=Variant.of(record.variant.family, record.variant.params),
        source_digest=record.source.digest,
        cubin_digest=record.source.cubin_digest,
        options=tuple(record.source.options),
        measurement=Measurement(
            measured.median_us, measured.p10_us, measured.p90_us, measured.samples, measured.tflops, measured.source,
            measured.conditions.clock_mhz, tuple(measured.conditions.throttle), measured.wide_scores_us,
        ),
        certificate=Certificate(
            Verdict.EXACT, certificate.suite, certificate.suite_digest, certificate.executor, certificate.cases,
            certificate.bitwise_cases, certificate.worst_error_ratio, certificate.worst_case, certificate.lse_abs_error,
            deterministic=certificate.deterministic,
        ),
        provenance=Provenance(
            found.created, found.flashgen, found.search.sampler, found.search.seed, found.search.asks, found.search.measured,
            found.search.space_digest, found.nvrtc, found.driver, found.cupy, found.device,
        ),
        runner_up=(Variant.of(runner_up.family, runner_up.params), runner_up.median_us) if runner_up else None,
    )  # fmt: skip


def to_raw(entry: TableEntry) -> dict[str, Any]:
    """The YAML form of an entry, in the order of the file. Raises InvalidTable for an entry that may not be in a table."""
    if entry.certificate.verdict is not Verdict.EXACT:
        raise InvalidTable(
            f"Only exact variants enter a table; {entry.variant} is {entry.certificate.verdict}: {entry.certificate.failure}."
        )
    problem, found = entry.problem, entry.provenance
    raw = {
        "key": {
            "op": str(problem.op), "dtype": str(problem.dtype), "head_dim": problem.head_dim, "head_dim_v": problem.head_dim_v,
            "mask": str(problem.mask.kind), "deterministic": problem.deterministic,
        },
        "shape": _raw_shape(problem),
        "variant": {"family": entry.variant.family, "params": Flow(entry.variant.params)},
        "source": {"digest": entry.source_digest, "cubin_digest": entry.cubin_digest, "options": list(entry.options)},
        "measurement": _raw_measurement(entry),
        "certificate": _raw_certificate(entry.certificate),
        "provenance": {
            "created": found.created, "flashgen": found.flashgen,
            "search": Flow(
                sampler=found.sampler, seed=found.seed, asks=found.asks, measured=found.measured, space_digest=found.space_digest
            ),
            "nvrtc": found.nvrtc, "driver": found.driver, "cupy": found.cupy, "device": found.device,
        },
    }  # fmt: skip
    convert(raw, EntryRecord, f"entry for {problem}")
    return raw


def _problem(record: EntryRecord, where: str) -> Problem:
    key, shape, conditions = record.key, record.shape, record.measurement.conditions
    if (shape.window is None) is (key.mask is MaskKind.WINDOW):
        raise InvalidTable(f"{where}: shape.window belongs to window masks, and only to them; the mask is {key.mask}. Correct the entry.")
    heads_q, rest = divmod(shape.batch_heads, conditions.batch)
    if rest or heads_q % shape.gqa_group:
        raise InvalidTable(
            f"{where}: batch_heads must be a multiple of batch * gqa_group; "
            f"got {shape.batch_heads}, {conditions.batch} and {shape.gqa_group}. Correct the entry."
        )
    left, right = shape.window or (-1, -1)
    if min(left, right) < -1:
        raise InvalidTable(f"{where}: shape.window {left}, {right}: bounds are at least -1. Correct the entry.")
    mask = Mask(key.mask, conditions.alignment, left, right)
    return Problem(
        key.dtype, key.head_dim, key.head_dim_v, conditions.batch, heads_q, heads_q // shape.gqa_group,
        shape.seqlen_q, shape.seqlen_kv, mask, key.op, key.deterministic,
    )  # fmt: skip


def _raw_shape(problem: Problem) -> dict[str, Any]:
    shape: dict[str, Any] = {
        "seqlen_q": problem.seqlen_q, "seqlen_kv": problem.seqlen_kv,
        "batch_heads": problem.batch_heads, "gqa_group": problem.gqa_group,
    }  # fmt: skip
    if problem.mask.kind is MaskKind.WINDOW:
        shape["window"] = [problem.mask.left, problem.mask.right]
    return shape


def _raw_measurement(entry: TableEntry) -> dict[str, Any]:
    taken, measured = entry.measurement, entry.measurement.source == "measured"
    conditions = Flow(
        batch=entry.problem.batch, alignment=str(entry.problem.mask.alignment), l2="flushed" if measured else "none", interleaved=measured
    )
    if taken.clock_mhz:
        conditions["clock_mhz"] = list(taken.clock_mhz)
    if taken.throttle:
        conditions["throttle"] = list(taken.throttle)
    raw: dict[str, Any] = {
        "source": taken.source, "median_us": _time(taken.median_us), "p10_us": _time(taken.p10_us), "p90_us": _time(taken.p90_us),
        "samples": taken.samples, "tflops": round(float(taken.tflops), 2),
    }  # fmt: skip
    if taken.wide_scores_us is not None:
        raw["wide_scores_us"] = _time(taken.wide_scores_us)
    if entry.runner_up:
        variant, median = entry.runner_up
        raw["runner_up"] = {"median_us": _time(median), "family": variant.family, "params": Flow(variant.params)}
    raw["conditions"] = conditions
    return raw


def _raw_certificate(certificate: Certificate) -> dict[str, Any]:
    raw: dict[str, Any] = {
        "verdict": str(certificate.verdict), "suite": certificate.suite, "suite_digest": certificate.suite_digest,
        "executor": str(certificate.executor), "cases": certificate.cases, "bitwise_cases": certificate.bitwise_cases,
        "worst_error_ratio": float(f"{certificate.worst_error_ratio:.4g}"), "worst_case": certificate.worst_case,
        "lse_abs_error": float(f"{certificate.lse_abs_error:.3g}"),
    }  # fmt: skip
    if certificate.deterministic is not None:  # forward entries are older than the field
        raw["deterministic"] = certificate.deterministic
    return raw


def _time(us: float) -> float:
    return round(float(us), TIME_DIGITS)


def _field(path: str) -> str:
    name = path.strip("`").removeprefix("$").removeprefix(".")
    return f"{name}: " if name else ""


def _found(raw: Any, path: str) -> str:
    """The offending value, where the path leads to one."""
    value = raw
    for step in re.findall(r"[A-Za-z_][A-Za-z0-9_]*|(?<=\[)\d+(?=\])", path.strip("`").removeprefix("$")):
        try:
            value = value[int(step) if step.isdigit() else step]
        except (KeyError, IndexError, TypeError):
            return ""
    shown = repr(value)
    return f"; found {shown if len(shown) <= 80 else shown[:80] + '…'}"
