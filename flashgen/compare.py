"""Two kernels on the same inputs: how far apart their outputs are, in ulp. Two exact kernels may differ in last bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashgen import cases, reference, suite
from flashgen.cases import Inputs
from flashgen.certify import TileSizes, expect, launch, tiles_of
from flashgen.errors import InvalidProblem, UnsupportedProblem
from flashgen.model import Executor, Op, Source
from flashgen.suite import Case


@dataclass(frozen=True, slots=True)
class UlpHistogram:
    """Distances in ulp between the outputs of two kernels on the same inputs: (lowest, highest, elements) per bucket."""

    buckets: tuple[tuple[int, int, int], ...]
    largest: int
    where: str
    repeats: tuple[bool, bool]  # whether each kernel repeats its own bits

    def lines(self) -> list[str]:
        """One line per bucket, for people."""
        total = sum(count for _, _, count in self.buckets)
        named = [f"{low}" if low == high else f"{low}-{high}" for low, high, _ in self.buckets]
        return [f"{name:>12} ulp  {count:>10}  {count / total:8.4%}" for name, (_, _, count) in zip(named, self.buckets, strict=True)]


def against(executor: Executor, space: TileSizes, source: Source, other: Source, seed: int) -> UlpHistogram:
    """Run both sources, of one problem class, on the bounded cases of the first one's suite and compare outputs in ulp."""
    if source.klass != other.klass:
        raise InvalidProblem(f"Only kernels of one problem class can be compared; got {source.klass} and {other.klass}.")
    if source.klass.op is not Op.FORWARD:
        raise UnsupportedProblem(f"Kernels are compared by o and lse, so op must be forward; got {source.klass.op}. Certify each of them.")
    distances, largest, where, repeats = list[NDArray[np.int64]](), -1, "", [True, True]
    for case in suite.full_suite(source.klass, tiles_of(space, source)):
        inputs = expect(case, seed).inputs
        runs = [[_outputs(executor, one, case, inputs) for _ in range(2)] for one in (source, other)]
        repeats = [same and bool((first == second).all()) for same, (first, second) in zip(repeats, runs, strict=True)]
        distance = reference.ulp_distance(_as_elements(runs[0][0], case), _as_elements(runs[1][0], case), case.problem.dtype).ravel()
        distances.append(distance)
        if distance.max(initial=-1) > largest:
            largest, where = int(distance.max()), case.name
    return UlpHistogram(buckets(np.concatenate(distances)), max(largest, 0), where, (repeats[0], repeats[1]))


def _outputs(executor: Executor, source: Source, case: Case, inputs: Inputs) -> NDArray[Any]:
    tensors, _ = launch(executor, source, case.problem, inputs, case.layout, case.scale)
    return cases.bits_of(tensors.o.view())


def _as_elements(bits: NDArray[Any], case: Case) -> NDArray[Any]:
    return bits.view(reference.storage(case.problem.dtype))


def buckets(distances: NDArray[np.int64]) -> tuple[tuple[int, int, int], ...]:
    """0, 1, then powers of two."""
    edges = [(0, 0), (1, 1)]
    while edges[-1][1] < distances.max(initial=0):
        edges.append((edges[-1][1] + 1, edges[-1][1] * 2))
    return tuple((low, high, int(((distances >= low) & (distances <= high)).sum())) for low, high in edges)
