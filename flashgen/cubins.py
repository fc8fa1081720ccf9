"""The content-addressed store of compiled kernels: `<key>.cubin` and `<key>.json` under FLASHGEN_HOME.

A file appears whole or not at all (temporary file, fsync, rename), its sha256 is checked on every read, and a home that cannot be written
costs nothing but the memory: the kernel is kept in this process and one warning says so.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from flashgen import paths
from flashgen.errors import HomeNotWritable
from flashgen.model import CompileReport

SCHEMA = "flashgen.cubin/1"


@dataclass(frozen=True, slots=True)
class Compiled:
    """A loadable kernel image. `key` names what it was made from, `report.cubin_digest` the bytes themselves."""

    key: str
    entry_points: tuple[str, ...]
    architecture: str  # sm_90, sm_90a, …
    cubin: bytes = field(repr=False)
    report: CompileReport
    cached: bool = False


@dataclass(frozen=True, slots=True)
class StoreStatistics:
    """What the store holds: finished kernels, their bytes on disk, unfinished leftovers, and the use times (seconds since 1970)."""

    path: Path
    kernels: int
    bytes: int
    leftovers: int
    oldest: float | None
    newest: float | None


def digest_of(data: bytes) -> str:
    """`sha256:<hex>` of some bytes."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


class CubinStore:
    """Kernels on disk, with the process memory behind it when the disk cannot be written. Safe for threads and for several processes."""

    def __init__(self, path: Path | None = None) -> None:
        """A store in `path`, which is created by the first write; the default is under FLASHGEN_HOME."""
        self.path = path if path is not None else paths.cubin_store()
        self._memory: dict[str, Compiled] = {}
        self._lock = threading.Lock()
        self._warned = False

    def get(self, key: str) -> Compiled | None:
        """The kernel stored under `key`; None when absent, cut, altered or unreadable (the caller then compiles anew)."""
        with self._lock:
            kept = self._memory.get(key)
        if kept is not None:
            return kept
        try:
            facts = json.loads((self.path / f"{key}.json").read_bytes())
            cubin = (self.path / f"{key}.cubin").read_bytes()
            return _checked(key, facts, cubin)
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def find(self, cubin_digest: str, architecture: str) -> Compiled | None:
        """The kernel whose bytes have this digest, whatever compiler made them; None when none has."""
        wanted = cubin_digest.removeprefix("sha256:")
        for name, _ in self._entries():
            if not name.endswith(".json"):
                continue
            try:
                facts = json.loads((self.path / name).read_bytes())
                same = facts["report"]["cubin_digest"].removeprefix("sha256:") == wanted and facts["architecture"] == architecture
            except (OSError, ValueError, KeyError, TypeError, AttributeError):
                continue
            found = self.get(name.removesuffix(".json")) if same else None
            if found is not None:
                return found
        return None

    def put(self, compiled: Compiled) -> None:
        """Publish a kernel; never raises for an unwritable or full disk."""
        facts = {
            "schema": SCHEMA,
            "key": compiled.key,
            "entry_points": list(compiled.entry_points),
            "architecture": compiled.architecture,
            "report": asdict(compiled.report),
        }
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            publish(self.path / f"{compiled.key}.cubin", compiled.cubin)
            publish(self.path / f"{compiled.key}.json", json.dumps(facts, indent=1, sort_keys=True).encode())
        except OSError as error:
            self._keep_in_memory(compiled, error)

    def _keep_in_memory(self, compiled: Compiled, error: OSError) -> None:
        with self._lock:
            self._memory[compiled.key] = compiled
            first, self._warned = not self._warned, True
        if first:
            warnings.warn(
                f"Compiled kernels cannot be stored in {self.path} ({error.strerror or error}); they live in memory and are compiled again "
                f"by the next process. Set {paths.ENVIRONMENT_VARIABLE} to a writable directory with free space.",
                HomeNotWritable,
                stacklevel=3,
            )

    def statistics(self) -> StoreStatistics:
        """Count what is stored; a missing directory is an empty store."""
        entries = list(self._entries())
        kernels = [stat for name, stat in entries if name.endswith(".cubin")]
        leftovers = sum(1 for name, _ in entries if name.endswith(".tmp"))
        times = [stat.st_mtime for stat in kernels]
        total = sum(stat.st_size for _, stat in entries)
        return StoreStatistics(self.path, len(kernels), total, leftovers, min(times, default=None), max(times, default=None))

    def prune(self, max_age_s: float | None = None, max_bytes: int | None = None, now: float | None = None) -> tuple[int, int]:
        """Delete leftovers of crashed writers (older than an hour), kernels older than `max_age_s`, then the oldest beyond `max_bytes`.

        Returns (kernels deleted, bytes freed). Without limits only leftovers go.
        """
        present = time.time() if now is None else now
        freed, kernels, total = 0, [], 0
        for name, stat in self._entries():
            if name.endswith(".tmp"):
                freed += self._delete(name, stat.st_size) if present - stat.st_mtime > 3600 else 0
            elif name.endswith(".cubin"):
                size = stat.st_size + _size(self.path / f"{name.removesuffix('.cubin')}.json")
                kernels.append((stat.st_mtime, name.removesuffix(".cubin"), size))
                total += size
        deleted = 0
        for modified, key, size in sorted(kernels):
            too_old = max_age_s is not None and present - modified > max_age_s
            if not too_old and (max_bytes is None or total <= max_bytes):
                continue
            # The facts go first: a cubin without facts is merely absent to a reader.
            self._delete(f"{key}.json", 0)
            self._delete(f"{key}.cubin", 0)
            deleted, freed, total = deleted + 1, freed + size, total - size
        return deleted, freed

    def _entries(self) -> Iterator[tuple[str, os.stat_result]]:
        try:
            names = sorted(os.listdir(self.path))
        except OSError:
            return
        for name in names:
            if name.endswith((".cubin", ".json", ".tmp")):
                try:
                    yield name, (self.path / name).stat()
                except OSError:  # another process pruned it meanwhile
                    continue

    def _delete(self, name: str, size: int) -> int:
        try:
            (self.path / name).unlink()
        except OSError:
            return 0
        return size


def publish(path: Path, data: bytes, write: Callable[[int, memoryview], int] = os.write) -> None:
    """Write `data` to `path` so that readers see the old file or the whole new one. Raises OSError and leaves no partial file behind.

    The mode follows the umask, so that several users can share one directory. `write` is os.write, replaceable to play a full disk.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        try:
            view = memoryview(data)
            while view:
                view = view[write(descriptor, view) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _checked(key: str, facts: Mapping[str, Any], cubin: bytes) -> Compiled:
    """Rebuild a kernel from its files. Raises ValueError, KeyError or TypeError when they do not belong together."""
    if facts["schema"] != SCHEMA or facts["key"] != key:
        raise ValueError(f"{key}: the facts are of another schema or key")
    fields = dict(facts["report"])
    fields["warnings"], fields["options"] = tuple(fields["warnings"]), tuple(fields["options"])
    report = CompileReport(**fields)
    if digest_of(cubin) != report.cubin_digest:
        raise ValueError(f"{key}: the cubin was cut or altered")
    return Compiled(key, tuple(facts["entry_points"]), facts["architecture"], cubin, report, cached=True)
