"""Bytes by a GPU's own counters beside the cost model's: the problems, the model's figures, and the recordings of the counters.

    python tests/recorded_traffic.py

prints the table of docs/explorer.md. tests/device/test_traffic_on_device.py counts on a GPU, and writes the recording where the environment
variable RECORD_TRAFFIC names a file; tests/test_traffic_recorded.py compares the recording with the model on any machine.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashgen import cost
from flashgen.device import preset
from flashgen.model import DeviceLimits
from flashgen.space import load_space

sys.path.insert(0, str(Path(__file__).parent / "device"))
import counters
from counters import Counts
from run_traffic import problem_of, variant_of

RECORDING = Path(__file__).parent / "recorded" / "h200-traffic.json"  # DRAM
L2_RECORDING = RECORDING.with_stem(RECORDING.stem + "-l2")
FLASH = ("ampere_forward", "hopper_forward")
FAMILIES = ("standard_forward", *FLASH)
PROBLEMS = (
    "8 32 4096 128 full",
    "8 64 4096 64 full",
    "16 32 2048 128 full",
    "2 64 8192 128 full",
    "4 32 8192 128 causal",
    "8 64 4096 64 causal",
    "16 32 2048 128 causal",
)
"""BATCH HEADS SEQLEN HEAD_DIM MASK, in fp16. Every operand is several times as large as L2, so that what a kernel leaves there unwritten
is a small part of its bytes. On an H200 the fourth is left to chance in `ampere_forward`, see `Modelled`; the other six are not."""
LAUNCHES = 5
WITHIN = 0.10  # of the model, the median of the launches
REPEATS = 0.05  # of the median, from the lowest launch to the highest


@dataclass(frozen=True, slots=True)
class Modelled:
    """DRAM bytes of the measured variant by the cost model: while CTAs of one head walk in step, and after they have drifted apart."""

    in_step: int
    apart: int

    @property
    def is_settled(self) -> bool:
        """Whether it hardly matters which of the two a launch is in; where it does, no figure is right for every launch."""
        return self.apart <= self.in_step * (1.0 + WITHIN)

    def misses(self, launches: list[Counts]) -> list[float]:
        """Counted bytes that are not within a tenth of the model: the median, or of an unsettled problem every launch off both states."""
        lowest, highest = self.in_step * (1.0 - WITHIN), (self.in_step if self.is_settled else self.apart) * (1.0 + WITHIN)
        found = [median(launches)] if self.is_settled else [counters.total(each) for each in launches]
        return [each for each in found if not lowest <= each <= highest]

    def __str__(self) -> str:
        return f"{self.in_step / 1e9:.2f}" if self.is_settled else f"{self.in_step / 1e9:.2f} to {self.apart / 1e9:.2f}"


def unsupported(family: str, words: str, limits: DeviceLimits) -> str | None:
    """Why the family does not run the problem on a device."""
    return load_space(family).unsupported(problem_of(words), limits)


def modelled(family: str, words: str, limits: DeviceLimits) -> Modelled:
    """The model's figures for a problem on a device."""
    in_step, apart = (_traffic(family, words, limits, in_step=state).dram_bytes for state in (True, False))
    return Modelled(in_step, apart)


def l2_ratios(family: str, counted: Mapping[str, list[Counts]], limits: DeviceLimits) -> dict[str, float]:
    """Bytes that SMs asked of L2 over the model's, by problem."""
    return {words: median(launches) / _traffic(family, words, limits).l2_bytes for words, launches in counted.items()}


def _traffic(family: str, words: str, limits: DeviceLimits, in_step: bool = True) -> cost.Traffic:
    bound = load_space(family).bind(problem_of(words), limits)
    variant = variant_of(bound)
    return cost.traffic(bound, variant, cost.resources(bound, variant).ctas_per_sm, in_step=in_step)


def median(launches: list[Counts]) -> float:
    """Bytes of the launch in the middle."""
    return statistics.median(map(counters.total, launches))


def spread(launches: list[Counts]) -> float:
    """From the lowest launch to the highest, over the median."""
    totals = [counters.total(each) for each in launches]
    return (max(totals) - min(totals)) / statistics.median(totals)


def spreads(counted: dict[str, list[Counts]], family: str, limits: DeviceLimits) -> dict[str, float]:
    """By problem, of those that the model does not leave to chance."""
    return {words: spread(launches) for words, launches in counted.items() if modelled(family, words, limits).is_settled}


def line(words: str, launches: list[Counts], model: Modelled) -> str:
    """One comparison in words."""
    found = ", ".join(f"{counters.total(each) / 1e9:.2f}" for each in launches)
    ratio = median(launches) / model.in_step
    return f"{words}: counted {found} GB (spread {spread(launches):.1%}), model {model} GB, median/model in step {ratio:.3f}"


def write(path: Path, about: dict[str, str], family: str, counted: dict[str, list[Counts]]) -> None:
    """Adds the launches of one family, by problem, to the record of the same GPU, driver and day; else begins a new one."""
    record: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    if record.get("about") != about:
        record = {"about": about, "families": {}}
    record["families"][family] = counted
    beside = path.with_suffix(".partial")
    beside.write_text(json.dumps(record, indent=1) + "\n")
    beside.replace(path)


def read(path: Path = RECORDING) -> tuple[DeviceLimits, dict[str, dict[str, list[Counts]]]]:
    """The recorded GPU, and by family and problem what was counted, launch by launch. FileNotFoundError where nothing is recorded."""
    record = json.loads(path.read_text())
    return preset(record["about"]["gpu"]), record["families"]


def table(path: Path = RECORDING) -> list[str]:
    """Counted and modelled gigabytes of every problem and family: the median, or the lowest and highest where it is left to chance."""
    limits, families = read(path)
    lines = ["| batch, heads, length, head dim, mask | " + " | ".join(f"`{family}`, spread, model" for family in families) + " |"]
    lines.append("|---" * (1 + len(families)) + "|")
    for words in PROBLEMS:
        cells = [_cell(by[words], modelled(family, words, limits)) for family, by in families.items()]
        lines.append(f"| {', '.join(words.split())} | " + " | ".join(cells) + " |")
    return lines


def _cell(launches: list[Counts], model: Modelled) -> str:
    found = f"{median(launches) / 1e9:.2f}, {spread(launches):.1%}"
    if not model.is_settled:
        found = ", ".join(f"{total / 1e9:.2f}" for total in sorted(map(counters.total, launches))) + ";"
    return f"{found}{',' if model.is_settled else ''} {model}"


if __name__ == "__main__":
    print("\n".join(table()))
