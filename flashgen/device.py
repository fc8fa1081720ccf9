"""What GPUs offer: presets for the common ones, and the limits of the GPU that is present.

Sources of the presets. Limits per SM: CUDA C++ Programming Guide, table "Technical Specifications per Compute Capability". SM counts, L2,
bandwidth and rates: NVIDIA's architecture white papers (Volta, Turing, Ampere GA100 and GA102, Ada, Hopper, RTX Blackwell) and the data
sheets of each card. Tensor rates are dense, 16-bit, with float32 accumulation (half the headline figure on GeForce cards). L2 and
bandwidth of the B200 are what its driver reports (126.5 MiB, 7680 bits at 3996 MHz). Clocks are the highest boost clock.
"""

from __future__ import annotations

import re
from dataclasses import replace
from math import log2
from typing import Any

from flashgen.errors import MissingDependency, UnknownDevice
from flashgen.model import DeviceLimits

DEFAULT_PRESET = "h200"
SAME_MEMORY = 0.10  # a driver's clock × bus width differs by a few percent from a data sheet; sister cards by 15 % or more

# Per compute capability: shared bytes per CTA (opt-in) and per SM, threads per SM, CTAs per SM. All have 65,536 registers per SM.
_SM_LIMITS = {
    70: (98304, 98304, 2048, 32),
    75: (65536, 65536, 1024, 16),
    80: (166912, 167936, 2048, 32),
    86: (101376, 102400, 1536, 16),
    89: (101376, 102400, 1536, 24),
    90: (232448, 233472, 2048, 32),
    100: (232448, 233472, 2048, 32),
    120: (101376, 102400, 1536, 24),
}
_MIB = 2**20


def _preset(name: str, sm: int, sm_count: int, l2_mib: float, dram: float, tensor: float, fp32: float, clock: int) -> DeviceLimits:
    per_cta, per_sm, threads, ctas = _SM_LIMITS[sm]
    return DeviceLimits(
        name=name, sm=sm, sm_count=sm_count, shared_bytes_per_cta=per_cta, shared_bytes_per_sm=per_sm, registers_per_sm=65536,
        threads_per_sm=threads, ctas_per_sm=ctas, l2_bytes=int(l2_mib * _MIB), dram_gb_per_s=dram, tensor_tflops=tensor,
        fp32_tflops=fp32, clock_mhz=clock, source="preset",
    )  # fmt: skip


PRESETS: dict[str, DeviceLimits] = {
    #                      name                          sm  SMs   L2 MiB  GB/s  tensor   fp32   MHz
    "h200": _preset("NVIDIA H200", 90, 132, 60, 4800.0, 989.4, 66.9, 1980),
    "h100": _preset("NVIDIA H100 80GB HBM3", 90, 132, 50, 3352.0, 989.4, 66.9, 1980),
    "h100-pcie": _preset("NVIDIA H100 PCIe", 90, 114, 50, 2039.0, 756.4, 51.2, 1755),
    "a100": _preset("NVIDIA A100-SXM4-80GB", 80, 108, 40, 2039.0, 312.0, 19.5, 1410),
    "a100-40gb": _preset("NVIDIA A100-SXM4-40GB", 80, 108, 40, 1555.0, 312.0, 19.5, 1410),
    "a10": _preset("NVIDIA A10", 86, 72, 6, 600.0, 125.0, 31.2, 1695),
    "l4": _preset("NVIDIA L4", 89, 58, 48, 300.0, 121.0, 30.3, 2040),
    "l40s": _preset("NVIDIA L40S", 89, 142, 96, 864.0, 362.0, 91.6, 2520),
    "rtx3090": _preset("NVIDIA GeForce RTX 3090", 86, 82, 6, 936.0, 71.0, 35.6, 1695),
    "rtx4090": _preset("NVIDIA GeForce RTX 4090", 89, 128, 72, 1008.0, 165.2, 82.6, 2520),
    "rtx5090": _preset("NVIDIA GeForce RTX 5090", 120, 170, 96, 1792.0, 209.5, 104.8, 2407),
    "b200": _preset("NVIDIA B200", 100, 148, 126.5, 7672.0, 2250.0, 75.0, 1965),
    "t4": _preset("Tesla T4", 75, 40, 4, 320.0, 65.0, 8.1, 1590),
    "v100": _preset("Tesla V100-SXM2-16GB", 70, 80, 6, 900.0, 125.0, 15.7, 1530),
}

# cudaDeviceAttr (and CUdevice_attribute) numbers, which never change; CuPy has no names for the later ones.
ATTRIBUTES = {
    "clock_khz": 13, "sm_count": 16, "memory_clock_khz": 36, "bus_bits": 37, "l2_bytes": 38, "threads_per_sm": 39, "major": 75,
    "minor": 76, "shared_bytes_per_sm": 81, "registers_per_sm": 82, "shared_bytes_per_cta": 97, "ctas_per_sm": 106,
}  # fmt: skip


