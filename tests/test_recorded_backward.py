"""Figures of backward kernels beside the attention of other libraries, recomputed from the recorded times of every round.

`tests/device/study_backward.py` records, into one file or one per head dim. `python tests/test_recorded_backward.py RECORDING …` prints
what docs/backward.md is to show of it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from test_recorded import ROOT, recording, speed_table, stale
from test_recorded_hopper import geomean

from flashgen.model import Op

FOLDER = ROOT / "tests" / "recorded" / "h200-backward"
PEERS = ("sdpa-flash", "sdpa-cudnn", "fa4")
AMPERE = sorted(FOLDER.glob("ampere*.json"))
GRID = {
    (head_dim, seqlen, mask)
    for head_dim in (64, 128, 256)
    for seqlen in (512, 1024, 2048, 4096, 8192, 16384)
    for mask in ("none", "causal")
}


def chosen(row: dict[str, Any]) -> str:
    """The fastest by the even rounds; the odd ones report, so that choosing does not flatter the figure."""
    own = {name: times for name, times in row["samples_us"].items() if name not in PEERS}
    return min(own, key=lambda name: median(own[name][::2]))


def ratio(row: dict[str, Any]) -> float:
    """Time of the fastest peer over time of flashgen."""
    samples = row["samples_us"]
    return min(median(times[1::2]) for name, times in samples.items() if name in PEERS) / median(samples[chosen(row)][1::2])


def rows_of(paths: Sequence[Path]) -> list[dict[str, Any]]:
    return [row for path in paths for row in recording(path)["rows"]]


def shown(paths: Sequence[Path]) -> list[str]:
    """What the docs show of a recording: where it was made, figures over all problems, and a table."""
    about, rows = recording(paths[0])["about"], rows_of(paths)
    ratios = [ratio(row) for row in rows]
    clocks = [clock for row in rows for clock in row["clock_mhz"]]
    capped = sum("power_cap" in row["throttle"] for row in rows)
    assert all(set(row["throttle"]) <= {"power_cap"} for row in rows), "name every reason for throttling in the docs"
    return [
        f"{about['gpu']}, {about['date']}, driver {about['driver']}, torch {about['torch']}",
        f"Geometric mean {geomean(ratios):.2f}, least {min(ratios):.2f}",
        f"SM clock {min(clocks)} to {max(clocks)} MHz, the power cap active in {capped} of {len(rows)} comparisons",
        speed_table(rows, ratio),
    ]


# How a choice is judged, on made-up times -------------------------------------------------------------------------------


def row(**samples_us: list[float]) -> dict[str, Any]:
    return {"samples_us": {name.replace("_", "-"): times for name, times in samples_us.items()}}


def test_the_even_rounds_choose_and_the_odd_ones_report() -> None:
    lucky, steady, peer = [10.0, 50.0] * 4, [20.0, 20.0] * 4, [99.0, 40.0] * 4
    assert chosen(row(lucky=lucky, steady=steady, sdpa_flash=peer)) == "lucky"
    assert ratio(row(lucky=lucky, steady=steady, sdpa_flash=peer)) == 40.0 / 50.0


def test_a_ratio_is_to_the_fastest_peer_and_no_peer_is_chosen_as_ours() -> None:
    times = row(ours=[20.0] * 4, sdpa_flash=[10.0] * 4, sdpa_cudnn=[5.0] * 4)
    assert chosen(times) == "ours" and ratio(times) == 0.25


# Recordings -------------------------------------------------------------------------------------------------------------


ampere = pytest.mark.skipif(not AMPERE, reason=f"nothing of ampere_backward recorded in {FOLDER.relative_to(ROOT)} yet")


@ampere
def test_ampere_backward_is_ahead_of_flash_attention_2_in_the_mean() -> None:
    rows = rows_of(AMPERE)
    assert {(row["head_dim"], row["seqlen"], row["mask"]) for row in rows} == GRID and len(rows) == len(GRID)
    assert all("sdpa-flash" in row["samples_us"] for row in rows)
    assert all(chosen(row).startswith("ampere_backward[") for row in rows)
    assert geomean([ratio(row) for row in rows]) >= 1.0


@ampere
def test_a_backward_recording_holds_every_round_of_every_kernel_of_one_gpu() -> None:
    for path in AMPERE:
        found = recording(path)
        assert {len(times) for row in found["rows"] for times in row["samples_us"].values()} == {found["about"]["rounds"]}
        assert found["about"] == recording(AMPERE[0])["about"]


@ampere
def test_the_recorded_backward_kernels_are_those_of_today() -> None:
    found = stale(rows_of(AMPERE), chosen, Op.BACKWARD)
    assert not found, f"the kernels changed since they were recorded; record them again with tests/device/study_backward.py: {found}"


@ampere
def test_the_docs_show_the_recorded_figures() -> None:
    text = (ROOT / "docs" / "backward.md").read_text()
    flat = " ".join(text.split())
    assert not [figure for figure in shown(AMPERE) if figure not in text and figure not in flat]


if __name__ == "__main__":
    print("\n".join(shown([Path(each) for each in sys.argv[1:]])))
