"""Work for coming problems: openings are ranked and compiled before their searches begin, and whatever fails is done in place."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from shipping import H200, NVRTC, compiled, entry, problem, source_of, variant
from test_standard import CREATED, Imagined

from flashgen import ahead, search, standard, wishes
from flashgen.ahead import Ahead, Ranker, Ranking
from flashgen.compiler import CompilePool, Urgency
from flashgen.cubins import Compiled
from flashgen.errors import EmptySpace, WorkerLost
from flashgen.evaluators import PredictedEvaluator
from flashgen.model import DeviceLimits, DType, ExecutorName, Mask, Problem, Source, Variant
from flashgen.space import BoundSpace
from flashgen.staleness import Tools
from flashgen.strategy import Predicted, Strategy

TOOLS = Tools(NVRTC, "580.65")
HALF = problem(512, head_dim=64, mask=Mask())
ASKED = replace(HALF, dtype=DType.FLOAT32)  # of one family, whose space is small


class Pool:
    """Takes texts to compile, and is done with each at once."""

    def __init__(self) -> None:
        self.submitted, self.withdrawn = list[str](), list[str]()
        self._digests = dict[int, str]()
        self.taken = list[Future[Compiled]]()

    def submit(self, source: Source, arch: str, urgency: Urgency) -> Future[Compiled]:
        assert urgency is Urgency.LATER and arch.startswith("sm_90")
        done: Future[Compiled] = Future()
        done.set_result(compiled(source, arch))
        self.taken.append(done)
        self._digests[id(done)] = source.digest
        self.submitted.append(source.digest)
        return done

    def withdraw(self, future: Future[Compiled]) -> None:
        self.withdrawn.append(self._digests[id(future)])


class InPlace(Ranker):
    """Ranks where it is asked, as soon as it is asked; or fails, or leaves everything waiting."""

    def __init__(self, fails: Exception | None = None, waits: bool = False) -> None:
        super().__init__()
        self.fails, self.waits = fails, waits
        self.asked = list[Problem]()

    def submit(self, problem: Problem, device: DeviceLimits, budget: int, seed: int, start: Sequence[Variant] = ()) -> Future[Ranking]:
        self.asked.append(problem)
        future: Future[Ranking] = Future()
        if self.fails:
            future.set_exception(self.fails)
        elif not self.waits:
            future.set_result(ahead.ranking(problem, device, budget, seed, start))
        return future


class Telling(Imagined):
    """Tells what was ready when an evaluator came for a problem."""

    pool: Pool
    ready: dict[Problem, list[str]]

    def __init__(self, bounds: Sequence[BoundSpace], asked: Problem, limits: DeviceLimits, seed: int) -> None:
        super().__init__(bounds, asked, limits, seed)
        self.ready[asked] = list(self.pool.submitted)


def prepared(pool: Pool | None, ranker: Ranker | None = None) -> Ahead:
    return Ahead(H200, cast(CompilePool, pool), ranker=ranker or InPlace())


@pytest.fixture
def listed(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[standard.Done]]:
    """Tunes a list with a pool and a ranker that are not there."""

    def run(asked_for: list[wishes.Wish], pool: Pool, ranker: Ranker, path: str = "t.yaml") -> list[standard.Done]:
        monkeypatch.setattr(standard, "ahead", lambda make, device: Ahead(device, cast(CompilePool, pool), ranker=ranker))
        options = {"budget": 24, "make_evaluator": Telling, "path": tmp_path / path}
        return list(standard.tune(asked_for, H200, ExecutorName.DEVICE, TOOLS, **options))  # type: ignore[arg-type]

    CREATED.clear()
    return run


def digests(of: Problem, variants: Sequence[Variant]) -> list[str]:
    return [source_of(of, each).digest for each in variants]


def opening(of: Problem, budget: int) -> list[Variant]:
    return Strategy(search.bind_families(of, H200), budget, 0).foreseeable()


def test_the_opening_of_a_coming_search_is_compiled_before_it_begins(listed: Callable[..., list[standard.Done]]) -> None:
    other = replace(ASKED, head_dim=128, head_dim_v=128)
    Telling.pool, Telling.ready = Pool(), {}
    ranker = InPlace()
    done = listed([wishes.Wish(ASKED), wishes.Wish(other)], Telling.pool, ranker)
    assert [each.how for each in done] == ["searched", "searched"] and ranker.asked == [other]
    assert len(opening(other, 24)) > 10
    assert Telling.ready[other] == digests(other, opening(other, 24))
    assert sorted(Telling.pool.withdrawn) == sorted(Telling.pool.submitted)


def test_a_coming_search_begins_with_what_is_known_to_have_won_nearby(home: Path) -> None:
    start = search.bind_families(ASKED, H200)[0].feasible()[-3:]
    pool = Pool()
    with prepared(pool) as coming:
        coming.search(ASKED, 20, start=start)
        head = [each for each in Strategy(search.bind_families(ASKED, H200), 20, 0, start=start).foreseeable() if each not in start]
        assert pool.submitted == digests(ASKED, [*start, *head]) and len(head) > 10
        with coming.begun(ASKED) as predicted:
            assert predicted == ahead.ranking(ASKED, H200, 20, 0).predicted


def test_a_search_with_predictions_made_before_is_the_same_search(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def trials(predicted: Predicted | None, name: str) -> list[str]:
        found = search.tune(ASKED, H200, budget=20, fresh=True, table=tmp_path / name, make_evaluator=Imagined, predicted=predicted)
        return [str(each.variant) for each in found.trials]

    plain = trials(None, "a.yaml")
    made = ahead.ranking(ASKED, H200, 20, 0).predicted
    asked = list[Variant]()
    monkeypatch.setattr("flashgen.cost.predict", lambda bound, each, report=None: asked.append(each))
    monkeypatch.setattr(search, "fallback_of", lambda bounds: None)
    assert trials(made, "b.yaml") == plain and len(plain) == 20
    assert not asked, "nothing was predicted again"


def test_predictions_of_another_number_of_variants_are_not_used() -> None:
    bounds = search.bind_families(ASKED, H200)
    wrong = {bound.space.family: [1.0] for bound in bounds}
    assert Strategy(bounds, 20, 0, predicted=wrong).opening() == Strategy(bounds, 20, 0).opening()


@pytest.mark.parametrize("ranker", [InPlace(WorkerLost("gone", "died")), InPlace(EmptySpace("none")), InPlace(waits=True)])
def test_where_ranking_fails_or_was_not_begun_the_search_ranks_in_place(
    ranker: InPlace, listed: Callable[..., list[standard.Done]]
) -> None:
    Telling.pool, Telling.ready = Pool(), {}
    lengths = [wishes.Wish(replace(ASKED, seqlen_q=length, seqlen_kv=length)) for length in (512, 1024)]
    assert [each.how for each in listed(lengths, Telling.pool, ranker)] == ["searched", "searched"]
    assert len(ranker.asked) == 1 and not Telling.pool.submitted


def test_what_is_in_the_table_is_not_prepared_again(listed: Callable[..., list[standard.Done]]) -> None:
    lengths = [wishes.Wish(replace(ASKED, seqlen_q=length, seqlen_kv=length)) for length in (512, 1024, 2048)]
    Telling.pool, Telling.ready = Pool(), {}
    listed(lengths[1:], Telling.pool, InPlace())
    ranker = InPlace()
    assert [each.how for each in listed(lengths, Telling.pool, ranker)] == ["searched", "kept", "kept"]
    assert not ranker.asked


def test_what_fills_coming_problems_is_compiled_ahead_once_they_have_neighbours(listed: Callable[..., list[standard.Done]]) -> None:
    Telling.pool, Telling.ready = Pool(), {}
    asked_for = [wishes.Wish(ASKED), wishes.Wish(replace(ASKED, batch=5), searched=False), wishes.Wish(HALF, searched=False)]
    done = listed(asked_for, Telling.pool, InPlace())
    assert [each.how for each in done] == ["searched", "filled", "filled"]
    assert Telling.ready[ASKED] == [], "there are no neighbours yet"
    best, ready = done[0].change, Telling.ready[asked_for[1].problem]
    assert best is not None and digests(HALF, [best.new.variant])[0] in ready and len(ready) == standard.NEIGHBOURS
    assert Telling.ready[HALF] == ready


def test_a_problem_is_prepared_once_and_let_go_when_it_is_done() -> None:
    pool = Pool()
    variants = [variant(HALF), variant(HALF, block_kv=64)]
    with prepared(pool) as coming:
        coming.fill(HALF, variants)
        coming.fill(HALF, variants)
        assert HALF in coming and pool.submitted == digests(HALF, variants) and not pool.withdrawn
        with coming.begun(HALF) as predicted:
            assert predicted is None and not pool.withdrawn
        assert HALF not in coming and pool.withdrawn == pool.submitted
        coming.fill(replace(HALF, batch=7), variants)
    assert len(pool.withdrawn) == 4, "what was not begun is withdrawn at the end"


def test_without_a_pool_nothing_is_prepared() -> None:
    ranker = InPlace()
    with prepared(None, ranker) as coming:
        assert not coming.works
        coming.search(ASKED, 20)
        coming.fill(HALF, [entry(HALF).variant])
        with coming.begun(ASKED) as predicted:
            assert predicted is None
    assert not ranker.asked
    with standard.evaluators(ExecutorName.EMULATED) as make, standard.ahead(make, H200) as coming:
        assert not coming.works


def test_texts_are_rendered_once_as_long_as_they_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    rendered = list[Variant]()
    monkeypatch.setattr(ahead, "render", lambda space, klass, each: (rendered.append(each), source_of(HALF, each))[1])
    made, one, two, three = ahead.Texts(2), *(variant(HALF, block_kv=rows) for rows in (32, 48, 64))
    assert made.all_of(HALF, [one, two, one]) == made.all_of(replace(HALF, batch=9), [one, two, one]) and rendered == [one, two]
    made.take([source_of(HALF, three)])
    made.all_of(HALF, [three, one, two])
    assert rendered == [one, two, two], "the oldest had to go"


def test_a_search_finds_its_opening_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ahead.Texts()
    with Ahead(H200, cast(CompilePool, Pool()), texts, InPlace()) as coming:
        coming.search(ASKED, 20)
        with coming.begun(ASKED):
            monkeypatch.setattr(ahead, "render", None)
            assert len(texts.all_of(ASKED, opening(ASKED, 20))) > 10


# What a search may propose soon ---------------------------------------------------------------------------------------


def test_what_may_come_soon_is_compiled_before_it_is_asked_for_and_let_go_at_the_end() -> None:
    asked, withdrawn = list[tuple[str, Urgency]](), list[object]()

    class Queue:
        def submit(self, source: Source, arch: str, urgency: Urgency = Urgency.NOW) -> object:
            asked.append((source.digest, urgency))
            return len(asked)

        def withdraw(self, future: object) -> None:
            withdrawn.append(future)

    one, two = variants = [variant(HALF), variant(HALF, block_kv=64)]
    bounds = search.bind_families(HALF, H200, ["ampere_forward"])
    evaluator = PredictedEvaluator(bounds, HALF, H200, 0, cast(CompilePool, Queue()))
    evaluator.prepare(one)
    evaluator.expect(variants)
    evaluator.expect(variants)
    evaluator.prepare(two)
    (first, second) = digests(HALF, [one, two])
    assert asked == [(first, Urgency.NOW), (second, Urgency.SOON), (second, Urgency.NOW)]
    evaluator.close()
    assert sorted(withdrawn, key=str) == [1, 2, 3]


# The ranking process ---------------------------------------------------------------------------------------------------


def until_it_runs(future: Future[Ranking]) -> None:
    end = time.monotonic() + 10.0
    while not future.running():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_process_ranks_as_this_one_would() -> None:
    ranker = Ranker()
    try:
        found = ranker.submit(ASKED, H200, 20, 0).result(60)
        with pytest.raises(EmptySpace):
            ranker.submit(ASKED, replace(H200, shared_bytes_per_cta=16, shared_bytes_per_sm=16), 20, 0).result(60)
        assert ranker.submit(ASKED, H200, 20, 0).result(60).predicted.keys() == found.predicted.keys(), "an error is no loss"
    finally:
        ranker.close()
    assert found == ahead.ranking(ASKED, H200, 20, 0)


def test_a_process_that_is_killed_leaves_ranking_to_the_search_and_is_not_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    ranker, pool = Ranker(), Pool()
    with prepared(pool, ranker) as coming:
        coming.search(ASKED, 20)
        with coming.begun(ASKED) as predicted:
            assert predicted is not None
        pid = ranker._child.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        coming.search(ASKED, 20)
        until_it_runs(coming._rankings[ASKED])
        os.kill(pid, signal.SIGKILL)
        with coming.begun(ASKED) as predicted:
            assert predicted is None
        coming.search(ASKED, 20)
        with pytest.raises(WorkerLost):
            coming._rankings[ASKED].result(10)
        assert ranker._child.started == 1


def test_leaving_ends_the_process_in_the_middle_of_a_ranking() -> None:
    ranker = Ranker()
    with prepared(Pool(), ranker) as coming:
        coming.search(ASKED, 20)
        coming._rankings[ASKED].result(60)
        pid = ranker._child.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        coming.search(replace(ASKED, batch=9), 20)
        until_it_runs(coming._rankings[replace(ASKED, batch=9)])
        began = time.monotonic()
    assert time.monotonic() - began < ahead.END_SECONDS
    assert ranker._thread is not None and not ranker._thread.is_alive() and ranker._child.pid is None
