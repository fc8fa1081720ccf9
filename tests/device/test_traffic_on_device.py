"""DRAM bytes by the GPU's own counters against the model. Needs Nsight Compute (ncu); RECORD_TRAFFIC=FILE keeps the counts."""

from __future__ import annotations

import os
import time
from functools import lru_cache
from pathlib import Path

import counters
import pytest
import recorded_traffic
from recorded_traffic import FAMILIES, PROBLEMS, WITHIN

from flashgen import bench
from flashgen.device import present

pytestmark = [pytest.mark.device, pytest.mark.slow]


@lru_cache
def counted(family: str) -> tuple[float, ...]:
    """DRAM bytes of each problem; one run of ncu for all."""
    try:
        found = counters.dram_bytes(family, PROBLEMS)
    except counters.NoCounters as error:
        pytest.skip(str(error))
    if path := os.environ.get("RECORD_TRAFFIC"):
        driver = bench.open_device(0).telemetry.driver_version()
        about = {"gpu": present().name, "date": time.strftime("%Y-%m-%d"), "driver": driver}
        recorded_traffic.write(Path(path), about, family, found)
    return tuple(counters.total(each) for each in found)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("words", PROBLEMS)
def test_dram_bytes_are_within_a_tenth_of_the_model(family: str, words: str) -> None:
    if (reason := recorded_traffic.unsupported(family, words, present())) is not None:
        pytest.skip(reason)
    found, model = counted(family)[PROBLEMS.index(words)], recorded_traffic.modelled(family, words, present())
    print(f"{family} {recorded_traffic.line(words, found, model)}")
    assert found == pytest.approx(model, rel=WITHIN)
