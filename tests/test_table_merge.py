"""Merging into tuned tables: what gives way, and concurrent writers."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from table_entries import DEVICE, entry, problem, written

from flashgen import table
from flashgen.errors import InvalidTable, NotWritable


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "nvidia-h200.yaml"


# ----------------------------------------------------------------------------------------------------------------- merge


def test_a_measured_entry_is_never_replaced_by_a_predicted_one(path: Path) -> None:
    before = written(path, entry(median=500.0))
    change = table.merge(path, DEVICE, entry(source="predicted", median=100.0))
    assert not change.written
    assert path.read_text() == before
    assert "never replaced" in change.describe()


def test_a_predicted_entry_gives_way_to_a_measured_one_and_the_others_stay(path: Path) -> None:
    written(path, entry(source="predicted", median=100.0), entry(problem(512)))
    change = table.merge(path, DEVICE, entry(median=500.0, block_q=64))
    assert change.written
    assert set(table.read(path, strict=True).entries) == {entry(median=500.0, block_q=64), entry(problem(512))}
    assert "block_q: 128 → 64" in change.describe()
    assert "100.0 µs" in change.describe()
    assert "predicted" in change.describe()


def test_a_merge_into_a_faulty_table_changes_nothing(path: Path) -> None:
    broken = written(path, entry()).replace("block_kv: 64", "block_kv: 96")
    path.write_text(broken)
    with pytest.raises(InvalidTable):
        table.merge(path, DEVICE, entry(problem(512)))
    assert path.read_text() == broken


def test_a_table_of_another_device_is_refused(path: Path) -> None:
    written(path, entry())
    with pytest.raises(InvalidTable, match="belongs to NVIDIA H200"):
        table.merge(path, replace(DEVICE, sm_count=114), entry())


def test_a_full_disk_leaves_the_old_table_and_no_rubbish(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = written(path, entry())

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(NotWritable, match="No space left"):
        table.merge(path, DEVICE, entry(problem(512)))
    assert path.read_text() == before
    assert [file.name for file in path.parent.iterdir() if not file.name.endswith(".lock")] == [path.name]


@pytest.mark.skipif(os.name != "posix", reason="POSIX permissions")
def test_a_table_in_a_shared_directory_can_be_read_and_locked_by_others(path: Path) -> None:
    mask = os.umask(0)
    try:
        written(path, entry())
    finally:
        os.umask(mask)
    assert {oct(file.stat().st_mode & 0o666) for file in path.parent.iterdir()} == {oct(0o666)}


def test_a_directory_that_cannot_be_made_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NotWritable, match="--table"):
        table.merge(tmp_path / "file" / "t.yaml", DEVICE, entry())


# ---------------------------------------------------------------------------------------------------- concurrency, case T06

WRITER = """
import sys
from pathlib import Path
from tests.table_entries import DEVICE, entry, problem
from flashgen import table
first, count = int(sys.argv[2]), int(sys.argv[3])
print("ready", flush=True)
for number in range(first, first + count):
    table.merge(Path(sys.argv[1]), DEVICE, entry(problem(number)))
"""


def _start(path: Path, first: int, count: int) -> subprocess.Popen[str]:
    root = Path(__file__).resolve().parents[1]
    environment = os.environ | {"PYTHONPATH": str(root)}
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path), str(first), str(count)], cwd=root, env=environment, stdout=subprocess.PIPE, text=True
    )


def _read_until(path: Path, stop: Any, faults: Any, reads: Any) -> None:
    while not stop.is_set():
        if path.exists():
            try:
                table.read(path, strict=True)
                reads.value += 1
            except Exception as problem:
                faults.put(repr(problem))
                return


@pytest.mark.parametrize(("writers", "readers", "each", "rounds"), [(3, 1, 4, 1), pytest.param(8, 8, 12, 20, marks=pytest.mark.slow)])
def test_concurrent_writers_lose_nothing_and_a_killed_one_blocks_nobody(
    tmp_path: Path, writers: int, readers: int, each: int, rounds: int
) -> None:
    rng = random.Random(6)
    context = multiprocessing.get_context("spawn")
    for number in range(rounds):
        path = tmp_path / f"round{number}.yaml"
        stop, faults = context.Event(), context.Queue()
        counts = [context.Value("i", 0) for _ in range(readers)]
        watching = [context.Process(target=_read_until, args=(path, stop, faults, count), daemon=True) for count in counts]
        for reader in watching:
            reader.start()
        running = [_start(path, 1 + writer * each, each) for writer in range(writers)]
        for process in running:
            assert process.stdout is not None
            process.stdout.readline()
        victim = running[0]
        time.sleep(rng.uniform(0, 0.05 * each))
        victim.send_signal(signal.SIGKILL)
        assert [process.wait(120) for process in running[1:]] == [0] * (writers - 1)
        victim.wait(10)
        while not all(count.value for count in counts) and faults.empty():
            time.sleep(0.01)
        stop.set()
        for reader in watching:
            reader.join(30)
        assert faults.empty(), faults.get()
        survivors = set(range(1 + each, 1 + writers * each))
        assert survivors <= {found.problem.seqlen_q for found in table.read(path, strict=True).entries}


HOLDER = """
import sys, time
from pathlib import Path
from flashgen import table
with table._locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def test_the_lock_of_a_killed_holder_is_free_at_once(path: Path) -> None:
    root = Path(__file__).resolve().parents[1]
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(path)], cwd=root, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    holder.kill()
    holder.wait(10)
    start = time.monotonic()
    table.merge(path, DEVICE, entry())
    assert time.monotonic() - start < 5
