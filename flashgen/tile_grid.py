"""The grid of tiles: one family's shapes on one problem and device, and the cell of every tile at a capacity of shared memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from flashgen import cost, limits, shapes
from flashgen.model import CompileReport, Problem, Resources, Variant
from flashgen.shapes import Shape, Shapes
from flashgen.space import BoundSpace

KIB = 1024
LARGEST_CAPACITY = 256 * KIB
"""Up to here the report's slider goes."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One tile of one family at one capacity: its fastest feasible variant, or the one nearest to feasible and what it violates."""

    family: str
    capacity_bytes: int
    block_q: int
    block_kv: int
    num_stages: int
    variant: Variant
    feasible: bool
    violation: float  # sum over the constraints, as the search tells Optuna; 0.0 when feasible
    reasons: tuple[str, ...]
    shared_bytes: int
    shared_parts: tuple[tuple[str, int], ...]
    registers: int
    registers_from: str  # estimate or compiler
    threads: int
    ctas_per_sm: int
    occupancy_limit: str
    waves: float
    dram_bytes: int
    l2_bytes: int
    shared_traffic_bytes: int
    predicted_us: float | None
    limit: str  # a key of limits.NAMES
    measured_us: float | None = None


@dataclass(frozen=True, slots=True)
class Best:
    """The fastest of a shape's twins on a problem, with a number of CTAs resident per SM."""

    variant: Variant
    prediction: cost.Prediction
    traffic: cost.Traffic
    limit: str
    shared_traffic_bytes: int


class Family:
    """One family's shapes on one problem and device, with every prediction remembered."""

    def __init__(self, bound: BoundSpace, reports: Mapping[Variant, CompileReport], known: Shapes | None = None) -> None:
        """`reports` holds what the compiler said about variants, where it is known; `known` the shapes of the same space."""
        self.bound = bound
        self.shapes = known or Shapes(bound)
        self.reports = reports
        self._best: dict[tuple[Variant, int, int], Best] = {}
        self._bounds: dict[tuple[int, int], BoundSpace] = {}
        self._feasible: dict[tuple[int, int], list[Shape]] = {}
        self._fits: dict[tuple[int, int], frozenset[Shape]] = {}
        self._least: dict[Variant, int] = {}
        self._taken: dict[Variant, Resources] = {}

    @property
    def name(self) -> str:
        """The family."""
        return self.bound.space.family

    def at(self, length: int, capacity: int | None = None) -> BoundSpace:
        """The space at another length and capacity."""
        wanted = self.bound.device.shared_bytes_per_cta if capacity is None else capacity
        key = (length, wanted)
        if key not in self._bounds:
            device = shapes.with_capacity(self.bound.device, wanted)
            self._bounds[key] = self.bound.space.bind(with_length(self.bound.problem, length), device)
        return self._bounds[key]

    def fitting(self, length: int, capacity: int | None = None) -> list[Shape]:
        """Shapes that violate nothing at a length and capacity, in the order of enumeration."""
        bound = self.at(length, capacity)
        key = (length, bound.device.shared_bytes_per_cta)
        if key not in self._feasible:
            self._feasible[key] = [shape for shape in self.shapes.all if not any(bound.violations(shape.first).values())]
        return self._feasible[key]

    def least_capacity(self, shape: Shape, length: int) -> int | None:
        """The smallest capacity in whole KiB, up to LARGEST_CAPACITY, at which a shape violates nothing; None when there is none."""
        if shape not in self._roomy(length):
            return None
        low, high = 0, LARGEST_CAPACITY // KIB  # infeasible, feasible: a larger capacity never hurts
        near = self._least.get(shape.first, 0)  # most often the same as at another length
        if 1 < near < high and self._fits_at(shape, length, near):
            low, high = (near - 1, near) if not self._fits_at(shape, length, near - 1) else (low, near - 1)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._fits_at(shape, length, middle) else (middle, high)
        self._least[shape.first] = high
        return high * KIB

    def _fits_at(self, shape: Shape, length: int, kib: int) -> bool:
        return not any(self.at(length, kib * KIB).violations(shape.first).values())

    def _roomy(self, length: int) -> frozenset[Shape]:
        key = (length, LARGEST_CAPACITY)
        if key not in self._fits:
            self._fits[key] = frozenset(self.fitting(*key))
        return self._fits[key]

    def taken(self, shape: Shape, capacity: int | None = None) -> Resources:
        """What one CTA takes, and how many are resident at a capacity."""
        if shape.first not in self._taken:
            self._taken[shape.first] = cost.resources(self.bound, shape.first, self.report(shape))
        known, report = self._taken[shape.first], self.report(shape)
        device = self.bound.device if capacity is None else shapes.with_capacity(self.bound.device, capacity)
        static = report.static_shared_bytes if report else 0
        ctas, limit = cost.occupancy(device, known.threads, known.est_registers, known.shared_bytes + static)
        return replace(known, ctas_per_sm=ctas, limit=limit)

    def report(self, shape: Shape) -> CompileReport | None:
        """What the compiler said about one of the twins."""
        return next((self.reports[each] for each in shape.twins if each in self.reports), None)

    def resident_by_the_rest(self, shape: Shape) -> int:
        """CTAs per SM if shared memory did not bind: what registers, threads and slots allow."""
        taken = self.taken(shape)
        return cost.occupancy(self.bound.device, taken.threads, taken.est_registers, 0)[0]

    def best(self, shape: Shape, length: int, resident: int) -> Best:
        """The fastest twin with `resident` CTAs per SM."""
        key = (shape.first, length, resident)
        if key not in self._best:
            self._best[key] = self._predict(shape, length, resident)
        return self._best[key]

    def _predict(self, shape: Shape, length: int, resident: int) -> Best:
        known = self.at(length)
        device = shapes.with_resident(known.device, self.taken(shape).shared_bytes, resident)
        bound = known.space.bind(known.problem, device)
        twins = [(cost.predict(bound, twin, self.reports.get(twin, self.report(shape))), twin) for twin in shape.twins]
        prediction, variant = min(twins, key=lambda each: each[0].us)
        moved = cost.traffic(bound, variant, resident)
        shared_us = dict(prediction.parts).get("shared", 0.0)
        shared_bytes = int(shared_us * device.clock_mhz * cost.SHARED_BYTES_PER_CLOCK * device.sm_count)
        return Best(variant, prediction, moved, limits.binding(bound, variant, prediction), shared_bytes)


