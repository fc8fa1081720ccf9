"""Runs a source on the CPU: the same text, compiled by the host g++ against templates/include/emu, one fiber per CUDA thread.

A run checks what a device would not: bounds of shared and global memory, alignment, races on shared memory, waits that do not cover a
copy, deadlocks and divergent barriers. It proves indexing, masking, synchronisation and algebra; rounding of tensor cores and what the
device compiler does are certified on a device.
"""

from __future__ import annotations

import atexit
import ctypes
import errno
import hashlib
import itertools
import mmap
import os
import shutil
import subprocess
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from enum import Enum
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashgen import paths
from flashgen.errors import CompileError, EmulationFault, HomeNotWritable, LaunchError, MissingDependency, NotWritable
from flashgen.launch import Operand, copied_for_maps, copy_results_back, plain_params, source_params
from flashgen.model import BackwardTensors, DeviceLimits, ExecutorName, ForwardTensors, Problem, Source, Tensor

RUNTIME_OPTIONS = ("-O2", "-ftree-vectorize", "-std=c++17", "-fPIC", "-shared", "-fvisibility=hidden")
VARIANT_OPTIONS = ("-O1", "-std=c++17", "-fPIC", "-shared", "-fvisibility=hidden", "-fno-gnu-unique", "-DFG_EMULATE")
# Products and sums are rounded one by one, on every machine alike.
ARITHMETIC_OPTIONS = ("-ffp-contract=off",)
DEADLINE_S = 60.0
ALL_CTAS = 2**31 - 1
"""As `live_ctas`: every block of the grid is alive at once, as persistent kernels need."""

_REPORT_BYTES = 16384
_REPORT_SEPARATOR = b"\x1e"
_PAGE = 4096
_ALIGNMENT = 256  # of every buffer, as device allocations have
_GAP = 1 << 16  # unowned bytes between buffers, so that a stray access meets no neighbour


class Schedule(Enum):
    """Which ready thread runs next."""

    LOCKSTEP = 0  # warps in turn, lowest lane first
    SHUFFLED = 1  # any lane of any warp; memory accesses may be preempted
    GREEDY = 2  # one warp as far as it can go
    STARVE = 3  # the warp `seed % warps` only when no other can run


@dataclass(frozen=True, slots=True)
class Policy:
    """One way to run a kernel that a device might choose. All of them must give the same bits."""

    schedule: Schedule = Schedule.SHUFFLED
    late_copies: bool = True  # asynchronous copies and bulk loads land at the wait that covers them, else at once
    poison: bool = True  # a late copy fills its target with NaN bytes until it lands, a late product its accumulators
    races: bool = True  # check that shared accesses of different threads and engines are ordered
    seed: int = 1
    late_products: bool | None = None  # the same for products of warpgroups and bulk stores; None: as the copies

    @property
    def products_are_late(self) -> bool:
        """`late_products`, or what it follows."""
        return self.late_copies if self.late_products is None else self.late_products

    def __str__(self) -> str:
        """Short name, as tests and failure messages print it."""
        copies = ("late-poison" if self.poison else "late") if self.late_copies else "early"
        products = "" if self.products_are_late == self.late_copies else "-late-products" if self.late_products else "-early-products"
        return f"{self.schedule.name.lower()}-{copies}{products}{'' if self.races else '-unchecked'}:{self.seed}"


POLICIES = (
    Policy(Schedule.SHUFFLED, late_copies=False),
    Policy(Schedule.SHUFFLED, late_copies=True),
    Policy(Schedule.GREEDY, late_copies=False, late_products=True),
    Policy(Schedule.STARVE, late_copies=True),
)
"""What a certificate runs: together they catch every planted fault of the tests."""
FAST = Policy(Schedule.LOCKSTEP, late_copies=True, races=False)
"""Values only, without the race checker."""


class _Counters(ctypes.Structure):
    """Twin of fg::emu::Counters."""

    _fields_ = [
        (name, ctypes.c_uint64)
        for name in (
            "global_bytes_read", "global_bytes_written", "shared_bytes_read", "shared_bytes_written", "copy_bytes",
            "matrix_phases", "matrix_conflicts", "shared_conflicts", "multiplies", "exponentials",
            "collectives", "block_barriers", "switches",
        )
    ]  # fmt: skip


