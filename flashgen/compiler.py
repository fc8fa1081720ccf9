"""Source → cubin, by NVRTC through CuPy's binding. Needs no driver and no GPU.

The binding is called directly: CuPy's own path always asks for plain `sm_90`, always adds `-ftz=true`, and hides the compiler's log. Only
cubins are made, never PTX: a cubin loads under every driver of the same CUDA major version, PTX needs one at least as new as NVRTC.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from enum import IntEnum
from functools import lru_cache, partial
from importlib import metadata
from pathlib import Path
from typing import Any

from flashgen import paths
from flashgen.cubins import Compiled, CubinStore, digest_of
from flashgen.errors import CompileError, ConflictingInstall, FlashgenError, MissingDependency
from flashgen.model import CompileReport, Source

CUPY_WHEELS = {"cupy-cuda13x": "cuda13", "cupy-cuda12x": "cuda12"}
ARCHITECTURE_SPECIFIC = ("hopper",)
"""Families whose instructions (wgmma, setmaxnreg) exist only in the `a` form of their architecture."""

LOG_OPTIONS = ("--ptxas-options=-v", "--no-cache")
"""They change the log, not the code, so they are no part of a key. NVRTC has a disk cache of its own whose hits lack the resource lines."""

_LOG_LINES = 40
_WARNINGS = 20


def architecture(source: Source, sm: int) -> str:
    """The NVRTC name of the device code to make for a device of SM version `sm`: sm_90, or sm_90a where the family needs it."""
    return f"sm_{sm}a" if source.family.startswith(ARCHITECTURE_SPECIFIC) else f"sm_{sm}"


def options_for(arch: str, line_info: bool = False) -> tuple[str, ...]:
    """The options that decide which code is made; a table entry records them."""
    return (f"--gpu-architecture={arch}", "--std=c++17", "-default-device", *(("--generate-line-info",) if line_info else ()))


def key_of(source: Source, options: Sequence[str], nvrtc: str) -> str:
    """The name of a cubin in the store: sha256 over everything that it is made from."""
    parts = (source.text, *(entry.name for entry in source.entry_points), *options, nvrtc)
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


@lru_cache(maxsize=1)
def binding() -> Any:
    """CuPy's NVRTC module. Raises ConflictingInstall for two CuPy wheels, MissingDependency without CuPy or NVRTC."""
    wheel = _cupy_wheel()
    extra = CUPY_WHEELS.get(wheel or "", "")
    install = f'pip install "flashgen[{extra}]"' if extra else 'pip install "flashgen[cuda13]" (or "flashgen[cuda12]" for a CUDA 12 driver)'
    try:
        from cupy.cuda import nvrtc
    except ImportError as error:
        raise MissingDependency(f"Compiling for a GPU needs CuPy, which cannot be imported ({error}). Install it: {install}.") from error
    try:
        nvrtc.getVersion()
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise MissingDependency(
            f"Compiling for a GPU needs NVRTC, which CuPy cannot load ({type(error).__name__}: {reason}). Install it: {install}."
        ) from error
    return nvrtc


def _cupy_wheel() -> str | None:
    found = [name for name in CUPY_WHEELS if _installed(name)]
    if len(found) > 1:
        raise ConflictingInstall(
            f"One CuPy wheel is allowed, since all install the same module; found {' and '.join(found)}. "
            f'Run: pip uninstall -y {" ".join(found)} && pip install "flashgen[cuda13]" (or "flashgen[cuda12]").'
        )
    return found[0] if found else None


def _installed(distribution: str) -> bool:
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True


def nvrtc_version() -> str:
    """`major.minor` of the NVRTC in use. Raises as `binding` does."""
    major, minor = binding().getVersion()
    return f"{major}.{minor}"


def supported_architectures() -> tuple[int, ...]:
    """SM versions that the NVRTC in use can compile for."""
    return tuple(binding().getSupportedArchs())