def preset(name: str) -> DeviceLimits:
    """The preset of that name; case, spaces and dashes do not matter, nor does a leading NVIDIA. Raises UnknownDevice listing the names."""
    wanted = _squeezed(name)
    for known, limits in PRESETS.items():
        if wanted in (_squeezed(known), _squeezed(limits.name)):
            return limits
    raise UnknownDevice(f"There is no preset for the GPU {name!r}; the presets are {', '.join(PRESETS)}. `auto` takes the present GPU.")


def is_present() -> bool:
    """Whether a CUDA device can be used here. Starts no CUDA context."""
    try:
        _runtime()
    except MissingDependency:
        return False
    return True


def present() -> DeviceLimits:
    """Limits of the current CUDA device, read from the driver. Raises MissingDependency without CuPy, driver or device.

    The driver does not know arithmetic rates: those are the nearest preset's, scaled by SM count and clock.
    """
    runtime = _runtime()
    index = runtime.getDevice()
    read = {name: int(runtime.deviceGetAttribute(number, index)) for name, number in ATTRIBUTES.items()}
    name = runtime.getDeviceProperties(index)["name"]
    return from_attributes(name.decode() if isinstance(name, bytes) else str(name), read)


def from_attributes(name: str, read: dict[str, int]) -> DeviceLimits:
    """Limits from driver attributes (clocks in kHz, bus width in bits, the rest as in DeviceLimits)."""
    limits = DeviceLimits(
        name=name, sm=10 * read["major"] + read["minor"], sm_count=read["sm_count"],
        shared_bytes_per_cta=read["shared_bytes_per_cta"], shared_bytes_per_sm=read["shared_bytes_per_sm"],
        registers_per_sm=read["registers_per_sm"], threads_per_sm=read["threads_per_sm"], ctas_per_sm=read["ctas_per_sm"],
        l2_bytes=read["l2_bytes"], dram_gb_per_s=2 * read["memory_clock_khz"] * read["bus_bits"] / 8 / 1e6,
        tensor_tflops=0.0, fp32_tflops=0.0, clock_mhz=read["clock_khz"] // 1000, source="present",
    )  # fmt: skip
    like = nearest_preset(limits)
    scale = limits.sm_count * limits.clock_mhz / (like.sm_count * like.clock_mhz)
    return replace(limits, tensor_tflops=like.tensor_tflops * scale, fp32_tflops=like.fp32_tflops * scale)


def resolve(name: str) -> DeviceLimits:
    """`auto`: the present device, or the default preset where there is none (ask `is_present`); else a preset. Raises UnknownDevice."""
    if name != "auto":
        return preset(name)
    return present() if is_present() else preset(DEFAULT_PRESET)


def same_resources(left: DeviceLimits, right: DeviceLimits) -> bool:
    """Whether tuned variants of one device hold for the other: equal limits, and DRAM bandwidth alike. Marketing names do not count.

    Bandwidth separates cards that share a chip (H100 SXM, H100 NVL, H200); the SM count separates slices of one card.
    """
    limits = ("sm", "sm_count", "shared_bytes_per_cta", "shared_bytes_per_sm", "registers_per_sm", "threads_per_sm", "ctas_per_sm")
    if any(getattr(left, name) != getattr(right, name) for name in limits):
        return False
    return abs(left.dram_gb_per_s - right.dram_gb_per_s) <= SAME_MEMORY * max(left.dram_gb_per_s, right.dram_gb_per_s)


def nearest_preset(device: DeviceLimits) -> DeviceLimits:
    """The preset most like the device: the architecture first, then SM count and bandwidth by ratio. A near match, never an identity."""

    def distance(candidate: DeviceLimits) -> tuple[int, float]:
        ratios = ((candidate.sm_count, device.sm_count), (candidate.dram_gb_per_s, device.dram_gb_per_s))
        return abs(candidate.sm - device.sm), sum(abs(log2(max(one, 1e-9) / max(other, 1e-9))) for one, other in ratios)

    return min(PRESETS.values(), key=distance)


def slug(device: DeviceLimits) -> str:
    """The device's name as a file name: `nvidia-h200`."""
    return re.sub(r"[^a-z0-9]+", "-", device.name.lower()).strip("-") or f"sm-{device.sm}"


def _squeezed(name: str) -> str:
    return re.sub(r"[^a-z0-9]|nvidia|geforce|tesla", "", name.lower())


def _runtime() -> Any:
    """CuPy's CUDA runtime, with at least one device. Raises MissingDependency with what is absent."""
    advice = "Name a GPU to work without one, as in --gpu h200."
    try:
        from cupy.cuda import runtime
    except ImportError as problem:
        install = "Install flashgen[cuda13] or flashgen[cuda12]"
        raise MissingDependency(f"No GPU can be used without CuPy ({problem}). {install}. {advice}") from None
    try:
        count = runtime.getDeviceCount()
    except runtime.CUDARuntimeError as problem:
        raise MissingDependency(f"No CUDA device can be used: {problem}. {advice}") from None
    if count < 1:
        raise MissingDependency(f"The CUDA driver shows no device (is CUDA_VISIBLE_DEVICES empty?). {advice}")
    return runtime