class _Range(ctypes.Structure):
    """Twin of fg::emu::Range."""

    _fields_ = [("begin", ctypes.c_void_p), ("end", ctypes.c_void_p), ("writable", ctypes.c_int64)]


class _Launch(ctypes.Structure):
    """Twin of fg::emu::Launch."""

    _fields_ = [
        ("kernel", ctypes.c_void_p),
        ("params", ctypes.c_void_p),
        ("ranges", ctypes.POINTER(_Range)),
        ("num_ranges", ctypes.c_int64),
        ("grid", ctypes.c_int64),
        ("threads", ctypes.c_int),
        ("ctas_per_sm", ctypes.c_int),
        ("shared_bytes", ctypes.c_int),
        ("live_ctas", ctypes.c_int),
        ("schedule", ctypes.c_int),
        ("late_copies", ctypes.c_int),
        ("late_products", ctypes.c_int),
        ("poison", ctypes.c_int),
        ("races", ctypes.c_int),
        ("seed", ctypes.c_uint64),
    ]


class _Result(ctypes.Structure):
    """Twin of fg::emu::Result."""

    _fields_ = [
        ("counters", _Counters),
        ("state", ctypes.c_int),
        ("num_faults", ctypes.c_int),
        ("text_bytes", ctypes.c_int),
        ("text", ctypes.c_char * _REPORT_BYTES),
    ]


_FINISHED = 1


@dataclass(frozen=True, slots=True)
class Counters:
    """Work of a run, summed over all threads."""

    global_bytes_read: int = 0  # asynchronous copies included
    global_bytes_written: int = 0
    shared_bytes_read: int = 0  # matrix loads included
    shared_bytes_written: int = 0  # asynchronous copies included
    copy_bytes: int = 0  # asynchronous copies from global memory
    matrix_phases: int = 0  # eight 16-byte rows each
    matrix_conflicts: int = 0  # extra passes over the banks beyond one per phase
    shared_conflicts: int = 0  # the same for ordinary shared accesses, lanes matched by their order since the last collective
    multiplies: int = 0  # 16x8x16 tensor-core products
    exponentials: int = 0
    collectives: int = 0  # of a warp
    block_barriers: int = 0
    switches: int = 0  # between fibers

    def __add__(self, other: Counters) -> Counters:
        """Work of both runs."""
        return Counters(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(Counters)))


@dataclass(frozen=True, slots=True)
class EmulationReport:
    """What one run did and which rules it broke."""

    faults: tuple[str, ...] = ()  # the first of each kind in full
    num_faults: int = 0
    counters: Counters = field(default_factory=Counters)
    seconds: float = 0.0

    def __add__(self, other: EmulationReport) -> EmulationReport:
        """Both runs as one."""
        return EmulationReport(
            self.faults + other.faults, self.num_faults + other.num_faults, self.counters + other.counters, self.seconds + other.seconds
        )

    def check(self, what: str) -> None:
        """Raises EmulationFault when the run broke a rule; `what` names the run."""
        if self.num_faults:
            hidden = self.num_faults - len(self.faults)
            more = f"\n({hidden} more of the same kinds)" if hidden else ""
            raise EmulationFault(f"{what} broke {self.num_faults} rule{'s' * (self.num_faults > 1)}:\n" + "\n".join(self.faults) + more)


# Compiling ------------------------------------------------------------------------------------------------------------


