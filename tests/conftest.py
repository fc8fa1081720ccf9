"""What every test shares: a home of its own, and reasons for skipping a tier whose tool is missing."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import browser
import pytest

_CREATED: list[Path] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also run the slow tests: long fuzzing, kill rounds, every policy")


def pytest_configure(config: pytest.Config) -> None:
    # One home for the whole run, made before the workers start, so that they share compiled kernels and never touch the user's.
    if not hasattr(config, "workerinput"):
        home = Path(tempfile.mkdtemp(prefix="flashgen tests "))  # a space in the path is part of the test
        _CREATED.append(home)
        os.environ["FLASHGEN_HOME"] = str(home)


def pytest_unconfigure(config: pytest.Config) -> None:
    for home in _CREATED:
        shutil.rmtree(home, ignore_errors=True)
    _CREATED.clear()


def _has_nvrtc() -> bool:
    try:
        from cupy.cuda import nvrtc

        nvrtc.getVersion()
    except Exception:
        return False
    return True


def _has_gpu() -> bool:
    try:
        import cupy

        return int(cupy.cuda.runtime.getDeviceCount()) > 0
    except Exception:
        return False


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    reasons = {
        "emulated": None if shutil.which("g++") else "needs a host C++ compiler: apt-get install g++",
        "compiled": None if _has_nvrtc() else "needs NVRTC: pip install 'flashgen[cuda13]'",
        "browser": browser.missing(),
        "device": None if _has_gpu() else "needs an NVIDIA GPU",
        "slow": None if config.getoption("--full") else "long; run with --full",
    }
    for item in items:
        for marker, reason in reasons.items():
            if reason and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty FLASHGEN_HOME for one test."""
    folder = tmp_path / "home"
    monkeypatch.setenv("FLASHGEN_HOME", str(folder))
    yield folder


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Mutation tests as killed / planted and accepted / right, over all workers."""
    reports = {outcome: terminalreporter.stats.get(outcome, []) for outcome in ("passed", "failed")}
    ran = {outcome: [each.nodeid for each in found if each.when == "call"] for outcome, found in reports.items()}
    for words, mark in (("faults killed / planted", "_is_rejected["), ("right kernels accepted / given", "test_the_unmutated_")):
        good, bad = (sum("test_mutations.py" in name and mark in name for name in ran[outcome]) for outcome in ("passed", "failed"))
        if good + bad:
            terminalreporter.write_line(f"mutation suite: {words}: {good} / {good + bad}")


@pytest.fixture
def nothing_shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No table comes with the package: for tests whose answer would change with every table that is shipped."""
    from flashgen import paths

    empty = tmp_path / "no tables"
    empty.mkdir()
    monkeypatch.setattr(paths, "shipped_tables", lambda: empty)
