"""Records how the ampere family compares with FlashAttention 2 (torch's SDPA flash backend), and how repeatable a tune is.

    python tests/device/study_against_fa2.py speed OUT.json [HEAD_DIM …]
        search at two lengths per head dim and mask, re-time the best eight at all
    python tests/device/study_against_fa2.py noise OUT.json [HEAD_DIM …]
        two independent tunes of six problems, their choices re-timed side by side

bf16, batch x seqlen = 16,384, hidden size 2,048. Kernels and peer run in one process, interleaved in random order with a cold L2.
The best of the eight is chosen by the even rounds and reported by the odd ones, so that choosing does not flatter the figure.
`tests/test_recorded.py` reads the recordings.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from flashgen import bench, device, search
from flashgen.compiler import compile_many
from flashgen.cubins import Compiled
from flashgen.model import DeviceLimits, DType, Mask, Outcome, Problem, Source, Variant
from flashgen.render import render
from flashgen.space import load_space

HEAD_DIMS = (64, 128, 256)
MASKS = (Mask(), Mask.causal())
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
SEARCHED = (1024, 8192)
ROUNDS, KEPT = 24, 8
PEER = "sdpa-flash"


def problem(head_dim: int, seqlen: int, mask: Mask) -> Problem:
    heads = 2048 // head_dim
    return Problem(DType.BFLOAT16, head_dim, head_dim, 16384 // seqlen, heads, heads, seqlen, seqlen, mask)


def tuned(each: Problem, limits: DeviceLimits, folder: Path, seed: int) -> search.TuneResult:
    return search.tune(each, limits, budget=60, seed=seed, fresh=True, table=folder / f"seed{seed}.yaml", families=["ampere_forward"])


def best(results: list[search.TuneResult]) -> list[Variant]:
    """The fastest of each search in turn, until there are enough."""
    ranked = []
    for result in results:
        timed = [
            (trial.measurement.median_us, str(trial.variant), trial.variant)
            for trial in result.trials
            if trial.outcome is Outcome.OK and trial.measurement
        ]
        ranked.append([variant for _, _, variant in sorted(timed)])
    merged = dict.fromkeys(variant for place in zip(*ranked, strict=False) for variant in place)
    return list(merged)[:KEPT]


def built(variants: list[Variant], each: Problem) -> list[tuple[str, Source, Compiled]]:
    sources = [render(load_space(variant.family), each.klass(), variant) for variant in variants]
    compiled = compile_many(sources, sm=90)
    return [
        (str(variant), source, found)
        for variant, source, found in zip(variants, sources, compiled, strict=True)
        if isinstance(found, Compiled)
    ]


def compared(state: bench.MeasuringState, variants: list[Variant], each: Problem, against: tuple[str, ...]) -> dict[str, Any]:
    found = bench.interleave_task(state, built(variants, each), each, ROUNDS, 1, against)
    samples = {name: [round(value, 2) for value in values] for name, values in found.samples.items()}
    digests = {str(variant): render(load_space(variant.family), each.klass(), variant).digest for variant in variants}
    return {
        "samples_us": samples,
        "clock_mhz": found.clock_mhz,
        "throttle": found.throttle,
        "missing": found.missing,
        "source_digests": digests,
    }


def described(each: Problem) -> dict[str, Any]:
    return {"head_dim": each.head_dim, "seqlen": each.seqlen_q, "batch": each.batch, "heads": each.heads_q, "mask": str(each.mask.kind)}


def speed(limits: DeviceLimits, folder: Path, head_dims: tuple[int, ...]) -> list[dict[str, Any]]:
    state, rows = bench.open_device(0), []
    for head_dim in head_dims:
        for mask in MASKS:
            started = time.perf_counter()
            results = [tuned(problem(head_dim, seqlen, mask), limits, folder, 1) for seqlen in SEARCHED]
            chosen = best(results)
            print(f"d{head_dim} {mask}: two searches in {time.perf_counter() - started:.0f} s", flush=True)
            for seqlen in LENGTHS:
                each = problem(head_dim, seqlen, mask)
                row = {**described(each), **compared(state, chosen, each, (PEER,))}
                row["search_seconds"] = [round(result.seconds, 1) for result in results]
                rows.append(row)
                name, ratio = verdict(row)
                print(f"  s{seqlen}: {ratio:.3f} {name}", flush=True)
    return rows


def verdict(row: dict[str, Any]) -> tuple[str, float]:
    """Chosen by the even rounds: its name and the peer's time over its own, medians of the odd rounds."""
    samples = row["samples_us"]
    own = {name: values for name, values in samples.items() if name != PEER}
    name = min(own, key=lambda each: median(own[each][::2]))
    return name, median(samples[PEER][1::2]) / median(own[name][1::2])


def median(values: list[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def noise(limits: DeviceLimits, folder: Path, head_dims: tuple[int, ...]) -> list[dict[str, Any]]:
    state, rows = bench.open_device(0), []
    for head_dim in head_dims:
        for mask in MASKS:
            each = problem(head_dim, 4096, mask)
            chosen = []
            for seed in (1, 2):
                result = tuned(each, limits, folder, seed)
                assert result.entry is not None
                chosen.append(result.entry.variant)
            row = {**described(each), "chosen": [str(variant) for variant in chosen]}
            row |= compared(state, list(dict.fromkeys(chosen)), each, ())
            times = [median(row["samples_us"][str(variant)]) for variant in chosen]
            print(f"d{head_dim} {mask}: {times[1] / times[0]:.4f} {'same' if chosen[0] == chosen[1] else 'different'} choice", flush=True)
            rows.append(row)
    return rows


def main(what: str, out: Path, head_dims: tuple[int, ...]) -> None:
    limits = device.present()
    folder = out.parent / f"tables-{what}"
    folder.mkdir(parents=True, exist_ok=True)
    rows = {"speed": speed, "noise": noise}[what](limits, folder, head_dims)
    facts = bench.open_device(0)
    from torch import __version__ as torch_version

    about = {"gpu": limits.name, "date": time.strftime("%Y-%m-%d"), "driver": facts.telemetry.driver_version(), "torch": torch_version}
    out.write_text(json.dumps({"about": {**about, "peer": PEER, "rounds": ROUNDS}, "rows": rows}, indent=None, separators=(",", ":")))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), tuple(map(int, sys.argv[3:])) or HEAD_DIMS)
