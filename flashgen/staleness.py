"""Whether the certificate of a table entry still speaks of what would run today, and if not, what has to be done.

An entry pins the digest of its text (comments and line marks left out), the digest of its machine code, the compiler's options and version,
the driver and the case suite. What each mismatch means:

* other text or compiler, same machine code: the certificate carries over, no GPU needed;
* same text, other machine code: to be proved again;
* other text, other machine code: stale, not to be served until refreshed;
* a constraint that fails on the device, or a variant outside its space: refused;
* other driver, other device with enough resources, older suite: still served after a quick certificate; a note says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from flashgen import gate
from flashgen.compiler import CompilePool, architecture, options_for
from flashgen.cubins import Compiled
from flashgen.errors import CompileError, FlashgenError, InfeasibleVariant, InvalidSpace, MissingDependency, UnsupportedProblem
from flashgen.model import DeviceLimits, ExecutorName, ProblemClass, Source, TableEntry, Variant
from flashgen.render import render
from flashgen.space import Space, load_space
from flashgen.table import Table, same_device
from flashgen.table_schema import DeviceRecord, device_record


class State(StrEnum):
    """What is left of an entry's certificate."""

    VALID = "valid"
    CARRIED = "carried"
    UNCHECKED = "unchecked"
    REPROVE = "re-prove"
    STALE = "stale"
    REFUSED = "refused"

    @property
    def serves(self) -> bool:
        """Whether the entry may run as it is."""
        return self in (State.VALID, State.CARRIED)

    @property
    def fails(self) -> bool:
        """Whether a check of the table must fail."""
        return self in (State.REPROVE, State.STALE, State.REFUSED)


class Note(StrEnum):
    """What does not touch the certificate's validity, but asks for a quick one before use, or for a refresh some day."""

    DRIVER = "driver"
    FOREIGN = "foreign"
    SUITE = "suite"
    PREDICTED = "predicted"
    ALTERED = "altered"


@dataclass(frozen=True, slots=True)
class Tools:
    """Versions in use: NVRTC's, and the driver's where there is a GPU. Empty: not there."""

    nvrtc: str = ""
    driver: str = ""


@dataclass(frozen=True, slots=True)
class Assessment:
    """The state of one entry with its reason in words, notes, and the digests of today (empty where not made)."""

    entry: TableEntry
    state: State
    reason: str = ""
    notes: tuple[tuple[Note, str], ...] = ()
    source_digest: str = ""
    cubin_digest: str = ""

    @property
    def altered(self) -> bool:
        """Whether another variant runs than the entry names."""
        return any(note is Note.ALTERED for note, _ in self.notes)

    def current(self, nvrtc: str) -> TableEntry:
        """The entry with the pins of today. Only for a certificate that carries over; the machine code, times and dates stay."""
        if self.state is not State.CARRIED:
            return self.entry
        provenance = replace(self.entry.provenance, nvrtc=nvrtc)
        return replace(self.entry, source_digest=self.source_digest, provenance=provenance)


Compile = Callable[[Source, str], Compiled]
"""(source, architecture) → cubin, as `compiler.compile_source`."""

Render = Callable[[Space, ProblemClass, Variant], Source]
"""(space, problem class, variant) → text, as `render`."""


def assess_table(
    table: Table, device: DeviceLimits, tools: Tools, compile_: Compile | None, *, recompile: bool = False
) -> tuple[Assessment, ...]:
    """Every entry of a table on `device`, which need not be the table's own. What is in doubt is compiled together, each text once."""
    text = _Texts()

    def each(ask: Compile | None) -> tuple[Assessment, ...]:
        return tuple(assess(entry, table.device, device, tools, ask, recompile=recompile, text=text) for entry in table.entries)

    if compile_ is None:
        return each(None)
    wanted: dict[tuple[str, str], Source] = {}

    def note(source: Source, arch: str) -> Compiled:
        wanted[source.digest, arch] = source
        raise MissingDependency("to be compiled")

    found = each(note)
    if not wanted:
        return found
    pool = CompilePool(compile_=compile_)
    try:
        made = {key: pool.submit(source, key[1]) for key, source in wanted.items()}
        return each(lambda source, arch: made[source.digest, arch].result())
    finally:
        pool.close()


class _Texts:
    """Renders each text once, however many problems it serves."""

    def __init__(self) -> None:
        self._made: dict[tuple[ProblemClass, Variant], Source] = {}

    def __call__(self, space: Space, klass: ProblemClass, variant: Variant) -> Source:
        if (klass, variant) not in self._made:
            self._made[klass, variant] = render(space, klass, variant)
        return self._made[klass, variant]


