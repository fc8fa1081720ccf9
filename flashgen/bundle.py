"""Bundles: chosen table entries with their machine code, to be launched where there is no compiler. This module writes them.

A bundle is a folder or a .zip with the same content: cubins, the table, LICENSE, a C header with an example, and a manifest that holds the
sha256 of everything. The same inputs give the same bytes. `bundle_reader` reads them.
"""

from __future__ import annotations

import re
import shutil
import tempfile
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from io import BytesIO
from pathlib import Path

from flashgen import compiler, formula
from flashgen.bundle_reader import (
    CODE,
    CUBINS,
    HEADER,
    LICENSE,
    MANIFEST,
    MAX_LAUNCHES,
    PARAMS,
    SCHEMA,
    TABLE,
    EntryPointRecord,
    FileRecord,
    KernelRecord,
    Manifest,
    sealed,
)
from flashgen.cubins import Compiled, digest_of
from flashgen.errors import CompileError, InvalidTable, MissingDependency, NotWritable, UnsupportedProblem
from flashgen.model import Alignment, DType, MaskKind, Source, TableEntry
from flashgen.render import render
from flashgen.space import Space, load_space
from flashgen.staleness import bare
from flashgen.table import Table, parse, render_table
from flashgen.table_tools import limits_of

_LAUNCHED = re.compile(r"^FG_KERNEL\(\w+, fg::(\w+),", re.MULTILINE)
_ZIP_DATE = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class Bundled:
    """What was written: its place, sizes in bytes, and the manifest's digest, which names the whole content."""

    path: Path
    kernels: int
    entries: int
    bytes: int
    digest: str


def write(out: Path, table: Table, entries: Sequence[TableEntry], architectures: Sequence[str] = (), *, replace: bool = False) -> Bundled:
    """Bundle `entries` of `table` into `out`: a .zip where the name ends so, else a folder.

    Cubins come from the store, or are compiled where NVRTC is installed. For the table's own architecture each must be the very machine
    code that the entry pins. `architectures` (sm_80, …) adds cubins for others, which no certificate speaks of; the manifest says so.
    Raises InvalidTable for stale entries, CompileError, UnsupportedProblem for kernels that C cannot launch, NotWritable.
    """
    if not entries:
        raise InvalidTable(f"There is nothing to bundle: {table.path} has no such entry. `flashgen table show` lists what it has.")
    if out.exists() and not replace:
        raise NotWritable(f"{out} exists already. Choose another place, or replace it with --force.")
    content = build(table, entries, architectures)
    archive = out.suffix == ".zip"
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        _write_zip(out, content) if archive else _write_folder(out, content)
    except OSError as problem:
        raise NotWritable(f"{out} cannot be written: {problem}. Free space, or choose another place.") from problem
    size = out.stat().st_size if archive else sum(map(len, content.values()))
    return Bundled(out, sum(name.startswith(CUBINS) for name in content), len(entries), size, bare(digest_of(content[MANIFEST])))


def build(table: Table, entries: Sequence[TableEntry], architectures: Sequence[str] = ()) -> dict[str, bytes]:
    """The content of a bundle by file name, in the order in which it is written. Raises as `write` does."""
    written = render_table(table.device, entries).encode()
    entries = parse(written, table.path).entries  # in the table's own order
    kernels: dict[tuple[str, str], KernelRecord] = {}
    content: dict[str, bytes] = {}
    for entry in entries:
        space = load_space(entry.variant.family)
        if other := altered(entry, table):
            raise InvalidTable(
                f"The entry for {entry.problem} names another variant than runs, {other}. Run `flashgen table refresh` first."
            )
        source = render(space, entry.problem.klass(), entry.variant)
        own = compiler.architecture(source, table.device.sm)
        for arch in dict.fromkeys((own, *(_form(source, each) for each in architectures))):
            if (source.digest, arch) in kernels:
                continue
            certified = str(entry.certificate.executor) if arch == own else "none"
            compiled = _cubin(entry, source, arch, pinned=arch == own)
            record = _kernel(space, source, compiled, certified)
            kernels[source.digest, arch] = record
            content[record.cubin] = compiled.cubin
    ordered = sorted(kernels.values(), key=lambda each: (each.source_digest, each.architecture))
    content = dict(sorted(content.items()))
    content[TABLE] = written
    content[LICENSE] = _data("LICENSE")
    content |= {name: _data(name) for name in CODE}
    content[HEADER] = c_header(ordered, entries).encode()
    listed = {name: FileRecord(sha256=bare(digest_of(data)), bytes=len(data)) for name, data in sorted(content.items())}
    content[MANIFEST] = sealed(Manifest(schema=SCHEMA, device=table.device, files=listed, kernels=ordered))
    return content