def with_length(problem: Problem, length: int) -> Problem:
    """The problem at another length; where queries and keys differ, only the keys' changes."""
    return replace(problem, seqlen_q=length if problem.seqlen_q == problem.seqlen_kv else problem.seqlen_q, seqlen_kv=length)


# Cells ----------------------------------------------------------------------------------------------------------------


def cells_of(family: Family, problem: Problem, capacity: int, times: Mapping[Variant, float]) -> list[Cell]:
    """One cell per tile, in the order of the grid."""
    by_tile: dict[tuple[int, int, int], list[Shape]] = {}
    for shape in family.shapes.all:
        by_tile.setdefault(shape.cell, []).append(shape)
    fitting = set(family.fitting(problem.seqlen_kv, capacity))
    return [_cell(family, problem, capacity, by_tile[tile], fitting, times) for tile in sorted(by_tile)]


def _cell(
    family: Family, problem: Problem, capacity: int, candidates: Sequence[Shape], fitting: set[Shape], times: Mapping[Variant, float]
) -> Cell:
    length, bound = problem.seqlen_kv, family.at(problem.seqlen_kv, capacity)
    takes = {shape: family.taken(shape, capacity) for shape in candidates if shape in fitting}
    runs = [(family.best(shape, length, taken.ctas_per_sm), shape) for shape, taken in takes.items() if taken.ctas_per_sm]
    violation = 0.0
    if runs:
        best, shape = min(runs, key=lambda run: run[0].prediction.us)
    else:
        violations = {shape: sum(bound.violations(shape.first).values()) for shape in candidates}
        shape = min(candidates, key=lambda each: violations[each])
        violation, best = violations[shape], family.best(shape, length, max(1, family.taken(shape, capacity).ctas_per_sm))
    taken = family.taken(shape, capacity)
    reasons = () if runs else tuple(bound.explain(shape.first)) or (f"not even one CTA fits an SM: {taken.limit}",)
    return Cell(
        family=family.name, capacity_bytes=capacity, block_q=shape.cell[0], block_kv=shape.cell[1], num_stages=shape.cell[2],
        variant=best.variant, feasible=bool(runs), violation=violation, reasons=reasons, shared_bytes=taken.shared_bytes,
        shared_parts=shared_parts(bound, shape.first), registers=taken.est_registers,
        registers_from="compiler" if family.report(shape) else "estimate", threads=taken.threads, ctas_per_sm=taken.ctas_per_sm,
        occupancy_limit=taken.limit, waves=best.prediction.waves, dram_bytes=best.traffic.dram_bytes, l2_bytes=best.traffic.l2_bytes,
        shared_traffic_bytes=best.shared_traffic_bytes, predicted_us=best.prediction.us if runs else None,
        limit=best.limit if runs else "capacity", measured_us=_measured(shape, times) if runs else None,
    )  # fmt: skip


def _measured(shape: Shape, times: Mapping[Variant, float]) -> float | None:
    """The shortest measured time of a shape's twins."""
    return min((times[each] for each in shape.twins if each in times), default=None)


def shared_parts(bound: BoundSpace, variant: Variant) -> tuple[tuple[str, int], ...]:
    """Named parts of the dynamic shared memory: the space's list, else every derived `…_bytes` that the total reads."""
    definition, at = bound.space.definition, bound.names(variant)
    names = definition.shared_parts or tuple(
        name for name in definition.derived
        if name in definition.derived["shared_bytes"].names and name.endswith("_bytes") and name in at
    )  # fmt: skip
    return tuple((name, int(at[name])) for name in names) or (("shared_bytes", int(at["shared_bytes"])),)
