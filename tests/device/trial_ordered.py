"""What equal bits cost: `hopper_backward` with sums in turn and with a loop of its own for dQ, beside the fast variants, in one process.

    python tests/device/trial_ordered.py OUT.json [HEAD_DIM …]

For each head dim and mask all seeds that compile are judged on a few cases; those that promise equal bits give them over 30 runs at every
timed size, or are reported. Then the fastest of each kind are timed in random order. A kernel that waits for a turn that never comes does
not end, so run this under a time limit.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

import trial_backward as trial
from backward_kernels import templates_with_candidates
from hopper_backward_kernels import hopper_space

from flashgen.model import Mask, Problem, Source

HEAD_DIMS, MASKS, LENGTHS = (64, 128), (Mask(), Mask.causal()), (512, 1024, 2048, 4096, 8192, 16384)
RUNS, KEPT, KINDS = 30, 2, ("any order", "ordered", "two loops")


def kind_of(source: Source) -> str:
    values = source.variant.as_dict()
    return "ordered" if values["ordered"] else "any order" if values["fused"] else "two loops"


def differing_runs(call: trial.Call, operands: trial.Operands) -> int:
    """Runs of 30 whose gradients are not those of the first, bit for bit."""
    kept = None
    different = 0
    for _ in range(RUNS):
        call()
        found = [operands.tensors[f"d{name}"].view(torch.int16) for name in "qkv"]
        if kept is None:
            kept = [each.clone() for each in found]
        different += not all(torch.equal(left, right) for left, right in zip(kept, found, strict=True))
    return different


def compared(device: trial.OnDevice, sources: list[Source], problem: Problem) -> dict[str, Any]:
    operands = trial.Operands(problem)
    expected: Any = operands.peers()["cudnn"]()
    calls, kinds = dict[str, trial.Call](), dict[str, str]()
    for source in sources:
        name, kind = str(source.variant), kind_of(source)
        call, _ = operands.bind(device, source)
        different = differing_runs(call, operands)
        distance = trial.wrong(operands, expected)
        if (kind != "any order" and different) or not distance < 0.012:
            print(f"  WRONG {kind}: {different} of {RUNS} runs differ, distance {distance:.4f}; {name}", flush=True)
            continue
        calls[name], kinds[name] = call, kind
    quick = trial.times_us(calls, 2, 3)
    ranked = sorted(calls, key=lambda name: min(quick[name]))
    best = [name for kind in KINDS for name in [each for each in ranked if kinds[each] == kind][:KEPT]]
    samples = trial.times_us({name: calls[name] for name in best}, trial.ROUNDS, trial.REPEATS)
    medians = {name: float(np.median(values)) for name, values in samples.items()}
    fast = min((medians[name] for name in best if kinds[name] == "any order"), default=float("nan"))
    print(f" s{problem.seqlen_q}: fastest in any order {fast:.0f} us", flush=True)
    for name in sorted(best, key=lambda name: medians[name]):
        print(f"  {kinds[name]} {medians[name]:.0f} us = {medians[name] / fast:.3f} x; {name}", flush=True)
    return {"problem": str(problem), "samples_us": samples, "quick_us": quick, "kinds": kinds}


def main(out: Path, head_dims: tuple[int, ...]) -> None:
    rows = list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as root, templates_with_candidates(Path(root)):
        device = trial.OnDevice(hopper_space())
        for head_dim in head_dims:
            for mask in MASKS:
                print(f"d{head_dim} {mask}", flush=True)
                sources = device.built(trial.problem_of(head_dim, 4096, mask), 0)
                sources.sort(key=lambda source: kind_of(source) != "ordered")  # judged on the most cases
                exact = device.judged(sources, trial.problem_of(head_dim, 512, mask))
                for seqlen in LENGTHS:
                    rows.append(compared(device, exact, trial.problem_of(head_dim, seqlen, mask)))
                    out.write_text(json.dumps(rows))
                    torch.cuda.empty_cache()


if __name__ == "__main__":
    started = time.perf_counter()
    main(Path(sys.argv[1]), tuple(map(int, sys.argv[2:])) or HEAD_DIMS)
    print(f"done in {time.perf_counter() - started:.0f} s")
