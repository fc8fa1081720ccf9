"""The measuring child: one process that runs risky tasks, so that a crash, a hang or a lost CUDA context costs one task, not the caller.

A task is an importable function `task(state, *args)`. The parent sends one at a time and waits until its deadline, so the task at fault is
always known. The child is an interpreter of its own (not a fork, and not a re-import of the caller's main script): it gets `sys.path`
alone, its own session, and ends with its parent.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from typing import IO, Any

from flashgen.errors import FlashgenError, WorkerLost

START_SECONDS = 120.0
"""Importing CuPy from a cold disk and making a CUDA context can take a minute."""

_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from flashgen.worker import serve; serve(int(sys.argv[2]), int(sys.argv[3]))"
)
_WATCH_SECONDS = 0.5
_KILL_SECONDS = 1.5
_DRIVER_SECONDS = 30.0
_TAIL_BYTES = 2000


@dataclass(frozen=True, slots=True)
class Reply:
    """What the child answers: a result, or an error with whether the child can go on."""

    ok: bool
    value: Any = None
    error: BaseException | None = None
    text: str = ""
    poisoned: bool = False


class MeasuringChild:
    """A child process that is started when first needed and replaced when lost. For one thread at a time.

    `open_state()` runs once in the child; its result is the first argument of every task. When the state has a method `settle()`, it runs
    after every task, good or bad: it waits for the device, and raises when the device is lost.
    """

    def __init__(
        self,
        open_state: Callable[..., Any] | None = None,
        *args: Any,
        deadline_s: float = 60.0,
        start_s: float = START_SECONDS,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Remember how to start; nothing runs yet. `environment` is added to the caller's (to choose a GPU, say)."""
        self._opening = (open_state, args)
        self._deadline_s = deadline_s
        self._start_s = start_s
        self._environment = dict(environment or {})
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._errors: IO[bytes] | None = None
        self._mark = 0  # where the present task's output begins
        self._end: Callable[[], object] = lambda: None
        self._dying: subprocess.Popen[bytes] | None = None
        self.started = 0

    def __enter__(self) -> MeasuringChild:
        """Nothing starts before the first task."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the child."""
        self.close()

    @property
    def pid(self) -> int | None:
        """Process id of the living child; None when there is none."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    def call(self, culprit: str, task: Callable[..., Any], *args: Any, deadline_s: float | None = None) -> Any:
        """Run `task(state, *args)` in the child and return its result; an exception of the task is raised here.

        Raises WorkerLost, naming `culprit`, when the child dies, exceeds the deadline or loses its device; the next call gets a new child.
        """
        message = pickle.dumps((task, args))
        try:
            self._ensure_started()
            reply = self._exchange(culprit, message, self._deadline_s if deadline_s is None else deadline_s)
        except BaseException:
            self.kill()  # also on Ctrl-C: a child in the middle of a task is of no use
            raise
        if reply.poisoned:
            tail = self.kill()
            raise WorkerLost(f"{culprit}: the device was lost ({reply.text}); the measuring child is replaced.{tail}", "poisoned")
        if not reply.ok:
            raise reply.error if reply.error is not None else FlashgenError(reply.text)
        return reply.value

    def close(self) -> None:
        """End the child in good order, or by force after two seconds."""
        if self._connection is not None and self._process is not None:
            try:
                self._connection.send_bytes(b"")
                self._process.wait(2.0)
            except (OSError, subprocess.TimeoutExpired):
                pass
        self.kill()

    def kill(self) -> str:
        """End the child now. Returns the end of what it wrote to its standard error, for messages."""
        tail = _tail(self._errors, self._mark)
        self._end()
        if self._process is not None and self._process.poll() is None:
            self._dying = self._process  # the driver is still tearing its context down
        if self._errors is not None:
            self._errors.close()
        self._process, self._connection, self._errors, self._end = None, None, None, lambda: None
        return tail

    def _ensure_started(self) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        self.kill()
        if self._dying is not None:
            # Its kernel may still run and its memory be held: a successor measured beside it would be too slow, or run out of memory.
            with suppress(subprocess.TimeoutExpired):
                self._dying.wait(_DRIVER_SECONDS)
            self._dying = None
        ours, theirs = Pipe()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by kill()
        descriptor = theirs.fileno()
        command = [sys.executable, "-P", "-c", _BOOT, json.dumps(sys.path), str(descriptor), str(os.getpid())]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._errors,
            stderr=self._errors,
            pass_fds=(descriptor,),
            env={**os.environ, **self._environment},
            start_new_session=True,
        )
        theirs.close()
        self._connection = ours
        self._end = weakref.finalize(self, _end, self._process, ours, os.getpid())
        self.started += 1
        reply = self._exchange("Starting the measuring child", pickle.dumps(self._opening), self._start_s, "not_started")
        if not reply.ok:
            raise reply.error if reply.error is not None else FlashgenError(reply.text)

    def _exchange(self, culprit: str, message: bytes, deadline_s: float, died: str = "died") -> Reply:
        connection, process = self._connection, self._process
        assert connection is not None and process is not None
        self._mark = self._errors.seek(0, os.SEEK_END) if self._errors is not None else 0
        try:
            connection.send_bytes(message)
            if not connection.poll(deadline_s):
                tail = self.kill()
                raise WorkerLost(f"{culprit}: no result after {deadline_s:g} s; the measuring child was killed.{tail}", "timed_out")
            received = connection.recv_bytes()
        except (EOFError, OSError) as error:
            how = _how_it_ended(process)
            tail = self.kill()
            raise WorkerLost(f"{culprit}: the measuring child {how}.{tail}", died) from error
        reply = pickle.loads(received)
        assert isinstance(reply, Reply)
        return reply


def _end(process: subprocess.Popen[bytes], connection: Connection, owner: int) -> None:
    """Kill the child with everything it started, and collect it. A fork of the owner leaves it alone."""
    if os.getpid() != owner:
        return
    connection.close()
    if process.poll() is not None:
        return
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        process.kill()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_KILL_SECONDS)


def _how_it_ended(process: subprocess.Popen[bytes]) -> str:
    try:
        code = process.wait(5.0)
    except subprocess.TimeoutExpired:
        return "closed its connection"
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def _tail(errors: IO[bytes] | None, mark: int) -> str:
    if errors is None:
        return ""
    size = errors.seek(0, os.SEEK_END)
    errors.seek(max(mark, size - _TAIL_BYTES))
    text = errors.read().decode(errors="replace").strip()
    return f"\nIts last words:\n{text}" if text else ""


# --- in the child ---------------------------------------------------------------


def serve(descriptor: int, parent: int) -> None:
    """The child's main loop: the first message opens the state, each later one is a task; an empty one or a closed pipe ends it."""
    import faulthandler

    faulthandler.enable()
    threading.Thread(target=_end_with_parent, args=(parent,), daemon=True).start()
    connection = Connection(descriptor)
    opened, state = _open(connection)
    while opened:
        message = _receive(connection)
        if message is None:
            break
        reply = _run(state, message)
        _send(connection, reply)
        if reply.poisoned:
            break
    # Without the interpreter's shutdown: destructors that touch a lost device could hang.
    sys.stdout.flush()
    os._exit(0)


