"""The cost model against recorded times: it orders variants, and its best ten hold a good one. Every recording in tests/recorded counts."""

from __future__ import annotations

import math
from statistics import median

import pytest
import recorded_variants
from recorded_variants import FEWEST, Group

STUDIES = [each for each in recorded_variants.studies() if len(each.times) >= FEWEST]
DRAWN = recorded_variants.drawn()
JUDGED = [each for each in DRAWN if len(each.times) >= FEWEST]
FAMILIES = sorted({each.family for each in DRAWN})
FINALISTS = recorded_variants.finalists()
HEAD_DIMS = {64, 80, 96, 128, 192, 256}
COMPILED = pytest.mark.parametrize("compiled", [False, True], ids=["estimated registers", "compiled"])


def of_family(family: str) -> list[Group]:
    """Problems with enough variants; all others of the recording are left out of every claim."""
    return [each for each in JUDGED if each.family == family]


# Studies: one problem, hundreds of variants that a search chose ------------------------------------------------------------


@COMPILED
def test_predictions_order_the_variants_of_a_study(compiled: bool) -> None:
    found = {str(each): each.rank_correlation(compiled) for each in STUDIES}
    assert median(found.values()) >= 0.8, found


@COMPILED
def test_the_ten_best_by_prediction_hold_a_variant_within_three_percent_of_the_best(compiled: bool) -> None:
    found = {str(each): each.ten_hold_a_good_one(compiled) for each in STUDIES}
    assert found and all(found.values()), found


# Variants drawn blindly: many problems. Without a recording of a family there is no claim about it ---------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_variants_were_drawn_at_every_head_dim_and_many_of_them(family: str) -> None:
    judged = of_family(family)
    assert {each.bound.problem.head_dim for each in judged} == HEAD_DIMS
    assert len({(each.bound.problem.klass(), variant) for each in judged for variant in each.times}) >= 300
    assert len(judged) >= 0.9 * len([each for each in DRAWN if each.family == family])


@COMPILED
@pytest.mark.parametrize("family", FAMILIES)
def test_predictions_order_variants_that_were_drawn_blindly(family: str, compiled: bool) -> None:
    found = {str(each): each.rank_correlation(compiled) for each in of_family(family)}
    assert median(found.values()) >= 0.8, found


@COMPILED
@pytest.mark.parametrize("family", FAMILIES)
def test_of_those_the_ten_best_by_prediction_hold_a_good_one_in_nine_problems_of_ten(family: str, compiled: bool) -> None:
    found = {str(each): each.ten_hold_a_good_one(compiled) for each in of_family(family)}
    assert sum(found.values()) >= 0.9 * len(found), found


# Finalists of searches: a few close variants per problem, so levels rather than order -----------------------------------------


@pytest.mark.parametrize("family", sorted({each.family for each in FINALISTS}))
def test_predicted_times_are_near_the_measured_ones_at_every_head_dim_mask_and_length(family: str) -> None:
    groups = [each for each in FINALISTS if each.family == family]
    pairs = [pair for each in groups for pair in zip(each.predicted(), each.times.values(), strict=True)]
    errors = [abs(math.log(predicted / measured)) for predicted, measured in pairs]
    assert len(errors) > 250
    assert median(errors) <= 0.15
