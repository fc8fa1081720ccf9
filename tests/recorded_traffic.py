"""DRAM bytes by a GPU's own counters beside the cost model's: the problems, the model's figures, and the recording of the counters.

    python tests/recorded_traffic.py

prints the table of docs/explorer.md. tests/device/test_traffic_on_device.py counts on a GPU, and writes the recording where the environment
variable RECORD_TRAFFIC names a file; tests/test_traffic_recorded.py compares the recording with the model on any machine.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from flashgen import cost
from flashgen.device import preset
from flashgen.model import DeviceLimits
from flashgen.space import load_space

sys.path.insert(0, str(Path(__file__).parent / "device"))
import counters
from run_traffic import problem_of, variant_of

RECORDING = Path(__file__).parent / "recorded" / "h200-traffic.json"
FAMILIES = ("standard_forward", "ampere_forward", "hopper_forward")
PROBLEMS = (
    "8 32 4096 128 full",
    "8 64 4096 64 full",
    "2 64 8192 128 full",
    "4 32 8192 128 causal",
    "8 64 4096 64 causal",
    "16 32 2048 128 causal",
)
"""BATCH HEADS SEQLEN HEAD_DIM MASK, in fp16. Every operand is several times as large as L2, so that what a kernel leaves there unwritten
is a small part of its bytes."""
WITHIN = 0.10

Counts = dict[str, dict[str, float]]  # kernel, counter: bytes


def unsupported(family: str, words: str, limits: DeviceLimits) -> str | None:
    """Why the family does not run the problem on a device."""
    return load_space(family).unsupported(problem_of(words), limits)


def modelled(family: str, words: str, limits: DeviceLimits) -> int:
    """DRAM bytes of the measured variant by the cost model."""
    bound = load_space(family).bind(problem_of(words), limits)
    variant = variant_of(bound)
    return cost.traffic(bound, variant, cost.resources(bound, variant).ctas_per_sm).dram_bytes


def line(words: str, counted: float, model: int) -> str:
    """One comparison in words."""
    return f"{words}: counted {counted / 1e9:.2f} GB, model {model / 1e9:.2f} GB, counted/model {counted / model:.3f}"


def write(path: Path, about: dict[str, str], family: str, counted: list[Counts]) -> None:
    """Adds the counts of one family, in the order of PROBLEMS, to the record of the same GPU, driver and day; else begins a new one."""
    record: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    if record.get("about") != about:
        record = {"about": about, "families": {}}
    record["families"][family] = dict(zip(PROBLEMS, counted, strict=True))
    beside = path.with_suffix(".partial")
    beside.write_text(json.dumps(record, indent=1) + "\n")
    beside.replace(path)


def read(path: Path = RECORDING) -> tuple[DeviceLimits, dict[str, dict[str, Counts]]]:
    """The recorded GPU, and by family and problem what was counted. FileNotFoundError where nothing is recorded."""
    record = json.loads(path.read_text())
    return preset(record["about"]["gpu"]), record["families"]


def table(path: Path = RECORDING) -> list[str]:
    """Counted and modelled gigabytes of every problem and family."""
    limits, families = read(path)
    lines = ["| batch, heads, length, head dim, mask | " + " | ".join(f"`{family}`, model" for family in families) + " |"]
    lines.append("|---" * (1 + len(families)) + "|")
    for words in PROBLEMS:
        cells = [f"{counters.total(by[words]) / 1e9:.2f}, {modelled(family, words, limits) / 1e9:.2f}" for family, by in families.items()]
        lines.append(f"| {', '.join(words.split())} | " + " | ".join(cells) + " |")
    return lines


if __name__ == "__main__":
    print("\n".join(table()))
