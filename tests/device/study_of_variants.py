"""Records the times of random variants of a family at many problems: what the cost model is judged by.

    python tests/device/study_of_variants.py FOLDER FAMILY COUNT [HEAD_DIM …] [--seconds N]

COUNT feasible variants per head dim and mask, drawn blindly, are compiled side by side before anything is timed. At each length they are
timed interleaved, in random order, with a cold L2, on random data. FOLDER gets `variants-FAMILY.json`, written after every problem, and the
family's space as it is; `tests/test_cost_recorded.py` reads both. The record names drawn variants that were not timed, and why; with
`--seconds` also the problems that the time did not reach.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashgen import bench, compiler, device, paths
from flashgen.cubins import Compiled
from flashgen.errors import FlashgenError
from flashgen.model import DeviceLimits, DType, Mask, Problem, Source, Variant
from flashgen.render import render
from flashgen.space import BoundSpace, load_space

HEAD_DIMS = (64, 80, 96, 128, 192, 256)
MASKS = (Mask(), Mask.causal())
LENGTHS = (1024, 4096)
ROUNDS = 5


@dataclass(frozen=True)
class Drawn:
    """Variants of one head dim and mask: those to be timed at every length, and why the others are not."""

    sources: list[tuple[Source, Compiled]]
    left_out: dict[str, str]


def problem_of(head_dim: int, seqlen: int, mask: Mask) -> Problem:
    """16384 tokens of hidden size 2048, or just below."""
    heads = 2048 // head_dim
    return Problem(DType.BFLOAT16, head_dim, head_dim, 16384 // seqlen, heads, heads, seqlen, seqlen, mask)


def drawn_variants(family: str, classes: list[tuple[int, Mask]], limits: DeviceLimits, count: int) -> list[Drawn]:
    """COUNT variants per head dim and mask that are feasible at the shortest length, and so at all; compiled together."""
    bounds = [load_space(family).bind(problem_of(head_dim, min(LENGTHS), mask), limits) for head_dim, mask in classes]
    chosen = [_blindly(bound, count) for bound in bounds]
    sources = [[render(bound.space, bound.problem.klass(), each) for each in some] for bound, some in zip(bounds, chosen, strict=True)]
    results = iter(compiler.compile_many([source for some in sources for source in some], sm=limits.sm))
    return [_sorted_out(bound, [(source, next(results)) for source in some]) for bound, some in zip(bounds, sources, strict=True)]


def _blindly(bound: BoundSpace, count: int) -> list[Variant]:
    feasible = bound.feasible()
    return random.Random(str(bound.problem)).sample(feasible, min(count, len(feasible)))


def _sorted_out(bound: BoundSpace, built: list[tuple[Source, Compiled | FlashgenError]]) -> Drawn:
    sources, left_out = list[tuple[Source, Compiled]](), dict[str, str]()
    for source, found in built:
        if isinstance(found, Compiled):
            broken = [name for name, by in bound.compiled_violations(source.variant, found.report).items() if by]
            if not broken:
                sources.append((source, found))
                continue
            left_out[str(source.variant)] = ", ".join(broken)
        else:
            left_out[str(source.variant)] = str(found)
    return Drawn(sources, left_out)


def row_of(state: bench.MeasuringState, problem: Problem, drawn: Drawn) -> dict[str, Any]:
    """The times of all variants at one problem."""
    finalists = [(str(source.variant), source, compiled) for source, compiled in drawn.sources]
    found = bench.interleave_task(state, finalists, problem, ROUNDS, 1)
    variants = [
        {
            "params": [int(value) for _, value in source.variant.params],
            "registers": compiled.report.registers,
            "spill_bytes": compiled.report.spill_bytes,
            "static_shared_bytes": compiled.report.static_shared_bytes,
            "samples_us": [round(value, 1) for value in found.samples[str(source.variant)]],
        }
        for source, compiled in drawn.sources
    ]
    return {
        "head_dim": problem.head_dim, "seqlen": problem.seqlen_q, "batch": problem.batch, "heads": problem.heads_q,
        "mask": str(problem.mask.kind), "clock_mhz": found.clock_mhz, "throttle": found.throttle, "left_out": drawn.left_out,
        "variants": variants,
    }  # fmt: skip


def write(path: Path, record: dict[str, Any]) -> None:
    """All or nothing, so that a run that is stopped leaves a record that can be read."""
    beside = path.with_suffix(".partial")
    beside.write_text(json.dumps(record, separators=(",", ":")))
    beside.replace(path)


def main(folder: Path, family: str, count: int, head_dims: tuple[int, ...], seconds: float) -> None:
    """Draw, compile, time, and write after every problem."""
    started = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(paths.search_spaces() / f"{family}.yaml", folder / f"{family}.yaml")
    limits, state = device.present(), bench.open_device(0)
    names = [each.name for each in load_space(family).parameters]
    about = {"gpu": limits.name, "date": time.strftime("%Y-%m-%d"), "driver": state.telemetry.driver_version(), "rounds": ROUNDS}
    classes = [(head_dim, mask) for head_dim in head_dims for mask in MASKS]
    drawn = drawn_variants(family, classes, limits, count)
    print(f"{sum(len(each.sources) for each in drawn)} kernels after {time.monotonic() - started:.0f} s", flush=True)
    waiting = [
        (problem_of(head_dim, seqlen, mask), some) for (head_dim, mask), some in zip(classes, drawn, strict=True) for seqlen in LENGTHS
    ]
    record: dict[str, Any] = {"about": about, "family": family, "parameters": names, "rows": [], "not_reached": []}
    longest = 0.0
    while waiting and time.monotonic() - started + longest < seconds:
        begun, (problem, some) = time.monotonic(), waiting.pop(0)
        record["rows"].append(row_of(state, problem, some))
        record["not_reached"] = [str(each) for each, _ in waiting]
        write(folder / f"variants-{family}.json", record)
        longest = max(longest, time.monotonic() - begun)
        print(f"{time.monotonic() - started:.0f} s {problem}: {len(some.sources)} variants, {len(some.left_out)} left out", flush=True)
    if waiting:
        print(f"stopped after {seconds:g} s; not reached: {', '.join(record['not_reached'])}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("family")
    parser.add_argument("count", type=int)
    parser.add_argument("head_dims", type=int, nargs="*", default=HEAD_DIMS)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no problem that this time may not reach the end of")
    given = parser.parse_args()
    main(given.folder, given.family, given.count, tuple(given.head_dims), given.seconds)
