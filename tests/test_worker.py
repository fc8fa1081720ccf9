"""The measuring child: each way to fail costs one task, names the culprit, and leaves the caller alone. No GPU is needed for that."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import child_tasks as tasks
import pytest

from flashgen.errors import FlashgenError, LaunchError, WorkerLost
from flashgen.worker import MeasuringChild


@pytest.fixture(scope="module")
def shared() -> Iterator[MeasuringChild]:
    with MeasuringChild(tasks.FakeDevice, "shared", deadline_s=20) as child:
        yield child


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def gone_within(pid: int, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.02)
    return not alive(pid)


def test_a_task_gets_the_state_and_returns_its_result(shared: MeasuringChild) -> None:
    pid, name, _ = shared.call("describe", tasks.describe)
    assert (pid, name) == (shared.pid, "shared") and pid != os.getpid()
    assert shared.call("add", tasks.add, 2, 3) == 5


def test_the_device_is_settled_after_good_and_bad_tasks(shared: MeasuringChild) -> None:
    _, _, before = shared.call("describe", tasks.describe)
    with pytest.raises(LaunchError):
        shared.call("fail", tasks.fail, "x")
    _, _, after = shared.call("describe", tasks.describe)
    assert after - before == 2


def test_an_ordinary_error_is_raised_here_and_keeps_the_child(shared: MeasuringChild) -> None:
    pid = shared.call("describe", tasks.describe)[0]
    with pytest.raises(LaunchError, match=r"^out of memory$"):
        shared.call("fail", tasks.fail, "out of memory")
    assert shared.call("describe", tasks.describe)[0] == pid


@pytest.mark.parametrize("task", [tasks.fail_oddly, tasks.return_oddly], ids=lambda task: task.__name__)
def test_what_cannot_be_sent_is_told_in_words_and_keeps_the_child(shared: MeasuringChild, task: object) -> None:
    pid = shared.call("describe", tasks.describe)[0]
    with pytest.raises(FlashgenError, match=r"Unpicklable: 1 and 2|cannot be sent"):
        shared.call("odd", task)  # type: ignore[arg-type]
    assert shared.call("describe", tasks.describe)[0] == pid


@pytest.mark.parametrize(
    ("task", "args", "reason", "told"),
    [
        (tasks.exit_with, (9,), "died", "exit code 9"),
        (tasks.crash, (), "died", "SIGSEGV"),
        (tasks.kill_self, (int(signal.SIGKILL),), "died", "SIGKILL"),
        (tasks.sleep, (60.0,), "timed_out", "no result after 0.5 s"),
        (tasks.hang_deaf, (), "timed_out", "no result after 0.5 s"),
        (tasks.lose_device, (True,), "poisoned", "cudaErrorIllegalAddress at launch"),
        (tasks.lose_device, (False,), "poisoned", "an illegal memory access"),
    ],
    ids=["exit", "segfault", "killed", "sleep", "deaf", "poisoned", "poisoned_late"],
)
def test_a_lost_child_names_the_culprit_and_is_replaced(task: object, args: tuple[object, ...], reason: str, told: str) -> None:
    with MeasuringChild(tasks.FakeDevice, deadline_s=20) as child:
        first = child.call("before", tasks.describe)[0]
        with pytest.raises(WorkerLost, match=told) as caught:
            child.call("variant 17", task, *args, deadline_s=0.5 if reason == "timed_out" else None)  # type: ignore[arg-type]
        assert str(caught.value).startswith("variant 17: ") and caught.value.reason == reason
        assert gone_within(first, 5.0)
        assert child.call("after", tasks.describe)[0] != first
        assert child.started == 2


def test_fifty_trials_with_four_faults_give_46_results_and_the_right_culprits() -> None:
    faults = {5: (tasks.lose_device, True), 10: (tasks.crash,), 15: (tasks.sleep, 60.0), 20: (tasks.fail, "cudaErrorMemoryAllocation")}
    good, blamed = [], []
    with MeasuringChild(tasks.FakeDevice, deadline_s=1.5) as child:
        for trial in range(50):
            task, *args = faults.get(trial, (tasks.add, trial, 0))
            try:
                good.append(child.call(f"trial {trial}", task, *args))
            except (WorkerLost, LaunchError):
                blamed.append(trial)
        assert child.started == 4, "running out of memory is no reason to replace the child"
    assert blamed == [5, 10, 15, 20]
    assert good == [trial for trial in range(50) if trial not in blamed]


def test_the_last_words_of_the_culprit_are_told_but_not_those_of_earlier_tasks() -> None:
    with MeasuringChild(deadline_s=20) as child:
        with pytest.raises(WorkerLost, match="the cause of it all"):
            child.call("talk", tasks.talk, "the cause of it all")
        with pytest.raises(WorkerLost) as caught:
            child.call("quiet", tasks.exit_with, 1)
        assert "the cause" not in str(caught.value)


def test_a_state_that_cannot_be_opened_raises_its_own_error() -> None:
    with MeasuringChild(tasks.refuse_to_open) as child:
        for _ in range(2):
            with pytest.raises(LaunchError, match="no device today"):
                child.call("anything", tasks.add, 1, 1)
        assert child.pid is None


def test_a_child_that_dies_at_start_is_reported_once_per_call() -> None:
    with MeasuringChild(tasks.die_opening) as child:
        with pytest.raises(WorkerLost, match="exit code 7") as caught:
            child.call("anything", tasks.add, 1, 1)
        assert caught.value.reason == "not_started" and child.started == 1


def test_the_environment_of_the_child_can_be_chosen() -> None:
    with MeasuringChild(environment={"CUDA_VISIBLE_DEVICES": "3"}) as child:
        assert child.call("environment", tasks.environment, "CUDA_VISIBLE_DEVICES") == "3"
    assert os.environ.get("CUDA_VISIBLE_DEVICES") != "3"


def test_closing_ends_the_child() -> None:
    child = MeasuringChild()
    child.call("add", tasks.add, 1, 1)
    pid = child.pid
    assert pid is not None
    child.close()
    assert gone_within(pid, 3.0) and child.pid is None


def test_forgetting_the_object_ends_the_child() -> None:
    child = MeasuringChild()
    child.call("add", tasks.add, 1, 1)
    pid = child.pid
    assert pid is not None
    del child
    assert gone_within(pid, 3.0)


SCRIPT = """
import sys
sys.path[:0] = {path!r}
import child_tasks
from flashgen.worker import MeasuringChild
child = MeasuringChild(deadline_s=3600)     # no __main__ guard: the child must not run this file again
child.call("hang", child_tasks.write_then_sleep, {file!r})
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_no_child_survives_a_signal_to_its_parent(tmp_path: Path, number: signal.Signals) -> None:
    file = tmp_path / "pid"
    script = tmp_path / "main.py"
    here = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    script.write_text(textwrap.dedent(SCRIPT.format(path=here, file=str(file))))
    parent = subprocess.Popen([sys.executable, str(script)], stderr=subprocess.PIPE)
    end = time.monotonic() + 20
    while not (file.exists() and file.read_text()) and time.monotonic() < end:
        assert parent.poll() is None, parent.stderr and parent.stderr.read()
        time.sleep(0.02)
    pid = int(file.read_text())
    started = time.monotonic()
    parent.send_signal(number)
    parent.communicate(timeout=5)
    assert gone_within(pid, 2.0) and time.monotonic() - started < 3.0
