"""Records the times of random variants of a family at many problems: what the cost model is judged by.

    python tests/device/study_of_variants.py FOLDER FAMILY COUNT [HEAD_DIM …]

For each head dim, mask and length COUNT feasible variants, drawn blindly, are compiled side by side and timed interleaved, in random order,
with a cold L2, on random data. FOLDER gets `variants-FAMILY.json`, written after every problem, and the family's space as it is;
`tests/test_cost_recorded.py` reads both.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from flashgen import bench, device, paths
from flashgen.compiler import compile_many
from flashgen.cubins import Compiled
from flashgen.model import DeviceLimits, DType, Mask, Problem, Source
from flashgen.render import render
from flashgen.space import load_space

HEAD_DIMS = (64, 80, 96, 128, 192, 256)
MASKS = (Mask(), Mask.causal())
LENGTHS = (1024, 4096)
ROUNDS = 5


def problem_of(head_dim: int, seqlen: int, mask: Mask) -> Problem:
    heads = 2048 // head_dim
    return Problem(DType.BFLOAT16, head_dim, head_dim, 16384 // seqlen, heads, heads, seqlen, seqlen, mask)


def kernels(family: str, problem: Problem, limits: DeviceLimits, count: int) -> list[tuple[Source, Compiled]]:
    """A random sample that compiles and keeps the compiled constraints."""
    bound = load_space(family).bind(problem, limits)
    feasible = bound.feasible()
    chosen = random.Random(str(problem)).sample(feasible, min(count, len(feasible)))
    sources = [render(bound.space, problem.klass(), variant) for variant in chosen]
    built = zip(sources, compile_many(sources, sm=limits.sm), strict=True)
    compiled = [(source, found) for source, found in built if isinstance(found, Compiled)]
    return [(source, found) for source, found in compiled if not any(bound.compiled_violations(source.variant, found.report).values())]


def row_of(state: bench.MeasuringState, family: str, problem: Problem, limits: DeviceLimits, count: int) -> dict[str, Any]:
    sample = kernels(family, problem, limits, count)
    found = bench.interleave_task(state, [(str(source.variant), source, compiled) for source, compiled in sample], problem, ROUNDS, 1)
    variants = [
        {
            "params": [int(value) for _, value in source.variant.params],
            "registers": compiled.report.registers,
            "spill_bytes": compiled.report.spill_bytes,
            "samples_us": [round(value, 1) for value in found.samples[str(source.variant)]],
        }
        for source, compiled in sample
    ]
    return {
        "head_dim": problem.head_dim, "seqlen": problem.seqlen_q, "batch": problem.batch, "heads": problem.heads_q,
        "mask": str(problem.mask.kind), "clock_mhz": found.clock_mhz, "throttle": found.throttle, "variants": variants,
    }  # fmt: skip


def main(folder: Path, family: str, count: int, head_dims: tuple[int, ...]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(paths.search_spaces() / f"{family}.yaml", folder)
    limits, state, rows = device.present(), bench.open_device(0), list[dict[str, Any]]()
    names = [each.name for each in load_space(family).parameters]
    about = {"gpu": limits.name, "date": time.strftime("%Y-%m-%d"), "driver": state.telemetry.driver_version(), "rounds": ROUNDS}
    for head_dim in head_dims:
        for mask in MASKS:
            for seqlen in LENGTHS:
                rows.append(row_of(state, family, problem_of(head_dim, seqlen, mask), limits, count))
                print(f"{family} d{head_dim} {mask} s{seqlen}: {len(rows[-1]['variants'])} variants", flush=True)
                record = {"about": about, "family": family, "parameters": names, "rows": rows}
                (folder / f"variants-{family}.json").write_text(json.dumps(record, separators=(",", ":")))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), tuple(map(int, sys.argv[4:])) or HEAD_DIMS)
