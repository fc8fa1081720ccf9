"""Work for problems to come, while the GPU measures others: their spaces are ranked, and what they will ask for first is compiled.

Nothing here changes what a search proposes or a list is filled from: what was not done ahead, or failed, is done when it is needed.
"""

from __future__ import annotations

import os
import queue
import signal
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from flashgen import search
from flashgen.compiler import CompilePool, Urgency, architecture
from flashgen.cubins import Compiled
from flashgen.errors import FlashgenError, WorkerLost
from flashgen.model import DeviceLimits, Problem, ProblemClass, Source, Variant
from flashgen.render import render
from flashgen.space import Space, load_space
from flashgen.strategy import Predicted, Strategy
from flashgen.worker import MeasuringChild

TEXTS = 512
RANKING_SECONDS = 60.0
START_SECONDS = 30.0
END_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Ranking:
    """What a search finds out before its first trial: predicted times, and the texts of its first proposals."""

    predicted: dict[str, array[float]]
    opening: tuple[Source, ...]


def ranking(problem: Problem, device: DeviceLimits, budget: int, seed: int, start: Sequence[Variant] = ()) -> Ranking:
    """The ranking of a search for `problem` among all families, begun with `start`. Raises as `search.bind_families`."""
    strategy = Strategy(search.bind_families(problem, device), budget, seed, start=start)
    predicted = {name: array("d", map(each.predicted.__getitem__, each.bound.feasible())) for name, each in strategy.families.items()}
    return Ranking(predicted, tuple(Texts().all_of(problem, strategy.foreseeable())))


def ranking_task(_: None, *arguments: Any) -> Ranking:
    """`ranking`, as a task of a child process."""
    return ranking(*arguments)


class Texts:
    """Texts of variants, of which the latest are remembered: rendering takes longer than all else that precedes a launch."""

    def __init__(self, most: int = TEXTS) -> None:
        """Keeps `most` of them, each of up to a quarter of a megabyte."""
        self._most = most
        self._kept: OrderedDict[tuple[str, ProblemClass, Variant], Source] = OrderedDict()

    def of(self, space: Space, klass: ProblemClass, variant: Variant) -> Source:
        """As `render`."""
        key = space.digest, klass, variant
        return self._put(key, self._kept.get(key) or render(space, klass, variant))

    def all_of(self, problem: Problem, variants: Sequence[Variant]) -> list[Source]:
        """Those of variants; what cannot be rendered is left to who needs it, who says why."""
        found = []
        for each in variants:
            with suppress(FlashgenError):
                found.append(self.of(load_space(each.family), problem.klass(), each))
        return found

    def take(self, sources: Sequence[Source]) -> None:
        """Remember what was rendered elsewhere, from the same files."""
        for each in sources:
            self._put((load_space(each.family).digest, each.klass, each.variant), each)

    def _put(self, key: tuple[str, ProblemClass, Variant], source: Source) -> Source:
        self._kept[key] = source
        self._kept.move_to_end(key)
        while len(self._kept) > self._most:
            self._kept.popitem(last=False)
        return source


