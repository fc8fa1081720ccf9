"""What ends up in the wheel, and what the project says of itself."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def tracked(*folders: str) -> set[str]:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("needs a git checkout")
    return set(
        subprocess.run(["git", "ls-files", "--", *folders], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    ) - {""}


def test_the_wheel_holds_the_tracked_files_and_nothing_else(tmp_path: Path) -> None:
    pytest.importorskip("hatchling", reason="needs hatchling: pip install hatchling")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)], cwd=ROOT, check=True, capture_output=True
    )
    (wheel,) = tmp_path.glob("*.whl")
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    expected = tracked("flashgen")
    expected |= {f"flashgen/_data/{name}" for name in tracked("templates", "search_spaces")}
    assert names == expected


def test_what_a_wheel_holds_is_found_when_it_is_installed(tmp_path: Path) -> None:
    pytest.importorskip("hatchling", reason="needs hatchling: pip install hatchling")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    lines = (
        "import sys; sys.path.insert(0, sys.argv[1]); import flashgen",
        "assert flashgen.__file__.startswith(sys.argv[1]), flashgen.__file__",
        "from flashgen.cli import run",
        "sys.exit(run(['table', 'list', '--json']) or run(['show', 'source', '--head-dim', '64', '--gpu', 'h200']))",
    )
    script = "\n".join(lines)
    run = subprocess.run([sys.executable, "-c", script, str(tmp_path / "site")], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "nvidia-h100" in run.stdout and "FG_KERNEL(forward" in run.stdout


def sh_blocks() -> list[str]:
    return re.findall(r"^```sh\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)


def test_the_readme_starts_with_two_one_line_commands() -> None:
    first, second = (block.strip() for block in sh_blocks()[:2])
    assert "flashgen tune --head-dim 128" in first and "\n" not in first
    assert "pytest" in second and "\n" not in second
