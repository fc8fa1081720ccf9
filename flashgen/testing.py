"""Help for tests of programs that use flashgen on machines without a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from flashgen.dispatch import Dispatcher
from flashgen.emulate import Policy


@contextmanager
def emulated(gpu: str = "h200", *, policy: Policy | None = None, tables: Sequence[Path] | None = None) -> Iterator[Dispatcher]:
    """Let CPU tensors and NumPy arrays through: the real kernels run, emulated on the CPU, as dispatch would choose them on `gpu`.

    Thousands of times slower than a GPU, so keep shapes small. `tables` are the directories of tables to look in (default: the user's and
    the shipped ones); `policy` schedules the emulated threads. Not to be nested across threads: the way in is open for the whole process.
    Raises UnknownDevice, and MissingDependency without a host C++ compiler.
    """
    from flashgen import device, dispatch

    before = dispatch.set_emulated(dispatch.emulation_of(device.preset(gpu), policy, tables))
    try:
        found = dispatch.emulated()
        assert found is not None
        yield found
    finally:
        dispatch.set_emulated(before)
