"""DRAM bytes by the GPU's own counters against the model, for problems larger than L2. Needs Nsight Compute (ncu)."""

from __future__ import annotations

import csv
import io
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from run_traffic import problem_of, variant_of

from flashgen import accounting, cost
from flashgen.device import present
from flashgen.space import load_space

pytestmark = [pytest.mark.device, pytest.mark.slow]
COUNTERS = ("dram__bytes_read.sum", "dram__bytes_write.sum")
ENTRIES = {"ampere_forward": ("forward",), "standard_forward": ("scores", "softmax", "product")}
PROBLEMS = (
    "1 1 8192 128 full",
    "4 16 4096 128 full",
    "2 16 8192 64 full",
    "2 16 8192 128 causal",
    "1 32 8192 64 causal",
    "1 8 16384 128 full",
)
WITHIN = 0.10


def counted(family: str, words: str) -> float:
    """DRAM bytes of all entry points of one run."""
    script = Path(__file__).with_name("run_traffic.py")
    names = "|".join(ENTRIES[family])
    command = ["ncu", "--csv", "--kernel-name", f"regex:^({names})$", "--cache-control", "all", "--metrics", ",".join(COUNTERS)]
    done = subprocess.run([*command, sys.executable, str(script), family, *words.split()], capture_output=True, text=True, timeout=600)
    if done.returncode or "ERR_NVGPUCTRPERM" in done.stdout:
        pytest.skip(f"ncu cannot read the counters here: {(done.stdout + done.stderr).strip()[-300:]}")
    table = done.stdout[done.stdout.index('"ID"') :]
    units = {"byte": 1.0, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9}
    rows = [row for row in csv.DictReader(io.StringIO(table)) if row["Metric Name"] in COUNTERS]
    return sum(float(row["Metric Value"].replace(",", "")) * units[row["Metric Unit"]] for row in rows)


@pytest.mark.skipif(shutil.which("ncu") is None, reason="needs Nsight Compute (ncu)")
@pytest.mark.parametrize("family", ENTRIES)
@pytest.mark.parametrize("words", PROBLEMS)
def test_dram_bytes_are_within_a_tenth_of_the_model(family: str, words: str) -> None:
    bound = load_space(family).bind(problem_of(words.split()), present())
    variant = variant_of(bound)
    if family == "standard_forward":
        modelled = accounting.account(bound, variant).once_bytes
    else:
        modelled = cost.traffic(bound, variant, cost.resources(bound, variant).ctas_per_sm).dram_bytes
    assert counted(family, words) == pytest.approx(modelled, rel=WITHIN), f"model {modelled:,} bytes"