@lru_cache(maxsize=8)
def store_at(path: str) -> CubinStore:
    """The one store object of this process for a directory, so that its warning comes once."""
    return CubinStore(Path(path))


def default_store() -> CubinStore:
    """The store under FLASHGEN_HOME."""
    return store_at(str(paths.cubin_store()))


def compile_source(source: Source, arch: str, store: CubinStore | None = None, line_info: bool = False) -> Compiled:
    """The cubin of a source, from the store or compiled now. `arch` is a name such as sm_90a.

    Raises CompileError with the compiler's log, MissingDependency, ConflictingInstall.
    """
    shelf = default_store() if store is None else store
    options = options_for(arch, line_info)
    version = nvrtc_version()
    key = key_of(source, options, version)
    found = shelf.get(key)
    if found is not None:
        return found
    _require_architecture(arch, version)
    started = time.perf_counter()
    cubin, log = _run_nvrtc(source, options)
    report = read_log(log, digest_of(cubin), time.perf_counter() - started, version, options)
    compiled = Compiled(key, tuple(entry.name for entry in source.entry_points), arch, cubin, report)
    shelf.put(compiled)
    return compiled


def _require_architecture(arch: str, version: str) -> None:
    known = supported_architectures()
    number = int(re.sub(r"\D", "", arch) or 0)
    if number not in known:
        listed = ", ".join(f"sm_{sm}" for sm in known)
        raise CompileError(
            f"NVRTC {version} cannot compile for {arch}; it knows {listed}. Install the extra of the other CUDA version "
            '("flashgen[cuda12]" reaches older GPUs, "flashgen[cuda13]" newer ones).'
        )


class UnderWay:
    """Counts the compilations of all threads, so that the interpreter ends after them: its exit cleans away what NVRTC still works with."""

    def __init__(self) -> None:
        """None are under way."""
        self.forget()

    def forget(self) -> None:
        """Count from nothing: in a fork, the threads that compile stay behind."""
        self._changed = threading.Condition()
        self.count = 0
        self._ended = False

    def __enter__(self) -> None:
        """One begins. Raises CompileError after `end`."""
        with self._changed:
            if self._ended:
                raise CompileError("Nothing is compiled once the interpreter is ending. Compile before its exit handlers run.")
            self.count += 1

    def __exit__(self, *_: object) -> None:
        """One ended."""
        with self._changed:
            self.count -= 1
            self._changed.notify_all()

    def end(self) -> None:
        """Let none begin any more, and wait for those that run."""
        with self._changed:
            self._ended = True
            self._changed.wait_for(lambda: self.count == 0)


UNDER_WAY = UnderWay()
atexit.register(UNDER_WAY.end)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=UNDER_WAY.forget)


def _run_nvrtc(source: Source, options: Sequence[str]) -> tuple[bytes, str]:
    with UNDER_WAY:
        return _nvrtc_output(source, options)


def _nvrtc_output(source: Source, options: Sequence[str]) -> tuple[bytes, str]:
    nvrtc = binding()
    program = nvrtc.createProgram(source.text, f"{source.family}.cu", [], [])
    try:
        try:
            nvrtc.compileProgram(program, [*options, *_log_options()])
        except nvrtc.NVRTCError as error:
            raise CompileError(_failure(source, options, str(error), nvrtc.getProgramLog(program))) from error
        log = nvrtc.getProgramLog(program)
        # The binding drops the last byte, a NUL: drivers do not mind, disassemblers call the file broken.
        return nvrtc.getCUBIN(program) + b"\0", log
    finally:
        nvrtc.destroyProgram(program)


@lru_cache(maxsize=1)
def _log_options() -> tuple[str, ...]:
    """The log options that this NVRTC knows, tried once on an empty program (NVRTC 12 has no --no-cache, and no cache)."""
    nvrtc = binding()
    accepted = []
    for option in LOG_OPTIONS:
        program = nvrtc.createProgram("", "probe.cu", [], [])
        try:
            nvrtc.compileProgram(program, [f"--gpu-architecture=sm_{max(supported_architectures())}", option])
            accepted.append(option)
        except nvrtc.NVRTCError:
            continue
        finally:
            nvrtc.destroyProgram(program)
    return tuple(accepted)