class _Builder:
    """Shared libraries of the runtime and of kernel texts, content-addressed on disk. Safe for threads and for several processes."""

    def __init__(self, store: Path | None = None, compiler: str | None = None) -> None:
        self._compiler = compiler or _find_compiler()
        self._include = paths.templates() / "include"
        self._digest = self._emulator_digest()
        self._store = _writable(store or paths.emulation_store()) / self._digest[:16]
        self._store.mkdir(parents=True, exist_ok=True)
        self._locks: dict[str, threading.Lock] = {}
        self._guard = threading.Lock()

    @property
    def runtime_name(self) -> str:
        """File name, and the name under which kernel libraries find the runtime beside them."""
        return f"flashgen_emulation_{self._digest[:16]}.so"

    def runtime(self) -> Path:
        """The runtime's library, compiled when absent. Raises CompileError."""
        options = (*RUNTIME_OPTIONS, *ARITHMETIC_OPTIONS, f"-Wl,-soname,{self.runtime_name}")
        return self._built(self.runtime_name, (self._include / "emu" / "runtime.cpp").read_text(encoding="utf-8"), options, ())

    def kernel(self, text: str) -> Path:
        """The library of a kernel text, compiled when absent. Raises CompileError with the compiler's log."""
        runtime = self.runtime()
        name = f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.so"
        return self._built(name, text, (*VARIANT_OPTIONS, *ARITHMETIC_OPTIONS), (str(runtime), "-Wl,-rpath,$ORIGIN", "-Wl,-z,defs"))

    def _built(self, name: str, text: str, options: Sequence[str], inputs: Sequence[str]) -> Path:
        target = self._store / name
        with self._guard:
            lock = self._locks.setdefault(name, threading.Lock())
        with lock:
            if not target.exists():
                self._compile(text, target, options, inputs)
        return target

    def _compile(self, text: str, target: Path, options: Sequence[str], inputs: Sequence[str]) -> None:
        temporary = target.with_name(f".{target.name}.{os.getpid()}.{threading.get_ident()}.tmp")
        command = [self._compiler, *options, "-I", str(self._include), "-I", str(self._include / "emu"), "-x", "c++", "-", "-x", "none"]
        try:
            done = subprocess.run(
                [*command, *inputs, "-o", str(temporary)], input=text, capture_output=True, text=True, check=False, cwd=self._store
            )
            if done.returncode and os.strerror(errno.ENOSPC) in done.stderr:
                raise NotWritable(
                    f"{self._compiler} found no space left in {self._store} or {tempfile.gettempdir()}. Free some, or set "
                    f"{paths.ENVIRONMENT_VARIABLE} and TMPDIR to directories with free space."
                )
            if done.returncode:
                raise CompileError(f"{self._compiler} refused the source for the emulated executor:\n{done.stderr[:8000]}")
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)

    def _emulator_digest(self) -> str:
        parts = [_compiler_version(self._compiler), " ".join((*RUNTIME_OPTIONS, *VARIANT_OPTIONS, *ARITHMETIC_OPTIONS))]
        parts += [path.name + path.read_text(encoding="utf-8") for path in sorted((self._include / "emu").iterdir()) if path.is_file()]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _find_compiler() -> str:
    found = shutil.which("g++")
    if not found:
        raise MissingDependency(
            "The emulated executor needs a host C++ compiler, and g++ is not on PATH. Install it, for example with `apt-get install g++`."
        )
    return found


@lru_cache(maxsize=8)
def _compiler_version(compiler: str) -> str:
    try:
        done = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise MissingDependency(
            f"The host C++ compiler {compiler} does not run ({error}). Reinstall it, for example with `apt-get install g++`."
        ) from None
    return done.stdout


def _writable(store: Path) -> Path:
    """The store, or a temporary directory with one warning when the store cannot be written."""
    try:
        store.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=store):
            return store
    except OSError as error:
        return _temporary_store(str(store), error.strerror or str(error))


@lru_cache(maxsize=8)
def _temporary_store(store: str, reason: str) -> Path:
    # Kept for the life of the process: libraries that are loaded from it must stay.
    warnings.warn(
        f"Libraries of the emulated executor cannot be stored in {store} ({reason}); they live in a temporary directory and are compiled "
        f"again by the next process. Set {paths.ENVIRONMENT_VARIABLE} to a writable directory.",
        HomeNotWritable,
        stacklevel=5,
    )
    scratch = tempfile.mkdtemp(prefix="flashgen-emulated-")
    atexit.register(shutil.rmtree, scratch, ignore_errors=True)
    return Path(scratch)


# Memory ---------------------------------------------------------------------------------------------------------------


