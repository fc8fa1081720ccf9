"""Tasks for a measuring child that holds a real GPU. A module of its own, so that the child can import it."""

from __future__ import annotations

import numpy as np
from small_kernels import one_cta_per_row, tensors

from flashgen import bench
from flashgen.bench import MeasuringState
from flashgen.model import Problem, Source


def open_small_device(index: int = 0) -> MeasuringState:
    """A device whose kernels are the small ones: one CTA per row."""
    state = MeasuringState(index)
    state.executor._bind = one_cta_per_row
    return state


def run_small(state: MeasuringState, source: Source, problem: Problem) -> int:
    """Run a small kernel; the count of finite outputs."""
    data = tensors(problem)
    state.executor.forward(source, problem, data, 1.0)
    return int(np.isfinite(data.o.view()).sum())


def launch_only(state: MeasuringState, source: Source, problem: Problem) -> None:
    """Launch without waiting: an abort shows only when the device is settled."""
    each = state.launchable("late", source, None, problem, 0)
    each()


def exhaust_memory(state: MeasuringState, problem: Problem) -> None:
    """Ask for more memory than the device has."""
    bench.make_operands(state.gpu, problem, 0)
