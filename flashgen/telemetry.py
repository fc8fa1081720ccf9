"""Clocks, throttle reasons and other work on a GPU, through NVML. Everything is None or empty where NVML is absent."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

BUSY_PERCENT = 10
"""Utilisation of a GPU, before any work of ours, from which on times cannot be trusted."""

# Bits of nvmlDeviceGetCurrentClocksEventReasons that slow a kernel down. Idle (bit 0) and requested clocks (bits 1, 8) are no throttling.
THROTTLE_REASONS = {
    0x4: "power_cap",
    0x8: "hardware_slowdown",
    0x10: "sync_boost",
    0x20: "software_thermal",
    0x40: "hardware_thermal",
    0x80: "power_brake",
}


@dataclass(frozen=True, slots=True)
class ClockState:
    """The SM clock in MHz and what held it down, at one moment."""

    clock_mhz: int
    throttle: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BoardState:
    """Power in W, temperature in °C, utilisation in percent; None where the board does not tell."""

    power_w: float | None
    temperature_c: int | None
    utilisation_percent: int | None


class Telemetry:
    """NVML's view of one GPU, found by its PCI address (NVML does not know CUDA_VISIBLE_DEVICES)."""

    def __init__(self, pci_bus_id: str | None) -> None:
        """Without NVML, driver or such a device this object answers None to everything."""
        self._nvml, self._handle = _open(pci_bus_id)

    @property
    def available(self) -> bool:
        """Whether NVML answers for the device."""
        return self._handle is not None

    def clocks(self) -> ClockState | None:
        """The SM clock now; None when it cannot be read."""
        nvml = self._nvml
        if nvml is None or self._handle is None:
            return None
        clock = self._ask(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_SM)
        read = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None) or nvml.nvmlDeviceGetCurrentClocksThrottleReasons
        bits = self._ask(read)  # the first name is that of drivers from 2023 on
        return None if clock is None else ClockState(int(clock), reasons(int(bits or 0)))

    def board(self) -> BoardState:
        """Power, temperature, utilisation."""
        nvml = self._nvml
        if nvml is None or self._handle is None:
            return BoardState(None, None, None)
        power = self._ask(nvml.nvmlDeviceGetPowerUsage)
        temperature = self._ask(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU)
        rates = self._ask(nvml.nvmlDeviceGetUtilizationRates)
        return BoardState(
            None if power is None else power / 1000.0,
            None if temperature is None else int(temperature),
            None if rates is None else int(rates.gpu),
        )

    def busy(self, own: Iterable[int] = ()) -> str | None:
        """Why times taken now would be too long, in words; None when the GPU looks idle. Ask before any work of one's own.

        Other processes alone do not count (a desktop has some); they are named when the GPU is also in use.
        """
        used = self.board().utilisation_percent
        if used is None or used < BUSY_PERCENT:
            return None
        nvml = self._nvml
        processes = self._ask(nvml.nvmlDeviceGetComputeRunningProcesses) if nvml is not None else None
        mine = {os.getpid(), *own}
        others = sorted({int(each.pid) for each in processes or ()} - mine)
        named = f"; other processes on it: {', '.join(map(str, others))}" if others else ""
        return f"the GPU is {used} % busy with other work{named}"

    def driver_version(self) -> str:
        """The driver's version, such as 580.65; empty when unknown."""
        if self._nvml is None:
            return ""
        try:
            version = self._nvml.nvmlSystemGetDriverVersion()
        except self._nvml.NVMLError:
            return ""
        return version.decode() if isinstance(version, bytes) else str(version)

    def _ask(self, question: Callable[..., Any], *args: Any) -> Any:
        assert self._nvml is not None
        try:
            return question(self._handle, *args)
        except self._nvml.NVMLError:  # not supported by this board, or not permitted
            return None


def reasons(bits: int) -> tuple[str, ...]:
    """Names of the throttle reasons in NVML's bit mask."""
    return tuple(name for bit, name in THROTTLE_REASONS.items() if bits & bit)


def spanning(before: ClockState | None, after: ClockState | None) -> tuple[tuple[int, int] | None, tuple[str, ...]]:
    """(clocks before and after, throttle reasons seen at either end) as a Measurement keeps them."""
    if before is None or after is None:
        return None, ()
    return (before.clock_mhz, after.clock_mhz), tuple(dict.fromkeys(before.throttle + after.throttle))


def _open(pci_bus_id: str | None) -> tuple[Any, Any]:
    if pci_bus_id is None:
        return None, None
    try:
        import pynvml
    except ImportError:
        return None, None
    try:
        pynvml.nvmlInit()
        return pynvml, pynvml.nvmlDeviceGetHandleByPciBusId(pci_bus_id.encode())
    except pynvml.NVMLError:
        return None, None
