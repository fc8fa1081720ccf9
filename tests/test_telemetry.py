"""NVML where it is absent, and what its answers mean, with a simulated NVML."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from flashgen.telemetry import BoardState, ClockState, Telemetry, reasons, spanning


class NvmlError(Exception):
    """What the simulated NVML raises."""


def simulated(utilisation: int = 0, pids: tuple[int, ...] = (), bits: int = 0x1, missing: tuple[str, ...] = ()) -> SimpleNamespace:
    answers: dict[str, Any] = {
        "nvmlDeviceGetClockInfo": 1980,
        "nvmlDeviceGetCurrentClocksThrottleReasons": bits,
        "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=utilisation),
        "nvmlDeviceGetComputeRunningProcesses": [SimpleNamespace(pid=pid) for pid in pids],
        "nvmlDeviceGetPowerUsage": 691_500,
        "nvmlDeviceGetTemperature": 61,
    }

    def question(name: str) -> Any:
        def ask(handle: object, *_: object) -> Any:
            if name in missing:
                raise NvmlError("not supported")
            return answers[name]

        return ask

    return SimpleNamespace(
        NVMLError=NvmlError,
        NVML_CLOCK_SM=1,
        NVML_TEMPERATURE_GPU=0,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByPciBusId=lambda address: address,
        nvmlSystemGetDriverVersion=lambda: "580.65",
        **{name: question(name) for name in answers},
    )


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    return lambda nvml: monkeypatch.setitem(sys.modules, "pynvml", nvml)


def test_without_nvml_everything_is_unknown_and_nothing_fails(install: Callable[[Any], None]) -> None:
    install(None)  # importing it raises ImportError
    absent = Telemetry("0000:00:00.0")
    assert not absent.available and absent.clocks() is None and absent.busy() is None and absent.driver_version() == ""
    assert absent.board() == BoardState(None, None, None)


def test_without_a_driver_everything_is_unknown(install: Callable[[Any], None]) -> None:
    nvml = simulated()

    def no_library() -> None:
        raise NvmlError("NVML Shared Library Not Found")

    nvml.nvmlInit = no_library
    install(nvml)
    assert not Telemetry("0000:00:00.0").available


def test_clock_and_throttle_reasons_are_read(install: Callable[[Any], None]) -> None:
    install(simulated(bits=0x1 | 0x4 | 0x40))
    assert Telemetry("x").clocks() == ClockState(1980, ("power_cap", "hardware_thermal"))


def test_an_idle_clock_is_no_throttling() -> None:
    assert reasons(0x1 | 0x2 | 0x100) == ()


def test_what_the_board_does_not_support_is_none(install: Callable[[Any], None]) -> None:
    install(simulated(missing=("nvmlDeviceGetPowerUsage", "nvmlDeviceGetClockInfo")))
    found = Telemetry("x")
    assert found.board() == BoardState(None, 61, 0) and found.clocks() is None


def test_a_busy_gpu_is_told_with_the_other_processes(install: Callable[[Any], None]) -> None:
    install(simulated(utilisation=83, pids=(os.getpid(), 77, 4242)))
    told = Telemetry("x").busy(own=[77])
    assert told is not None and "83 %" in told and told.endswith("processes on it: 4242")


@pytest.mark.parametrize("pids", [(), (4242,)])
def test_an_idle_gpu_is_not_busy_whoever_holds_a_context(install: Callable[[Any], None], pids: tuple[int, ...]) -> None:
    install(simulated(utilisation=0, pids=pids))
    assert Telemetry("x").busy() is None


def test_a_measurement_keeps_the_reasons_of_both_ends() -> None:
    before, after = ClockState(1980, ("power_cap",)), ClockState(1500, ("power_cap", "software_thermal"))
    assert spanning(before, after) == ((1980, 1500), ("power_cap", "software_thermal"))
    assert spanning(None, after) == (None, ())
