"""The cost model's DRAM bytes against the recorded counters of a GPU, and the recording itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import recorded_traffic
from recorded_traffic import FAMILIES, PROBLEMS, RECORDING, WITHIN, counters

from flashgen.device import preset

recorded = pytest.mark.skipif(
    not RECORDING.exists(),
    reason=f"no {RECORDING.name} yet: run tests/device/test_traffic_on_device.py with RECORD_TRAFFIC={RECORDING.name}",
)
DOCS = Path(__file__).resolve().parents[1] / "docs" / "explorer.md"
ABOUT = {"gpu": "NVIDIA H200", "date": "2026-01-01", "driver": "1.2"}


def counts(kernel: str, size: float) -> dict[str, dict[str, float]]:
    return {kernel: {counters.READ: size, counters.WRITTEN: size}}


@recorded
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("words", PROBLEMS)
def test_recorded_dram_bytes_are_within_a_tenth_of_the_model(family: str, words: str) -> None:
    limits, families = recorded_traffic.read()
    found, model = counters.total(families[family][words]), recorded_traffic.modelled(family, words, limits)
    assert found == pytest.approx(model, rel=WITHIN), recorded_traffic.line(words, found, model)


@recorded
def test_the_table_of_the_docs_is_that_of_the_recording() -> None:
    assert "\n".join(recorded_traffic.table()) in DOCS.read_text(), "run python tests/recorded_traffic.py"


def test_families_counted_one_after_the_other_share_a_record_and_another_gpu_begins_a_new_one(tmp_path: Path) -> None:
    path = tmp_path / "traffic.json"
    recorded_traffic.write(path, ABOUT, "ampere_forward", [counts("forward", 1e9)] * len(PROBLEMS))
    recorded_traffic.write(path, ABOUT, "hopper_forward", [counts("forward", 2e9)] * len(PROBLEMS))
    limits, families = recorded_traffic.read(path)
    assert limits == preset("h200") and [*families] == ["ampere_forward", "hopper_forward"]
    assert [counters.total(families["hopper_forward"][words]) for words in PROBLEMS] == [4e9] * len(PROBLEMS)
    assert recorded_traffic.table(path)[2].startswith("| 8, 32, 4096, 128, full | 2.00, ")
    recorded_traffic.write(path, ABOUT | {"gpu": "NVIDIA L40S"}, "ampere_forward", [counts("forward", 1e9)] * len(PROBLEMS))
    assert [*json.loads(path.read_text())["families"]] == ["ampere_forward"]
