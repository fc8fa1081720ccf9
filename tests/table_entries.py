"""Entries and files of tuned tables, for tests."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from flashgen import table, yaml_io
from flashgen.errors import InvalidTable
from flashgen.model import (
    Certificate,
    DeviceLimits,
    DType,
    ExecutorName,
    Mask,
    Measurement,
    Problem,
    Provenance,
    TableEntry,
    Variant,
    Verdict,
)

DEVICE = DeviceLimits(
    "NVIDIA H200", 90, 132, 232448, 233472, 65536, 2048, 32, 60 * 2**20, 4800.0, 990.0, 67.0, 1980, source="test"
)  # fmt: skip
PARAMS = {"block_q": 128, "block_kv": 64, "q_in_registers": True}


def problem(seqlen: int = 4096, **changes: Any) -> Problem:
    fields: dict[str, Any] = {
        "dtype": DType.BFLOAT16, "head_dim": 128, "head_dim_v": 128, "batch": 4, "heads_q": 16, "heads_kv": 4,
        "seqlen_q": seqlen, "seqlen_kv": seqlen, "mask": Mask.causal(),
    }  # fmt: skip
    return Problem(**(fields | changes))


def entry(of: Problem | None = None, *, source: str = "measured", median: float = 412.625, **params: int) -> TableEntry:
    executor = ExecutorName.DEVICE if source == "measured" else ExecutorName.EMULATED
    return TableEntry(
        problem=of or problem(),
        variant=Variant.of("ampere_forward", PARAMS | params),
        source_digest="sha256:" + "3f" * 32,
        cubin_digest="sha256:" + "9b" * 32,
        options=("--gpu-architecture=sm_90a", "--std=c++17"),
        measurement=Measurement(median, median - 1, median + 2, 200, 333.25, source, (1965, 1980), ("power cap",)),
        certificate=Certificate(Verdict.EXACT, "attention-forward/1", "sha256:" + "a9" * 32, executor, 64, 24, 1.18, "ragged", 3.1e-06),
        provenance=Provenance("2026-08-24T10:15:00Z", "0.1.0", "tpe", 1, 143, 60, "77" * 32, "13.0", "580.65", "14.2.0", "NVIDIA H200"),
        runner_up=(Variant.of("simt_forward", PARAMS), median + 10),
    )


def written(path: Path, *entries: TableEntry) -> str:
    for each in entries:
        table.merge(path, DEVICE, each)
    return path.read_text()


def sealed(text: str) -> str:
    """The text with a digest that fits its (edited) entries, so that only the edit can be refused."""
    entries = yaml_io.load_strict(text, "edited", error=InvalidTable)["entries"]
    return re.sub(r"entries: \d+\n  digest: .*", f'entries: {len(entries)}\n  digest: "{table.entries_digest(entries)}"', text, count=1)
