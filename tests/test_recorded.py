"""Figures that the README shows, recomputed from the recorded times of every round."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from flashgen.model import DType, MaskKind, Op, ProblemClass, Variant
from flashgen.render import render
from flashgen.space import load_space

ROOT = Path(__file__).resolve().parents[1]
AGAINST_FA2 = ROOT / "tests" / "recorded" / "h200-ampere-against-fa2.json"
PEER = "sdpa-flash"


def recording(path: Path = AGAINST_FA2) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(path.read_text())
    return loaded


def chosen(row: dict[str, Any]) -> str:
    """The fastest by the even rounds; the odd ones report, so that choosing does not flatter the figure."""
    own = {name: times for name, times in row["samples_us"].items() if name != PEER}
    return min(own, key=lambda name: median(own[name][::2]))


def ratio(row: dict[str, Any]) -> float:
    samples = row["samples_us"]
    return median(samples[PEER][1::2]) / median(samples[chosen(row)][1::2])


def parsed(text: str) -> Variant:
    """A variant from its printed form, `family[name=value …]`."""
    family, _, rest = text.partition("[")
    return Variant(family, tuple((name, int(value)) for name, _, value in (part.partition("=") for part in rest.rstrip("]").split())))


def test_against_flash_attention_2_no_shape_is_slow_and_the_mean_is_ahead() -> None:
    ratios = [ratio(row) for row in recording()["rows"]]
    assert len(ratios) == 36
    assert math.prod(ratios) ** (1 / len(ratios)) >= 1.0
    assert min(ratios) >= 0.9


def stale(rows: list[dict[str, Any]], chosen: Callable[[dict[str, Any]], str], op: Op = Op.FORWARD) -> list[str]:
    """Rows whose chosen variant has another source by now that is not known to give the same machine code (carry_recordings.py)."""
    carried = json.loads((ROOT / "tests" / "recorded" / "carried.json").read_text())
    found = []
    for row in rows:
        name, dtype = chosen(row), DType(row.get("dtype", "bfloat16"))
        variant, klass = parsed(name), ProblemClass(op, dtype, row["head_dim"], row["head_dim"], MaskKind(row["mask"]))
        space = load_space(variant.family)
        recorded = row["source_digests"][name]
        if render(space, klass, Variant.of(space.family, space.checked(variant.as_dict()))).digest not in (recorded, carried.get(recorded)):
            found.append(f"d{row['head_dim']} s{row['seqlen']} {row['mask']}")
    return found


def test_the_recorded_kernels_are_those_of_today() -> None:
    found = stale(recording()["rows"], chosen)
    assert not found, f"the kernels changed since {AGAINST_FA2.name}; record it again with tests/device/study_against_fa2.py: {found}"


def speed_table(rows: list[dict[str, Any]], ratio: Callable[[dict[str, Any]], float]) -> str:
    """A table of the README: time of the peer over time of flashgen, head dims and masks down, lengths across."""
    lengths = sorted({row["seqlen"] for row in rows})
    lines = ["| head dim, mask | " + " | ".join(f"{length}" for length in lengths) + " |", "|---|" + "---|" * len(lengths)]
    for head_dim in sorted({row["head_dim"] for row in rows}):
        for mask in ("none", "causal"):
            found = {row["seqlen"]: ratio(row) for row in rows if (row["head_dim"], row["mask"]) == (head_dim, mask)}
            name = f"{head_dim}, {'full' if mask == 'none' else mask}"
            lines.append(f"| {name} | " + " | ".join(f"{found[length]:.2f}" for length in lengths) + " |")
    return "\n".join(lines)


def conditions() -> str:
    """Clocks and throttling over all comparisons, and the time of the searches, as the README words them."""
    rows = recording()["rows"]
    clocks = [clock for row in rows for clock in row["clock_mhz"]]
    capped = sum("power_cap" in row["throttle"] for row in rows)
    assert all(set(row["throttle"]) <= {"power_cap"} for row in rows), "name every reason for throttling in the README"
    seconds = [taken for row in rows for taken in row["search_seconds"]]
    return (
        f"SM clock {min(clocks)} to {max(clocks)} MHz, the power cap active in {capped} of {len(rows)} comparisons; "
        f"searches took {min(seconds):.0f} to {max(seconds):.0f} s"
    )


def test_the_readme_shows_the_recorded_figures() -> None:
    text = " ".join((ROOT / "README.md").read_text().split()) + "\n" + (ROOT / "README.md").read_text()
    about = recording()["about"]
    ratios = [ratio(row) for row in recording()["rows"]]
    mean = math.prod(ratios) ** (1 / len(ratios))
    assert f"Geometric mean {mean:.2f}, least {min(ratios):.2f}." in text
    assert conditions() in text
    assert speed_table(recording()["rows"], ratio) in text
    assert f"driver {about['driver']}" in text and about["date"] in text


@pytest.mark.parametrize("row", recording()["rows"], ids=lambda row: f"d{row['head_dim']}-s{row['seqlen']}-{row['mask']}")
def test_a_recording_holds_every_round_of_every_kernel(row: dict[str, Any]) -> None:
    assert {len(times) for times in row["samples_us"].values()} == {recording()["about"]["rounds"]}


def test_the_choices_of_two_independent_tunes_are_equally_fast() -> None:
    rows = recording(ROOT / "tests" / "recorded" / "h200-two-tunes-d256.json")["rows"]
    times = [[median(row["samples_us"][name]) for name in row["chosen"]] for row in rows]
    assert len(times) == 2
    assert all(abs(second / first - 1) <= 0.02 for first, second in times)


# Designs that were tried and left ---------------------------------------------------------------------------------------


LEFT = ROOT / "tests" / "recorded" / "h200-hopper-designs-left.json"


def joined_speeds() -> list[float]:
    """Speed with joined query tiles over that of the same variant without."""
    found = []
    for row in recording(LEFT)["rows"]:
        if row["tried"] != "joined query tiles":
            continue
        times = {name: median(values) for name, values in row["samples_us"].items()}
        found += [times[name.replace("join_tiles=1", "join_tiles=0")] / us for name, us in times.items() if "join_tiles=1" in name]
    return found


def two_cta_speeds() -> list[float]:
    """Speed of the fastest variant with two CTAs per SM over that of the fastest with one."""
    found = []
    for row in recording(LEFT)["rows"]:
        if row["tried"] != "two CTAs per SM":
            continue
        times = {name: median(values) for name, values in row["samples_us"].items()}
        best = [min(us for name, us in times.items() if f"ctas_per_sm={count}" in name) for count in (1, 2)]
        found.append(best[0] / best[1])
    return found


def test_the_family_s_readme_tells_what_did_not_pay() -> None:
    text = " ".join((ROOT / "templates" / "hopper" / "README.md").read_text().split())
    joined, two = joined_speeds(), two_cta_speeds()
    slower = sum(speed < 1.0 for speed in joined)
    lost = [100 * (1 - speed) for speed in joined]
    assert f"slower in {slower} of {len(joined)} pairs, by {min(lost):.1f} to {max(lost):.1f} %" in text
    assert f"the best of them is {100 * (1 - max(two)):.1f} to {100 * (1 - min(two)):.1f} % slower than the best single CTA" in text
    about = recording(LEFT)["about"]
    assert f"{about['date']}, driver {about['driver']}, SM clock {about['clock_mhz'][0]} to {about['clock_mhz'][1]} MHz" in text
