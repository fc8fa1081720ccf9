"""Which shapes the study of near matches asks for, and how it sums up; the rest of it needs a GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median

from flashgen import device, near, paths, table

sys.path.insert(0, str(Path(__file__).parent / "device"))
import near_shapes


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


def test_recorded_ratios_follow_from_their_rounds_and_shapes_from_their_table() -> None:
    """Some of the 40 shapes, on one H200; where the search found what was served there was nothing to time."""
    found = table.read(RECORDED / "nvidia-h200.yaml", strict=True)
    asked = {str(each) for each in near_shapes.between(found, 40, 0)}
    rows = [row for path in sorted(RECORDED.glob("near*.json")) for row in json.loads(path.read_text())["rows"]]
    assert rows and len({row["problem"] for row in rows}) == len(rows) and {row["problem"] for row in rows} <= asked
    for row in rows:
        times = {name: median(each) for name, each in row["samples_us"].items()}
        assert row["ratio"] == (times[row["served"]] / min(times.values()) if times else 1.0)
        assert bool(times) == (row["served"] != row["tuned"])