def _failure(source: Source, options: Sequence[str], status: str, log: str) -> str:
    lines = [line for line in log.splitlines() if line.strip()]
    shown = "\n".join(f"  {line}" for line in lines[:_LOG_LINES])
    more = f"\n  … and {len(lines) - _LOG_LINES} more lines" if len(lines) > _LOG_LINES else ""
    return (
        f"NVRTC refused {source.variant} ({status}; options {' '.join(options)}):\n{shown}{more}\n"
        "Run `flashgen show source` with the same problem to see the text that was compiled."
    )


def read_log(log: str, cubin_digest: str, seconds: float, nvrtc: str, options: Sequence[str]) -> CompileReport:
    """The resources that ptxas reports, the worst over all functions.

    Raises CompileError when the log has none: a silent 0 would pass every gate.
    """
    registers = [int(count) for count in re.findall(r"Used (\d+) registers", log)]
    if not registers:
        raise CompileError(f"The log of NVRTC {nvrtc} has no resource lines, so spills cannot be seen. Log:\n{log[:2000]}")
    frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    shared = re.findall(r"Used \d+ registers[^\n]*?(\d+) bytes smem", log)
    return CompileReport(
        cubin_digest=cubin_digest,
        registers=max(registers),
        spill_bytes=max((max(int(stores), int(loads)) for _, stores, loads in frames), default=0),
        stack_bytes=max((int(stack) for stack, _, _ in frames), default=0),
        static_shared_bytes=max((int(size) for size in shared), default=0),
        warnings=_warnings(log),
        seconds=round(seconds, 4),
        nvrtc=nvrtc,
        options=tuple(options),
    )


def _warnings(log: str) -> tuple[str, ...]:
    """Compiler warnings and the C7xxx notes of ptxas (C7512: wgmma serialised for want of registers), each once."""
    lines = (line.strip() for line in log.splitlines() if re.search(r"\bC7\d{3}\b|\bwarning\s*[:#]", line))
    return tuple(dict.fromkeys(lines))[:_WARNINGS]


