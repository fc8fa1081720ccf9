"""How good near matches are: shapes inside a table's range but not in it, the dispatched kernel beside the best that tuning finds.

    python tests/device/near_shapes.py nvidia-h200 out.json [--shapes 40] [--budget 60] [--part 1/2] [--within SECONDS]
    python tests/device/near_shapes.py --read out1.json out2.json

Both kernels are timed in one run, in random order, with a cold L2; one line of figures per shape, kept in the JSON with every round. Shapes
that `out.json` holds already are left as they are, so a run that was stopped goes on, unless the table serves them otherwise by now;
`--part` shares one list among several GPUs.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from flashgen import near, search, standard, table, table_tools
from flashgen.backends import DeviceBackend
from flashgen.device import present
from flashgen.dispatch import Answer, Dispatcher
from flashgen.evaluators import DeviceEvaluator
from flashgen.model import DeviceLimits, ExecutorName, Problem
from flashgen.space import load_space
from flashgen.strategy import Predicted

LONGEST_S = 45.0  # of one shape; none is begun that would hardly end in time
AHEAD = 3  # searches that are ranked, and whose first proposals are compiled, while the GPU is busy


def between(found: table.Table, count: int, seed: int) -> list[Problem]:
    """Problems inside the range of a table, not in it: each an entry's with as many rows, in sequences of another length."""
    rng, chosen = random.Random(seed), dict[Problem, None]()
    known = {table.full_key(each.problem) for each in found.entries}
    while len(chosen) < count:
        base = rng.choice(found.entries).problem
        lengths = [each.problem.seqlen_q for each in found.entries if each.problem.klass() == base.klass()]
        length = round(2 ** rng.uniform(math.log2(min(lengths)), math.log2(max(lengths))))
        asked = replace(base, seqlen_q=length, seqlen_kv=length, batch=max(1, base.batch * base.seqlen_q // length))
        if table.full_key(asked) not in known:
            chosen[asked] = None
    return list(chosen)


def still(
    rows: Sequence[dict[str, Any]], asked: Sequence[Problem], tables: Sequence[table.Table], limits: DeviceLimits
) -> list[dict[str, Any]]:
    """Those rows of shapes that are asked for which are served as they were when the row was made."""
    by_name = {str(each): each for each in asked}
    kept = []
    for row in rows:
        problem = by_name.get(row["problem"])
        found = near.look_up(problem, limits, tables).found if problem is not None else None
        if problem is None or found is None:
            continue
        variant = load_space(found.entry.variant.family).bind(problem, limits).variant(found.entry.variant.as_dict())
        if str(variant) == row["served"]:
            kept.append(row)
    return kept


def compared(
    asked: Problem, answer: Answer, limits: DeviceLimits, make: search.EvaluatorFactory, budget: int, predicted: Predicted | None
) -> dict[str, Any]:
    """One row: what serves the problem, what a search of its own finds, and all times of both."""
    served = answer.variant
    with tempfile.TemporaryDirectory() as folder:
        tuned = search.tune(asked, limits, budget=budget, table=Path(folder) / "t.yaml", make_evaluator=make, predicted=predicted).entry
    assert tuned is not None
    evaluator = make(search.bind_families(asked, limits), asked, limits, 1)
    assert isinstance(evaluator, DeviceEvaluator)
    try:
        variants = list(dict.fromkeys([served, tuned.variant]))
        decision = evaluator.decide(variants, [], {}) if len(variants) > 1 else None
        samples = evaluator.comparison.samples if decision and evaluator.comparison else {}
    finally:
        evaluator.close()
    times = {name: median(each) for name, each in samples.items()}
    return {
        "problem": str(asked),
        "served": str(served),
        "near": str(answer.entry.problem) if answer.entry else None,
        "tuned": str(tuned.variant),
        "ratio": times[str(served)] / min(times.values()) if times else 1.0,
        "samples_us": samples,
    }


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """Median and worst ratio, and how many shapes a near match served."""
    ratios = sorted(row["ratio"] for row in rows)
    near = sum(row["near"] is not None for row in rows)
    return f"{len(rows)} shapes, {near} served by a near match: median {median(ratios):.3f}, worst {ratios[-1]:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", nargs="?")
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--shapes", type=int, default=40)
    parser.add_argument("--budget", type=int, default=60)
    parser.add_argument("--part", default="1/1", metavar="I/N")
    parser.add_argument("--within", type=float, default=float("inf"), metavar="SECONDS")
    parser.add_argument("--read", type=Path, nargs="+", metavar="OUT")
    options = parser.parse_args()
    if options.read:
        print(summary([row for path in options.read for row in json.loads(path.read_text())["rows"]]))
        return
    started, limits = time.monotonic(), present()
    file = table_tools.find([options.table])[0]
    found, dispatcher = table.read(file, strict=True), Dispatcher(DeviceBackend(0), [file.parent])
    part, count = map(int, options.part.split("/"))
    wanted = between(found, options.shapes, 0)
    rows = json.loads(options.out.read_text())["rows"] if options.out.exists() else []
    rows = still(rows, wanted, table.load_all([file.parent]), limits)
    done = {row["problem"] for row in rows}
    left = [asked for asked in wanted[part - 1 :: count] if str(asked) not in done]
    with standard.evaluators(ExecutorName.DEVICE) as make, standard.ahead(make, limits) as coming:
        for number, asked in enumerate(left):
            if time.monotonic() - started + LONGEST_S > options.within:
                break
            for each in left[number + 1 : number + 1 + AHEAD]:
                coming.search(each, options.budget)
            answer = dispatcher.serve(asked).answer
            with coming.begun(asked) as predicted:
                rows.append(compared(asked, answer, limits, make, options.budget, predicted))
            print(f"{rows[-1]['ratio']:.3f} {time.monotonic() - started:5.0f} s {asked}", flush=True)
            options.out.write_text(json.dumps({"device": limits.name, "rows": rows}, indent=1))
    print(summary(rows))


if __name__ == "__main__":
    main()
