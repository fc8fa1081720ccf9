"""Records how a family compares with the attention of other libraries: one run, interleaved in random order, cold L2, random data.

    python tests/device/study_of_speed.py main|head_dims|fp16|gqa|spread OUT.json [HEAD_DIM …]

main       bf16, batch x seqlen = 16,384, hidden size 2,048, head dims 64, 128, 256, six lengths, full and causal: searched at two lengths
           per head dim and mask, the table filled by timing the winners at the others, each entry then timed beside the peers
head_dims  the same for head dims 80, 96, 192 at two lengths
fp16       the variants of a recording (--from main.json) without a search of their own
gqa        32 query heads on 8, head dim 128, two lengths
spread     of each head dim and mask of a recording (--from) the best that looks at sums only, and its twin that looks at every score, on
           scores of standard deviation 1, 8, 16 and 30 nats

Every row holds the entry of the table (main) or the best variants, the best that look at every score (softmax_mode 0), and every peer that
is installed. Of several variants the best is chosen by the even rounds; the odd ones report. An entry was chosen before. OUT.json is
written after every row; `tests/test_recorded.py` reads recordings.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from study_against_fa2 import built, median

from flashgen import bench, device, search, standard
from flashgen import table as tables
from flashgen.launch import LOG2_E
from flashgen.model import DeviceLimits, DType, ExecutorName, Mask, Outcome, Problem, Trial, Variant
from flashgen.render import render
from flashgen.space import load_space
from flashgen.staleness import tools_in_use
from flashgen.wishes import Wish

FAMILY = "hopper_forward"
PEERS = ("sdpa-cudnn", "fa3", "fa4")
MASKS = (Mask(), Mask.causal())
LENGTHS, SEARCHED = (512, 1024, 2048, 4096, 8192, 16384), (1024, 8192)
BUDGET, KEPT, KEPT_LAZY = 40, 7, 3
SPREADS = (1.0, 8.0, 16.0, 30.0)


def problem_of(head_dim: int, seqlen: int, mask: Mask, dtype: DType = DType.BFLOAT16) -> Problem:
    heads = max(1, 2048 // head_dim)
    return Problem(dtype, head_dim, head_dim, max(1, 16384 // seqlen), heads, heads, seqlen, seqlen, mask)


class Study:
    """One recording under way."""

    def __init__(self, out: Path, rounds: int, make: search.EvaluatorFactory) -> None:
        self.out, self.rounds, self.rows, self.make = out, rounds, list[dict[str, Any]](), make
        self.limits: DeviceLimits = device.present()
        self.state = bench.open_device(0)
        self.table = out.parent / f"tables-{out.stem}" / "searched.yaml"
        self.table.parent.mkdir(parents=True, exist_ok=True)

    def searched(self, problems: list[Problem]) -> tuple[list[Variant], list[dict[str, Any]]]:
        """The best of searches in turn, lazy ones included, and what each search took."""
        overall, lazy, facts = [], [], []
        for each in problems:
            found = search.tune(
                each, self.limits, budget=BUDGET, seed=1, fresh=True, table=self.table, families=[FAMILY], make_evaluator=self.make
            )
            timed = sorted((trial for trial in found.trials if trial.outcome is Outcome.OK and trial.measurement), key=_us)
            overall.append([trial.variant for trial in timed])
            lazy.append([trial.variant for trial in timed if not trial.variant.as_dict()["softmax_mode"]])
            facts.append(self.facts(each, found))
        kept = dict.fromkeys([*in_turn(overall)[:KEPT], *in_turn(lazy)[:KEPT_LAZY]])
        return list(kept), facts

    def facts(self, each: Problem, found: search.TuneResult) -> dict[str, Any]:
        """Size of the space, time, and how soon the search came within 1 % of its best."""
        times = [trial.measurement.median_us if trial.measurement else float("inf") for trial in found.trials]
        reached = next((number for number, us in enumerate(times, 1) if us <= 1.01 * min(times)), 0)
        feasible = len(load_space(FAMILY).bind(each, self.limits).feasible())
        outcomes = {str(outcome): count for outcome, count in found.outcomes().items()}
        return {"seqlen": each.seqlen_q, "feasible": feasible, "trials": len(times), "within_1_percent_after": reached,
                "seconds": round(found.seconds, 1), "outcomes": outcomes}  # fmt: skip

    def entry(self, each: Problem) -> Variant:
        """The table's variant for exactly this problem; the table is filled where it has none."""
        wish = Wish(each, searched=False)
        (done,) = standard.tune([wish], self.limits, ExecutorName.DEVICE, tools_in_use(), path=self.table, make_evaluator=self.make)
        print(f"  {each}: {done.how}", flush=True)
        entries = tables.read(self.table, strict=True).entries
        return next(entry.variant for entry in entries if tables.full_key(entry.problem) == tables.full_key(each))

    def compare(self, variants: list[Variant], each: Problem, about: dict[str, Any]) -> None:
        """Times everything side by side and records the row."""
        fitting = [variant for variant in variants if not any(load_space(FAMILY).bind(each, self.limits).violations(variant).values())]
        found = bench.interleave_task(self.state, built(fitting, each), each, self.rounds, 1, PEERS)
        row = {
            "dtype": str(each.dtype), "head_dim": each.head_dim, "seqlen": each.seqlen_q, "batch": each.batch, "heads": each.heads_q,
            "kv_heads": each.heads_kv, "mask": str(each.mask.kind), **about,
            "samples_us": {name: [round(value, 2) for value in values] for name, values in found.samples.items()},
            "clock_mhz": found.clock_mhz, "throttle": found.throttle, "missing": found.missing,
            "source_digests": {str(variant): render(load_space(FAMILY), each.klass(), variant).digest for variant in fitting},
        }  # fmt: skip
        self.record(row)
        peer, best, lazy = verdict(row)
        print(f"d{each.head_dim} {row['mask']} s{each.seqlen_q} {row['dtype']}: {best:.3f}, lazy {lazy:.3f}, best peer {peer}", flush=True)

    def record(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        from torch import __version__ as torch_version

        about = {"gpu": self.limits.name, "date": time.strftime("%Y-%m-%d"), "driver": self.state.telemetry.driver_version(),
                 "torch": torch_version, "rounds": self.rounds, "peers": PEERS}  # fmt: skip
        self.out.write_text(json.dumps({"about": about, "rows": self.rows}, separators=(",", ":")))


def _us(trial: Trial) -> float:
    return trial.measurement.median_us if trial.measurement else float("inf")


def in_turn(ranked: list[list[Variant]]) -> list[Variant]:
    """The first of each, then the second of each, …, without repetitions."""
    longest = max(map(len, ranked), default=0)
    return list(dict.fromkeys(each[place] for place in range(longest) for each in ranked if place < len(each)))


def verdict(row: dict[str, Any]) -> tuple[str, float, float]:
    """The fastest peer, its time over that of the best variant, and over that of the best that looks at every score."""
    samples = row["samples_us"]
    peer = min((name for name in PEERS if name in samples), key=lambda name: median(samples[name][1::2]))
    own = {name: values for name, values in samples.items() if name not in PEERS}

    entry = row.get("entry")

    def ratio(names: list[str]) -> float:
        if not names:
            return 0.0
        chosen = min(names, key=lambda name: median(own[name][::2]))
        return median(samples[peer][1::2]) / median(own[chosen][1::2])

    return peer, ratio([entry] if entry else list(own)), ratio([name for name in own if "softmax_mode=0" in name])


def main_study(study: Study, head_dims: tuple[int, ...]) -> None:
    for head_dim in head_dims:
        for mask in MASKS:
            chosen, facts = study.searched([problem_of(head_dim, seqlen, mask) for seqlen in SEARCHED])
            print(f"d{head_dim} {mask}: {facts}", flush=True)
            lazy = [variant for variant in chosen if not variant.as_dict()["softmax_mode"]]
            for seqlen in LENGTHS:
                each = problem_of(head_dim, seqlen, mask)
                entry = study.entry(each)
                study.compare(list(dict.fromkeys([entry, *lazy])), each, {"searches": facts, "entry": str(entry)})


def other_study(study: Study, head_dims: tuple[int, ...], lengths: tuple[int, ...], searched: tuple[int, ...]) -> None:
    for head_dim in head_dims:
        for mask in MASKS:
            chosen, facts = study.searched([problem_of(head_dim, seqlen, mask) for seqlen in searched])
            print(f"d{head_dim} {mask}: {facts}", flush=True)
            for seqlen in lengths:
                study.compare(chosen, problem_of(head_dim, seqlen, mask), {"searches": facts})


def fp16_study(study: Study, source: Path) -> None:
    """The lazy variants of a recording in bf16, and their neighbours in the order of its rows."""
    for row in json.loads(source.read_text())["rows"]:
        mask = Mask.causal() if row["mask"] == "causal" else Mask()
        each = problem_of(row["head_dim"], row["seqlen"], mask, DType.FLOAT16)
        bound = load_space(FAMILY).bind(each, study.limits)
        own = {name: values for name, values in row["samples_us"].items() if name not in PEERS}
        ranked = sorted(own, key=lambda name: median(own[name]))
        study.compare(list(dict.fromkeys(bound.variant(parsed(name)) for name in ranked))[:6], each, {})


def parsed(name: str) -> dict[str, int]:
    """Parameters of a variant from its printed form, with the softmax that looks at every score."""
    parts = name.partition("[")[2].rstrip("]").split()
    return {key: int(value) for key, _, value in (part.partition("=") for part in parts)} | {"softmax_mode": 0}


def gqa_study(study: Study) -> None:
    for mask in MASKS:
        problems = [
            replace(problem_of(128, seqlen, mask), heads_q=32, heads_kv=8, batch=max(1, 8192 // seqlen)) for seqlen in (4096, 16384)
        ]
        chosen, facts = study.searched(problems[:1])
        for each in problems:
            study.compare(chosen, each, {"searches": facts})


def spread_study(study: Study, source: Path, head_dims: tuple[int, ...]) -> None:
    """Of every head dim and mask at two lengths the best that looks at sums only (where none was timed: the best of all in that mode)
    and its lazy twin, on scores spread wider and wider by the scale."""
    for row in json.loads(source.read_text())["rows"]:
        if row["seqlen"] not in (2048, 16384) or row["head_dim"] not in head_dims:
            continue
        mask = Mask.causal() if row["mask"] == "causal" else Mask()
        each = problem_of(row["head_dim"], row["seqlen"], mask)
        own = {name: values for name, values in row["samples_us"].items() if name not in PEERS}
        unseen = [name for name in own if "softmax_mode=1" in name]
        best = parsed(min(unseen or own, key=lambda name: median(own[name])))
        bound = load_space(FAMILY).bind(each, study.limits)
        kernels = built([bound.variant(best | {"softmax_mode": mode}) for mode in (0, 1)], each)
        launches = [study.state.launchable(name, source, compiled, each, 1) for name, source, compiled in kernels]
        for nats in SPREADS:
            for launched in launches:
                launched.params.problem.scale_log2 = nats * each.scale * LOG2_E  # q and k are standard normal
            samples: dict[str, list[float]] = {launched.name: [] for launched in launches}
            for turn in range(study.rounds):
                for launched in launches if turn % 2 else launches[::-1]:
                    samples[launched.name] += study.state.stopwatch.run([launched])
            lazy_us, unseen_us = (median(samples[launched.name]) for launched in launches)
            study.record({"head_dim": each.head_dim, "seqlen": each.seqlen_q, "mask": row["mask"], "nats": nats, "samples_us": samples})
            told = f"d{each.head_dim} {row['mask']} s{each.seqlen_q} {nats:g} nats"
            print(f"{told}: lazy {lazy_us:.1f}, sums only {unseen_us / lazy_us:.3f} of it", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("main", "head_dims", "fp16", "gqa", "spread"))
    parser.add_argument("out", type=Path)
    parser.add_argument("head_dims", type=int, nargs="*")
    parser.add_argument("--from", dest="source", type=Path, default=Path("main.json"))
    parser.add_argument("--rounds", type=int, default=16)
    options = parser.parse_args()
    with standard.evaluators(ExecutorName.DEVICE) as make:
        run(Study(options.out, options.rounds, make), options)


def run(study: Study, options: argparse.Namespace) -> None:
    if options.what == "main":
        main_study(study, tuple(options.head_dims) or (64, 128, 256))
    elif options.what == "head_dims":
        other_study(study, tuple(options.head_dims) or (80, 96, 192), (2048, 8192), (2048,))
    elif options.what == "fp16":
        fp16_study(study, options.source)
    elif options.what == "gqa":
        gqa_study(study)
    else:
        spread_study(study, options.source, tuple(options.head_dims) or (64, 128, 256))


if __name__ == "__main__":
    main()
