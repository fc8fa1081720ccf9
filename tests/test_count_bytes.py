"""The command that counts the bytes of a matrix three ways, as far as a machine without a GPU can run it; and reading ncu's table."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from flashgen import device

sys.path.insert(0, str(Path(__file__).parent / "device"))
import count_bytes
import counters

HEADER = '==PROF== Connected\n"ID","Process ID","Kernel Name","Metric Name","Metric Unit","Metric Value"\n'


def line(number: int, kernel: str, name: str, value: str, unit: str = "byte") -> str:
    return f'"{number}","7","{kernel}","{name}","{unit}","{value}"\n'


def test_rows_of_ncu_become_bytes_per_problem_kernel_and_counter() -> None:
    text = HEADER + "".join(
        line(number, name, counters.READ, "1,024") + line(number, name, counters.WRITTEN, "1.5", "Mbyte")
        for number, name in enumerate(["scores(Params)", "softmax(Params)"] * 2)
    )
    found = counters.parsed(text, ("scores", "softmax"), 2)
    assert found == [{name: {counters.READ: 1024.0, counters.WRITTEN: 1.5e6} for name in ("scores", "softmax")}] * 2
    assert counters.total(found[0]) == 2 * (1024 + 1.5e6)


def test_runs_of_ncu_are_grouped_by_problem_and_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    output = HEADER + "".join(line(number, "forward", counters.READ, str(number)) for number in range(6))
    asked: list[str] = []

    def ncu(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        asked.extend(command)
        return subprocess.CompletedProcess(command, 0, output, "")

    monkeypatch.setattr(counters.shutil, "which", lambda name: "ncu")
    monkeypatch.setattr(counters.subprocess, "run", ncu)
    found = counters.moved_bytes("ampere_forward", ["first", "second"], launches=3)
    assert [[counters.total(each) for each in launches] for launches in found] == [[0, 1, 2], [3, 4, 5]]
    assert asked[-4:] == ["ampere_forward", "3", "first", "second"]


def test_a_kernel_that_ncu_did_not_see_is_no_zero() -> None:
    with pytest.raises(counters.NoCounters, match=r"\['scores'\] instead of 1 times \['scores', 'softmax'\]"):
        counters.parsed(HEADER + line(0, "scores", counters.READ, "1"), ("scores", "softmax"), 1)


def test_the_formula_names_128_mib_per_matrix_and_head() -> None:
    first, *walks = count_bytes.by_formula()
    assert first == "128.0 MiB per matrix and head"
    assert len(walks) == 4 and all(each.endswith("128.0 MiB per head once") for each in walks)


@pytest.mark.emulated
def test_the_emulator_s_count_at_512_is_that_of_the_formula() -> None:
    (found,) = count_bytes.by_emulator()
    assert re.fullmatch(r"3\.00 MiB in 6 walks over a matrix: 0\.50 MiB each; times 256: 128\.0 MiB", found)


def test_without_a_gpu_or_ncu_the_third_part_says_what_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "is_present", lambda: False)
    count_bytes.section("GPU", count_bytes.by_gpu)
    assert capsys.readouterr().out == "GPU\n  not counted: there is no GPU\n"
    monkeypatch.setattr(counters.shutil, "which", lambda name: None)
    with pytest.raises(counters.NoCounters, match="ncu"):
        counters.moved_bytes("standard_forward", [count_bytes.LARGE], launches=1)
