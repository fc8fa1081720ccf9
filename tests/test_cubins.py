"""The store of compiled kernels: whole files or none, verified reads, and a home that cannot be written."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import stat
import warnings
from pathlib import Path

import pytest

from flashgen import cubins
from flashgen.cubins import Compiled, CubinStore, digest_of, publish
from flashgen.errors import HomeNotWritable
from flashgen.model import CompileReport


def compiled(key: str = "k" * 64, cubin: bytes = b"\x7fELF image") -> Compiled:
    report = CompileReport(digest_of(cubin), 96, 8, 16, 0, ("C7512",), 0.5, "13.0", ("--gpu-architecture=sm_90",))
    return Compiled(key, ("forward",), "sm_90", cubin, report)


def test_a_stored_kernel_comes_back_equal_but_for_being_cached(tmp_path: Path) -> None:
    store, kernel = CubinStore(tmp_path / "cubins"), compiled()
    assert store.get(kernel.key) is None
    store.put(kernel)
    found = CubinStore(tmp_path / "cubins").get(kernel.key)
    assert found is not None and found.cached
    assert (found.cubin, found.report, found.entry_points, found.architecture) == (kernel.cubin, kernel.report, ("forward",), "sm_90")


def damage_cut(path: Path, key: str) -> None:
    (path / f"{key}.cubin").write_bytes(b"\x7fELF")


def damage_flip(path: Path, key: str) -> None:
    (path / f"{key}.cubin").write_bytes(b"\x7fELF imagf")


def damage_empty_facts(path: Path, key: str) -> None:
    (path / f"{key}.json").write_bytes(b"")


def damage_no_facts(path: Path, key: str) -> None:
    (path / f"{key}.json").unlink()


def damage_no_cubin(path: Path, key: str) -> None:
    (path / f"{key}.cubin").unlink()


def damage_facts_of_another_key(path: Path, key: str) -> None:
    facts = json.loads((path / f"{key}.json").read_text())
    (path / f"{key}.json").write_text(json.dumps(facts | {"key": "other"}))


def damage_newer_schema(path: Path, key: str) -> None:
    facts = json.loads((path / f"{key}.json").read_text())
    (path / f"{key}.json").write_text(json.dumps(facts | {"schema": "flashgen.cubin/9"}))


def damage_list_instead_of_facts(path: Path, key: str) -> None:
    (path / f"{key}.json").write_text("[1, 2]")


DAMAGES = [
    damage_cut, damage_flip, damage_empty_facts, damage_no_facts, damage_no_cubin, damage_facts_of_another_key, damage_newer_schema,
    damage_list_instead_of_facts,
]  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_kernel_is_absent_and_can_be_stored_again(tmp_path: Path, damage: object) -> None:
    store, kernel = CubinStore(tmp_path), compiled()
    store.put(kernel)
    damage(tmp_path, kernel.key)  # type: ignore[operator]
    assert store.get(kernel.key) is None
    store.put(kernel)
    assert store.get(kernel.key) is not None


def unwritable(tmp_path: Path) -> Path:
    """A path below a regular file: creating it fails for everybody, also for root."""
    (tmp_path / "file").write_text("")
    return tmp_path / "file" / "cubins"


def test_an_unwritable_home_keeps_kernels_in_memory_and_warns_once(tmp_path: Path) -> None:
    store = CubinStore(unwritable(tmp_path))
    with pytest.warns(HomeNotWritable, match="FLASHGEN_HOME") as caught:
        store.put(compiled("a" * 64))
        store.put(compiled("b" * 64))
    assert len(caught) == 1
    assert store.get("a" * 64) is not None and store.get("b" * 64) is not None
    assert store.statistics().kernels == 0


def test_a_full_disk_leaves_no_partial_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, written = os.write, [0]

    def full_after_four_bytes(descriptor: int, data: memoryview) -> int:
        if written[0] >= 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        count = real(descriptor, data[:4])
        written[0] += count
        return count

    original = cubins.publish
    monkeypatch.setattr(cubins, "publish", lambda path, data: original(path, data, full_after_four_bytes))
    store = CubinStore(tmp_path)
    with pytest.warns(HomeNotWritable, match="No space left"):
        store.put(compiled())
    assert os.listdir(tmp_path) == []
    assert store.get(compiled().key) is not None, "the kernel is kept in memory"


def test_a_short_write_is_continued(tmp_path: Path) -> None:
    publish(tmp_path / "file", b"0123456789", lambda descriptor, data: os.write(descriptor, data[:3]))
    assert (tmp_path / "file").read_bytes() == b"0123456789"


def test_files_follow_the_umask_so_that_users_can_share_them(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        CubinStore(tmp_path).put(compiled())
    finally:
        os.umask(before)
    assert {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in os.listdir(tmp_path)} == {0o644}


def write_many(path: str, rounds: int) -> None:
    for _ in range(rounds):
        CubinStore(Path(path)).put(compiled(cubin=b"x" * 100_000))


def test_readers_see_whole_kernels_while_two_processes_write(tmp_path: Path) -> None:
    store = CubinStore(tmp_path)
    store.put(compiled(cubin=b"x" * 100_000))
    writers = [multiprocessing.get_context("fork").Process(target=write_many, args=(str(tmp_path), 60)) for _ in range(2)]
    for writer in writers:
        writer.start()
    reads = 0
    while any(writer.is_alive() for writer in writers):
        assert store.get(compiled().key) is not None
        reads += 1
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert reads > 0 and store.statistics().leftovers == 0


def aged(path: Path, key: str, seconds: float) -> None:
    for ending in ("cubin", "json"):
        file = path / f"{key}.{ending}"
        os.utime(file, (1000.0 - seconds, 1000.0 - seconds))


@pytest.fixture
def three(tmp_path: Path) -> CubinStore:
    store = CubinStore(tmp_path)
    for number, age in enumerate((300.0, 200.0, 100.0)):
        store.put(compiled(f"{number}" * 64, b"y" * 1000))
        aged(tmp_path, f"{number}" * 64, age)
    return store


def test_statistics_count_kernels_and_bytes_on_disk(three: CubinStore, tmp_path: Path) -> None:
    found = three.statistics()
    assert (found.kernels, found.oldest, found.newest) == (3, 700.0, 900.0)
    assert found.bytes == sum((tmp_path / name).stat().st_size for name in os.listdir(tmp_path))
    assert CubinStore(tmp_path / "absent").statistics().kernels == 0


def test_pruning_by_age_deletes_what_is_older(three: CubinStore) -> None:
    assert three.prune(max_age_s=150.0, now=1000.0)[0] == 2
    assert [three.get(f"{number}" * 64) is not None for number in range(3)] == [False, False, True]


def test_pruning_by_size_deletes_the_oldest_first(three: CubinStore) -> None:
    before = three.statistics().bytes
    deleted, freed = three.prune(max_bytes=before - 1, now=1000.0)
    assert deleted == 1 and three.get("0" * 64) is None and three.get("1" * 64) is not None
    assert three.statistics().bytes == before - freed


def test_pruning_without_limits_deletes_only_old_leftovers(three: CubinStore, tmp_path: Path) -> None:
    for name, age in (("old.tmp", 4000.0), ("young.tmp", 10.0)):
        (tmp_path / name).write_text("partial")
        os.utime(tmp_path / name, (1000.0 - age, 1000.0 - age))
    assert three.prune(now=1000.0) == (0, 7)
    assert (tmp_path / "young.tmp").exists() and not (tmp_path / "old.tmp").exists()
    assert three.statistics().kernels == 3


def test_a_store_that_works_warns_about_nothing(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        CubinStore(tmp_path).put(compiled())
