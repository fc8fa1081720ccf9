"""The cost model against recorded times: it orders variants, and its best ten hold a good one. Every study in tests/recorded counts."""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from test_recorded import AGAINST_FA2, PEER, parsed

from flashgen import cost
from flashgen.device import preset
from flashgen.model import DType, Mask, Problem, Trial, Variant
from flashgen.space import BoundSpace, parse_space
from flashgen.study import RecordedStudy, read_study

RECORDED = Path(__file__).parent / "recorded"
STUDIES = sorted(path.parent for path in RECORDED.glob("*/study.jsonl"))
FEWEST = 50
"""A family with fewer measured variants in a study says nothing about ranks."""


def groups() -> list[tuple[str, BoundSpace, list[Trial]]]:
    """(name, space, measured trials) per study and family."""
    found = []
    for folder in STUDIES:
        study: RecordedStudy = read_study(folder / "study.jsonl")
        for family in study.header.spaces:
            trials = [each for each in study.trials if each.measurement is not None and each.variant.family == family]
            if len(trials) >= FEWEST:
                space = parse_space((folder / f"{family}.yaml").read_text())
                found.append((f"{folder.name} {family}", space.bind(study.header.problem, study.header.device), trials))
    return found


GROUPS = groups()


def ranks(values: list[float]) -> list[int]:
    order = sorted(range(len(values)), key=lambda index: values[index])
    placed = [0] * len(values)
    for place, index in enumerate(order):
        placed[index] = place
    return placed


def spearman(left: list[float], right: list[float]) -> float:
    one, other, middle = ranks(left), ranks(right), (len(left) - 1) / 2
    top = sum((a - middle) * (b - middle) for a, b in zip(one, other, strict=True))
    return top / sum((a - middle) ** 2 for a in one)


def times(bound: BoundSpace, trials: list[Trial], compiled: bool) -> tuple[list[float], list[float]]:
    """Predicted and measured µs."""
    predicted = [cost.roofline_us(bound, each.variant, each.report if compiled else None) for each in trials]
    return predicted, [each.measurement.median_us for each in trials if each.measurement is not None]


@pytest.mark.parametrize("compiled", [False, True], ids=["estimated registers", "compiled"])
def test_predictions_order_the_variants_of_a_study(compiled: bool) -> None:
    found = [spearman(*times(bound, trials, compiled)) for _, bound, trials in GROUPS]
    assert median(found) >= 0.8, dict(zip((name for name, *_ in GROUPS), found, strict=True))


@pytest.mark.parametrize("compiled", [False, True], ids=["estimated registers", "compiled"])
def test_the_ten_best_by_prediction_hold_a_variant_within_three_percent_of_the_best(compiled: bool) -> None:
    good = 0
    for _, bound, trials in GROUPS:
        predicted, measured = times(bound, trials, compiled)
        ten = sorted(range(len(trials)), key=lambda index: predicted[index])[:10]
        good += min(measured[index] for index in ten) <= 1.03 * min(measured)
    assert good >= 0.9 * len(GROUPS)


def recorded_row(row: dict[str, Any]) -> tuple[Problem, dict[Variant, float]]:
    mask = Mask.causal() if row["mask"] == "causal" else Mask()
    asked = Problem(
        DType.BFLOAT16, row["head_dim"], row["head_dim"], row["batch"], row["heads"], row["heads"], row["seqlen"], row["seqlen"], mask
    )
    return asked, {parsed(name): median(samples) for name, samples in row["samples_us"].items() if name != PEER}


def test_predicted_times_are_near_the_measured_ones_at_every_head_dim_mask_and_length() -> None:
    space = parse_space((Path(__file__).parents[1] / "search_spaces" / "ampere_forward.yaml").read_text())
    errors = []
    for row in json.loads(AGAINST_FA2.read_text())["rows"]:
        asked, measured = recorded_row(row)
        bound = space.bind(asked, preset("h200"))
        errors += [abs(math.log(cost.roofline_us(bound, each) / us)) for each, us in measured.items()]
    assert len(errors) > 250
    assert median(errors) <= 0.15