def assess(
    entry: TableEntry, owner: DeviceRecord, device: DeviceLimits, tools: Tools, compile_: Compile | None, *, recompile: bool = False,
    text: Render = render,
) -> Assessment:  # fmt: skip
    """One entry of the table of `owner`, to be served on `device`.

    `compile_` is asked where digests and versions leave a doubt, or for every entry with `recompile`; None where there is no compiler.
    `text` makes the text, as `render` does.
    """
    notes = _notes(entry, owner, device, tools)
    try:
        space = load_space(entry.variant.family)
        bound = space.bind(entry.problem, device)
        violated = bound.explain(bound.variant(entry.variant.as_dict()))
        if other := bound.altered(entry.variant):
            notes = (*notes, (Note.ALTERED, f"another variant runs: {other}"))
        source = text(space, entry.problem.klass(), entry.variant)
    except (InfeasibleVariant, InvalidSpace, UnsupportedProblem) as problem:
        return Assessment(entry, State.REFUSED, str(problem).rstrip("."), notes)
    if violated:
        return Assessment(entry, State.REFUSED, "; ".join(violated), notes, source.digest)
    return _judge(entry, source, owner, tools, compile_, recompile, notes)


def _judge(
    entry: TableEntry, source: Source, owner: DeviceRecord, tools: Tools, compile_: Compile | None, recompile: bool,
    notes: tuple[tuple[Note, str], ...],
) -> Assessment:  # fmt: skip
    arch = architecture(source, owner.sm)
    doubts = _doubts(entry, source, arch, tools)
    if not doubts and not recompile:
        return Assessment(entry, State.VALID, "", notes, source.digest)
    same_text = bare(entry.source_digest) == source.digest
    why = "; ".join(doubts) or "compiled again"
    built = ""
    if compile_ is not None and entry.cubin_digest:
        try:
            built = compile_(source, arch).report.cubin_digest
        except CompileError as problem:
            return Assessment(entry, State.STALE, f"{why}; it no longer compiles: {str(problem).splitlines()[0]}", notes, source.digest)
        except MissingDependency as problem:
            why += f"; {problem}"
    if built and bare(built) == bare(entry.cubin_digest):
        state = State.CARRIED if doubts else State.VALID
        return Assessment(entry, state, why if doubts else "", notes, source.digest, built)
    if same_text and entry.certificate.executor is ExecutorName.EMULATED:  # it speaks of the text alone
        return Assessment(entry, State.VALID, "", notes, source.digest, built)
    if built:
        why += "; the machine code is another one"
        return Assessment(entry, State.REPROVE if same_text else State.STALE, why, notes, source.digest, built)
    return Assessment(entry, State.UNCHECKED if same_text else State.STALE, f"{why}; not compiled here", notes, source.digest)


def _doubts(entry: TableEntry, source: Source, arch: str, tools: Tools) -> list[str]:
    doubts = []
    if bare(entry.source_digest) != source.digest:
        doubts.append(f"the text has changed, {bare(entry.source_digest)[:12]} → {source.digest[:12]}")
    if entry.options != options_for(arch):
        doubts.append(f"options {' '.join(options_for(arch))}, the entry's are {' '.join(entry.options)}")
    if tools.nvrtc and tools.nvrtc != entry.provenance.nvrtc:
        doubts.append(f"NVRTC {tools.nvrtc}, the entry's is {entry.provenance.nvrtc}")
    return doubts


def _notes(entry: TableEntry, owner: DeviceRecord, device: DeviceLimits, tools: Tools) -> tuple[tuple[Note, str], ...]:
    notes: list[tuple[Note, str]] = []
    if not same_device(owner, device_record(device)):
        notes.append((Note.FOREIGN, f"tuned for {owner.name} (sm_{owner.sm}), looked at for {device.name} (sm_{device.sm})"))
    if tools.driver and entry.provenance.driver and tools.driver != entry.provenance.driver:
        notes.append((Note.DRIVER, f"driver {tools.driver}, the entry's is {entry.provenance.driver}"))
    if bare(entry.certificate.suite_digest) != gate.suite_digest(entry.problem.op):
        notes.append((Note.SUITE, f"certified by another edition of {entry.certificate.suite}"))
    if entry.measurement.source == "predicted":
        notes.append((Note.PREDICTED, "never timed, certified on the CPU"))
    return tuple(notes)


def bare(digest: str) -> str:
    """A digest without its algorithm's name."""
    return digest.removeprefix("sha256:")


def carry(entries: Sequence[TableEntry], assessed: Sequence[Assessment], nvrtc: str) -> tuple[TableEntry, ...]:
    """`entries` with the pins of those whose certificate carries over brought up to date. Needs no GPU and touches nothing else."""
    current = {each.entry: each.current(nvrtc) for each in assessed}
    return tuple(current.get(entry, entry) for entry in entries)


def tools_in_use() -> Tools:
    """NVRTC's version where it is installed, and the driver's where a GPU is present."""
    from flashgen import device
    from flashgen.compiler import nvrtc_version

    try:
        nvrtc = nvrtc_version()
    except FlashgenError:
        return Tools()
    if not device.is_present():
        return Tools(nvrtc)
    from flashgen.gpu import Gpu
    from flashgen.telemetry import Telemetry

    return Tools(nvrtc, Telemetry(Gpu(0).pci_bus_id).driver_version())
