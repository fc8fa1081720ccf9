"""The cost model's DRAM bytes against the recorded counters of a GPU, and the recording itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import recorded_traffic
from recorded_traffic import FAMILIES, FLASH, L2_RECORDING, LAUNCHES, PROBLEMS, REPEATS, WITHIN, Modelled, counters

from flashgen.device import preset

DOCS = Path(__file__).resolve().parents[1] / "docs" / "explorer.md"
ABOUT = {"gpu": "NVIDIA H200", "date": "2026-01-01", "driver": "1.2"}


def counts(*totals: float) -> list[counters.Counts]:
    """Launches of one kernel that moved so many bytes."""
    return [{"forward": {counters.READ: total / 2, counters.WRITTEN: total / 2}} for total in totals]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("words", PROBLEMS)
def test_recorded_dram_bytes_are_within_a_tenth_of_the_model(family: str, words: str) -> None:
    limits, families = recorded_traffic.read()
    launches, model = families[family][words], recorded_traffic.modelled(family, words, limits)
    assert len(launches) == LAUNCHES
    assert not model.misses(launches), recorded_traffic.line(words, launches, model)


@pytest.mark.parametrize("family", FAMILIES)
def test_recorded_launches_of_a_problem_repeat_unless_the_model_leaves_them_to_chance(family: str) -> None:
    limits, families = recorded_traffic.read()
    spreads = recorded_traffic.spreads(families[family], family, limits)
    assert max(spreads.values()) < REPEATS, spreads


@pytest.mark.parametrize("family", FLASH)
def test_recorded_l2_bytes_are_within_a_tenth_of_the_model_and_as_the_docs_say(family: str) -> None:
    limits, families = recorded_traffic.read(L2_RECORDING)
    ratios = recorded_traffic.l2_ratios(family, families[family], limits)
    assert [*ratios] == list(PROBLEMS) and all(abs(ratio - 1.0) <= WITHIN for ratio in ratios.values()), ratios
    assert f"{min(ratios.values()):.3f} to {max(ratios.values()):.3f} for `{family}`" in " ".join(DOCS.read_text().split())


def test_the_table_of_the_docs_is_that_of_the_recording() -> None:
    assert "\n".join(recorded_traffic.table()) in DOCS.read_text(), "run python tests/recorded_traffic.py"


@pytest.mark.parametrize("family", FAMILIES)
def test_the_model_leaves_at_most_one_problem_to_chance_and_settles_six(family: str) -> None:
    chance = [words for words in PROBLEMS if not recorded_traffic.modelled(family, words, preset("h200")).is_settled]
    assert chance == (["2 64 8192 128 full"] if family == "ampere_forward" else [])
    assert len(PROBLEMS) - len(chance) >= 6


def test_the_docs_name_both_states_of_the_problem_that_is_left_to_chance() -> None:
    model = recorded_traffic.modelled("ampere_forward", "2 64 8192 128 full", preset("h200"))
    prose = " ".join(DOCS.read_text().split())
    assert f"{model.in_step / 1e9:.1f} GB in all by the model; apart nearly every request goes there, {model.apart / 1e9:.1f} GB" in prose


def test_a_settled_problem_is_held_to_a_tenth_of_the_model_by_its_median() -> None:
    model = Modelled(in_step=100, apart=105)
    assert model.misses(counts(80, 111, 120)) == [111]
    assert model.misses(counts(80, 109, 120)) == []


def test_every_launch_of_an_unsettled_problem_lies_between_the_model_s_two_states() -> None:
    model = Modelled(in_step=100, apart=200)
    assert model.misses(counts(95, 150, 215)) == []
    assert model.misses(counts(89, 150, 221)) == [89, 221]


def test_families_counted_one_after_the_other_share_a_record_and_another_gpu_begins_a_new_one(tmp_path: Path) -> None:
    path = tmp_path / "traffic.json"
    recorded_traffic.write(path, ABOUT, "standard_forward", dict.fromkeys(PROBLEMS, counts(2e9, 3e9, 2.5e9)))
    recorded_traffic.write(path, ABOUT, "ampere_forward", dict.fromkeys(PROBLEMS, counts(4e9, 6e9, 5e9)))
    limits, families = recorded_traffic.read(path)
    assert limits == preset("h200") and [*families] == ["standard_forward", "ampere_forward"]
    assert families["ampere_forward"] == dict.fromkeys(PROBLEMS, counts(4e9, 6e9, 5e9))
    recorded_traffic.write(path, ABOUT | {"gpu": "NVIDIA L40S"}, "ampere_forward", dict.fromkeys(PROBLEMS, counts(1e9)))
    assert [*json.loads(path.read_text())["families"]] == ["ampere_forward"]


def test_the_table_gives_medians_and_spreads_and_every_launch_where_chance_decides(tmp_path: Path) -> None:
    path = tmp_path / "traffic.json"
    recorded_traffic.write(path, ABOUT, "ampere_forward", dict.fromkeys(PROBLEMS, counts(20e9, 30e9, 25e9)))
    rows = recorded_traffic.table(path)[2:]
    assert rows[0] == "| 8, 32, 4096, 128, full | 25.00, 40.0%, 17.22 |"
    assert rows[3] == "| 2, 64, 8192, 128, full | 20.00, 25.00, 30.00; 17.48 to 33.17 |"