def _open(connection: Connection) -> tuple[bool, Any]:
    message = _receive(connection)
    if message is None:
        return False, None
    try:
        opener, args = pickle.loads(message)
        state = opener(*args) if opener is not None else None
    except Exception as error:
        _send(connection, _error(error))
        return False, None
    _send(connection, Reply(True))
    return True, state


def _run(state: Any, message: bytes) -> Reply:
    try:
        task, args = pickle.loads(message)
        reply = Reply(True, task(state, *args))
    except Exception as error:
        reply = _error(error)
    settle = getattr(state, "settle", None)
    if settle is not None:
        try:
            settle()
        except Exception as error:
            cause = reply.text if not reply.ok else f"{type(error).__name__}: {error}"
            return Reply(False, text=cause, poisoned=True)
    return reply


def _error(error: Exception) -> Reply:
    """An error as the parent can raise it: itself when it survives a pickle, else its text."""
    text = f"{type(error).__name__}: {error}"
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return Reply(False, text=text)
    return Reply(False, error=error, text=text)


def _receive(connection: Connection) -> bytes | None:
    try:
        return connection.recv_bytes() or None
    except (EOFError, OSError):
        return None


def _send(connection: Connection, reply: Reply) -> None:
    try:
        data = pickle.dumps(reply)
    except Exception as error:
        data = pickle.dumps(Reply(False, text=f"The result cannot be sent: {type(error).__name__}: {error}"))
    connection.send_bytes(data)


def _end_with_parent(parent: int) -> None:
    """Leave at once when the parent is gone, even in the middle of a task. A closed pipe is not enough: a fork may hold it open."""
    while os.getppid() == parent:
        time.sleep(_WATCH_SECONDS)
    os._exit(1)
