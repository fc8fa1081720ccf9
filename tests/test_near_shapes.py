"""Which shapes the study of near matches asks for, and how it sums up; the rest of it needs a GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

from flashgen import device, near, paths, table

sys.path.insert(0, str(Path(__file__).parent / "device"))
import near_shapes

ROOT = Path(__file__).resolve().parents[1]


def test_shapes_lie_inside_a_table_and_none_is_in_it() -> None:
    found = table.read(paths.shipped_tables() / "nvidia-h200.yaml", strict=True)
    asked = near_shapes.between(found, 40, 0)
    lengths = [each.problem.seqlen_q for each in found.entries]
    assert len(set(asked)) == 40 and asked == near_shapes.between(found, 40, 0)
    assert not {table.full_key(each) for each in asked} & {table.full_key(each.problem) for each in found.entries}
    assert all(min(lengths) <= each.seqlen_q <= max(lengths) and each.seqlen_q == each.seqlen_kv for each in asked)
    assert {each.klass() for each in asked} <= {each.problem.klass() for each in found.entries}
    assert len({each.klass() for each in asked}) > 15 and sum(each.seqlen_q < 4096 for each in asked) > 10


def test_a_summary_gives_median_and_worst_and_counts_near_matches() -> None:
    rows = [{"ratio": ratio, "near": near} for ratio, near in ((1.2, "a"), (1.0, "b"), (1.01, None))]
    assert near_shapes.summary(rows) == "3 shapes, 2 served by a near match: median 1.010, worst 1.200"


def test_rows_stay_that_are_served_as_they_were() -> None:
    found = table.read(paths.shipped_tables() / "nvidia-h200.yaml", strict=True)
    asked, limits = near_shapes.between(found, 3, 0), device.preset("h200")
    served = [near.look_up(each, limits, [found]).found for each in asked]
    rows = [{"problem": str(each), "served": str(by.entry.variant)} for each, by in zip(asked, served, strict=True) if by]
    other = {**rows[1], "served": "hopper_forward[block_kv=64]"}
    assert near_shapes.still([rows[0], other, rows[2]], asked[:2], [found], limits) == [rows[0]]


RECORDED = Path(__file__).parent / "recorded" / "h200-near-shapes"


def recorded(name: str = "near") -> list[dict[str, Any]]:
    """`near`: served by the shipped table. `again`: by one that was made again from nothing."""
    return [row for path in sorted(RECORDED.glob(f"{name}*.json")) for row in json.loads(path.read_text())["rows"]]


def test_recorded_ratios_follow_from_their_rounds() -> None:
    """On one H200; where the search found what was served there was nothing to time."""
    for row in (*recorded(), *recorded("again")):
        times = {name: median(each) for name, each in row["samples_us"].items()}
        assert row["ratio"] == (times[row["served"]] / min(times.values()) if times else 1.0)
        assert bool(times) == (row["served"] != row["tuned"])


def test_the_shipped_table_serves_the_recorded_shapes_as_it_did_when_they_were_timed() -> None:
    """Else: time them again with tests/device/near_shapes.py, which leaves what is served as before."""
    found, rows = table.read(paths.shipped_tables() / "nvidia-h200.yaml", strict=True), recorded()
    asked = near_shapes.between(found, 40, 0)
    assert {row["problem"] for row in rows} == set(map(str, asked)) and len(rows) == 40
    assert near_shapes.still(rows, asked, [found], device.preset("h200")) == rows


def test_near_matches_are_as_good_as_the_docs_say() -> None:
    rows = recorded()
    ratios, untimed = sorted(row["ratio"] for row in rows), sum(not row["samples_us"] for row in rows)
    said = " ".join((ROOT / "docs" / "tables.md").read_text().split())
    assert f"{len(rows)} such shapes: the kernel that served took {median(ratios):.3f} of the time of the best" in said
    assert (
        f"in the median and {ratios[-1]:.3f} in the worst case" in said and f"in {untimed} of them the search found what was served" in said
    )
    assert median(ratios) <= 1.03 and ratios[-1] <= 1.15 and all(row["near"] for row in rows)


def test_the_docs_say_how_a_table_made_again_serves_the_same_shapes() -> None:
    shipped, again = ({row["problem"]: row for row in recorded(name)} for name in ("near", "again"))
    assert set(shipped) == set(again)
    others = sum(shipped[problem]["served"] != row["served"] for problem, row in again.items())
    ratios = sorted(row["ratio"] for row in again.values())
    worst = next(problem for problem, row in again.items() if row["ratio"] == ratios[-1])
    assert worst == "forward bfloat16 d192/128 s1914 b1 h10 causal", "which the docs name"
    said = " ".join((ROOT / "docs" / "tables.md").read_text().split())
    assert f"A table made again from nothing serves {others} of them with other kernels" in said
    assert f"{median(ratios):.3f} in the median, {ratios[-1]:.3f} in the worst case" in said