def altered(entry: TableEntry, table: Table) -> str:
    """What another variant than the entry names runs, in words; empty where it is the same, and the entry's certificate speaks of it."""
    return load_space(entry.variant.family).bind(entry.problem, limits_of(table.device)).altered(entry.variant)


def _form(source: Source, arch: str) -> str:
    match = re.fullmatch(r"sm_(\d{2,3})a?", arch)
    if match is None:
        raise UnsupportedProblem(f"An architecture is written sm_90; got {arch!r}.")
    if int(match[1]) < source.min_sm:
        raise UnsupportedProblem(f"{source.family} needs sm_{source.min_sm} or newer; {arch} was asked for. Leave out one of them.")
    return compiler.architecture(source, int(match[1]))


def _cubin(entry: TableEntry, source: Source, arch: str, *, pinned: bool) -> Compiled:
    """The machine code of an entry; where `pinned`, exactly the one that its certificate was given for."""
    store = compiler.default_store()
    if bare(entry.source_digest) != source.digest:
        raise InvalidTable(f"The entry for {entry.problem} is stale: its text has changed since. Run `flashgen table refresh` first.")
    if pinned and entry.cubin_digest:
        found = store.find(entry.cubin_digest, arch)
        if found is not None:
            return found
    try:
        compiled = compiler.compile_source(source, arch)
    except MissingDependency as problem:
        raise CompileError(f"The store has no cubin of {source.variant} for {arch}, and it cannot be compiled here. {problem}") from None
    if pinned and entry.cubin_digest and compiled.report.cubin_digest != entry.cubin_digest:
        raise InvalidTable(
            f"NVRTC {compiled.report.nvrtc} makes other machine code for {entry.problem} than the certified one "
            f"(NVRTC {entry.provenance.nvrtc}). Run `flashgen table refresh` first, or bundle where the cubin store holds it."
        )
    return compiled


def _kernel(space: Space, source: Source, compiled: Compiled, certified: str) -> KernelRecord:
    params = set(_LAUNCHED.findall(source.text))
    if len(params) != 1 or not params <= set(PARAMS) or len(source.entry_points) > MAX_LAUNCHES:
        raise UnsupportedProblem(
            f"{source.variant} is launched with {', '.join(sorted(params))}; a bundle holds kernels launched with {' or '.join(PARAMS)}. "
            "Leave the entry out of the bundle."
        )
    grids, workspace = formula.launch_formulas(space, source.klass, source.variant)
    report, klass = compiled.report, source.klass
    points = [
        EntryPointRecord(name=each.name, threads=each.threads, shared_bytes=each.shared_bytes, grid=grid)
        for each, grid in zip(source.entry_points, grids, strict=True)
    ]
    return KernelRecord(
        cubin=f"{CUBINS}/{bare(report.cubin_digest)}.cubin", bytes=len(compiled.cubin), architecture=compiled.architecture,
        certified=certified, source_digest=source.digest, family=source.family,
        params={name: int(value) for name, value in source.variant.params},
        op=klass.op, dtype=klass.dtype, head_dim=klass.head_dim, head_dim_v=klass.head_dim_v, mask=klass.mask,
        deterministic=klass.deterministic, min_sm=source.min_sm, entry_points=points, workspace_bytes=workspace,
        boxes=dict(source.boxes), counters=source.counters,
        registers=report.registers, static_shared_bytes=report.static_shared_bytes, nvrtc=report.nvrtc, options=list(report.options),
    )  # fmt: skip


def _data(name: str) -> bytes:
    return (files("flashgen") / "bundle_files" / name).read_bytes()


# C ------------------------------------------------------------------------------------------------------------------------

