"""Bytes of DRAM and L2 by the GPU's own counters, read with Nsight Compute (ncu)."""

from __future__ import annotations

import csv
import io
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from flashgen.space import load_space

READ, WRITTEN = DRAM = ("dram__bytes_read.sum", "dram__bytes_write.sum")
L2 = ("lts__t_sectors_srcunit_tex_op_read.sum", "lts__t_sectors_srcunit_tex_op_write.sum")  # asked by SMs, answered there or not
UNITS = {"byte": 1.0, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "sector": 32.0, "": 32.0}
LIMIT_S = 300

Counts = dict[str, dict[str, float]]  # of one run: kernel, counter: bytes


class NoCounters(Exception):
    """Why the counters cannot be read here."""


def entries(family: str) -> tuple[str, ...]:
    """Names of the kernels that one run launches, in order."""
    return tuple(each.entry for each in load_space(family).definition.launches)


def moved_bytes(family: str, problems: Sequence[str], launches: int, counters: Sequence[str] = DRAM) -> list[list[Counts]]:
    """Per problem (words as of run_traffic.py) and launch; caches are empty before each kernel. Raises NoCounters."""
    if shutil.which("ncu") is None:
        raise NoCounters("Nsight Compute (ncu) is not on the PATH")
    names = entries(family)
    chosen = ["--kernel-name", f"regex:^({'|'.join(names)})$", "--metrics", ",".join(counters)]
    chosen += ["--cache-control", "all", "--clock-control", "none"]  # bytes do not depend on clocks
    script = [sys.executable, str(Path(__file__).with_name("run_traffic.py")), family, str(launches), *problems]
    try:
        done = subprocess.run(["ncu", "--csv", *chosen, *script], capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired as error:
        raise NoCounters(f"ncu took longer than {LIMIT_S} s") from error
    if done.returncode or '"ID"' not in done.stdout:
        raise NoCounters(f"ncu cannot read the counters here: {(done.stdout + done.stderr).strip()[-400:]}")
    runs = parsed(done.stdout, names, len(problems) * launches, counters)
    return [runs[first : first + launches] for first in range(0, len(runs), launches)]


def parsed(output: str, names: Sequence[str], runs: int, counters: Sequence[str] = DRAM) -> list[Counts]:
    """The counters in the comma-separated table that ncu prints after its own lines, one row per launch and counter."""
    launches: dict[int, tuple[str, dict[str, float]]] = {}
    for row in csv.DictReader(io.StringIO(output[output.index('"ID"') :])):
        if row["Metric Name"] in counters:
            _, counts = launches.setdefault(int(row["ID"]), (row["Kernel Name"].partition("(")[0], {}))
            counts[row["Metric Name"]] = float(row["Metric Value"].replace(",", "")) * UNITS[row["Metric Unit"]]
    found = [launches[number] for number in sorted(launches)]
    if [name for name, _ in found] != [*names] * runs:
        raise NoCounters(f"ncu saw the kernels {[name for name, _ in found]} instead of {runs} times {list(names)}")
    return [dict(found[first : first + len(names)]) for first in range(0, len(found), len(names))]


def total(counted: Counts) -> float:
    """Bytes of all kernels of one run, read and written."""
    return sum(sum(each.values()) for each in counted.values())
