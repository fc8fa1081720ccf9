"""First contact of a family on trial (tests/candidates) with a GPU: certificates, then times beside other libraries, in one process.

    python tests/device/trial.py OUT.json [VARIANTS] [HEAD_DIM …]

For each head dim and mask: the seeds and a random sample of VARIANTS feasible variants are compiled side by side, the seeds run the whole
suite, and everything exact is timed interleaved with the peers that are installed. Nothing is written to a table.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from flashgen import bench, certify, paths
from flashgen.compiler import compile_many
from flashgen.cubins import Compiled
from flashgen.errors import FlashgenError
from flashgen.model import DType, Mask, Problem, Source, Verdict
from flashgen.render import render
from flashgen.runtime import present_limits
from flashgen.space import load_space

CANDIDATES = Path(__file__).resolve().parents[1] / "candidates"
FAMILY = "hopper_forward"
HEAD_DIMS = (128, 64, 256)
MASKS = (Mask(), Mask.causal())
LENGTHS = (512, 4096, 16384)
PEERS = ("sdpa-cudnn", "fa3", "fa4")
ROUNDS, TIMED = 8, 12


def with_candidates(root: Path) -> None:
    """Let this process see templates and spaces as they would be if the candidates were families."""
    for name in ("templates", "search_spaces"):
        shutil.copytree(getattr(paths, name)(), root / name)
        shutil.copytree(CANDIDATES / name, root / name, dirs_exist_ok=True)
        setattr(paths, name, lambda folder=root / name: folder)


def problem_of(head_dim: int, seqlen: int, mask: Mask) -> Problem:
    heads = 2048 // head_dim
    return Problem(DType.BFLOAT16, head_dim, head_dim, 16384 // seqlen, heads, heads, seqlen, seqlen, mask)


def built(state: bench.MeasuringState, problem: Problem, count: int) -> list[tuple[Source, Compiled]]:
    """Seeds first, then a sample; what does not compile or spills too much is reported and left out."""
    space = load_space(FAMILY)
    bound = space.bind(problem, present_limits(state.gpu))
    feasible = bound.feasible()
    chosen = dict.fromkeys([*bound.seeds(), *random.Random(1).sample(feasible, min(count, len(feasible)))])
    sources = [render(space, problem.klass(), variant) for variant in chosen]
    started, kept = time.perf_counter(), []
    for source, found in zip(sources, compile_many(sources, sm=state.gpu.sm), strict=True):
        if isinstance(found, FlashgenError):
            print(f"  {source.variant}: {str(found)[:200]}", flush=True)
        elif not any(bound.compiled_violations(source.variant, found.report).values()):
            kept.append((source, found))
    print(f"  {len(kept)} of {len(sources)} kept, compiled in {time.perf_counter() - started:.1f} s", flush=True)
    return kept


def certified(state: bench.MeasuringState, problem: Problem, kernels: list[tuple[Source, Compiled]]) -> list[tuple[Source, Compiled]]:
    """Those that pass the quick suite; the first few must pass the whole one."""
    exact = []
    for number, (source, compiled) in enumerate(kernels):
        suite = certify.full if number < 3 else certify.quick
        try:
            state.executor.load(source, compiled)
            found = suite(state.executor, load_space(FAMILY), source, problem, 1)
        except FlashgenError as error:
            print(f"  {source.variant}: {str(error)[:300]}", flush=True)
            raise
        if found.verdict is Verdict.EXACT:
            exact.append((source, compiled))
        else:
            print(f"  inexact {source.variant}: {found.failure[:300]}", flush=True)
    print(f"  exact: {len(exact)} of {len(kernels)}", flush=True)
    return exact


def main(out: Path, count: int, head_dims: tuple[int, ...]) -> None:
    with_candidates(Path(tempfile.mkdtemp()))
    state, rows = bench.open_device(0), list[dict[str, Any]]()
    for head_dim in head_dims:
        for mask in MASKS:
            print(f"d{head_dim} {mask}", flush=True)
            kernels = certified(state, problem_of(head_dim, 1024, mask), built(state, problem_of(head_dim, 4096, mask), count))
            for seqlen in LENGTHS:
                problem = problem_of(head_dim, seqlen, mask)
                first = bench.interleave_task(state, [(str(s.variant), s, c) for s, c in kernels], problem, 2, 1)
                kernels.sort(key=lambda each: min(first.samples[str(each[0].variant)]))
                found = bench.interleave_task(state, [(str(s.variant), s, c) for s, c in kernels[:TIMED]], problem, ROUNDS, 2, PEERS)
                times = {name: sorted(values)[len(values) // 2] for name, values in found.samples.items()}
                best = min((name for name in times if name not in PEERS), key=times.__getitem__)
                ratios = ", ".join(f"{peer} {times[peer] / times[best]:.3f}" for peer in PEERS if peer in times)
                print(f"  s{seqlen}: {found.measurement(best, problem).tflops:.0f} TFLOP/s, {ratios}, {best}", flush=True)
                rows.append({"problem": str(problem), "samples_us": found.samples, "clock_mhz": found.clock_mhz})
            out.write_text(json.dumps(rows))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int((sys.argv[2:] or ["20"])[0]), tuple(map(int, sys.argv[3:])) or HEAD_DIMS)