_DTYPE = {DType.FLOAT32: "FG_FLOAT32", DType.FLOAT16: "FG_FLOAT16", DType.BFLOAT16: "FG_BFLOAT16"}
_MASK = {MaskKind.NONE: "FG_MASK_NONE", MaskKind.CAUSAL: "FG_MASK_CAUSAL", MaskKind.WINDOW: "FG_MASK_WINDOW"}


def c_header(kernels: Sequence[KernelRecord], entries: Iterable[TableEntry]) -> str:
    """kernels.h: the kernels, their launch formulas, and the tuned problems that choose among them. Included by flashgen.h."""
    texts = [text for kernel in kernels for text in (*(point.grid for point in kernel.entry_points), kernel.workspace_bytes)]
    functions = {text: f"fg_formula_{number}" for number, text in enumerate(dict.fromkeys(texts))}
    lines = ["/* Written by flashgen bundle; included by flashgen.h. */"]
    lines += [f"static int64_t {name}(const fg_shape* s) {{ (void)s; return {formula.to_c(text)}; }}" for text, name in functions.items()]
    lines += ["static const fg_kernel fg_kernels[] = {", *(_c_kernel(kernel, functions) for kernel in kernels), "};"]
    tuned = [_c_tuned(number, entry) for entry in entries for number, kernel in enumerate(kernels) if _serves(kernel, entry)]
    lines += ["static const fg_tuned fg_tuned_problems[] = {", *tuned, "};", f"enum {{ fg_tuned_count = {len(tuned)} }};", ""]
    return "\n".join(lines)


def _serves(kernel: KernelRecord, entry: TableEntry) -> bool:
    return kernel.source_digest == bare(entry.source_digest)


def _c_kernel(kernel: KernelRecord, functions: dict[str, str]) -> str:
    points = ", ".join(
        f'{{"{point.name}", {point.threads}u, {point.shared_bytes}u, {functions[point.grid]}}}' for point in kernel.entry_points
    )
    sha256 = kernel.cubin.removeprefix(f"{CUBINS}/").removesuffix(".cubin")
    sm = re.sub(r"\D", "", kernel.architecture)
    boxes = ", ".join(str(kernel.boxes.get(name, 0)) for name in ("q", "k", "v", "o"))
    klass = f"{_DTYPE[kernel.dtype]}, {kernel.head_dim}, {kernel.head_dim_v}, {_MASK[kernel.mask]}"
    launched = f"{functions[kernel.workspace_bytes]}, {len(kernel.entry_points)}, {{{points}}}"
    return f'    {{"{kernel.cubin}", "{sha256}", {kernel.bytes}u, {sm}, {klass}, {{{boxes}}}, {kernel.counters}, {launched}}},'


def _c_tuned(number: int, entry: TableEntry) -> str:
    problem = entry.problem
    values = (
        number, problem.seqlen_q, problem.seqlen_kv, problem.batch, problem.batch_heads, problem.gqa_group, problem.mask.left,
        problem.mask.right, int(problem.mask.alignment is Alignment.TOP_LEFT),
    )  # fmt: skip
    return f"    {{{', '.join(map(str, values))}}},"


# Files ----------------------------------------------------------------------------------------------------------------


def zip_bytes(content: dict[str, bytes]) -> bytes:
    """The content as an archive: stored, not deflated, with fixed dates and modes, so that every zlib gives the same bytes."""
    out = BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        for name, data in content.items():
            info = zipfile.ZipInfo(name, _ZIP_DATE)
            info.create_system, info.external_attr = 3, 0o100644 << 16
            archive.writestr(info, data)
    return out.getvalue()


def _write_zip(out: Path, content: dict[str, bytes]) -> None:
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as folder:
        whole = Path(folder) / "bundle.zip"
        whole.write_bytes(zip_bytes(content))
        if out.is_dir():
            raise IsADirectoryError(f"{out} is a folder")
        whole.replace(out)


def _write_folder(out: Path, content: dict[str, bytes]) -> None:
    """Whole or not at all: written beside the place, then moved there."""
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as folder:
        whole = Path(folder) / "bundle"
        for name, data in content.items():
            (whole / name).parent.mkdir(parents=True, exist_ok=True)
            (whole / name).write_bytes(data)
        if out.exists():
            if not (out / MANIFEST).is_file():
                raise FileExistsError(f"{out} is no bundle, and is left alone")
            shutil.move(str(out), str(Path(folder) / "old"))
        whole.replace(out)
