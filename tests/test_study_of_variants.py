"""Recordings of blindly drawn variants: what the study writes is what the judgement of the cost model reads. The GPU is imagined."""

from __future__ import annotations

import itertools
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import recorded_variants
import shipping

from flashgen import bench, compiler, cost, device
from flashgen.model import Problem, Source
from flashgen.space import load_space

sys.path.insert(0, str(Path(__file__).parent / "device"))
import study_of_variants as study

FAMILY, COUNT, ROUNDS = "hopper_forward", 20, study.ROUNDS


def imagined_times(state: object, finalists: Sequence[Any], problem: Problem, rounds: int, seed: int) -> bench.Comparison:
    """The cost model's own, but for the noise of a tenth of a percent."""
    bound, noise = load_space(FAMILY).bind(problem, shipping.H200), random.Random(seed)
    samples = {
        name: [cost.roofline_us(bound, source.variant) * noise.uniform(0.999, 1.001) for _ in range(rounds)]
        for name, source, _ in finalists
    }
    return bench.Comparison(samples, (1980, 1980), (), {})


@pytest.fixture
def imagined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "present", lambda: shipping.H200)
    monkeypatch.setattr(bench, "open_device", lambda index: SimpleNamespace(telemetry=SimpleNamespace(driver_version=lambda: "580.1")))
    monkeypatch.setattr(bench, "interleave_task", imagined_times)
    monkeypatch.setattr(compiler, "compile_many", lambda sources, sm: [shipping.compiled(each) for each in sources])


def test_what_is_written_is_read_back_and_judged(imagined: None, tmp_path: Path) -> None:
    study.main(tmp_path / "gpu", FAMILY, COUNT, (80, 256), float("inf"))
    found = recorded_variants.drawn(tmp_path)
    assert len(found) == 2 * len(study.MASKS) * len(study.LENGTHS)
    assert all(len(each.times) == COUNT for each in found)
    assert all(each.rank_correlation() > 0.95 and each.ten_hold_a_good_one() for each in found)


def test_times_that_the_model_does_not_foresee_are_told(imagined: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def upside_down(*given: Any) -> bench.Comparison:
        true = imagined_times(*given)
        return bench.Comparison({name: [1e6 / us for us in times] for name, times in true.samples.items()}, (1980, 1980), (), {})

    monkeypatch.setattr(bench, "interleave_task", upside_down)
    study.main(tmp_path / "gpu", FAMILY, COUNT, (80,), float("inf"))
    found = recorded_variants.drawn(tmp_path)
    assert all(each.rank_correlation() < -0.95 for each in found)
    assert not any(each.ten_hold_a_good_one() for each in found)


def test_a_run_that_is_out_of_time_leaves_a_record_that_names_what_it_did_not_reach(
    imagined: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = itertools.count()
    monkeypatch.setattr(study.time, "monotonic", lambda: float(next(ticks)))
    study.main(tmp_path / "gpu", FAMILY, 2, (128,), 10.0)
    record = json.loads((tmp_path / "gpu" / f"variants-{FAMILY}.json").read_text())
    problems = len(study.MASKS) * len(study.LENGTHS)
    assert 0 < len(record["rows"]) < problems
    assert len(record["rows"]) + len(record["not_reached"]) == problems


def test_variants_that_cannot_be_timed_are_named_with_the_reason(imagined: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(sources: Sequence[Source], sm: int) -> list[Any]:
        built = [shipping.compiled(each) for each in sources]
        return [compiler.CompileError("planted"), *built[1:]]

    monkeypatch.setattr(compiler, "compile_many", refusing)
    study.main(tmp_path / "gpu", FAMILY, 3, (128,), float("inf"))
    rows = json.loads((tmp_path / "gpu" / f"variants-{FAMILY}.json").read_text())["rows"]
    assert list(rows[0]["left_out"].values()) == ["planted"] and len(rows[0]["variants"]) == 2
    assert all(len(row["left_out"]) + len(row["variants"]) == 3 for row in rows)


def test_equal_values_share_a_rank_and_a_constant_says_nothing() -> None:
    assert recorded_variants.ranks([3.0, 1.0, 1.0, 7.0]) == [2.0, 0.5, 0.5, 3.0]
    assert recorded_variants.spearman([1.0, 2.0, 3.0], [10.0, 20.0, 30.0]) == pytest.approx(1.0)
    assert recorded_variants.spearman([1.0, 1.0, 1.0], [1.0, 2.0, 3.0]) == 0.0
