"""Table entries whose pins are those of today's texts, for tests of what is shipped. Machine code is invented, or compiled where asked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from flashgen import certify, device, gate, suite, table
from flashgen.compiler import architecture, options_for
from flashgen.cubins import Compiled, CubinStore, digest_of
from flashgen.model import (
    Certificate,
    CompileReport,
    DType,
    ExecutorName,
    Mask,
    Measurement,
    Op,
    Problem,
    Provenance,
    Source,
    TableEntry,
    Variant,
    Verdict,
)
from flashgen.render import render
from flashgen.space import load_space

H200 = device.preset("h200")
NVRTC = "13.0"


def problem(seqlen: int = 1024, head_dim: int = 64, mask: Mask | None = None, **changes: Any) -> Problem:
    fields: dict[str, Any] = {"batch": 2, "heads_q": 4, "heads_kv": 2}
    fields |= changes
    return Problem(
        DType.BFLOAT16, head_dim, head_dim, seqlen_q=seqlen, seqlen_kv=seqlen, mask=Mask.causal() if mask is None else mask, **fields
    )


def variant(of: Problem, **params: int) -> Variant:
    bound = load_space("ampere_forward").bind(of, H200)
    return bound.variant(bound.fallback().as_dict() | params)


def source_of(of: Problem, chosen: Variant) -> Source:
    return render(load_space(chosen.family), of.klass(), chosen)


def invented_cubin(source: Source) -> bytes:
    """Bytes that look like machine code to who only looks at the beginning."""
    return b"\x7fELF" + source.digest.encode() * 8 + b"\0"


def compiled(source: Source, arch: str | None = None, cubin: bytes | None = None, nvrtc: str = NVRTC) -> Compiled:
    arch = arch or architecture(source, 90)
    cubin = invented_cubin(source) if cubin is None else cubin
    report = CompileReport(digest_of(cubin), 128, 0, 0, 0, (), 0.1, nvrtc, options_for(arch))
    return Compiled(source.digest, tuple(each.name for each in source.entry_points), arch, cubin, report)


def entry(of: Problem | None = None, *, kind: str = "measured", median: float = 100.0, chosen: Variant | None = None) -> TableEntry:
    """An entry that is valid today under NVRTC 13.0."""
    of = of or problem()
    chosen = chosen or variant(of)
    source = source_of(of, chosen)
    built = compiled(source)
    executor = ExecutorName.DEVICE if kind == "measured" else ExecutorName.EMULATED
    return TableEntry(
        of, chosen, source.digest, built.report.cubin_digest, built.report.options,
        Measurement(median, median * 0.99, median * 1.01, 30, 100.0, kind),
        Certificate(Verdict.EXACT, suite.SUITE, certify.suite_digest(), executor, 60, 20, 0.8, "ragged", 1e-6),
        Provenance("2026-01-01T00:00:00Z", "0.1.0", "tpe", 0, 60, 48, "ab" * 32, NVRTC, "580.65", "14.2.0", H200.name),
    )  # fmt: skip


def gradients(of: Problem | None = None, *, median: float = 100.0, **unsettled: int) -> TableEntry:
    """An entry of the backward pass, of the same shape as `of`, with the certificate of its suite.

    `unsettled` are parameters that keep their value whatever the space's conditions say.
    """
    asked = replace(of or problem(), op=Op.BACKWARD)
    chosen = load_space("hopper_backward").bind(asked, H200).fallback()
    made = entry(asked, median=median, chosen=Variant.of(chosen.family, chosen.as_dict() | unsettled))
    suited = replace(made.certificate, suite=gate.suite_name(Op.BACKWARD), suite_digest=gate.suite_digest(Op.BACKWARD), deterministic=True)
    return replace(made, certificate=suited)


def table_of(path: Path, *entries: TableEntry) -> table.Table:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(table.render_table(table.device_record(H200), entries))
    return table.read(path, strict=True)


def store_with(entries: tuple[TableEntry, ...], path: Path) -> CubinStore:
    """A cubin store that holds the invented machine code of entries."""
    store = CubinStore(path)
    for each in entries:
        store.put(compiled(source_of(each.problem, each.variant)))
    return store


def stale(of: TableEntry) -> TableEntry:
    """The entry as if its template had been another one when it was made."""
    return replace(of, source_digest="0" * 64)