class Memory:
    """Emulated global memory: copies of host buffers in pages that a child process shares, with gaps that belong to nobody.

    `place` first, then `address` and launches, then `fetch`.
    """

    def __init__(self, capacity: int) -> None:
        """Room for `capacity` bytes of buffers, gaps not counted."""
        self._pages = mmap.mmap(-1, max(_PAGE, capacity))
        self._bytes = np.frombuffer(self._pages, dtype=np.uint8)
        self._base = int(self._bytes.ctypes.data)
        self._used = 0
        self._ranges: list[tuple[int, int, bool]] = []
        self._placed: dict[tuple[int, int], tuple[NDArray[Any], int]] = {}

    @classmethod
    def for_buffers(cls, sizes: Sequence[int]) -> Memory:
        """Memory that holds buffers of these sizes in bytes."""
        return cls(sum(size + _ALIGNMENT + _GAP for size in sizes) + _GAP)

    def place(self, buffer: NDArray[Any], writable: bool) -> int:
        """Copy a contiguous one-dimensional buffer in; returns its address, a multiple of 256. The same buffer placed twice is one."""
        key = (int(buffer.ctypes.data), buffer.nbytes)
        if key in self._placed:
            address = self._placed[key][1]
            if writable:
                self._ranges = [(begin, end, write or begin == address) for begin, end, write in self._ranges]
            return address
        address = self._reserve(buffer.nbytes, writable)
        self.array(address, buffer.nbytes)[:] = buffer.view(np.uint8)
        self._placed[key] = (buffer, address)
        return address

    def scratch(self, size: int) -> int:
        """`size` bytes of NaN; returns their address, or 0 for no bytes."""
        if not size:
            return 0
        address = self._reserve(size, True)
        self.array(address, size)[:] = 0xFF
        return address

    def array(self, address: int, size: int) -> NDArray[np.uint8]:
        """The bytes at an address."""
        return self._bytes[address - self._base : address - self._base + size]

    def fetch(self) -> None:
        """Copy all placed buffers back, guards included: what the kernel did there must be seen."""
        for buffer, address in self._placed.values():
            buffer.view(np.uint8)[:] = self.array(address, buffer.nbytes)

    def ranges(self) -> list[tuple[int, int, bool]]:
        """(first address, end, writable) of everything a kernel may touch."""
        return list(self._ranges)

    def _reserve(self, size: int, writable: bool) -> int:
        offset = -(-(self._used + _GAP) // _ALIGNMENT) * _ALIGNMENT
        if offset + size > len(self._bytes):
            raise LaunchError(f"The emulated memory of {len(self._bytes)} bytes has no room for {size} more.")
        self._used = offset + size
        address = self._base + offset
        self._ranges.append((address, address + size, writable))
        return address


# Running --------------------------------------------------------------------------------------------------------------


class Emulator:
    """Compiles kernel texts and runs their entry points, each run in a child process unless told otherwise."""

    def __init__(self, store: Path | None = None, compiler: str | None = None) -> None:
        """`store` is a directory for libraries (default: below FLASHGEN_HOME). Raises MissingDependency without a host C++ compiler."""
        self._builder = _Builder(store, compiler)

    def build(self, text: str) -> Path:
        """Compile a kernel text; returns its library. Raises CompileError."""
        return self._builder.kernel(text)

    def build_all(self, texts: Sequence[str]) -> None:
        """Compile several texts in parallel. Raises CompileError for the first that fails."""
        self._builder.runtime()
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(self.build, texts))

    def launch(
        self,
        text: str,
        entry: str,
        grid: int,
        threads: int,
        shared_bytes: int,
        params: ctypes.Structure,
        memory: Memory,
        policy: Policy = POLICIES[1],
        live_ctas: int = 1,
        isolated: bool = True,
        deadline_s: float = DEADLINE_S,
    ) -> EmulationReport:
        """Run `grid` blocks of one entry point, `live_ctas` of them alive at a time.

        An isolated run costs a few milliseconds more; a crash or a hang ends it alone, after `deadline_s`. Otherwise a faulty kernel may
        take the process along. Raises CompileError, and LaunchError when no child can be started; broken rules are in the report.
        """
        kernel, ctas_per_sm = self._entry(text, entry, threads)
        ranges = [_Range(*each) for each in memory.ranges()]
        launch = _Launch(
            kernel=kernel, params=ctypes.addressof(params), ranges=(_Range * len(ranges))(*ranges), num_ranges=len(ranges), grid=grid,
            threads=threads, ctas_per_sm=ctas_per_sm, shared_bytes=shared_bytes, live_ctas=live_ctas, schedule=policy.schedule.value,
            late_copies=policy.late_copies, late_products=policy.products_are_late, poison=policy.poison, races=policy.races,
            seed=policy.seed,
        )  # fmt: skip
        runtime = self._runtime()
        begin = time.perf_counter()
        result, lost = _isolated(runtime, launch, deadline_s) if isolated else _in_process(runtime, launch)
        return _report(result, lost, time.perf_counter() - begin)

    def _entry(self, text: str, entry: str, threads: int) -> tuple[int, int]:
        """Address of the kernel, and the CTAs per SM that its launch bounds promise."""
        self._runtime()
        library = _loaded(self.build(text))
        most = ctypes.c_int.in_dll(library, f"{entry}_max_threads").value
        if threads > most:
            raise LaunchError(f"{entry} was compiled for at most {most} threads per block; got {threads}.")
        promised = ctypes.c_int.in_dll(library, f"{entry}_ctas_per_sm").value
        return ctypes.cast(getattr(library, entry), ctypes.c_void_p).value or 0, promised

    def _runtime(self) -> ctypes.CDLL:
        """The one runtime of the process: the loader would bind kernels of a second store to the first, whatever lies beside them."""
        with _loading:
            name = self._builder.runtime_name
            if name not in _runtimes:
                _runtimes[name] = ctypes.CDLL(str(self._builder.runtime()))
            return _runtimes[name]


