"""Bytes of DRAM and L2 by the GPU's own counters against the model. Needs Nsight Compute (ncu); RECORD_TRAFFIC=FILE keeps the counts."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import counters
import pytest
import recorded_traffic
from counters import Counts
from recorded_traffic import FAMILIES, FLASH, LAUNCHES, PROBLEMS, REPEATS

from flashgen import bench
from flashgen.device import present

pytestmark = [pytest.mark.device, pytest.mark.slow]


@lru_cache
def counted(family: str) -> dict[str, list[Counts]]:
    """DRAM bytes of each problem, launch by launch; one run of ncu for all."""
    return kept(family, LAUNCHES, counters.DRAM, "")


def kept(family: str, launches: int, which: Sequence[str], ending: str) -> dict[str, list[Counts]]:
    """Counts of each problem, in the recording as well if one is asked for, whose name then has the ending."""
    try:
        found = dict(zip(PROBLEMS, counters.moved_bytes(family, PROBLEMS, launches, which), strict=True))
    except counters.NoCounters as error:
        pytest.skip(str(error))
    if path := os.environ.get("RECORD_TRAFFIC"):
        driver = bench.open_device(0).telemetry.driver_version()
        about = {"gpu": present().name, "date": time.strftime("%Y-%m-%d"), "driver": driver}
        recorded_traffic.write(Path(path).with_stem(Path(path).stem + ending), about, family, found)
    return found


def skip_unsupported(family: str) -> None:
    reasons = (recorded_traffic.unsupported(family, words, present()) for words in PROBLEMS)
    if (reason := next(filter(None, reasons), None)) is not None:
        pytest.skip(reason)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("words", PROBLEMS)
def test_dram_bytes_are_within_a_tenth_of_the_model(family: str, words: str) -> None:
    skip_unsupported(family)
    launches, model = counted(family)[words], recorded_traffic.modelled(family, words, present())
    print(f"{family} {recorded_traffic.line(words, launches, model)}")
    assert not model.misses(launches)


@pytest.mark.parametrize("family", FAMILIES)
def test_launches_of_a_problem_repeat_unless_the_model_leaves_them_to_chance(family: str) -> None:
    skip_unsupported(family)
    spreads = recorded_traffic.spreads(counted(family), family, present())
    assert max(spreads.values()) < REPEATS, spreads


@pytest.mark.parametrize("family", FLASH)
def test_l2_bytes_are_within_a_tenth_of_the_model(family: str) -> None:
    skip_unsupported(family)
    ratios = recorded_traffic.l2_ratios(family, kept(family, 1, counters.L2, "-l2"), present())
    print(family, {words: f"{ratio:.3f}" for words, ratio in ratios.items()})
    assert all(abs(ratio - 1.0) <= recorded_traffic.WITHIN for ratio in ratios.values())
