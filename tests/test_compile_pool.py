"""The compile pool that several share: nothing twice, what is wanted first, no one loses another's work, nothing is kept."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import CancelledError, wait
from dataclasses import replace

import pytest
from small_kernels import copy_source

from flashgen import compiler
from flashgen.compiler import CompilePool, Urgency
from flashgen.model import Source

SECONDS = 10.0


class Compiler:
    """Stands for NVRTC: notes what begins, and ends when told to."""

    def __init__(self) -> None:
        self.begun, self.gates = list[str](), dict[str, threading.Event]()
        self._seen = threading.Condition()

    def __call__(self, source: Source, arch: str, store: object) -> object:
        with self._seen:
            self.begun.append(source.text)
            self._seen.notify_all()
        if source.text in self.gates:
            assert self.gates[source.text].wait(SECONDS)
        if source.text == "broken":
            raise ValueError(source.text)
        return object.__new__(Result)

    def wait_for(self, *texts: str) -> None:
        with self._seen:
            assert self._seen.wait_for(lambda: set(texts) <= set(self.begun), SECONDS)


class Result:
    """What is compiled; it can be seen whether anyone keeps it."""


def text(name: str) -> Source:
    return replace(copy_source(), text=name)


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiler]:
    made = Compiler()
    made.gates["first"] = threading.Event()
    monkeypatch.setattr(compiler, "compile_source", made)
    yield made
    for gate in made.gates.values():
        gate.set()


def busy(stub: Compiler) -> CompilePool:
    """A pool whose only thread is busy until the gate of `first` opens."""
    pool = CompilePool(1)
    pool.submit(text("first"), "sm_90")
    stub.wait_for("first")
    return pool


def finish(stub: Compiler, pool: CompilePool, *futures: object) -> None:
    stub.gates["first"].set()
    wait(futures, SECONDS)  # type: ignore[type-var]
    pool.close()


def test_what_is_queued_or_running_is_compiled_once_for_each_architecture(stub: Compiler) -> None:
    pool = busy(stub)
    queued = pool.submit(text("a"), "sm_90")
    other = pool.submit(text("a"), "sm_80")
    assert pool.submit(text("first"), "sm_90") is not queued
    assert pool.submit(text("a"), "sm_90") is queued and pool.submit(text("a"), "sm_90", Urgency.LATER) is queued and other is not queued
    finish(stub, pool, queued, other)
    assert stub.begun == ["first", "a", "a"]


def test_what_is_wanted_now_goes_before_what_may_wait(stub: Compiler) -> None:
    pool = busy(stub)
    later = [pool.submit(text(name), "sm_90", Urgency.LATER) for name in ("p", "q", "r")]
    soon = [pool.submit(text(name), "sm_90", Urgency.SOON) for name in ("u", "v", "q")]
    now = [pool.submit(text(name), "sm_90") for name in ("x", "y")]
    assert pool.submit(text("r"), "sm_90") is later[2] and pool.submit(text("y"), "sm_90", Urgency.LATER) is now[1]
    assert pool.submit(text("u"), "sm_90") is soon[0]
    finish(stub, pool, *later, *soon, *now)
    assert stub.begun == ["first", "x", "y", "r", "u", "v", "q", "p"]


def test_work_ahead_leaves_processors_to_others_who_do_not_wait_for_it(stub: Compiler) -> None:
    pool = CompilePool(compiler.SPARE + 2)
    stub.gates |= {name: threading.Event() for name in "abcdefgh"}
    later = [pool.submit(text(name), "sm_90", Urgency.LATER) for name in "abc"]
    stub.wait_for("a", "b")
    wanted = [pool.submit(text(name), "sm_90") for name in "defgh"]
    stub.wait_for("d", "e", "f", "g")
    assert "c" not in stub.begun and "h" not in stub.begun
    stub.gates["a"].set()
    stub.gates["d"].set()
    stub.wait_for("h")
    assert "c" not in stub.begun, "as much is running as there are processors"
    for gate in stub.gates.values():
        gate.set()
    wait([*later, *wanted], SECONDS)
    assert "c" in stub.begun
    pool.close()


def test_who_withdraws_cancels_for_nobody_else(stub: Compiler) -> None:
    pool = busy(stub)
    shared, alone = pool.submit(text("shared"), "sm_90"), pool.submit(text("alone"), "sm_90", Urgency.LATER)
    pool.submit(text("shared"), "sm_90")
    pool.withdraw(shared)
    pool.withdraw(alone)
    assert alone.cancelled() and not shared.cancelled()
    with pytest.raises(CancelledError):
        alone.result(0)
    again = pool.submit(text("alone"), "sm_90")
    finish(stub, pool, shared, again)
    assert stub.begun == ["first", "shared", "alone"] and isinstance(again.result(0), Result)


def test_withdrawing_what_runs_or_is_done_changes_nothing(stub: Compiler) -> None:
    pool = busy(stub)
    running = pool.submit(text("first"), "sm_90")
    for _ in range(2):
        pool.withdraw(running)
    assert pool.submit(text("first"), "sm_90") is running
    finish(stub, pool, running)
    assert isinstance(running.result(0), Result) and stub.begun == ["first"]
    pool.withdraw(running)


def test_what_is_done_is_not_kept_and_a_failure_reaches_all_who_asked(stub: Compiler) -> None:
    pool = busy(stub)
    done, broken = pool.submit(text("a"), "sm_90"), pool.submit(text("broken"), "sm_90")
    shared = pool.submit(text("broken"), "sm_90")
    stub.gates["first"].set()
    with pytest.raises(ValueError, match="broken"):
        shared.result(SECONDS)
    kept = weakref.ref(done.result(SECONDS))
    last = pool.submit(text("z"), "sm_90")
    last.result(SECONDS)
    del done
    gc.collect()
    assert kept() is None and broken is shared
    assert pool.submit(text("a"), "sm_90").result(SECONDS) is not None and stub.begun.count("a") == 2, "the store has it, not the pool"
    pool.close()


def test_a_closed_pool_ends_its_threads_after_what_is_queued(stub: Compiler) -> None:
    pool = busy(stub)
    queued = [pool.submit(text(name), "sm_90", Urgency.LATER if name == "a" else Urgency.NOW) for name in "ab"]
    pool.close()
    stub.gates["first"].set()
    for each in queued:
        each.result(SECONDS)
    for thread in pool._threads:
        thread.join(SECONDS)
        assert not thread.is_alive()
