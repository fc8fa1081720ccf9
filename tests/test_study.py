"""Studies on disk: nothing finished is lost, torn lines are survived, one writer at a time; recordings replay."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from flashgen import device
from flashgen.errors import HomeNotWritable, NotWritable, StudyMismatch
from flashgen.model import CompileReport, DType, ExecutorName, Mask, Measurement, Outcome, Problem, Trial, Variant
from flashgen.study import MAX_STARTS, Header, Journal, read_study, study_name

PROBLEM = Problem(DType.BFLOAT16, 128, 128, 4, 16, 16, 4096, 4096, Mask.causal())
HEADER = Header(
    problem=PROBLEM, device=device.preset("h200"), executor=ExecutorName.DEVICE, spaces={"ampere_forward": "77"}, nvrtc="13.0", flashgen="1"
)  # fmt: skip
REPORT = CompileReport("9b" * 32, 255, 0, 0, 0, ("a warning",), 0.3, "13.0", ("--std=c++17",))


def variant(number: int) -> Variant:
    return Variant.of("ampere_forward", {"block_q": number, "q_in_registers": number % 2 == 0})


def trial(number: int) -> Trial:
    return Trial(variant(number), Outcome.OK, "", Measurement(100.0 + number, 99.5, 101.25, 50, 300.0, clock_mhz=(1, 2)), REPORT, "3f" * 32)


FAILED = [
    Trial(variant(90), Outcome.COMPILE_FAILED, "line 1\nline 2 “quoted”"),
    Trial(variant(91), Outcome.INEXACT, "selection", report=REPORT),
    Trial(variant(92), Outcome.TIMED_OUT, "60 s"),
]


def run(journal: Journal, *trials: Trial) -> None:
    for each in trials:
        journal.start(each.variant)
        journal.end(each)


def test_every_trial_comes_back_as_it_was(tmp_path: Path) -> None:
    trials = [trial(1), trial(2), *FAILED]
    with_file = Journal.open(HEADER, directory=tmp_path)
    run(with_file, *trials)
    assert with_file.path is not None
    assert read_study(with_file.path).trials == tuple(trials), "readable while the search still runs"
    with_file.close()
    again = Journal.open(HEADER, directory=tmp_path)
    assert list(again.trials.values()) == trials
    assert [type(value) for _, value in again.trials[variant(2)].variant.params] == [int, bool]
    again.close()


@pytest.mark.parametrize("cut", [1, 7, 40])
def test_a_torn_last_line_costs_that_trial_only(tmp_path: Path, cut: int) -> None:
    journal = Journal.open(HEADER, directory=tmp_path)
    run(journal, trial(1), trial(2))
    journal.close()
    assert journal.path is not None
    journal.path.write_bytes(journal.path.read_bytes()[:-cut])
    again = Journal.open(HEADER, directory=tmp_path)
    assert list(again.trials.values()) == [trial(1)]
    run(again, trial(3))
    again.close()
    assert read_study(journal.path).trials == (trial(1), trial(3))


def test_fresh_starts_anew_and_keeps_the_old_file(tmp_path: Path) -> None:
    journal = Journal.open(HEADER, directory=tmp_path)
    run(journal, trial(1))
    journal.close()
    again = Journal.open(HEADER, directory=tmp_path, fresh=True)
    assert again.trials == {}
    again.close()
    assert journal.path is not None
    assert read_study(journal.path.with_suffix(".previous")).trials == (trial(1),)


OTHERS = {
    "problem": replace(PROBLEM, seqlen_q=512),
    "window": replace(PROBLEM, mask=Mask.window(1, 0)),
    "alignment": replace(PROBLEM, mask=Mask.causal(alignment="top_left")),  # type: ignore[arg-type]
    "device": device.preset("h100"),
    "executor": ExecutorName.EMULATED,
    "spaces": {"ampere_forward": "78"},
    "families": {"ampere_forward": "77", "simt_forward": "1"},
    "nvrtc": "13.1",
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_problem_device_space_or_toolchain_is_another_study(name: str) -> None:
    field = {"window": "problem", "alignment": "problem", "families": "spaces"}.get(name, name)
    fields = {key: getattr(HEADER, key) for key in Header.__struct_fields__} | {field: OTHERS[name]}
    assert study_name(Header(**fields)) != study_name(HEADER)


def test_the_name_of_a_card_does_not_change_the_study() -> None:
    fields = {key: getattr(HEADER, key) for key in Header.__struct_fields__}
    renamed = Header(**(fields | {"device": replace(HEADER.device, name="H200 again"), "flashgen": "2"}))
    assert renamed.digest() == HEADER.digest()


def test_a_variant_that_never_came_back_is_left_alone_after_two_starts(tmp_path: Path) -> None:
    for start in range(MAX_STARTS):
        journal = Journal.open(HEADER, directory=tmp_path)
        assert not journal.lost(variant(5)), start
        journal.start(variant(5))
        journal.close()  # as if the process had ended here
    journal = Journal.open(HEADER, directory=tmp_path)
    assert journal.lost(variant(5))
    assert not journal.lost(variant(6))
    journal.close()


def test_two_searches_of_the_same_problem_exclude_each_other(tmp_path: Path) -> None:
    first = Journal.open(HEADER, directory=tmp_path)
    with pytest.raises(NotWritable, match="Another process searches the same problem"):
        Journal.open(HEADER, directory=tmp_path)
    first.close()
    Journal.open(HEADER, directory=tmp_path).close()


def test_an_unwritable_home_keeps_trials_in_memory_with_one_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.warns(HomeNotWritable, match="FLASHGEN_HOME") as caught:
        journal = Journal.open(HEADER, directory=tmp_path / "file" / "studies")
        run(journal, trial(1))
    assert len(caught) == 1
    assert journal.path is None
    assert list(journal.trials.values()) == [trial(1)]


def test_a_full_disk_ends_journalling_and_not_the_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal.open(HEADER, directory=tmp_path)
    run(journal, trial(1))

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.warns(HomeNotWritable, match="No space left") as caught:
        run(journal, trial(2), trial(3))
    assert len(caught) == 1
    assert len(journal.trials) == 3


@pytest.mark.parametrize("content", ["", "{}\n", "nonsense\n", '{"type":"study","schema":"flashgen.study/2"}\n'])
def test_a_file_that_is_no_study_is_refused_and_set_aside(tmp_path: Path, content: str) -> None:
    path = tmp_path / f"{study_name(HEADER)}.jsonl"
    path.write_text(content)
    with pytest.raises(StudyMismatch, match="--fresh"):
        read_study(path)
    with pytest.warns(UserWarning, match="begun anew"):
        journal = Journal.open(HEADER, directory=tmp_path)
    run(journal, trial(1))
    journal.close()
    assert read_study(path).trials == (trial(1),)
    assert path.with_suffix(".previous").read_text() == content


WRITER = """
import sys
from pathlib import Path
from tests.test_study import HEADER, Journal, run, trial
journal = Journal.open(HEADER, directory=Path(sys.argv[1]))
for number in range(10_000):
    if number not in {int(v.as_dict()["block_q"]) for v in journal.trials}:
        run(journal, trial(number))
        print(number, flush=True)
"""


@pytest.mark.parametrize("rounds", [2, pytest.param(25, marks=pytest.mark.slow)])
def test_a_killed_search_loses_no_finished_trial_and_is_resumed(tmp_path: Path, rounds: int) -> None:
    root, rng, told = Path(__file__).resolve().parents[1], random.Random(15), set[int]()
    for _ in range(rounds):
        process = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], cwd=root, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        told.add(int(process.stdout.readline()))
        time.sleep(rng.uniform(0.0, 0.1))
        process.send_signal(signal.SIGKILL)
        reported = [int(line) for line in process.stdout.read().splitlines() if line]
        process.wait()
        assert not told & set(reported), "nothing runs twice"
        told |= set(reported)
        (path,) = tmp_path.glob("*.jsonl")
        kept = {int(each.variant.as_dict()["block_q"]) for each in read_study(path).trials}
        assert told <= kept
        assert len(kept - told) <= 1, "at most the one that was written and not yet told"
        told = kept
