"""Recorded times of variants beside what the cost model predicts for them; every recording in tests/recorded that holds such times.

Kinds of recordings, by how their variants were chosen:
- `drawn`: blindly, by tests/device/study_of_variants.py, at many head dims, masks and lengths. They judge the model.
- `searched`: by searches, which measure what they find promising. Studies of one problem hold hundreds; recordings of finalists hold a few
  variants per problem whose times are close to each other, so they judge levels rather than order.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from math import comb
from pathlib import Path
from statistics import median
from typing import Any

from flashgen import cost
from flashgen.device import preset
from flashgen.model import CompileReport, DType, Mask, Problem, Variant
from flashgen.space import BoundSpace, Space, load_space, parse_space
from flashgen.study import read_study

RECORDED = Path(__file__).parent / "recorded"
FEWEST = 18
"""A problem with fewer variants says nothing about order: the ten best of a dozen are nearly all of them."""
NEAR = 1.03  # of the best time
COMPARISONS = ("h200-ampere-against-fa2.json", *(f"h200-hopper/{name}.json" for name in ("fp16", "gqa", "head_dims", "main")))
"""With other libraries; of each problem some finalists of searches."""


@dataclass(frozen=True)
class Group:
    """The variants of one family that were timed on one problem. Times are medians in µs."""

    recording: str  # folder or file in tests/recorded
    family: str
    bound: BoundSpace
    times: Mapping[Variant, float]
    reports: Mapping[Variant, CompileReport]

    def __str__(self) -> str:
        return f"{self.recording} {self.family} {self.bound.problem}"

    def predicted(self, compiled: bool = False) -> list[float]:
        """Predicted µs, in the order of `times`."""
        return [cost.roofline_us(self.bound, each, self.reports[each] if compiled else None) for each in self.times]

    def rank_correlation(self, compiled: bool = False) -> float:
        """Spearman's, of predicted and measured times."""
        return spearman(self.predicted(compiled), list(self.times.values()))

    def ten_hold_a_good_one(self, compiled: bool = False) -> bool:
        """Whether the ten best by prediction hold a variant within 3 % of the best measured."""
        measured, predicted = list(self.times.values()), self.predicted(compiled)
        ten = sorted(range(len(measured)), key=lambda index: predicted[index])[:10]
        return min(measured[index] for index in ten) <= NEAR * min(measured)

    def chance_of_a_good_one(self) -> float:
        """How likely ten variants drawn without any model hold one within 3 % of the best measured."""
        measured = list(self.times.values())
        others = sum(each > NEAR * min(measured) for each in measured)
        return 1 - comb(others, 10) / comb(len(measured), 10)

    def pairs_in_order(self) -> tuple[int, int]:
        """Of the pairs whose measured times differ by more than 3 %: how many are predicted in the right order, and how many there are."""
        predicted, measured = self.predicted(), list(self.times.values())
        apart = [pair for pair in combinations(range(len(measured)), 2) if abs(measured[pair[0]] / measured[pair[1]] - 1) > NEAR - 1]
        right = sum((predicted[one] - predicted[other]) * (measured[one] - measured[other]) > 0 for one, other in apart)
        return right, len(apart)


def ranks(values: list[float]) -> list[float]:
    """Places from 0; equal values share the mean of theirs."""
    return [sum(other < value for other in values) + (sum(other == value for other in values) - 1) / 2 for value in values]


def spearman(left: list[float], right: list[float]) -> float:
    """Rank correlation; 0 where one side does not vary."""
    middle = (len(left) - 1) / 2
    one, other = ([rank - middle for rank in ranks(each)] for each in (left, right))
    scale = (sum(a * a for a in one) * sum(b * b for b in other)) ** 0.5
    return sum(a * b for a, b in zip(one, other, strict=True)) / scale if scale else 0.0


# Drawn blindly ----------------------------------------------------------------------------------------------------------


def drawn(folder: Path = RECORDED) -> list[Group]:
    """All groups of every FOLDER/*/variants-FAMILY.json, against the space yaml beside it."""
    return [group for path in sorted(folder.glob("*/variants-*.json")) for group in _drawn_of(path)]


def _drawn_of(path: Path) -> list[Group]:
    record = json.loads(path.read_text())
    space = parse_space((path.parent / f"{record['family']}.yaml").read_text())
    device = preset(record["about"]["gpu"])
    found = []
    for row in record["rows"]:
        times, reports = dict[Variant, float](), dict[Variant, CompileReport]()
        for each in row["variants"]:
            variant = _variant(space, dict(zip(record["parameters"], each["params"], strict=True)))
            times[variant] = median(each["samples_us"])
            spilled, static = each["spill_bytes"], each["static_shared_bytes"]
            reports[variant] = CompileReport("", each["registers"], spilled, 0, static, (), 0.0, "", ())
        assert len(times) == len(row["variants"]), f"{path}: a variant twice in one row"
        found.append(Group(path.parent.name, space.family, space.bind(_problem(row), device), times, reports))
    return found


def _variant(space: Space, params: dict[str, int]) -> Variant:
    return Variant.of(space.family, space.checked(params))


def _problem(row: dict[str, Any]) -> Problem:
    head_dim, heads, seqlen = row["head_dim"], row["heads"], row["seqlen"]
    mask = Mask.causal() if row["mask"] == "causal" else Mask()
    dtype = DType(row.get("dtype", "bfloat16"))
    return Problem(dtype, head_dim, head_dim, row["batch"], heads, row.get("kv_heads", heads), seqlen, seqlen, mask)


# Found by searches ------------------------------------------------------------------------------------------------------


def studies(folder: Path = RECORDED) -> list[Group]:
    """The trials of every recorded study, by family, against the space yaml beside it."""
    found = []
    for path in sorted(folder.glob("*/study.jsonl")):
        study = read_study(path)
        for family in study.header.spaces:
            timed = {each.variant: each for each in study.trials if each.measurement is not None and each.variant.family == family}
            if not timed:
                continue
            bound = parse_space((path.parent / f"{family}.yaml").read_text()).bind(study.header.problem, study.header.device)
            times = {variant: trial.measurement.median_us for variant, trial in timed.items() if trial.measurement}
            reports = {variant: trial.report for variant, trial in timed.items() if trial.report}
            found.append(Group(path.parent.name, family, bound, times, reports))
    return found


def finalists(folder: Path = RECORDED) -> list[Group]:
    """Own variants of the comparisons with other libraries, against the spaces of today."""
    found = []
    for path in (folder / name for name in COMPARISONS):
        record = json.loads(path.read_text())
        for row in record["rows"]:
            own = {name: median(samples) for name, samples in row["samples_us"].items() if "[" in name}
            space = load_space(next(iter(own)).partition("[")[0])
            times = {_variant(space, _parameters(name)): us for name, us in own.items()}
            bound = space.bind(_problem(row), preset(record["about"]["gpu"]))
            found.append(Group(str(path.relative_to(folder)), space.family, bound, times, {}))
    return found


def _parameters(name: str) -> dict[str, int]:
    """Of a variant's printed form, `family[name=value …]`."""
    return {word: int(value) for word, _, value in (part.partition("=") for part in name.partition("[")[2].rstrip("]").split())}
