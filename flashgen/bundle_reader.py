"""Reading bundles: everything is verified before anything is used, and what was verified is what is loaded. Needs no compiler.

The digests guard against damage and against alterations by anyone who cannot alter the manifest too; against the others stands a signature
of the manifest, made and checked with outside tools, or its sha256 given to `load_bundle`.
"""

from __future__ import annotations

import hashlib
import json
import re
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta, Struct

from flashgen import table as tables
from flashgen.cubins import Compiled
from flashgen.errors import InvalidBundle, InvalidTable, LaunchError, UnsupportedProblem
from flashgen.expression import Expression, ExpressionError, parse_expression
from flashgen.formula import RUN_TIME_NAMES
from flashgen.model import (
    CompileReport,
    DeviceLimits,
    DType,
    EntryPoint,
    ForwardTensors,
    MaskKind,
    Op,
    Problem,
    ProblemClass,
    Source,
    TableEntry,
    Variant,
)
from flashgen.table_schema import Count, DeviceRecord, HeadDim, Option, ParameterName, ParameterValue, Positive, Text, canonical_digest

if TYPE_CHECKING:
    from flashgen.gpu import Gpu
    from flashgen.runtime import DeviceExecutor, LoadedKernel

SCHEMA = "flashgen.bundle/1"
MANIFEST, TABLE, LICENSE, HEADER, CUBINS = "manifest.json", "table.yaml", "LICENSE", "kernels.h", "cubins"
CODE = ("flashgen.h", "example.c")
PARAMS = ("ForwardParams", "MappedForwardParams")
MAX_LAUNCHES = 4  # FG_MAX_LAUNCHES of flashgen.h
MAX_MANIFEST_BYTES = 16 * 2**20
MAX_FILES = 10_000
MAX_BYTES = 2**31
SIGNATURES = (".sig", ".asc", ".minisig", ".sigstore.json", ".pem")
"""What may lie beside the manifest, by its name and one of these."""

Sha256 = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}$")]
FileName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,99}(/[A-Za-z0-9][A-Za-z0-9_.-]{0,99})?$")]
EntryName = Annotated[str, Meta(pattern=r"^[a-z][a-z0-9_]{0,59}$")]
TensorName = Annotated[str, Meta(pattern=r"^[qkvo]$")]
Formula = Annotated[str, Meta(max_length=1000)]


