"""Which variant to try next: enumeration where the spaces are small, else seeds, the cost model's best, then Optuna's sampler.

A strategy only proposes; it neither compiles nor measures. Proposals can run ahead of results, so that compilation overlaps measuring.
With the same seed and the same results it proposes the same variants, which is what makes a resumed search continue where it stopped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING

from flashgen.cost import roofline_us
from flashgen.model import Outcome, Trial, Variant
from flashgen.space import BoundSpace

if TYPE_CHECKING:
    import optuna

COST_BEST = 10  # variants taken from the cost model's ranking before the sampler starts
CLIMB_AFTER = 2 / 3  # of the budget: from here on, neighbours of the best come before the sampler's wishes
CLIMB_FROM = 3  # best variants whose neighbours are tried
OTHERS = 3  # trials in the first round of a family that is not predicted to be the best: enough to see that the model is wrong
HOPELESS = 3.0  # a family predicted to be so many times slower than the best gets one trial
LOST = 10.0  # one so many times slower gets none, as long as another family runs
FAILURES = 3  # of a family that nothing else is known of: from here on others go before it
MAX_ASKS = 6  # asks in a row without a new feasible variant before the last one's neighbour is taken

Cost = Callable[[BoundSpace, Variant], float]
Predicted = Mapping[str, Sequence[float]]
"""By family: µs of its feasible variants in the order of `BoundSpace.feasible`."""


class Strategy:
    """Proposes variants of several families for one problem and budget.

    The feasible set fits the budget: everything, seeds first, then in the order of the cost model. Otherwise a first round gives the family
    with the best prediction its seeds and some of the cost model's best, and other promising ones some trials; from then on the family with
    the best time so far gets all: what is left of its seeds and of the model's best, then by the sampler, and in the last third among the
    variants one parameter away from the best, so that independent searches end alike. Seeds come before the cost model's best because a
    model can be wrong about what spills. Where it is known what won for a near problem, that is the first round, with the head of the
    winner's family; other families get nothing as long as that one runs.
    """

    def __init__(
        self,
        bounds: Sequence[BoundSpace],
        budget: int,
        seed: int,
        cost: Cost = roofline_us,
        *,
        by_cost_only: bool = False,
        predicted: Predicted | None = None,
        start: Sequence[Variant] = (),
    ) -> None:
        """`bounds` are the families on offer, `budget` counts trials, `cost` predicts µs. `by_cost_only` leaves the sampler out.

        `predicted` is what `cost` says of the same bounds, where that is known already; `start` is what won for near problems, best
        first: it is tried first where the sampler is in use, as far as it is feasible here.
        """
        known = predicted or {}
        self.families = {bound.space.family: _Family(bound, seed, cost, known.get(bound.space.family, ())) for bound in bounds}
        self.total = sum(len(family.ranked) for family in self.families.values())
        self.exhaustive = self.total <= budget
        self.asks = 0
        self._climb_after = int(budget * CLIMB_AFTER)
        self._climbs = budget - self._climb_after
        self._known: dict[Variant, Trial] = {}
        self._pending: set[Variant] = set()
        self._budget = budget
        self.sampler = "enumeration" if self.exhaustive else "cost_model" if by_cost_only else "tpe"
        """Name for the provenance of an entry."""
        known_to_win = self._adapted(start) if self.sampler == "tpe" else []
        self._begun_with = {variant.family for variant in known_to_win}
        self._opening = deque(self._from(known_to_win, budget) if known_to_win else self._first(budget))

    @property
    def foreseen(self) -> int:
        """Proposals to come that no result can change."""
        return len(self._opening)

    def opening(self) -> list[Variant]:
        """The proposals to come that no result can change, in their order."""
        return [variant for variant in dict.fromkeys(self._opening) if not self._seen(variant)]

    def foreseeable(self) -> list[Variant]:
        """The opening, and what follows if the family that begins it turns out to be the best; as much as the budget has room for."""
        opening = self.opening()
        following = self.families[opening[0].family].head() if opening and self.sampler == "tpe" else []
        return list(dict.fromkeys([*opening, *(variant for variant in following if not self._seen(variant))]))[: self._budget]

    def likely(self, beside: bool = True) -> list[Variant]:
        """Variants that may be proposed soon if nothing better turns up; only where a sampler comes at all.

        What is left of the seeds and the cost model's best of the family that leads, and, with `beside`, those beside the best so far.
        """
        if self.sampler != "tpe":
            return []
        leading, left = self._by_promise()[0], self._budget - len(self._known) - len(self._pending)
        found = [variant for variant in leading.head() if not self._seen(variant)][: max(0, left)]
        return found + (list(islice(dict.fromkeys(leading.beside_the_best(self._known, self._pending)), self._climbs)) if beside else [])

    def next(self) -> Variant | None:
        """A feasible variant that was not proposed before; None when there is none left."""
        while self._opening:
            variant = self._opening.popleft()
            if not self._seen(variant):
                return self._propose(variant)
        for family in self._by_promise():
            climbing = len(self._known) + len(self._pending) >= self._climb_after
            found = family.next(self._known, self._pending, climbing)
            self.asks += family.take_asks()
            if found is not None:
                self._pending.add(found)
                return found
        return None

    def tell(self, trial: Trial) -> None:
        """The result of a proposal, or of an earlier search."""
        self._pending.discard(trial.variant)
        self._known[trial.variant] = trial
        if trial.variant.family in self.families:
            self.families[trial.variant.family].tell(trial)

    def _propose(self, variant: Variant) -> Variant:
        self._pending.add(variant)
        self.asks += 1
        return variant

    def _seen(self, variant: Variant) -> bool:
        return variant in self._known or variant in self._pending

    def _all_by_cost(self) -> list[Variant]:
        """Seeds of promising families, then everything."""
        rated = [(family.predicted[variant], number, variant) for number, (family, variant) in enumerate(self._every())]
        return [variant for family in self._promising() for variant in family.seeds] + [variant for _, _, variant in sorted(rated)]

    def _every(self) -> Iterable[tuple[_Family, Variant]]:
        return ((family, variant) for family in self.families.values() for variant in family.ranked)

    def _promising(self) -> list[_Family]:
        """Families that could win by their predictions, best first."""
        offered = sorted((family for family in self.families.values() if family.ranked), key=lambda family: family.best_predicted)
        return [family for family in offered if family.best_predicted <= HOPELESS * offered[0].best_predicted]

    def _first(self, budget: int) -> list[Variant]:
        return self._first_round(budget) if self.sampler == "tpe" else self._all_by_cost()

    def _first_round(self, budget: int) -> list[Variant]:
        promising = self._promising()
        share = max(1, budget // (2 * len(promising))) if len(promising) > 1 else budget
        first, *others = (family.head()[:share] for family in promising)
        few = [variant for head in others for variant in head[:OTHERS]]  # soon, so that their times are there when the opening is over
        hopeless = [family for family in self.families.values() if family.ranked and family not in promising]
        lost = LOST * promising[0].best_predicted
        return [*first[:2], *few, *first[2:], *(family.ranked[0] for family in hopeless if family.best_predicted <= lost)]

    def _adapted(self, variants: Sequence[Variant]) -> list[Variant]:
        """Those of the families on offer, as they are for this problem, each once; without what is not feasible here."""
        known = [each for each in variants if each.family in self.families]
        adapted = dict.fromkeys(self.families[each.family].bound.adapted(each) for each in known)
        return [each for each in adapted if each is not None and each in self.families[each.family].predicted]

    def _from(self, start: Sequence[Variant], budget: int) -> list[Variant]:
        """A first round that begins with all of `start`: what won nearby is a better guess than what would take its place."""
        return [*start, *self.families[start[0].family].head()][: max(len(start), budget // 2)]

    def _by_promise(self) -> list[_Family]:
        """Best measured first; a family whose results are not in yet counts by its prediction.

        What won nearby goes before both, what has only failed comes last.
        """

        def promise(family: _Family) -> tuple[bool, bool, float]:
            begun = family.bound.space.family in self._begun_with
            return family.fails, not begun, family.best_predicted if family.best_measured is None else family.best_measured

        return sorted((family for family in self.families.values() if family.ranked), key=promise)


class _Family:
    """The part of a search inside one family, with an Optuna study of its own: its parameters and their ranges never change."""

    def __init__(self, bound: BoundSpace, seed: int, cost: Cost, known: Sequence[float]) -> None:
        self.bound = bound
        feasible = bound.feasible()
        offered = set(feasible)
        if len(known) == len(feasible):
            self.predicted = dict(zip(feasible, known, strict=True))
        else:
            self.predicted = {variant: cost(bound, variant) for variant in bound.walked() if variant in offered}
        self.ranked = sorted(feasible, key=self.predicted.__getitem__)  # stable: ties stay in canonical order
        self.best_measured: float | None = None
        self._seed = seed
        self._asks = 0
        self._results: dict[Variant, Trial] = {}
        self._study: optuna.Study | None = None
        self._running: dict[Variant, list[optuna.Trial]] = {}
        self.seeds = [variant for variant in bound.seeds() if variant in self.predicted]
        self._head = deque(self.head())

    @property
    def best_predicted(self) -> float:
        return self.predicted[self.ranked[0]]

    @property
    def fails(self) -> bool:
        """Whether there are several results, and none is a time."""
        return len(self._results) >= FAILURES and self.best_measured is None

    @cached_property
    def ordinals(self) -> dict[Variant, tuple[int, ...]]:
        return self.bound.steps(self.ranked)

    def head(self) -> list[Variant]:
        """Seeds, then the cost model's best."""
        return list(dict.fromkeys([*self.seeds, *self.ranked[:COST_BEST]]))

    def take_asks(self) -> int:
        asks, self._asks = self._asks, 0
        return asks

    def tell(self, trial: Trial) -> None:
        self._results[trial.variant] = trial
        if trial.outcome is Outcome.OK and trial.measurement is not None:
            median = trial.measurement.median_us
            self.best_measured = median if self.best_measured is None else min(self.best_measured, median)
        if self._study is not None:
            running = self._running.pop(trial.variant, None) or [self._enqueued(self._study, trial.variant)]
            for asked in running:
                self._report(asked, trial)

    def next(self, known: dict[Variant, Trial], pending: set[Variant], climbing: bool) -> Variant | None:
        while self._head:
            variant = self._head.popleft()
            if variant not in known and variant not in pending:
                self._asks += 1
                return variant
        if all(variant in known or variant in pending for variant in self.ranked):
            return None
        found = next(self.beside_the_best(known, pending), None) if climbing else None
        if found is None:
            return self._sampled(known, pending)
        self._asks += 1
        return found

    def beside_the_best(self, known: dict[Variant, Trial], pending: set[Variant]) -> Iterator[Variant]:
        """Unseen feasible variants that differ in one parameter from one of the best; the best one's first, nearest values first."""
        timed = [(trial.measurement.median_us, str(variant), variant) for variant, trial in self._results.items() if trial.measurement]
        for _, _, centre in sorted(timed)[:CLIMB_FROM]:
            at = self.ordinals[centre]
            beside = (
                (abs(place - at[index]), number)
                for index, places in enumerate(self._offered)
                for place in places
                if place != at[index]
                for number in self._numbers.get((*at[:index], place, *at[index + 1 :]), ())
            )
            for _, number in sorted(beside):
                if self.ranked[number] not in known and self.ranked[number] not in pending:
                    yield self.ranked[number]

    @cached_property
    def _numbers(self) -> dict[tuple[int, ...], list[int]]:
        """Places in the ranking by ordinals, which several variants may share."""
        numbers: dict[tuple[int, ...], list[int]] = {}
        for number, variant in enumerate(self.ranked):
            numbers.setdefault(self.ordinals[variant], []).append(number)
        return numbers

    @cached_property
    def _offered(self) -> list[set[int]]:
        """Of each ordinal: the values that occur."""
        return [set(values) for values in zip(*self.ordinals.values(), strict=True)]

    def _sampled(self, known: dict[Variant, Trial], pending: set[Variant]) -> Variant:
        """A new variant by the sampler's wish, or the unseen neighbour of what it keeps asking for."""
        study = self._started()
        variant = self.ranked[0]
        for _ in range(MAX_ASKS):
            self._asks += 1
            asked = study.ask()
            variant = self.bound.suggest(asked)
            violations = self.bound.violations(variant)
            if any(violations.values()):
                _constrain(asked, violations)
                _tell(study, asked, None)  # PRUNED: a trial told as failed teaches the sampler nothing
            elif variant in known:
                self._report(asked, known[variant])
            elif variant in pending:
                self._running.setdefault(variant, []).append(asked)
            else:
                self._running[variant] = [asked]
                return variant
        found = self._neighbour(variant, known, pending)
        self._running[found] = [self._enqueued(study, found)]
        return found

    def _neighbour(self, wish: Variant, known: dict[Variant, Trial], pending: set[Variant]) -> Variant:
        """The unseen feasible variant with the least steps from `wish`; ties go to the cost model."""
        centre = tuple(self.bound.ordinals(wish).values())

        def steps(variant: Variant) -> int:
            return sum(abs(left - right) for left, right in zip(self.ordinals[variant], centre, strict=True))

        return min((variant for variant in self.ranked if variant not in known and variant not in pending), key=steps)

    def _started(self) -> optuna.Study:
        """The study, begun with all results so far."""
        if self._study is None:
            import optuna

            optuna.logging.set_verbosity(optuna.logging.WARNING)
            self._study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=self._seed))
            for variant, trial in self._results.items():
                self._report(self._enqueued(self._study, variant), trial)
        return self._study

    def _enqueued(self, study: optuna.Study, variant: Variant) -> optuna.Trial:
        study.enqueue_trial(dict(self.bound.ordinals(variant)))
        asked = study.ask()
        self.bound.suggest(asked)
        return asked

    def _report(self, asked: optuna.Trial, trial: Trial) -> None:
        assert self._study is not None
        violations = self.bound.violations(trial.variant)
        if trial.report is not None:
            violations |= self.bound.compiled_violations(trial.variant, trial.report)
        ok = trial.outcome is Outcome.OK and trial.measurement is not None
        _constrain(asked, violations | {"runs": 0.0 if ok or any(violations.values()) else 1.0})
        _tell(self._study, asked, trial.measurement.median_us if ok and trial.measurement else None)


def _constrain(asked: optuna.Trial, violations: dict[str, float]) -> None:
    for name, amount in violations.items():
        asked.set_constraint(name, amount)


def _tell(study: optuna.Study, asked: optuna.Trial, value: float | None) -> None:
    import optuna

    if value is None:
        study.tell(asked, state=optuna.trial.TrialState.PRUNED)
    else:
        study.tell(asked, value)
