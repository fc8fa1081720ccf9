"""Which table entry serves a problem: `table.lookup` with search spaces and cost model as judges of what was tuned for another shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

from flashgen import table
from flashgen.cost import roofline_us
from flashgen.errors import EmptySpace, InfeasibleVariant, InvalidSpace, UnsupportedProblem
from flashgen.model import DeviceLimits, Op, Problem, TableEntry, Variant
from flashgen.space import BoundSpace, load_space, load_spaces

DRIFT = 1.1  # of the model's error from one shape to a near one

Refuse = Callable[[TableEntry], str | None]


def look_up(problem: Problem, device: DeviceLimits, tables: Sequence[table.Table], refuse: Refuse = lambda _: None) -> table.Lookup:
    """`table.lookup` by the constraints of the entries' spaces and the cost model; what `refuse` gives a reason against is passed over."""
    judged = refusal(problem, device)
    return table.lookup(problem, device, tables, lambda entry: refuse(entry) or judged(entry), expectation(problem, device))


def refusal(problem: Problem, device: DeviceLimits) -> Callable[[TableEntry], str | None]:
    """The `refuse` of `table.lookup`: why an entry must not serve `problem` on `device`.

    Its variant cannot compute the problem, or it was tuned for another shape and is predicted to take longer than the fallback.
    """

    def refuse(entry: TableEntry) -> str | None:
        try:
            bound = load_space(entry.variant.family).bind(problem, device)
            variant = bound.variant(entry.variant.as_dict())
            reasons = bound.explain(variant)
        except (InfeasibleVariant, InvalidSpace, UnsupportedProblem) as refused:
            return str(refused)
        if reasons:
            return "; ".join(reasons)
        return None if table.full_key(entry.problem) == table.full_key(problem) else slower_than_fallback(bound, variant, entry)

    return refuse


def slower_than_fallback(bound: BoundSpace, variant: Variant, entry: TableEntry) -> str | None:
    """Why the cost model would rather run the fallback than the variant of a near match, or None.

    A measured entry's variant beat the fallback. If the model says otherwise of that problem, it errs, and may err `DRIFT` more here.
    """
    expected, other = roofline_us(bound, variant), _fallback_us(bound.problem, bound.device)
    if other is None or expected <= other * max(1.0, _known_error(entry, bound.device)):
        return None
    return f"a near match, but predicted to take {expected:.1f} µs here against {other:.1f} µs of the fallback"


def _known_error(entry: TableEntry, device: DeviceLimits) -> float:
    """How many times as long as the fallback the model expects a measured winner to take for its own problem."""
    fallback_us = _fallback_us(entry.problem, device) if entry.measurement.source == "measured" else None
    if fallback_us is None:
        return 1.0
    try:
        bound = load_space(entry.variant.family).bind(entry.problem, device)
        return DRIFT * roofline_us(bound, bound.variant(entry.variant.as_dict())) / fallback_us
    except (InfeasibleVariant, InvalidSpace, UnsupportedProblem):  # by another device's limits
        return 1.0


def expectation(problem: Problem, device: DeviceLimits) -> Callable[[TableEntry], float | None]:
    """The `expect` of `table.lookup`: predicted µs of an entry's variant; None where the model is no judge.

    It orders good variants of the forward pass well enough, not those of the backward pass.
    """

    def expect(entry: TableEntry) -> float | None:
        if problem.op is not Op.FORWARD or not (problem.batch and problem.seqlen_q and problem.seqlen_kv):
            return None
        try:
            bound = load_space(entry.variant.family).bind(problem, device)
            return roofline_us(bound, bound.variant(entry.variant.as_dict()))
        except (InfeasibleVariant, InvalidSpace, UnsupportedProblem):
            return None

    return expect


@lru_cache(maxsize=1024)
def _fallback_us(problem: Problem, device: DeviceLimits) -> float | None:
    """Predicted time of the fallback that serves the problem untuned; None where no family has one."""
    bounds = [space.bind(problem, device) for space in load_spaces(problem.op) if space.unsupported(problem, device) is None]
    fallback = fallback_of(bounds)
    return next((roofline_us(bound, fallback) for bound in bounds if fallback and bound.space.family == fallback.family), None)


def fallback_of(bounds: Sequence[BoundSpace]) -> Variant | None:
    """The fallback variant that serves the problem untuned: of all families' the one with the least predicted time."""
    found: list[tuple[float, str, Variant]] = []
    for bound in bounds:
        try:
            variant = bound.fallback()
        except EmptySpace:
            continue
        found.append((roofline_us(bound, variant), bound.space.family, variant))
    return min(found)[2] if found else None
