"""How good near matches are: 40 shapes inside a table's range but not in it, the dispatched kernel beside the best that tuning finds.

    python tests/device/near_shapes.py nvidia-h200 out.json [--shapes 40] [--budget 60]

Both kernels are timed in one run, in random order, with a cold L2; one line of figures per shape, kept in the JSON with every round.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median

from flashgen import search, table, table_tools
from flashgen.device import present
from flashgen.evaluators import DeviceEvaluator
from flashgen.model import Problem


def between(found: table.Table, count: int, seed: int) -> list[Problem]:
    """Problems inside the range of a table, not in it, each with the key of one of its entries."""
    rng, chosen = random.Random(seed), dict[Problem, None]()
    known = {table.full_key(each.problem) for each in found.entries}
    while len(chosen) < count:
        base = rng.choice(found.entries).problem
        lengths = [each.problem.seqlen_q for each in found.entries if each.problem.klass() == base.klass()]
        length = rng.randint(min(lengths), max(lengths))
        asked = replace(base, seqlen_q=length, seqlen_kv=length, batch=max(1, 16_384 // length))
        if table.full_key(asked) not in known:
            chosen[asked] = None
    return list(chosen)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table")
    parser.add_argument("out", type=Path)
    parser.add_argument("--shapes", type=int, default=40)
    parser.add_argument("--budget", type=int, default=60)
    options = parser.parse_args()
    limits = present()
    found = table.read(table_tools.find([options.table])[0], strict=True)
    rows = []
    for asked in between(found, options.shapes, 0):
        answer = table.lookup(asked, limits, [found], search.refusal(asked, limits))
        bounds = search.bind_families(asked, limits)
        served = answer.found.entry.variant if answer.found else search.fallback_of(bounds)
        assert served is not None
        with tempfile.TemporaryDirectory() as folder:
            tuned = search.tune(asked, limits, budget=options.budget, table=Path(folder) / "t.yaml").entry
        assert tuned is not None
        evaluator = DeviceEvaluator(bounds, asked, limits, 0)
        try:
            variants = list(dict.fromkeys([served, tuned.variant]))
            decision = evaluator.decide(variants, [], {}) if len(variants) > 1 else None
            samples = evaluator.comparison.samples if decision and evaluator.comparison else {}
        finally:
            evaluator.close()
        times = {name: median(each) for name, each in samples.items()}
        ratio = times[str(served)] / min(times.values()) if times else 1.0
        row = {"problem": str(asked), "served": str(served), "near": bool(answer.found), "tuned": str(tuned.variant), "ratio": ratio}
        rows.append(row | {"samples_us": samples})
        print(f"{ratio:.3f} {asked}", flush=True)
        options.out.write_text(json.dumps({"device": limits.name, "rows": rows}, indent=1))
    ratios = [row["ratio"] for row in rows]
    print(f"median {median(ratios):.3f}, worst {max(ratios):.3f} of {len(ratios)}")


if __name__ == "__main__":
    main()
