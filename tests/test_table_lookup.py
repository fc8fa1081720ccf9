"""Which entry of a tuned table serves a problem."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from table_entries import DEVICE, entry, problem

from flashgen import table
from flashgen.model import (
    Alignment,
    DeviceLimits,
    DType,
    Mask,
    Problem,
    TableEntry,
)
from flashgen.table_schema import device_record

# --------------------------------------------------------------------------------------------------------------- look-up


def never(_: TableEntry) -> str | None:
    return None


def tables(tmp_path: Path, *entries: TableEntry, device: DeviceLimits = DEVICE, name: str = "a.yaml") -> tuple[table.Table, ...]:
    for each in entries:
        table.merge(tmp_path / name, device, each)
    return table.load_all([tmp_path])


HARD = [
    {"dtype": DType.FLOAT16},
    {"head_dim": 64},
    {"head_dim_v": 64},
    {"mask": Mask()},
    {"mask": Mask.window(64, 0)},
    {"deterministic": True},
]


@pytest.mark.parametrize("changed", HARD, ids=lambda changed: next(iter(changed)))
def test_one_changed_hard_field_is_a_miss(tmp_path: Path, changed: dict[str, Any]) -> None:
    found = table.lookup(problem(**changed), DEVICE, tables(tmp_path, entry()), never)
    assert found.found is None
    assert "0 with the key" in found.explain()


@pytest.mark.parametrize("alignment", Alignment)
def test_alignment_is_a_run_time_value_and_shares_the_entry(tmp_path: Path, alignment: Alignment) -> None:
    found = table.lookup(problem(mask=Mask.causal(alignment)), DEVICE, tables(tmp_path, entry()), never)
    assert found.found is not None


@pytest.mark.parametrize(
    ("asked", "served"), [(1, None), (3, None), (4, 16), (24, 16), (127, 128), (129, 128), (1500, 1024), (2897, 1024), (100_000, None)]
)
def test_the_nearest_tuned_length_serves_and_far_ones_do_not(tmp_path: Path, asked: int, served: int | None) -> None:
    known = tables(tmp_path, *(entry(problem(length)) for length in (16, 128, 1024, 8192)))
    found = table.lookup(problem(asked), DEVICE, known, never).found
    assert (found.entry.problem.seqlen_q if found else None) == (8192 if asked == 2897 else served)


def test_any_length_falls_into_one_of_a_few_buckets() -> None:
    rng = random.Random(20)
    assert len({table.shape_bucket(problem(rng.randint(1, 8192))) for _ in range(500)}) <= 14


def test_every_length_of_a_bucket_is_served_by_the_entry_tuned_for_the_bucket(tmp_path: Path) -> None:
    known = tables(tmp_path, entry(problem(1024)))
    same = [length for length in range(1, 4096) if table.shape_bucket(problem(length)) == table.shape_bucket(problem(1024))]
    assert (same[0], same[-1]) == (725, 1448)
    assert all(table.lookup(problem(length), DEVICE, known, never).found for length in (same[0], 1023, 1025, same[-1]))


def test_an_entry_that_cannot_compute_the_problem_is_passed_over_with_the_reason(tmp_path: Path) -> None:
    known = tables(tmp_path, entry(problem(1024), block_q=256), entry(problem(2048)))
    found = table.lookup(problem(1024), DEVICE, known, lambda e: "too long a tile" if e.variant.as_dict()["block_q"] == 256 else None)
    assert found.found is not None
    assert found.found.entry.problem.seqlen_q == 2048
    assert "too long a tile" in found.explain()


def test_equal_distances_take_the_smaller_tile(tmp_path: Path) -> None:
    known = tables(tmp_path, entry(problem(512), block_q=256), entry(problem(2048), block_q=64))
    found = table.lookup(problem(1024), DEVICE, known, never).found
    assert found is not None
    assert found.entry.variant.as_dict()["block_q"] == 64


def test_entries_with_query_groups_serve_problems_with_query_groups(tmp_path: Path) -> None:
    """A group's gradients are summed, so what is best for single heads says little."""
    single, grouped = replace(problem(2048), heads_q=16, heads_kv=16), replace(problem(1024), heads_q=16, heads_kv=4)
    known = tables(tmp_path, entry(single), entry(grouped))
    for heads_kv, tuned in ((8, 1024), (16, 2048)):
        found = table.lookup(replace(single, seqlen_q=1500, seqlen_kv=1500, heads_kv=heads_kv), DEVICE, known, never).found
        assert found is not None and found.entry.problem.seqlen_q == tuned


