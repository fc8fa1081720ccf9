"""Backward kernels beside other libraries: what the recordings in tests/recorded/h200-backward must show, and what the docs say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import recorded_backward as recorded
from recorded_backward import AMPERE, FAMILIES, FOLDER, HEAD_DIMS, HOPPER, Family, Row, chosen, chosen_steady, determinism, ratio
from test_recorded import recording, stale
from test_recorded_hopper import geomean

from flashgen.device import preset
from flashgen.model import Op
from flashgen.space import load_space

GRID = {
    (head_dim, seqlen, mask) for head_dim in HEAD_DIMS for seqlen in (512, 1024, 2048, 4096, 8192, 16384) for mask in ("none", "causal")
}
of_every_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)


# How a choice is judged, on made-up times -------------------------------------------------------------------------------


def row(**samples_us: list[float]) -> Row:
    return {"samples_us": {name.replace("_", "-"): times for name, times in samples_us.items()}}


def test_the_even_rounds_choose_and_the_odd_ones_report() -> None:
    lucky, steady, peer = [10.0, 50.0] * 4, [20.0, 20.0] * 4, [99.0, 40.0] * 4
    found = row(lucky=lucky, other=steady, sdpa_flash=peer)
    assert chosen(found) == "lucky" and ratio(found) == 40.0 / 50.0


def test_a_ratio_is_to_the_fastest_peer_and_no_peer_is_chosen_as_ours() -> None:
    times = row(ours=[20.0] * 4, sdpa_flash=[10.0] * 4, sdpa_cudnn=[5.0] * 4)
    assert chosen(times) == "ours" and ratio(times) == 0.25


def test_determinism_is_the_time_of_the_best_variant_that_promises_the_same_bits_over_the_best_of_all() -> None:
    like = {"head_dim": 64, "seqlen": 512, "batch": 1, "heads": 1, "mask": "none"}
    bound = load_space("ampere_backward").bind(recorded.problem_of(like), preset("h200"))
    atomic, steady = (str(next(each for each in bound.feasible() if each.as_dict()["two_pass"] == passes)) for passes in (0, 1))
    times = like | {"samples_us": {atomic: [20.0, 30.0] * 4, steady: [25.0, 36.0] * 4, "sdpa-flash": [1.0] * 8}}
    assert recorded.steadies(times) == [steady] and determinism(times) == 36.0 / 30.0
    times["samples_us"][steady] = [10.0] * 8
    assert determinism(times) == 1.0


def test_a_part_of_a_page_is_drawn_again_and_a_missing_one_is_named() -> None:
    text = "a\n<!-- recorded: x -->\nold\nlines\n<!-- end -->\nb\n<!-- recorded: y -->\nkept\n<!-- end -->"
    assert recorded.redrawn(text, "x", "new") == text.replace("old\nlines", "new")
    with pytest.raises(ValueError, match="<!-- recorded: z -->"):
        recorded.redrawn(text, "z", "new")


# Recordings -------------------------------------------------------------------------------------------------------------


@of_every_family
def test_every_problem_of_the_grid_is_compared_once_with_every_peer(family: Family) -> None:
    rows = family.rows()
    assert {(row["head_dim"], row["seqlen"], row["mask"]) for row in rows} == GRID and len(rows) == len(GRID)
    assert all((row["batch"] * row["seqlen"], row["heads"] * row["head_dim"]) == (16384, 2048) for row in rows)
    assert all(set(family.peers) == set(row["samples_us"]) - set(recorded.own(row)) for row in rows)
    assert all(name.startswith(f"{family.name}[") for row in rows for name in recorded.own(row))


@of_every_family
def test_a_recording_holds_every_round_of_every_kernel(family: Family) -> None:
    for path in family.paths:
        found = recording(path)
        assert {len(times) for row in found["rows"] for times in row["samples_us"].values()} == {found["about"]["rounds"]}, path.name


def test_everything_was_recorded_on_one_gpu_with_one_driver_and_one_torch() -> None:
    abouts = [about for family in FAMILIES for about in family.about] + [recording(FOLDER / "memory.json")["about"]]
    assert len({(about["gpu"], about["driver"], about["torch"]) for about in abouts}) == 1


def test_ampere_backward_is_ahead_of_flash_attention_2_in_the_mean() -> None:
    assert geomean([ratio(row) for row in AMPERE.rows()]) >= 1.0


def test_hopper_backward_is_ahead_of_the_best_of_flash_attention_4_and_2_and_cudnn_in_the_mean_and_slow_nowhere() -> None:
    ratios = [ratio(row) for row in HOPPER.rows()]
    assert geomean(ratios) >= 1.05
    assert min(ratios) >= 0.92


@pytest.mark.parametrize(("head_dim", "at_least"), [(64, 1.0), (128, 1.0), (256, 1.25)])
def test_hopper_backward_is_ahead_at_every_head_dim(head_dim: int, at_least: float) -> None:
    assert geomean([ratio(row) for row in HOPPER.rows(head_dim)]) >= at_least


@pytest.mark.parametrize(("head_dim", "at_most"), [(64, 1.25), (128, 1.25), (256, 1.01)])
def test_the_same_bits_every_time_cost_at_most_a_quarter_and_nothing_at_head_dim_256(head_dim: int, at_most: float) -> None:
    costs = {(row["seqlen"], row["mask"]): determinism(row) for row in HOPPER.rows(head_dim)}
    worst = max(costs, key=lambda key: costs[key])
    print(f"d{head_dim}: {geomean(list(costs.values())):.3f}, worst {costs[worst]:.3f} at {worst}")
    assert geomean(list(costs.values())) <= at_most


@pytest.mark.parametrize(
    ("family", "chosen"), [(HOPPER, chosen), (HOPPER, chosen_steady), (AMPERE, chosen)], ids=["hopper", "hopper-deterministic", "ampere"]
)
def test_the_recorded_backward_kernels_are_those_of_today(family: Family, chosen: Any) -> None:
    found = stale(family.rows(), chosen, Op.BACKWARD)
    assert not found, f"the kernels changed since they were recorded; record them again with tests/device/study_backward.py: {found}"


def test_memory_is_the_results_and_no_more_than_is_promised_and_less_than_flash_attention_2_takes() -> None:
    found, results = recording(FOLDER / "memory.json"), recorded.mib_of_results()
    numbers = 4 * found["heads"] * found["rows"]  # one float32 per row
    promised = (found["head_dim"] + 4) * numbers >> 20  # dq; lse, its gradient, and two numbers
    assert results < found["flashgen_mib"] <= (results + promised) * 1.02
    assert found["flashgen_mib"] < found["fa2_mib"]


def test_a_model_learns_as_with_torchs_own_attention_within_the_difference_of_torchs_own_two() -> None:
    pytest.importorskip("torch", reason="needs torch: pip install torch")
    runs = recorded.runs()
    assert {len(run["losses"]) for run in runs.values()} == {200}
    assert recorded.apart("flashgen") <= max(2 * recorded.apart("sdpa-flash"), 0.01)
    assert runs["flashgen"]["losses"][-1] < 0.7 * runs["flashgen"]["losses"][0]
    assert runs["flashgen"]["tokens_per_s"] > runs["sdpa-math"]["tokens_per_s"]


# The docs ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "name"),
    [(path, name) for path, parts in recorded.PARTS.items() for name in parts],
    ids=lambda value: getattr(value, "stem", value),
)
def test_the_docs_show_the_recorded_figures(path: Path, name: str) -> None:
    if name == "training":
        pytest.importorskip("torch", reason="needs torch: pip install torch")
    text = path.read_text()
    assert recorded.redrawn(text, name, recorded.PARTS[path][name]()) == text, "draw them again: python tests/recorded_backward.py"
