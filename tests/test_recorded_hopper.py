"""Figures of hopper_forward beside the attention of other libraries, recomputed from the recorded times of every round."""

from __future__ import annotations

import math
import re
from statistics import median
from typing import Any

import pytest
from test_recorded import ROOT, recording, speed_table, stale

from flashgen import paths, table
from flashgen.model import DType, Mask, Problem, TableEntry

FOLDER = ROOT / "tests" / "recorded" / "h200-hopper"
PEERS = ("sdpa-cudnn", "fa3", "fa4")
README = (ROOT / "README.md").read_text()


def rows(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = recording(FOLDER / f"{name}.json")["rows"]
    return found


def best_peer(row: dict[str, Any]) -> str:
    samples = row["samples_us"]
    return min((name for name in PEERS if name in samples), key=lambda name: median(samples[name][1::2]))


def chosen(row: dict[str, Any], lazy: bool = False) -> str:
    """The table's entry; else the fastest by the even rounds, of all or of those that look at every score. The odd rounds report."""
    if "entry" in row and not lazy:
        return str(row["entry"])
    own = [name for name in row["samples_us"] if name not in PEERS and (not lazy or "softmax_mode=0" in name)]
    return min(own, key=lambda name: median(row["samples_us"][name][::2]))


def ratio(row: dict[str, Any], lazy: bool = False) -> float:
    """Time of the fastest peer over time of flashgen."""
    samples = row["samples_us"]
    return median(samples[best_peer(row)][1::2]) / median(samples[chosen(row, lazy)][1::2])


def geomean(values: list[float]) -> float:
    return math.prod(values) ** (1 / len(values))


def test_no_shape_is_slow_beside_the_best_of_cudnn_and_flash_attention_3_and_4_and_the_mean_is_ahead() -> None:
    ratios = [ratio(row) for row in rows("main")]
    assert len(ratios) == 36 and all(set(PEERS) <= set(row["samples_us"]) for row in rows("main"))
    assert geomean(ratios) >= 1.07
    assert min(ratios) >= 0.97


def test_looking_at_every_score_alone_keeps_up() -> None:
    assert geomean([ratio(row, lazy=True) for row in rows("main")]) >= 0.98


def test_other_head_dims_are_ahead() -> None:
    found = rows("head_dims")
    assert {row["head_dim"] for row in found} == {80, 96, 192} and {row["seqlen"] for row in found} == {2048, 8192}
    assert geomean([ratio(row) for row in found]) >= 1.05


def test_float16_is_ahead() -> None:
    ratios = [ratio(row) for row in rows("fp16")]
    assert len(ratios) == 36
    assert geomean(ratios) >= 1.03 and min(ratios) >= 0.93


def test_grouped_heads_keep_up() -> None:
    found = rows("gqa")
    assert {(row["heads"], row["kv_heads"], row["seqlen"]) for row in found} == {(32, 8, 4096), (32, 8, 16384)}
    assert min(ratio(row) for row in found) >= 1.0


def test_looking_at_sums_only_never_costs_more_than_a_tenth() -> None:
    for row in rows("spread"):
        lazy, unseen = (median(times) for times in row["samples_us"].values())
        assert unseen <= 1.10 * lazy, row


@pytest.mark.parametrize("name", ["main", "head_dims", "fp16", "gqa"])
def test_the_recorded_kernels_are_those_of_today(name: str) -> None:
    found = stale(rows(name), chosen)
    assert not found, f"the kernels changed since {name}.json; record it again with tests/device/study_of_speed.py: {found}"


def shipped() -> dict[object, TableEntry]:
    found = table.read(paths.shipped_tables() / "nvidia-h200.yaml", strict=True)
    return {table.full_key(entry.problem): entry for entry in found.entries}


def gave_way(entry: TableEntry, row: dict[str, Any]) -> bool:
    """Whether what was compared has lost since, timed side by side on the same GPU, to what is served now."""
    if str(entry.variant) == row["entry"]:
        return False
    second = entry.runner_up
    assert second is not None and str(second[0]) == row["entry"] and entry.measurement.median_us < second[1]
    return True


def test_the_shipped_table_serves_what_was_compared_or_what_was_no_slower_beside_it() -> None:
    entries = shipped()
    gone = 0
    for row in rows("main"):
        mask, heads = Mask.causal() if row["mask"] == "causal" else Mask(), row["heads"]
        asked = Problem(
            DType.BFLOAT16, row["head_dim"], row["head_dim"], row["batch"], heads, row["kv_heads"], row["seqlen"], row["seqlen"], mask
        )
        gone += gave_way(entries[table.full_key(asked)], row)
    said = " ".join((ROOT / "README.md").read_text().split())
    assert f"{gone} of the {len(rows('main'))} have since given way to variants that were level or faster beside them" in said


# The README -------------------------------------------------------------------------------------------------------------


def sentences() -> list[str]:
    found = rows("main")
    ratios, lazy = [ratio(row) for row in found], [ratio(row, lazy=True) for row in found]
    clocks = [clock for row in found for clock in row["clock_mhz"]]
    capped = sum("power_cap" in row["throttle"] for row in found)
    assert all(set(row["throttle"]) <= {"power_cap"} for row in found)
    searches = [each for row in found if row["seqlen"] == 512 for each in row["searches"]]
    seconds = [each["seconds"] for each in searches]
    reached = [each["within_1_percent_after"] for each in searches]
    feasible = [each["feasible"] for each in searches]
    spreads = [[median(times) for times in row["samples_us"].values()] for row in rows("spread") if row["nats"] > 1]
    wide = [unseen_us / lazy_us for lazy_us, unseen_us in spreads]
    return [
        f"Geometric mean {geomean(ratios):.2f}, least {min(ratios):.2f}",
        f"looking at every score alone: {geomean(lazy):.2f}",
        f"SM clock {min(clocks)} to {max(clocks)} MHz, the power cap active in {capped} of {len(found)} comparisons",
        f"searches of 40 trials took {min(seconds):.0f} to {max(seconds):.0f} s",
        f"{min(feasible):,} to {max(feasible):,} feasible variants",
        f"within 1 % of their best after {min(reached)} to {max(reached)} trials, {median(reached):g} in the median",
        f"head dims 80, 96 and 192: {geomean([ratio(row) for row in rows('head_dims')]):.2f}",
        f"float16, looking at every score: {geomean([ratio(row) for row in rows('fp16')]):.2f}",
        f"32 query heads on 8: {min(ratio(row) for row in rows('gqa')):.2f} to {max(ratio(row) for row in rows('gqa')):.2f}",
        f"at most {max(wide) - 1:.0%}".replace("%", " %"),
    ]


def test_the_readme_shows_the_recorded_figures() -> None:
    assert speed_table(rows("main"), ratio) in README
    text = re.sub(r"\s+", " ", README)
    assert not [sentence for sentence in sentences() if sentence not in text]