_loading = threading.Lock()
_runtimes: dict[str, ctypes.CDLL] = {}


@cache
def _loaded(path: Path) -> ctypes.CDLL:
    return ctypes.CDLL(str(path))


_in_process_guard = threading.Lock()


def _in_process(runtime: ctypes.CDLL, launch: _Launch) -> tuple[_Result, str]:
    result = _Result()
    with _in_process_guard:  # the runtime holds one launch at a time
        runtime.fg_emulate_run(ctypes.byref(launch), ctypes.byref(result))
    return result, ""


def _isolated(runtime: ctypes.CDLL, launch: _Launch, deadline_s: float) -> tuple[_Result, str]:
    pages = mmap.mmap(-1, ctypes.sizeof(_Result))
    result = _Result.from_buffer(pages)
    child = runtime.fg_emulate_start(ctypes.byref(launch), ctypes.byref(result))
    if child < 0:
        raise LaunchError(f"No child process could be started for the emulated run: {os.strerror(-child)}.")
    lost = "crash: the child process ended without a result"
    try:
        if not _wait(runtime, child, deadline_s):
            lost = f"timeout: the run was still going after {deadline_s:g} s (a loop without end, or a deadline too short)"
    except BaseException:
        runtime.fg_emulate_kill(child)
        raise
    copied = _Result.from_buffer_copy(result)
    return copied, "" if copied.state == _FINISHED or b"crash: " in copied.text else lost


def _wait(runtime: ctypes.CDLL, child: int, deadline_s: float) -> bool:
    """Whether the child ended in time; in slices, so that an interrupt from the keyboard is served. Kills it otherwise."""
    end = time.monotonic() + deadline_s
    for _ in itertools.count():
        slice_ms = int(1000 * max(0.0, min(0.2, end - time.monotonic())))
        if runtime.fg_emulate_wait(child, slice_ms):
            return True
        if time.monotonic() >= end:
            break
    runtime.fg_emulate_kill(child)
    return False


def _report(result: _Result, lost: str, seconds: float) -> EmulationReport:
    text = bytes(result.text[: result.text_bytes])
    faults = tuple(part.decode(errors="replace") for part in text.split(_REPORT_SEPARATOR) if part) + ((lost,) if lost else ())
    counters = Counters(*(int(getattr(result.counters, each.name)) for each in fields(Counters)))
    return EmulationReport(faults, result.num_faults + bool(lost), counters, seconds)