def usable_processors() -> int:
    """Processors that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


SPARE = 2
"""Processors that what is not needed now leaves to whoever measures meanwhile, and to what is wanted now."""


class Urgency(IntEnum):
    """When what a pool is asked for is needed: NOW by someone who waits, SOON perhaps by the same, LATER by someone else."""

    NOW = 0
    SOON = 1
    LATER = 2


class _Job(Future[Compiled]):
    """One source on its way through a pool, the same for all who asked for it."""

    def __init__(self, source: Source, arch: str) -> None:
        super().__init__()
        self.source, self.arch = source, arch
        self.key = source.text, source.entry_points, arch
        self.askers, self.urgency = 0, Urgency.NOW


class CompilePool:
    """Compiles in threads: NVRTC is thread-safe and the binding releases the GIL. They are daemons: what is queued ends with the
    interpreter, which waits for what runs.

    Several may share a pool. What is queued or running is compiled once, whoever asks; what is done is in the store, and not kept here.
    """

    def __init__(
        self, jobs: int | None = None, store: CubinStore | None = None, compile_: Callable[[Source, str], Compiled] | None = None
    ) -> None:
        """`jobs` at once (default: the processors this process may use); threads are started as work arrives.

        `compile_`, when given, does the work in the place of `compile_source`.
        """
        self.jobs = max(1, jobs) if jobs is not None else usable_processors()
        self._make = compile_ or partial(compile_source, store=store)
        self._changed = threading.Condition()
        self._jobs: dict[object, _Job] = {}  # queued or running
        self._queues: dict[Urgency, dict[object, _Job]] = {urgency: {} for urgency in Urgency}
        self._running = {True: 0, False: 0}  # by whether it is needed now
        self._idle = 0
        self._closed = False
        self._threads: list[threading.Thread] = []

    def submit(self, source: Source, arch: str, urgency: Urgency = Urgency.NOW) -> Future[Compiled]:
        """Queue one source; the future holds a Compiled, or raises what `compile_source` raises. Others may share it: see `withdraw`.

        What is not needed now begins where nothing else waits, on most processors but not on all, unless someone needs it meanwhile. What
        is needed now does not wait for what began before: they share processors.
        """
        asked = _Job(source, arch)
        with self._changed:
            job = self._jobs.get(asked.key)
            if job is None or job.cancelled():
                self._forget(asked.key)
                job = self._jobs[asked.key] = asked
                self._enqueue(job, urgency)
                self._start_thread()
            elif urgency < job.urgency and self._queues[job.urgency].pop(job.key, None) is not None:
                self._enqueue(job, urgency)
            job.askers += 1
            self._changed.notify()
        return job

    def withdraw(self, future: Future[Compiled]) -> None:
        """One who asked wants it no longer. It is cancelled when nobody else asked for it, and it has not begun."""
        assert isinstance(future, _Job)
        with self._changed:
            future.askers -= 1
            if future.askers <= 0 and self._jobs.get(future.key) is future and future.cancel():
                self._forget(future.key)

    def close(self) -> None:
        """Let the threads end after the work queued so far."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _enqueue(self, job: _Job, urgency: Urgency) -> None:
        job.urgency = urgency
        self._queues[urgency][job.key] = job

    def _forget(self, key: object) -> None:
        for jobs in (self._jobs, *self._queues.values()):
            jobs.pop(key, None)

    def _start_thread(self) -> None:
        if self._idle < sum(map(len, self._queues.values())) and len(self._threads) < 2 * self.jobs:
            thread = threading.Thread(target=self._work, name=f"flashgen-compile-{len(self._threads)}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _next(self) -> _Job | None:
        """The next one to compile; None where there is none now."""
        room = self._running[True] < self.jobs, sum(self._running.values()) < max(1, self.jobs - SPARE)
        for urgency, jobs in self._queues.items():
            if jobs and room[urgency is not Urgency.NOW]:
                return jobs.pop(next(iter(jobs)))
        return None

    def _work(self) -> None:
        while True:
            with self._changed:
                while (job := self._next()) is None:
                    if self._closed and not any(self._queues.values()):
                        return
                    self._idle += 1
                    self._changed.wait()
                    self._idle -= 1
                now = job.urgency is Urgency.NOW
                self._running[now] += 1
            if job.set_running_or_notify_cancel():
                self._compile(job)
            with self._changed:
                self._running[now] -= 1
                if self._jobs.get(job.key) is job:
                    del self._jobs[job.key]
                self._changed.notify_all()

    def _compile(self, job: _Job) -> None:
        try:
            job.set_result(self._make(job.source, job.arch))
        except BaseException as error:
            job.set_exception(error)


def compile_many(
    sources: Sequence[Source], arch: str | None = None, jobs: int | None = None, sm: int | None = None, store: CubinStore | None = None
) -> list[Compiled | FlashgenError]:
    """Compile many sources in parallel; one result per source in order, a CompileError standing where a source was refused.

    Give `arch` for all, or `sm` to let each family choose its form. Raises MissingDependency and ConflictingInstall at once.
    """
    binding()
    pool = CompilePool(jobs, store)
    try:
        futures = [pool.submit(source, arch or architecture(source, _needed(sm))) for source in sources]
        return [_result(future) for future in futures]
    finally:
        pool.close()


def _needed(sm: int | None) -> int:
    if sm is None:
        raise ValueError("compile_many needs `arch` or `sm`.")
    return sm


def _result(future: Future[Compiled]) -> Compiled | FlashgenError:
    try:
        return future.result()
    except CompileError as error:
        return error