class Record(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of all records of a manifest."""


class FileRecord(Record, frozen=True):
    """One file."""

    sha256: Sha256
    bytes: Annotated[int, Meta(ge=0, le=MAX_BYTES)]


class EntryPointRecord(Record, frozen=True):
    """One launch. `grid` is a formula of the run-time names of `formula`."""

    name: EntryName
    threads: Annotated[int, Meta(ge=1, le=1024)]
    shared_bytes: Count
    grid: Formula


class KernelRecord(Record, frozen=True):
    """One kernel for one architecture. `certified` says which executor proved this machine code: device, emulated, or none."""

    cubin: FileName
    bytes: Positive
    architecture: Annotated[str, Meta(pattern=r"^sm_[0-9]{2,3}a?$")]
    certified: Annotated[str, Meta(pattern=r"^(device|emulated|none)$")]
    source_digest: Sha256
    family: ParameterName
    params: dict[ParameterName, ParameterValue]
    op: Op
    dtype: DType
    head_dim: HeadDim
    head_dim_v: HeadDim
    mask: MaskKind
    deterministic: bool
    min_sm: Positive
    entry_points: Annotated[list[EntryPointRecord], Meta(min_length=1, max_length=MAX_LAUNCHES)]
    workspace_bytes: Formula
    boxes: Annotated[dict[TensorName, Positive], Meta(max_length=4)]
    counters: Annotated[int, Meta(ge=0, le=1024)]
    registers: Count
    static_shared_bytes: Count
    nvrtc: Text
    options: list[Option]


class Manifest(Record, frozen=True):
    """What a bundle consists of. `digest` covers everything else in the manifest."""

    schema: Text
    device: DeviceRecord
    files: Annotated[dict[FileName, FileRecord], Meta(max_length=MAX_FILES)]
    kernels: Annotated[list[KernelRecord], Meta(min_length=1, max_length=MAX_FILES)]
    digest: str = ""


def sealed(manifest: Manifest) -> bytes:
    """The text of a manifest, with its digest."""
    raw = msgspec.to_builtins(manifest)
    raw["digest"] = _digest(raw)
    return (json.dumps(raw, indent=1) + "\n").encode()


def _digest(raw: dict[str, Any]) -> str:
    return canonical_digest({name: value for name, value in raw.items() if name != "digest"})


# Loading ------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BundledKernel:
    """One kernel with its machine code."""

    record: KernelRecord
    cubin: bytes = field(repr=False)

    @property
    def sm(self) -> int:
        """The SM version that runs it."""
        return int(re.sub(r"\D", "", self.record.architecture))

    @cached_property
    def source(self) -> Source:
        """What `runtime` wants to know of a kernel. There is no text in it."""
        record = self.record
        klass = ProblemClass(record.op, record.dtype, record.head_dim, record.head_dim_v, record.mask, record.deterministic)
        points = tuple(EntryPoint(each.name, each.threads, each.shared_bytes) for each in record.entry_points)
        variant = Variant.of(record.family, record.params)
        boxes = tuple(record.boxes.items())
        return Source(record.family, klass, variant, "", record.source_digest, points, record.min_sm, boxes, record.counters)

    @cached_property
    def compiled(self) -> Compiled:
        """The machine code as the runtime loads it."""
        record = self.record
        digest = f"sha256:{hashlib.sha256(self.cubin).hexdigest()}"
        report = CompileReport(
            digest, record.registers, 0, 0, record.static_shared_bytes, (), 0.0, record.nvrtc, tuple(record.options)
        )  # fmt: skip
        names = tuple(each.name for each in record.entry_points)
        return Compiled(record.source_digest, names, record.architecture, self.cubin, report, cached=True)

    @cached_property
    def formulas(self) -> tuple[tuple[Expression, ...], Expression]:
        """Grids and workspace."""
        grids = tuple(parse_expression(each.grid) for each in self.record.entry_points)
        return grids, parse_expression(self.record.workspace_bytes)


@dataclass(frozen=True)
class BundledLaunch:
    """Grids and workspace of one kernel on one problem (fulfils `runtime.Bound`)."""

    kernel: BundledKernel
    names: dict[str, int]

    def grids(self, variant: Variant) -> tuple[int, ...]:
        """CTAs per entry point."""
        return tuple(each.value(self.names) for each in self.kernel.formulas[0])

    def workspace_bytes(self, variant: Variant) -> int:
        """Device memory between the launches."""
        return self.kernel.formulas[1].value(self.names)


@dataclass(frozen=True)
class Bundle:
    """A verified bundle: its table, and the kernels in memory. `digest` is the sha256 of the manifest file."""

    path: Path
    digest: str
    manifest: Manifest
    table: tables.Table
    kernels: tuple[BundledKernel, ...]

    def lookup(self, problem: Problem, device: DeviceLimits) -> tables.Lookup:
        """The entry that serves a problem on a device, by the rule of all tables, among those with machine code for the device."""

        def refuse(entry: TableEntry) -> str | None:
            kernel = self._kernel(entry, device.sm)
            if kernel is None:
                return f"the bundle has no certified machine code of it for sm_{device.sm}"
            need = max(each.shared_bytes for each in kernel.record.entry_points) + kernel.record.static_shared_bytes
            if need > device.shared_bytes_per_cta:
                return f"it needs {need} bytes of shared memory, {device.name} offers {device.shared_bytes_per_cta}"
            return None

        return tables.lookup(problem, device, [self.table], refuse)

    def kernel_for(self, problem: Problem, device: DeviceLimits) -> BundledKernel:
        """The kernel that serves a problem. Raises UnsupportedProblem with the steps of the look-up."""
        answer = self.lookup(problem, device)
        kernel = self._kernel(answer.found.entry, device.sm) if answer.found else None
        if kernel is None:
            raise UnsupportedProblem(f"{self.path} has no kernel for {problem} on {device.name}:\n{answer.explain()}")
        return kernel

    def _kernel(self, entry: TableEntry, sm: int) -> BundledKernel | None:
        wanted = entry.source_digest.removeprefix("sha256:")
        return next(
            (each for each in self.kernels if each.record.source_digest == wanted and each.sm == sm and each.record.certified != "none"),
            None,
        )

    def load(self, problem: Problem, gpu: Gpu | None = None) -> LoadedKernel:
        """The kernel for a problem in the memory of a GPU (default: device 0). Raises UnsupportedProblem, LaunchError."""
        executor = self.executor(gpu)
        kernel = self.kernel_for(problem, _limits(executor.gpu))
        return executor.load(kernel.source, kernel.compiled)

    def forward(self, problem: Problem, tensors: ForwardTensors, scale: float | None = None, gpu: Gpu | None = None) -> None:
        """Run once on host arrays, as `runtime.DeviceExecutor.forward` does. Raises UnsupportedProblem, LaunchError."""
        executor = self.executor(gpu)
        kernel = self.kernel_for(problem, _limits(executor.gpu))
        executor.load(kernel.source, kernel.compiled)
        executor.forward(kernel.source, problem, tensors, problem.scale if scale is None else scale)

    def executor(self, gpu: Gpu | None = None) -> DeviceExecutor:
        """An executor that takes grids and workspaces from the bundle. Load kernels into it first; it would compile others."""
        from flashgen.gpu import Gpu
        from flashgen.runtime import DeviceExecutor

        gpu = Gpu(0) if gpu is None else gpu
        if gpu.index not in self._executors:
            sm_count = gpu.attribute("MultiProcessorCount")
            self._executors[gpu.index] = DeviceExecutor(gpu, bind=lambda source, problem: self.bound(source, problem, sm_count))
        return self._executors[gpu.index]

    @cached_property
    def _executors(self) -> dict[int, DeviceExecutor]:
        return {}

    def bound(self, source: Source, problem: Problem, sm_count: int) -> BundledLaunch:
        """How a kernel of the bundle is launched for a problem. Raises LaunchError for a kernel that is not of this bundle."""
        kernel = next((each for each in self.kernels if each.record.source_digest == source.digest), None)
        if kernel is None:
            raise LaunchError(f"{source.variant} is not in the bundle {self.path}. Load it through the bundle.")
        fields = ("batch", "heads_q", "heads_kv", "gqa_group", "batch_heads", "seqlen_q", "seqlen_kv")
        names = {f"problem.{name}": int(getattr(problem, name)) for name in fields}
        return BundledLaunch(kernel, names | {"device.sm_count": sm_count})


def load_bundle(path: str | Path, sha256: str | None = None) -> Bundle:
    """The bundle in a folder or .zip, read into memory and verified as a whole.

    `sha256`, when given, must be that of the file manifest.json: whoever pins it trusts exactly these bytes. Raises InvalidBundle, naming
    the file and what is wrong with it, before anything is loaded into a GPU.
    """
    place = Path(path)
    with _opened(place) as store:
        text = store.read(MANIFEST, MAX_MANIFEST_BYTES)
        digest = hashlib.sha256(text).hexdigest()
        if sha256 is not None and digest != sha256.lower().removeprefix("sha256:"):
            raise InvalidBundle(f"{place}: {MANIFEST} has sha256 {digest}, not the wanted {sha256}. It is another bundle, or was altered.")
        manifest = _manifest(text, place)
        content = _content(store, manifest, place)
    kernels = tuple(_kernel(record, content, place) for record in manifest.kernels)
    return Bundle(place, digest, manifest, _table(content, manifest, kernels, place), kernels)


def _manifest(text: bytes, place: Path) -> Manifest:
    try:
        raw = json.loads(text.decode("utf-8"), object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
        manifest = msgspec.convert(raw, Manifest, strict=True)
    except (ValueError, RecursionError, msgspec.ValidationError) as problem:
        raise InvalidBundle(f"{place}: {MANIFEST} is not readable: {problem}. Get the bundle anew.") from None
    if manifest.schema != SCHEMA:
        raise InvalidBundle(f"{place}: schema {manifest.schema!r}; this version reads {SCHEMA!r} only. Upgrade flashgen if it is newer.")
    if manifest.digest != _digest(raw):
        raise InvalidBundle(f"{place}: {MANIFEST} does not match its own digest: altered or damaged. Get the bundle anew.")
    return manifest


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name twice in one object")
    return found


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no number")


def _content(store: _Store, manifest: Manifest, place: Path) -> dict[str, bytes]:
    present = set(store.names()) - {MANIFEST}
    listed = set(manifest.files)
    signatures = {f"{MANIFEST}{end}" for end in SIGNATURES}
    if extra := sorted(present - listed - signatures):
        raise InvalidBundle(f"{place}: {extra[0]} is in no manifest. Remove it, or get the bundle anew.")
    if missing := sorted(listed - present):
        raise InvalidBundle(f"{place}: {missing[0]} is missing. Get the bundle anew.")
    if sum(each.bytes for each in manifest.files.values()) > MAX_BYTES:
        raise InvalidBundle(f"{place}: more than {MAX_BYTES} bytes. Bundle fewer entries.")
    content = {}
    for name, wanted in manifest.files.items():
        data = store.read(name, wanted.bytes)
        if len(data) != wanted.bytes or hashlib.sha256(data).hexdigest() != wanted.sha256:
            raise InvalidBundle(f"{place}: {name} is not the file that was bundled (its sha256 differs). Get the bundle anew.")
        content[name] = data
    return content


def _kernel(record: KernelRecord, content: dict[str, bytes], place: Path) -> BundledKernel:
    cubin = content.get(record.cubin)
    if cubin is None or record.cubin != f"{CUBINS}/{hashlib.sha256(cubin).hexdigest()}.cubin" or len(cubin) != record.bytes:
        raise InvalidBundle(f"{place}: {record.cubin} is not the machine code that its name says. Get the bundle anew.")
    kernel = BundledKernel(record, cubin)
    try:
        grids, workspace = kernel.formulas
    except ExpressionError as problem:
        raise InvalidBundle(f"{place}: {MANIFEST}: {problem}. Get the bundle anew.") from None
    if unknown := sorted(frozenset().union(*(each.names for each in (*grids, workspace))) - set(RUN_TIME_NAMES)):
        raise InvalidBundle(f"{place}: {MANIFEST}: a formula reads {unknown[0]}, which means nothing at a launch. Get the bundle anew.")
    return kernel


def _table(content: dict[str, bytes], manifest: Manifest, kernels: tuple[BundledKernel, ...], place: Path) -> tables.Table:
    if TABLE not in content:
        raise InvalidBundle(f"{place}: {TABLE} is missing. Get the bundle anew.")
    try:
        table = tables.parse(content[TABLE], place / TABLE)
    except InvalidTable as problem:
        raise InvalidBundle(str(problem)) from None
    if table.device != manifest.device:
        raise InvalidBundle(f"{place}: {TABLE} belongs to {table.device.name}, {MANIFEST} to {manifest.device.name}. Get the bundle anew.")
    own = {(each.record.source_digest, Path(each.record.cubin).stem) for each in kernels if each.sm == table.device.sm}
    for entry in table.entries:
        pins = (entry.source_digest.removeprefix("sha256:"), entry.cubin_digest.removeprefix("sha256:"))
        if pins not in own and (pins[1] or pins[0] not in {source for source, _ in own}):
            raise InvalidBundle(f"{place}: the entry for {entry.problem} pins machine code that is not in the bundle. Get the bundle anew.")
    return table


# Places ---------------------------------------------------------------------------------------------------------------


class _Store:
    """A folder or an archive. Only plain files count; everything else is refused."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def names(self) -> Iterator[str]:
        for path in sorted(self.place.rglob("*")):
            name = path.relative_to(self.place).as_posix()
            if path.is_symlink() or not (path.is_file() or path.is_dir()):
                raise InvalidBundle(f"{self.place}: {name} is no plain file. Remove it, or get the bundle anew.")
            if path.is_file():
                yield name

    def read(self, name: str, most: int) -> bytes:
        path = self.place / name
        try:
            if path.is_symlink() or (path.parent != self.place and path.parent.is_symlink()):
                raise InvalidBundle(f"{self.place}: {name} is no plain file. Remove it, or get the bundle anew.")
            with path.open("rb") as file:
                return file.read(most + 1)
        except OSError as problem:
            raise InvalidBundle(f"{path} cannot be read: {problem.strerror}. Check the path and its permissions.") from problem

    def __enter__(self) -> _Store:
        return self

    def __exit__(self, *_: object) -> None:
        return None


class _Archive(_Store):
    def __init__(self, place: Path) -> None:
        super().__init__(place)
        try:
            self.archive = zipfile.ZipFile(place)
        except (OSError, zipfile.BadZipFile, ValueError) as problem:
            raise InvalidBundle(f"{place} is neither a folder nor a readable .zip ({problem}). Check the path.") from problem
        self.members = self.archive.infolist()
        names = [each.filename for each in self.members]
        if len(names) > MAX_FILES or len(set(names)) != len(names):
            raise InvalidBundle(f"{place}: a file twice, or more than {MAX_FILES} files. Get the bundle anew.")

    def names(self) -> Iterator[str]:
        return (each.filename for each in self.members if not each.is_dir())

    def read(self, name: str, most: int) -> bytes:
        try:
            with self.archive.open(name) as file:
                return file.read(most + 1)
        except KeyError:
            raise InvalidBundle(f"{self.place}: {name} is missing. Get the bundle anew.") from None
        except (OSError, zipfile.BadZipFile, zlib.error, ValueError, RuntimeError, NotImplementedError, EOFError) as problem:
            raise InvalidBundle(f"{self.place}: {name} cannot be read: {problem}. Get the bundle anew.") from problem

    def __exit__(self, *_: object) -> None:
        self.archive.close()


def _opened(place: Path) -> _Store:
    return _Store(place) if place.is_dir() else _Archive(place)


def _limits(gpu: Gpu) -> DeviceLimits:
    from flashgen.runtime import present_limits

    return present_limits(gpu)