class Ranker:
    """Ranks one problem after the other in a process of its own, which starts when first needed: ranking takes all of an interpreter.

    Once the process was lost nothing more is ranked: all futures raise WorkerLost.
    """

    def __init__(self) -> None:
        self._child = MeasuringChild(deadline_s=RANKING_SECONDS, start_s=START_SECONDS)
        self._queue: queue.SimpleQueue[tuple[Future[Ranking], tuple[object, ...]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lost: WorkerLost | None = None

    def submit(self, problem: Problem, device: DeviceLimits, budget: int, seed: int, start: Sequence[Variant] = ()) -> Future[Ranking]:
        """The ranking of a coming search, as `ranking` makes it. The future may be cancelled as long as it waits."""
        future: Future[Ranking] = Future()
        self._queue.put((future, (problem, device, budget, seed, start)))
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="flashgen-ranking", daemon=True)
            self._thread.start()
        return future

    def close(self) -> None:
        """End the process, even in the middle of a ranking."""
        self._lost = self._lost or WorkerLost("The ranking process was ended.", "died")
        self._queue.put(None)
        if (pid := self._child.pid) is not None:  # the thread that waits for it closes its connection
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self._thread is not None:
            self._thread.join(END_SECONDS)

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            future, arguments = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                if self._lost is not None:
                    raise self._lost
                future.set_result(self._child.call("Ranking", ranking_task, *arguments))
            except BaseException as error:
                self._lost = self._lost or (error if isinstance(error, WorkerLost) else None)
                future.set_exception(error)
        self._child.kill()


class Ahead:
    """Prepares coming problems: begin with `fill` or `search`, then work on them inside `begun`.

        with standard.evaluators(executor) as make, standard.ahead(make, device) as ahead:
            for each in problems:
                ahead.search(each, budget)
            for each in problems:
                with ahead.begun(each) as predicted:
                    search.tune(each, device, budget=budget, make_evaluator=make, predicted=predicted)

    Without a pool it does nothing. Memory is bounded by how many problems are prepared and not yet done.
    """

    def __init__(self, device: DeviceLimits, pool: CompilePool | None, texts: Texts | None = None, ranker: Ranker | None = None) -> None:
        """Compiles for `device` in `pool`, which the caller closes; ranks in `ranker`, or in one of its own, and closes it.

        `texts` receives what was rendered before the problem that needs it begins.
        """
        self.device = device
        self._pool = pool
        self._texts = texts or Texts()
        self._ranker = ranker or Ranker()
        self._lock = threading.Lock()  # openings are submitted by the ranker's thread
        self._compiling: dict[Problem, list[Future[Compiled]]] = {}
        self._rankings: dict[Problem, Future[Ranking]] = {}

    def __enter__(self) -> Ahead:
        return self

    def __exit__(self, *_: object) -> None:
        """Forget all that is not done. What is compiled stays in the store."""
        for problem in {*self._rankings, *self._compiling}:
            self._over(problem)
        self._ranker.close()

    @property
    def works(self) -> bool:
        """Whether anything is prepared at all."""
        return self._pool is not None

    def __contains__(self, problem: Problem) -> bool:
        """Whether a problem is prepared already, or being prepared."""
        return problem in self._compiling

    def fill(self, problem: Problem, variants: Sequence[Variant]) -> None:
        """Compile what a problem will be filled from."""
        if self._pool is not None and problem not in self:
            self._compiling[problem] = []
            self._compile(problem, self._texts.all_of(problem, variants))

    def search(self, problem: Problem, budget: int, seed: int = 0, start: Sequence[Variant] = ()) -> None:
        """Rank the spaces of a problem that will be searched with this budget and seed, and compile its opening.

        `start` is what it will begin with, as far as that is known; the ranking does not depend on it.
        """
        if self._pool is None or problem in self:
            return
        self._compiling[problem] = []
        self._rankings[problem] = self._ranker.submit(problem, self.device, budget, seed, start)
        self._rankings[problem].add_done_callback(lambda future: self._ranked(problem, future))

    @contextmanager
    def begun(self, problem: Problem) -> Iterator[Predicted | None]:
        """While a problem is worked on: what a search of it needs not predict again, or None. After that it may be prepared anew."""
        try:
            yield self._predicted(problem)
        finally:
            self._over(problem)

    def _predicted(self, problem: Problem) -> Predicted | None:
        future = self._rankings.get(problem)
        if future is None or future.cancel():  # nothing is gained by waiting for one that waits itself
            return None
        with suppress(Exception):  # whatever it is, the search will meet it again, and say so
            found = future.result()
            self._texts.take(found.opening)
            return found.predicted
        return None

    def _ranked(self, problem: Problem, future: Future[Ranking]) -> None:
        if not future.cancelled() and future.exception() is None:
            self._compile(problem, future.result().opening)

    def _compile(self, problem: Problem, sources: Sequence[Source]) -> None:
        assert self._pool is not None
        with self._lock:
            if problem in self._compiling:
                self._compiling[problem] += [self._pool.submit(each, architecture(each, self.device.sm), Urgency.LATER) for each in sources]

    def _over(self, problem: Problem) -> None:
        if (waiting := self._rankings.pop(problem, None)) is not None:
            waiting.cancel()
        with self._lock:
            futures = self._compiling.pop(problem, [])
        for each in futures:
            assert self._pool is not None
            self._pool.withdraw(each)