@lru_cache(maxsize=1)
def shared_emulator() -> Emulator:
    """The emulator of this process, with libraries below FLASHGEN_HOME."""
    return Emulator()


GridRule = Callable[[Source, Problem], tuple[Sequence[int], int]]
"""CTAs of each entry point, and bytes of workspace."""


class EmulatedExecutor:
    """`model.Executor` on the CPU. `last_report` tells what the latest call did."""

    def __init__(
        self,
        device: DeviceLimits,
        policy: Policy = POLICIES[1],
        isolated: bool = True,
        deadline_s: float = DEADLINE_S,
        live_ctas: int = 1,
        emulator: Emulator | None = None,
        grids: GridRule | None = None,
    ) -> None:
        """`device` gives the limits that grids may depend on; `grids` replaces the rule of the family's search space."""
        self.policy = policy
        self.last_report = EmulationReport()
        self._emulator = emulator or shared_emulator()
        self._isolated = isolated
        self._deadline_s = deadline_s
        self._live_ctas = live_ctas
        self._grids = grids or space_grids(device)

    @property
    def name(self) -> ExecutorName:
        """Which executor this is; a certificate records it."""
        return ExecutorName.EMULATED

    def prepare(self, sources: Sequence[Source]) -> None:
        """Compile ahead, in parallel. Raises CompileError."""
        self._emulator.build_all([source.text for source in sources])

    def forward(self, source: Source, problem: Problem, tensors: ForwardTensors, scale: float) -> None:
        """Run all entry points of `source` once; results land in the buffers of `tensors.o` and `tensors.lse`.

        Raises CompileError, LaunchError, and EmulationFault with every broken rule; the buffers hold what the kernel wrote even then.
        """
        self._run(source, problem, tensors, scale)

    def backward(self, source: Source, problem: Problem, tensors: BackwardTensors, scale: float) -> None:
        """The same for a backward source; results land in the buffers of dq, dk and dv."""
        self._run(source, problem, tensors, scale)

    def _run(self, source: Source, problem: Problem, tensors: ForwardTensors | BackwardTensors, scale: float) -> None:
        grids, workspace_bytes = self._grids(source, problem)
        used = copied_for_maps(tensors, problem.dtype) if source.boxes else tensors
        counters = np.zeros(source.counters, np.uint32)
        memory = Memory.for_buffers([*(tensor.buffer.nbytes for _, tensor in used.named()), workspace_bytes, counters.nbytes])
        at = {name: _operand(memory, tensor, name in used.outputs) for name, tensor in used.named()}
        plain = plain_params(problem, scale, at, memory.scratch(workspace_bytes))
        params = source_params(source, plain, problem, memory.place(counters, True) if source.counters else 0, self.name)
        self.last_report = EmulationReport()
        for entry, grid in zip(source.entry_points, grids, strict=True):
            self.last_report += self._emulator.launch(
                source.text, entry.name, grid, entry.threads, entry.shared_bytes, params, memory, self.policy, self._live_ctas,
                self._isolated, self._deadline_s,
            )  # fmt: skip
            if self.last_report.num_faults:
                break
        memory.fetch()
        copy_results_back(used, tensors)
        self.last_report.check(f"{source.variant} for {problem} under {self.policy}")
        if counters.any():
            raise EmulationFault(f"{source.variant} for {problem} left its counters at {counters.tolist()}; the next launch needs zeros.")


def space_grids(device: DeviceLimits) -> GridRule:
    """The rule of the family's search space on a device."""

    def grids(source: Source, problem: Problem) -> tuple[Sequence[int], int]:
        from flashgen.space import load_space

        bound = load_space(source.family).bind(problem, device.crowded(problem))
        return bound.grids(source.variant), bound.workspace_bytes(source.variant)

    return grids


def _operand(memory: Memory, tensor: Tensor, writable: bool) -> Operand:
    address = memory.place(tensor.buffer, writable) + tensor.offset * tensor.buffer.itemsize
    return Operand(address, tensor.strides[:3])
