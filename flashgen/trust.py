"""Is a table entry's certificate good for the binary that would run here? If not, one quick certificate decides, and is remembered.

A certificate was given for one binary: it carries over when the text and the cubin compiled here are the pinned ones. Everything else, an
entry of another toolchain, of another device of the architecture, or one that was only emulated, is proved once on the device.
"""

from __future__ import annotations

import hashlib
import json

from flashgen import paths
from flashgen.backends import Backend, Loaded
from flashgen.cubins import publish
from flashgen.errors import LaunchError
from flashgen.model import ExecutorName, Problem, TableEntry, Verdict
from flashgen.space import Space

SCHEMA = "flashgen.proof/1"


class Proofs:
    """The quick certificates of one device, in memory and under FLASHGEN_HOME."""

    def __init__(self, backend: Backend) -> None:
        """For the kernels of one backend."""
        self._backend = backend
        self._known: dict[str, str] = {}  # key → failure in words, '' for exact

    def doubt(self, entry: TableEntry, sister: bool, loaded: Loaded) -> str:
        """Why the entry's certificate does not cover the loaded kernel; '' when it does."""
        if loaded.source.digest != entry.source_digest.removeprefix("sha256:"):
            return "its kernel text has changed since it was certified"
        if self._backend.name is ExecutorName.EMULATED:
            return ""  # the emulation runs the text itself
        if entry.certificate.executor is not ExecutorName.DEVICE:
            return "it was certified by emulation only"
        if loaded.cubin_digest != entry.cubin_digest:
            return "another compiler makes another binary of it here"
        return "it was certified on another device of the architecture" if sister else ""

    def prove(self, space: Space, loaded: Loaded, problem: Problem) -> None:
        """Certify quickly unless it was done before. Raises LaunchError when the kernel is not exact, WorkerLost when it cannot be run."""
        key = self._key(loaded)
        failure = self._known.get(key)
        if failure is None:
            failure = self._read(key)
        if failure is None:
            certificate = self._backend.quick(space, loaded, problem)
            failure = "" if certificate.verdict is Verdict.EXACT else certificate.failure or "inexact"
            self._write(key, failure, loaded)
        self._known[key] = failure
        if failure:
            raise LaunchError(f"{loaded.source.variant} is not exact on {self._backend.limits.name}: {failure}")

    def _key(self, loaded: Loaded) -> str:
        from flashgen.gate import suite_digest

        limits, source = self._backend.limits, loaded.source
        suite = suite_digest(source.klass.op)
        parts = (SCHEMA, source.digest, loaded.cubin_digest, self._backend.name, limits.name, str(limits.sm), suite)
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def _read(self, key: str) -> str | None:
        try:
            found = json.loads((paths.proof_store() / f"{key}.json").read_bytes())
            return str(found["failure"]) if found["schema"] == SCHEMA and found["key"] == key else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _write(self, key: str, failure: str, loaded: Loaded) -> None:
        document = {
            "schema": SCHEMA, "key": key, "variant": str(loaded.source.variant), "device": self._backend.limits.name, "failure": failure,
        }  # fmt: skip
        try:
            paths.proof_store().mkdir(parents=True, exist_ok=True)
            publish(paths.proof_store() / f"{key}.json", json.dumps(document, indent=1).encode())
        except OSError:
            return  # this process remembers; the next one proves again