def test_an_expectation_moves_problems_that_were_not_tuned_and_only_if_it_is_clear(tmp_path: Path) -> None:
    known = tables(tmp_path, entry(problem(1024)), entry(problem(16_384), block_q=256))

    def expecting(far: float, asked: Problem, refused: str | None = None) -> int | None:
        by_tile = {128: 100.0, 256: far}
        found = table.lookup(
            asked,
            DEVICE,
            known,
            lambda each: refused if each.problem.seqlen_q == 16_384 else None,
            lambda each: by_tile[each.variant.as_dict()["block_q"]],
        ).found
        return found.entry.problem.seqlen_q if found else None

    assert expecting(88.0, problem(1500)) == 16_384  # farther than a near match may be, but proved for the same key
    assert expecting(90.0, problem(1500)) == 1024
    assert expecting(88.0, problem(1024)) == 1024
    assert expecting(88.0, problem(1500), "does not fit") == 1024
    assert expecting(1.0, problem(100)) is None  # nothing near: nothing to be better than


def test_a_predicted_entry_never_outranks_a_measured_one(tmp_path: Path) -> None:
    known = tables(tmp_path, entry(problem(1024), source="predicted"), entry(problem(2048)))
    found = table.lookup(problem(1024), DEVICE, known, never).found
    assert found is not None
    assert found.entry.measurement.source == "measured"


def test_the_users_table_goes_before_the_shipped_one(tmp_path: Path) -> None:
    for name, block_q in (("shipped", 64), ("user", 256)):
        table.merge(tmp_path / name / "t.yaml", DEVICE, entry(block_q=block_q))
    found = table.lookup(problem(), DEVICE, table.load_all([tmp_path / "user", tmp_path / "shipped"]), never)
    assert found.found is not None
    assert found.found.entry.variant.as_dict()["block_q"] == 256
    assert "user" in found.explain()


def test_a_measured_shipped_entry_goes_before_the_users_predicted_one(tmp_path: Path) -> None:
    table.merge(tmp_path / "shipped" / "t.yaml", DEVICE, entry(block_q=64))
    table.merge(tmp_path / "user" / "t.yaml", DEVICE, entry(source="predicted", block_q=256))
    found = table.lookup(problem(), DEVICE, table.load_all([tmp_path / "user", tmp_path / "shipped"]), never)
    assert found.found is not None
    assert found.found.entry.variant.as_dict()["block_q"] == 64


@pytest.mark.parametrize(("asked", "served"), [(100, 127), (900, 1023)])
def test_the_nearest_window_serves(tmp_path: Path, asked: int, served: int) -> None:
    known = tables(tmp_path, *(entry(problem(mask=Mask.window(left, 0))) for left in (127, 1023)))
    found = table.lookup(problem(mask=Mask.window(asked, 0)), DEVICE, known, never).found
    assert found is not None
    assert found.entry.problem.mask.left == served


SISTERS = {
    "NVIDIA H100 80GB HBM3": {"dram_gb_per_s": 3350.0},
    "NVIDIA H100 PCIe": {"sm_count": 114, "dram_gb_per_s": 2000.0},
    "NVIDIA H100 NVL": {"dram_gb_per_s": 3900.0},
    "a slice of an H200": {"sm_count": 60, "dram_gb_per_s": 2400.0},
}


@pytest.mark.parametrize("name", SISTERS)
def test_a_sister_device_is_a_labelled_match(tmp_path: Path, name: str) -> None:
    sister = replace(DEVICE, name=name, **SISTERS[name])  # type: ignore[arg-type]
    assert not table.same_device(device_record(sister), device_record(DEVICE))
    found = table.lookup(problem(), sister, tables(tmp_path, entry()), never).found
    assert found is not None
    assert found.sister


def test_a_name_neither_joins_nor_parts_devices(tmp_path: Path) -> None:
    renamed = replace(DEVICE, name="NVIDIA H200 141GB", dram_gb_per_s=4813.0)
    found = table.lookup(problem(), renamed, tables(tmp_path, entry()), never).found
    assert found is not None
    assert not found.sister
    assert table.table_path(renamed, tmp_path) == tmp_path / "a.yaml"
    namesake = replace(DEVICE, sm_count=60)
    table.merge(tmp_path / "nvidia-h200.yaml", DEVICE, entry())
    assert table.table_path(namesake, tmp_path) == tmp_path / "nvidia-h200-60sm-4800gbps.yaml"


def test_a_device_of_another_architecture_gets_nothing(tmp_path: Path) -> None:
    found = table.lookup(problem(), replace(DEVICE, name="NVIDIA RTX PRO 6000", sm=120), tables(tmp_path, entry()), never)
    assert found.found is None
    assert "no entry serves" in found.explain()
