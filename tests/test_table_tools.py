"""Tables reviewed, compared and merged; exports; the commands around them."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from shipping import H200, NVRTC, entry, gradients, problem, stale, table_of, variant

from flashgen import cli, device, paths, staleness, t4, table, table_tools
from flashgen.errors import InvalidTable
from flashgen.model import ExecutorName, Mask, Outcome, TableEntry
from flashgen.study import read_study
from flashgen.table_schema import device_record
from flashgen.table_tools import Difference

ROOT = Path(__file__).resolve().parents[1]
MEASURED = ROOT / "tests" / "data" / "nvidia-h200.yaml"
Captured = pytest.CaptureFixture[str]


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch) -> staleness.Tools:
    """The toolchain that the invented entries were made with."""
    found = staleness.Tools(NVRTC, "580.65")
    monkeypatch.setattr(staleness, "tools_in_use", lambda: found)
    return found


def timed(of: TableEntry, median: float, spread: float = 0.02) -> TableEntry:
    half = median * spread / 2
    return replace(of, measurement=replace(of.measurement, median_us=median, p10_us=median - half, p90_us=median + half))


def run(arguments: list[str], capsys: Captured, code: int = 0) -> Any:
    assert cli.run([*arguments, "--json"]) == code, capsys.readouterr()
    return json.loads(capsys.readouterr().out)


# Differences ----------------------------------------------------------------------------------------------------------


def kinds(tmp_path: Path, old: list[TableEntry], new: list[TableEntry]) -> list[Difference]:
    before, after = table_of(tmp_path / "old.yaml", *old), table_of(tmp_path / "new.yaml", *new)
    return [each.difference for each in table_tools.diff(before, after)]


def test_a_difference_beyond_the_spread_is_faster_or_slower_and_one_within_it_is_neither(tmp_path: Path) -> None:
    base, other = entry(), variant(problem(), block_kv=64)
    assert kinds(tmp_path, [timed(base, 100.0)], [timed(base, 90.0)]) == [Difference.FASTER]
    assert kinds(tmp_path, [timed(base, 100.0)], [timed(base, 110.0)]) == [Difference.SLOWER]
    assert kinds(tmp_path, [timed(base, 100.0)], [timed(base, 99.0)]) == [Difference.RECERTIFIED]
    assert kinds(tmp_path, [timed(base, 100.0)], [timed(entry(chosen=other), 99.0)]) == [Difference.LEVEL]


def test_what_is_new_what_is_gone_and_what_is_the_same_are_told_apart(tmp_path: Path) -> None:
    a, b, c = (entry(problem(length)) for length in (512, 1024, 2048))
    assert kinds(tmp_path, [a, b], [b, c]) == [Difference.SAME, Difference.NEW, Difference.GONE]


def test_times_of_different_kinds_are_not_compared(tmp_path: Path) -> None:
    table_tools_found = table_tools.diff(
        table_of(tmp_path / "a.yaml", entry(kind="predicted", median=10.0)), table_of(tmp_path / "b.yaml", entry(median=100.0))
    )
    assert [(each.difference, each.ratio) for each in table_tools_found] == [(Difference.RECERTIFIED, None)]
    assert table_tools_found[0].words.startswith("predicted → measured")


def test_the_diff_command_fails_when_something_is_slower_or_gone(tmp_path: Path, capsys: Captured) -> None:
    fast, slow = table_of(tmp_path / "fast.yaml", timed(entry(), 90.0)), table_of(tmp_path / "slow.yaml", timed(entry(), 100.0))
    assert run(["table", "diff", str(slow.path), str(fast.path)], capsys)["changes"][0]["ratio"] == 0.9
    assert run(["table", "diff", str(fast.path), str(slow.path)], capsys, 1)["changes"][0]["difference"] == "slower"
    assert cli.run(["table", "diff", str(fast.path), str(slow.path)]) == 1
    assert "slower" in capsys.readouterr().out


# Merging --------------------------------------------------------------------------------------------------------------


def measured_with(nvrtc: str, median: float) -> TableEntry:
    base = timed(entry(), median)
    return replace(base, provenance=replace(base.provenance, nvrtc=nvrtc))


@pytest.mark.parametrize(
    ("present", "other", "kept", "rule"),
    [
        (entry(kind="predicted", median=1.0), entry(median=100.0), 1, "measured over predicted"),
        (entry(median=100.0), entry(kind="predicted", median=1.0), 0, "measured over predicted"),
        (measured_with("13.0", 90.0), measured_with("13.5", 100.0), 1, "newer NVRTC"),
        (measured_with("13.10", 100.0), measured_with("13.9", 90.0), 0, "newer NVRTC"),
        (measured_with("13.0", 100.0), measured_with("13.0", 90.0), 1, "faster by more than the spread"),
        (measured_with("13.0", 90.0), measured_with("13.0", 100.0), 0, "faster by more than the spread"),
        (measured_with("13.0", 100.0), measured_with("13.0", 99.5), 0, "the present entry stays"),
    ],
)
def test_a_conflict_goes_by_evidence(present: TableEntry, other: TableEntry, kept: int, rule: str) -> None:
    found = table_tools.stronger(present, other)
    assert (found.kept, found.dropped) == ((present, other), (other, present))[kept]
    assert rule in found.rule


def test_an_emulated_certificate_gives_way_to_one_by_a_device() -> None:
    device_, emulated = entry(median=100.0), entry(median=50.0)
    emulated = replace(emulated, certificate=replace(emulated.certificate, executor=ExecutorName.EMULATED))
    assert table_tools.stronger(emulated, device_).kept is device_


def test_no_problem_is_lost_whatever_the_order_of_merging(tmp_path: Path) -> None:
    rng = random.Random(3)
    lengths = [2**power for power in range(5, 13)]
    for round_ in range(20):
        made = [
            table_of(
                tmp_path / f"{round_}-{number}.yaml",
                *(timed(entry(problem(length)), rng.uniform(50, 150)) for length in rng.sample(lengths, 4)),
            )
            for number in range(3)
        ]
        into = tmp_path / f"{round_}.yaml"
        merged, _ = table_tools.merge(into, made)
        wanted = {table.full_key(each.problem) for source in made for each in source.entries}
        assert {table.full_key(each.problem) for each in merged.entries} == wanted
        assert table.read(into, strict=True).entries == table.parse(into.read_bytes(), into).entries


def test_entries_of_both_passes_live_side_by_side(tmp_path: Path, tools: staleness.Tools, capsys: Captured) -> None:
    forward, backward = entry(), gradients()
    one, two = table_of(tmp_path / "one.yaml", forward), table_of(tmp_path / "two.yaml", backward)
    merged, conflicts = table_tools.merge(tmp_path / "both.yaml", [one, two])
    assert set(merged.entries) == {forward, backward} and not conflicts
    assert cli.run(["table", "check", str(merged.path)]) == 0
    assert kinds(tmp_path, [forward, backward], [forward, timed(backward, 50.0)]) == [Difference.FASTER, Difference.SAME]
    worse = timed(backward, 200.0)
    merged, (conflict,) = table_tools.merge(merged.path, [table_of(tmp_path / "three.yaml", worse)])
    assert conflict.kept == backward and set(merged.entries) == {forward, backward}
    capsys.readouterr()


def test_a_damaged_entry_of_the_backward_pass_fails_its_check(tmp_path: Path, tools: staleness.Tools, capsys: Captured) -> None:
    path = table_of(tmp_path / "a.yaml", entry(), stale(gradients())).path
    assert cli.run(["table", "check", str(path)]) == 1
    assert "backward" in capsys.readouterr().out


def test_merging_twice_changes_nothing(tmp_path: Path) -> None:
    source = table_of(tmp_path / "a.yaml", entry(), entry(problem(2048)))
    into = tmp_path / "b.yaml"
    table_tools.merge(into, [source])
    text = into.read_bytes()
    _, conflicts = table_tools.merge(into, [source])
    assert not conflicts and into.read_bytes() == text


def test_tables_of_two_devices_are_not_merged(tmp_path: Path) -> None:
    one = table_of(tmp_path / "a.yaml", entry())
    (tmp_path / "b.yaml").write_text(table.render_table(device_record(device.preset("a100")), [entry()]))
    other = table.read(tmp_path / "b.yaml", strict=True)
    with pytest.raises(InvalidTable, match="Merge per device"):
        table_tools.merge(tmp_path / "c.yaml", [one, other])
    with pytest.raises(InvalidTable, match="belongs to"):
        table_tools.merge(one.path, [other])


def test_the_merge_command_names_the_rule_of_each_conflict(tmp_path: Path, capsys: Captured) -> None:
    one, other = table_of(tmp_path / "a.yaml", timed(entry(), 100.0)), table_of(tmp_path / "b.yaml", timed(entry(), 90.0))
    found = run(["table", "merge", str(one.path), str(other.path)], capsys)
    assert found["conflicts"] == [{**found["conflicts"][0], "kept_us": 90.0, "dropped_us": 100.0, "rule": "faster by more than the spread"}]


# Checking -------------------------------------------------------------------------------------------------------------


def test_the_check_command_passes_a_table_of_today(tmp_path: Path, tools: staleness.Tools, capsys: Captured) -> None:
    path = table_of(tmp_path / "a.yaml", entry()).path
    found = run(["table", "check", str(path)], capsys)
    assert found["passed"] and found["tables"][0]["entries"][0]["state"] == "valid"


@pytest.mark.parametrize(
    ("right", "wrong", "said"),
    [
        ("median_us: 100.0", "median_us: 10.0", "cut or edited"),
        ("sm_count: 132", "sm_count: 133", "device's record is not the sealed one"),
        ("dtype: bfloat16", "dtype: bfloat17", "dtype"),
        ("schema: flashgen.table/1", "schema: flashgen.table/9", "schema 'flashgen.table/9'"),
        ("verdict: exact", "verdict: exakt", "verdict"),
        ("block_q: 64", "block_q: 99", "block_q"),
    ],
)
def test_a_damaged_copy_fails_with_its_reason(
    tmp_path: Path, tools: staleness.Tools, capsys: Captured, right: str, wrong: str, said: str
) -> None:
    path = table_of(tmp_path / "a.yaml", entry()).path
    text = path.read_text()
    assert right in text
    path.write_text(text.replace(right, wrong, 1))
    assert cli.run(["table", "check", str(path)]) == 1
    assert said in " ".join(capsys.readouterr().out.split())


def test_a_stale_entry_fails_the_check_and_a_refresh_of_unchanged_machine_code_mends_it(
    tmp_path: Path, tools: staleness.Tools, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shipping import compiled

    from flashgen import compiler

    path = table_of(tmp_path / "a.yaml", stale(entry())).path
    monkeypatch.setattr(compiler, "compile_source", lambda source, arch: compiled(source, arch, b"\x7fELF other"))
    assert run(["table", "check", str(path)], capsys, 1)["tables"][0]["entries"][0]["state"] == "stale"
    monkeypatch.setattr(compiler, "compile_source", lambda source, arch: compiled(source, arch))
    assert run(["table", "check", str(path)], capsys)["tables"][0]["entries"][0]["state"] == "carried"
    assert run(["table", "refresh", str(path)], capsys)["carried"] == 1
    assert run(["table", "check", str(path)], capsys)["tables"][0]["entries"][0]["state"] == "valid"


def test_a_measured_stale_entry_is_not_refreshed_without_its_gpu_and_not_lost(
    tmp_path: Path, tools: staleness.Tools, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shipping import compiled

    from flashgen import compiler

    monkeypatch.setattr(device, "is_present", lambda: False)
    monkeypatch.setattr(compiler, "compile_source", lambda source, arch: compiled(source, arch, b"\x7fELF other"))
    path = table_of(tmp_path / "a.yaml", stale(entry())).path
    text = path.read_bytes()
    found = run(["table", "refresh", str(path)], capsys, 1)
    assert list(found["failed"].values()) == ["needs the table's GPU"]
    assert path.read_bytes() == text


def test_an_edit_by_hand_is_sealed_only_when_asked_to(tmp_path: Path, tools: staleness.Tools, capsys: Captured) -> None:
    path = table_of(tmp_path / "a.yaml", entry()).path
    path.write_text(path.read_text().replace("seed: 0", "seed: 7").replace("sm_count: 132", "sm_count: 131"))
    run(["table", "check", str(path)], capsys, 1)
    assert run(["table", "check", "--reseal", str(path)], capsys)["passed"]
    assert table.read(path, strict=True).entries[0].provenance.seed == 7


def test_reseal_does_not_accept_what_is_wrong_otherwise(tmp_path: Path, tools: staleness.Tools, capsys: Captured) -> None:
    path = table_of(tmp_path / "a.yaml", entry()).path
    path.write_text(path.read_text().replace("block_q: 64", "block_q: 65"))
    damaged = path.read_bytes()
    assert "block_q" in run(["table", "check", "--reseal", str(path)], capsys, 1)["tables"][0]["fault"]
    assert path.read_bytes() == damaged


def test_a_table_is_checked_for_a_gpu_that_is_not_present(tmp_path: Path, tools: staleness.Tools, capsys: Captured) -> None:
    path = table_of(tmp_path / "a.yaml", entry()).path
    found = run(["table", "check", "--gpu", "h100", str(path)], capsys)
    assert found["tables"][0]["entries"][0]["notes"][0]["note"] == "foreign"
    assert cli.run(["table", "check", "--gpu", "nonsense", str(path)]) == 2


def test_a_name_that_is_no_table_is_refused_with_the_known_ones(capsys: Captured) -> None:
    assert cli.run(["table", "show", "nowhere"]) == 2
    assert "There is no table 'nowhere'" in " ".join(capsys.readouterr().err.split())


# Lists ----------------------------------------------------------------------------------------------------------------


def test_list_and_show_name_tables_entries_and_what_gives_way(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    shipped = tmp_path / "shipped"
    monkeypatch.setattr(paths, "shipped_tables", lambda: shipped)
    table_of(home / "tables" / "nvidia-h200.yaml", entry(median=90.0), entry(problem(512), kind="predicted"))
    table_of(shipped / "nvidia-h200.yaml", entry(median=100.0), entry(problem(512)))
    found = run(["table", "list"], capsys)
    assert [each["whose"] for each in found["tables"]] == ["user", "shipped"]
    given = {each["problem"]: (Path(each["table"]).parent.name, Path(each["to"]).parent.name) for each in found["shadowed"]}
    assert given == {str(problem()): ("shipped", "tables"), str(problem(512)): ("tables", "shipped")}
    assert len(run(["table", "show", "nvidia-h200"], capsys)["entries"]) == 2
    assert cli.run(["table", "list"]) == cli.run(["table", "show", "nvidia-h200"]) == 0
    assert "gives way to" in capsys.readouterr().out


def test_the_limits_of_a_table_are_those_of_its_preset() -> None:
    assert table_tools.limits_of(device_record(H200)).l2_bytes == H200.l2_bytes
    odd = replace(device.preset("h100"), name="odd", sm_count=99)
    assert table_tools.limits_of(device_record(odd)).sm_count == 99


def test_measured_entries_from_an_h200_are_read_and_exported() -> None:
    found = table.read(MEASURED, strict=True)
    assert {each.measurement.source for each in found.entries} == {"measured"}
    assert len(t4.of_tables([found])["results"]) == 4


# T4 -------------------------------------------------------------------------------------------------------------------

INVALIDITY = {"timeout", "compile", "runtime", "correctness", "constraints", "correct"}


def fulfils_t4(document: dict[str, Any]) -> None:
    assert document["schema_version"] == "1.0.0"
    for each in document["results"]:
        assert {"configuration", "times", "invalidity", "correctness"} <= set(each)
        assert each["invalidity"] in INVALIDITY and isinstance(each["correctness"], float)
        assert all(isinstance(value, int) for value in each["configuration"].values())
        assert isinstance(each["times"]["runtimes"], list) and isinstance(each["objectives"], list)
        assert all({"name", "value", "unit"} == set(one) for one in each["measurements"])
        if each["invalidity"] == "correct":
            assert each["objectives"][0] in {one["name"] for one in each["measurements"]}


def test_the_export_of_a_table_fulfils_t4_in_milliseconds(capsys: Captured) -> None:
    assert cli.run(["table", "export", str(MEASURED)]) == 0
    document = json.loads(capsys.readouterr().out)
    fulfils_t4(document)
    first = document["results"][0]
    assert first["times"]["runtimes"] == [0.797456] and first["family"] == "ampere_forward"


def test_the_export_of_a_study_holds_every_trial_with_its_outcome(tmp_path: Path) -> None:
    (study,) = (ROOT / "tests" / "recorded" / "h200-bfloat16-d128-causal-s2048").glob("*.jsonl")
    out = tmp_path / "t4.json"
    assert cli.run(["table", "export", str(study), "--out", str(out)]) == 0
    document = json.loads(out.read_text())
    fulfils_t4(document)
    trials = read_study(study).trials
    assert len(document["results"]) == len(trials)
    good = sum(trial.outcome is Outcome.OK for trial in trials)
    assert sum(each["invalidity"] == "correct" for each in document["results"]) == good


def test_masks_of_all_kinds_have_entries_of_their_own(tmp_path: Path) -> None:
    masks = (Mask(), Mask.causal(), Mask.window(127, 0), Mask.window(63, 0))
    found = table_of(tmp_path / "a.yaml", *(entry(problem(mask=mask)) for mask in masks))
    assert len(found.entries) == 4
