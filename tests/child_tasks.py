"""Tasks for the measuring child, good and bad. A module of its own, so that the child can import it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from typing import Any, NoReturn

from flashgen.errors import LaunchError


class FakeDevice:
    """A device that can be lost: from then on every settling fails, as after an illegal access."""

    def __init__(self, name: str = "fake") -> None:
        self.name = name
        self.lost = False
        self.calls = 0

    def settle(self) -> None:
        """Wait for the device."""
        self.calls += 1
        if self.lost:
            raise LaunchError("cudaErrorIllegalAddress: an illegal memory access was encountered")


def refuse_to_open() -> NoReturn:
    """A state that cannot be made."""
    raise LaunchError("no device today")


def die_opening() -> NoReturn:
    """A driver that kills the process at start."""
    os._exit(7)


def add(state: Any, left: int, right: int) -> int:
    """The task that works."""
    return left + right


def describe(state: FakeDevice) -> tuple[int, str, int]:
    """Process id, device name, settlings so far."""
    return os.getpid(), state.name, state.calls


def environment(state: Any, name: str) -> str | None:
    """A variable as the child sees it."""
    return os.environ.get(name)


def exit_with(state: Any, code: int) -> NoReturn:
    """End at once."""
    os._exit(code)


def crash(state: Any) -> None:
    """A segmentation fault."""
    ctypes.string_at(0)


def kill_self(state: Any, number: int) -> None:
    """Die of a signal."""
    os.kill(os.getpid(), number)
    time.sleep(60)


def sleep(state: Any, seconds: float) -> None:
    """Hang."""
    time.sleep(seconds)


def hang_deaf(state: Any) -> None:
    """Hang and ignore polite signals."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    time.sleep(3600)


def fail(state: Any, message: str) -> NoReturn:
    """An ordinary error."""
    raise LaunchError(message)


class Unpicklable(Exception):
    """An error that does not survive a pickle."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def fail_oddly(state: Any) -> NoReturn:
    """An error that cannot be sent."""
    raise Unpicklable(1, 2)


def return_oddly(state: Any) -> Any:
    """A result that cannot be sent."""
    return lambda: None


def lose_device(state: FakeDevice, raises: bool) -> str:
    """An illegal access that shows at once, or only when the device is settled."""
    state.lost = True
    if raises:
        raise LaunchError("cudaErrorIllegalAddress at launch")
    return "looks good"


def talk(state: Any, text: str) -> None:
    """Write to standard error, then die."""
    print(text, file=sys.stderr, flush=True)
    os._exit(3)


def write_then_sleep(state: Any, path: str) -> None:
    """Tell the own process id through a file, then hang."""
    with open(path, "w", encoding="ascii") as file:
        file.write(str(os.getpid()))
    time.sleep(3600)
