"""Records how backward kernels compare with FlashAttention 2, cuDNN and FlashAttention 4, and what determinism costs.

    python tests/device/study_backward.py OUT.json [HEAD_DIM …] [--family NAME] [--peers sdpa-flash] [--lengths N,N] [--masks full,causal]
        [--budget N] [--searched N,N] [--rounds N] [--seconds N] [--cost]

bf16, batch x seqlen = 16,384, hidden size 2,048. Per head dim and mask: a search at three lengths, then the best nine beside the peers'
backward passes (through autograd) at every length, in one process, in random order with a cold L2. The best of them is chosen by the
even rounds and reported by the odd ones, so that choosing does not flatter the figure. With --budget 0 the seeds of the spaces and a few
variants that the cost model likes stand in for a search; those that fail the quick suite are left out. With --cost also a search for
deterministic variants, and the ratio of the two choices. Past --seconds nothing new begins, and what was left out is told. OUT.json grows
with every problem; nothing is written to the user's tables.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from pathlib import Path
from typing import Any

from flashgen import bench, cost, device, gate, search
from flashgen.compiler import compile_many
from flashgen.cubins import Compiled
from flashgen.model import DeviceLimits, DType, Mask, Op, Outcome, Problem, Source, Variant
from flashgen.render import render
from flashgen.space import BoundSpace, load_space

HEAD_DIMS = (64, 128, 256)
MASKS = {"full": Mask(), "causal": Mask.causal()}
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
SEARCHED = (512, 2048, 8192)
PEERS = ("sdpa-flash", "sdpa-cudnn", "fa4")
ROUNDS, KEPT, GUESSED = 16, 9, 6
STARTED = time.perf_counter()


def problem(head_dim: int, seqlen: int, mask: Mask, deterministic: bool = False) -> Problem:
    heads = 2048 // head_dim
    return Problem(DType.BFLOAT16, head_dim, head_dim, 16384 // seqlen, heads, heads, seqlen, seqlen, mask, Op.BACKWARD, deterministic)


def searched(each: Problem, limits: DeviceLimits, folder: Path, options: argparse.Namespace) -> search.TuneResult:
    table = folder / f"{'steady' if each.deterministic else 'fast'}.yaml"
    return search.tune(each, limits, budget=options.budget, seed=1, fresh=True, table=table, families=options.family or None)


def found(problems: list[Problem], limits: DeviceLimits, folder: Path, options: argparse.Namespace) -> list[Variant]:
    """The best variants of searches for these problems, or without a budget what is exact among seeds and guesses."""
    if options.budget:
        return best([searched(each, limits, folder, options) for each in problems])
    bounds = [bound for each in problems for bound in search.bind_families(each, limits, options.family or None)]
    return exact_of(list(dict.fromkeys(variant for bound in bounds for variant in [*bound.seeds(), *guessed(bound)])), problems[-1])


def guessed(bound: BoundSpace) -> list[Variant]:
    """Some of the tenth of a space that is predicted to be fastest."""
    ranked = sorted(bound.feasible(), key=lambda variant: cost.roofline_us(bound, variant))[: max(GUESSED, len(bound.feasible()) // 10)]
    return random.Random(1).sample(ranked, min(GUESSED, len(ranked)))


def exact_of(variants: list[Variant], each: Problem) -> list[Variant]:
    """Those that pass the quick suite and compile within the limits of their space."""
    state, kept = bench.open_device(0), []
    for _, source, compiled in built(variants, each):
        space = load_space(source.family)
        state.executor.load(source, compiled)
        failure = gate.quick(state.executor, space, source, each, 1).failure
        spills = any(space.bind(each, device.present()).compiled_violations(source.variant, compiled.report).values())
        if failure or spills:
            print(f"  left out, {failure or 'spills'}: {source.variant}", flush=True)
        else:
            kept.append(source.variant)
    return kept


def best(results: list[search.TuneResult]) -> list[Variant]:
    """The fastest of each search in turn, until there are enough."""
    ranked = []
    for result in results:
        good = [trial for trial in result.trials if trial.outcome is Outcome.OK and trial.measurement]
        ranked.append([trial.variant for trial in sorted(good, key=lambda trial: (trial.measurement.median_us, str(trial.variant)))])  # type: ignore[union-attr]
    return list(dict.fromkeys(variant for place in zip(*ranked, strict=False) for variant in place))[:KEPT]


def built(variants: list[Variant], each: Problem) -> list[tuple[str, Source, Compiled]]:
    sources = [render(load_space(variant.family), each.klass(), variant) for variant in variants]
    pairs = zip(sources, compile_many(sources, sm=device.present().sm), strict=True)
    return [(str(source.variant), source, compiled) for source, compiled in pairs if isinstance(compiled, Compiled)]


def median(values: list[float]) -> float:
    ordered = sorted(values)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


def timed(state: bench.MeasuringState, variants: list[Variant], each: Problem, options: argparse.Namespace) -> dict[str, Any]:
    compared = bench.interleave_task(state, built(variants, each), each, options.rounds, 1, options.peers)
    return {
        "head_dim": each.head_dim, "seqlen": each.seqlen_q, "batch": each.batch, "heads": each.heads_q, "mask": str(each.mask.kind),
        "samples_us": {name: [round(value, 2) for value in values] for name, values in compared.samples.items()},
        "clock_mhz": compared.clock_mhz, "throttle": compared.throttle, "missing": compared.missing,
        "source_digests": {str(variant): render(load_space(variant.family), each.klass(), variant).digest for variant in variants},
    }  # fmt: skip


def choice(row: dict[str, Any], names: set[str]) -> tuple[str, float]:
    """The best of some kernels by the even rounds, and its time in µs by the odd ones."""
    samples = {name: values for name, values in row["samples_us"].items() if name in names}
    name = min(samples, key=lambda each: median(samples[each][::2]))
    return name, median(samples[name][1::2])


def verdict(row: dict[str, Any], each: Problem) -> str:
    """One line: our choice, its TFLOP/s, and the ratio to every peer."""
    name, own = choice(row, set(row["samples_us"]) - set(PEERS))
    ratios = {peer: median(row["samples_us"][peer][1::2]) / own for peer in PEERS if peer in row["samples_us"]}
    row["ratio"] = round(min(ratios.values()), 4) if ratios else None
    told = ", ".join(f"{peer} {ratio:.3f}" for peer, ratio in ratios.items())
    return f"s{each.seqlen_q}: {cost.flops(each) / own / 1e6:.0f} TFLOP/s, ratio to {told}: {name}"


def late(what: str, options: argparse.Namespace) -> bool:
    """Whether the time is up; tells what is left out."""
    over = time.perf_counter() - STARTED > options.seconds
    if over:
        print(f"time is up: left out {what}", flush=True)
    return over


def rows_of(head_dim: int, mask: Mask, limits: DeviceLimits, folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    if late(f"d{head_dim} {mask}", options):
        return []
    started = time.perf_counter()
    fast = found([problem(head_dim, seqlen, mask) for seqlen in options.searched], limits, folder, options)
    steady = list[Variant]()
    if options.cost:
        steady = found([problem(head_dim, seqlen, mask, True) for seqlen in options.searched], limits, folder, options)
    print(f"d{head_dim} {mask}: {len(fast) + len(steady)} variants found in {time.perf_counter() - started:.0f} s", flush=True)
    state, rows = bench.open_device(0), []
    for seqlen in options.lengths:
        each = problem(head_dim, seqlen, mask)
        if late(str(each), options):
            continue
        row = timed(state, list(dict.fromkeys([*fast, *steady])), each, options)
        print("  " + verdict(row, each), flush=True)
        if steady:
            times = [choice(row, {str(variant) for variant in group})[1] for group in ([*fast, *steady], steady)]
            row["determinism"] = round(times[1] / times[0], 4)
            print(f"    deterministic: {row['determinism']:.3f} of the time", flush=True)
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("head_dims", type=int, nargs="*", default=HEAD_DIMS)
    parser.add_argument("--family", action="append", default=[])
    parser.add_argument("--peers", type=lambda text: tuple(text.split(",")), default=PEERS)
    parser.add_argument("--lengths", type=lambda text: tuple(map(int, text.split(","))), default=LENGTHS)
    parser.add_argument("--masks", type=lambda text: text.split(","), default=list(MASKS))
    parser.add_argument("--budget", type=int, default=60)
    parser.add_argument("--searched", type=lambda text: tuple(map(int, text.split(","))), default=SEARCHED)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--cost", action="store_true")
    options = parser.parse_args()
    limits, folder, rows = device.present(), options.out.parent / "tables-backward", list[dict[str, Any]]()
    folder.mkdir(parents=True, exist_ok=True)
    from torch import __version__ as torch_version

    driver = bench.open_device(0).telemetry.driver_version()
    about = {"gpu": limits.name, "date": time.strftime("%Y-%m-%d"), "driver": driver, "torch": torch_version, "rounds": options.rounds}
    for head_dim in options.head_dims:
        for name in options.masks:
            rows += rows_of(head_dim, MASKS[name], limits, folder, options)
            options.out.write_text(json.dumps({"about": about, "rows": rows}, separators=(",", ":")))
    ratios = [row["ratio"] for row in rows if row["ratio"]]
    if ratios:
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        print(f"geometric mean {mean:.3f} of the best peer, least {min(ratios):.3f}, {len(ratios)} problems, {', '.join(options.peers)}")


if __name__ == "__main__":
    main()
