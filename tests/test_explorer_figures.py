"""Figures and the picture of docs/explorer.md, computed again."""

from __future__ import annotations

import re
from pathlib import Path

import predicted_measured
import pytest

from flashgen import device, explorer
from flashgen.errors import EmptySpace
from flashgen.limits import NAMES
from flashgen.model import DType, Problem

TEXT = (Path(__file__).resolve().parents[1] / "docs" / "explorer.md").read_text()
PROSE = re.sub(r"\s+", " ", TEXT)
H200 = device.preset("h200")
ASKED = Problem(DType.BFLOAT16, 128, 128, 4, 16, 16, 4096, 4096)


def test_the_picture_is_that_of_the_recordings() -> None:
    drawn = predicted_measured.drawing(predicted_measured.groups())
    assert predicted_measured.PICTURE.read_text() == drawn, "run python tests/predicted_measured.py"
    assert len(drawn.encode()) < 60_000 and "prefers-color-scheme:dark" in drawn
    assert drawn.count("h0") > 900  # one dot per variant


def test_the_tables_are_those_of_the_recordings() -> None:
    for table in (predicted_measured.order_table(), predicted_measured.finalists_table()):
        assert len(table) > 2 and "\n".join(table) in TEXT, "run python tests/predicted_measured.py"


def test_predicted_times_by_shared_memory_and_what_binds_by_length() -> None:
    found = explorer.explore(ASKED, H200, compare=False)
    best = [found.best(capacity) for capacity in found.capacities]
    times = [f"{cell.predicted_us:,.0f}" for cell in best if cell is not None and cell.predicted_us is not None]
    assert f"Predicted: {', '.join(times[:-1])} and {times[-1]} µs" in PROSE
    assert [cell.family for cell in best if cell is not None] == ["ampere_forward"] * 2 + ["hopper_forward"] * 3
    binding = [(each.problem.seqlen_kv, NAMES[each.limit.key].partition(":")[0]) for each in found.traffic]
    assert [name for _, name in binding] == ["launch overhead", *["occupancy"] * 3, *["tensor cores or multiply-adds"] * 2]
    assert "the launch for 128 rows, then occupancy, and the tensor cores from 8192 on" in PROSE and binding[4][0] == 8192


def test_the_smallest_hopper_variant_misses_64_kib_by_160_bytes() -> None:
    with pytest.raises(EmptySpace, match="needs 65,696 bytes"):
        explorer.explore(ASKED, H200, families=["hopper_forward"], capacities=[64 * 1024], compare=False)
    assert 65_696 - 64 * 1024 == 160 and "misses 64 KiB by 160 bytes" in PROSE
