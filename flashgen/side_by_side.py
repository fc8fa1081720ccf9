"""Variants and the attention of other libraries timed side by side on the present GPU, in a child process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log
from typing import TYPE_CHECKING

from flashgen.model import DeviceLimits, Measurement, Problem, Variant

if TYPE_CHECKING:
    from flashgen.bench import Comparison
    from flashgen.timing import Ratio

DEADLINE_S = 300.0


@dataclass(frozen=True)
class SideBySide:
    """Interleaved times of variants and peers on one problem. Speed-ups are peer time over the first variant's time."""

    problem: Problem
    names: tuple[str, ...]
    measurements: dict[str, Measurement]
    speedups: dict[str, Ratio]
    missing: dict[str, str]

    def lines(self) -> list[str]:
        """One sentence per peer."""
        ours = self.names[0]
        found = [
            f"{name}: {self.measurements[name].median_us:.1f} µs, this entry {self.measurements[ours].median_us:.1f} µs: "
            f"{ratio.median:.3f}× as fast, 95 % within [{ratio.low:.3f}, {ratio.high:.3f}], {ratio.rounds} interleaved rounds"
            for name, ratio in self.speedups.items()
        ]
        return found + [f"{name}: not compared: {reason}" for name, reason in self.missing.items()]


def compare(
    problem: Problem, device: DeviceLimits, variants: Sequence[Variant], against: Sequence[str], rounds: int = 20, seed: int = 0
) -> SideBySide:
    """Compile, then time variants and peers side by side in a child process. Raises CompileError, LaunchError, WorkerLost."""
    from flashgen import bench
    from flashgen.compiler import architecture, compile_source
    from flashgen.render import render
    from flashgen.space import load_space
    from flashgen.worker import MeasuringChild

    sources = [render(load_space(variant.family), problem.klass(), variant) for variant in variants]
    kernels = [(str(source.variant), source, compile_source(source, architecture(source, device.sm))) for source in sources]
    names = tuple(name for name, _, _ in kernels)
    with MeasuringChild(bench.open_device, 0, deadline_s=DEADLINE_S) as child:
        found: Comparison = child.call(f"Timing {', '.join(names)}", bench.interleave_task, kernels, problem, rounds, seed, tuple(against))
    return SideBySide(
        problem,
        names,
        {name: found.measurement(name, problem) for name in found.samples},
        {peer: found.ratio(peer, names[0]) for peer in against if peer in found.samples},
        found.missing,
    )


def geomeans(found: Sequence[SideBySide]) -> dict[str, tuple[float, float, int]]:
    """Per peer: geometric mean and least of the speed-ups, and over how many problems."""
    peers = dict.fromkeys(name for each in found for name in each.speedups)
    means = {}
    for peer in peers:
        ratios = [each.speedups[peer].median for each in found if peer in each.speedups]
        means[peer] = (exp(sum(map(log, ratios)) / len(ratios)), min(ratios), len(ratios))
    return means
