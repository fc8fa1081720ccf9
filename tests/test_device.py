"""Device presets and the present device."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from flashgen import device
from flashgen.errors import MissingDependency, UnknownDevice

# What drivers report; names as in the marketing zoo of one chip.
H200 = {
    "major": 9, "minor": 0, "sm_count": 132, "shared_bytes_per_cta": 232448, "shared_bytes_per_sm": 233472, "registers_per_sm": 65536,
    "threads_per_sm": 2048, "ctas_per_sm": 32, "l2_bytes": 62914560, "memory_clock_khz": 3201000, "bus_bits": 6144, "clock_khz": 1980000,
}  # fmt: skip
H100_SXM = H200 | {"l2_bytes": 52428800, "memory_clock_khz": 2619000, "bus_bits": 5120}
H100_NVL = H200 | {"l2_bytes": 62914560, "memory_clock_khz": 2619000, "bus_bits": 6144, "clock_khz": 1785000}
H100_PCIE = H200 | {"sm_count": 114, "l2_bytes": 52428800, "memory_clock_khz": 1593000, "bus_bits": 5120, "clock_khz": 1755000}
H100_SLICE = H100_SXM | {"sm_count": 60}

SISTERS = {"H100 80GB HBM3": H100_SXM, "H100 NVL": H100_NVL, "H100 PCIe": H100_PCIE, "H100 slice": H100_SLICE, "H200": H200}


@pytest.mark.parametrize("name", device.PRESETS)
def test_every_preset_is_found_by_its_own_and_its_driver_name(name: str) -> None:
    limits = device.PRESETS[name]
    assert device.preset(name) is limits
    assert device.preset(name.upper().replace("-", " ")) is limits
    assert device.preset(limits.name) is limits


def test_an_unknown_gpu_is_refused_with_the_list_of_presets() -> None:
    with pytest.raises(UnknownDevice, match=r"'gtx9000'.*h200, h100, .*rtx4090"):
        device.preset("gtx9000")


def test_presets_are_distinct_devices() -> None:
    presets = list(device.PRESETS.values())
    for index, one in enumerate(presets):
        assert not any(device.same_resources(one, other) for other in presets[index + 1 :])
    assert len({device.slug(limits) for limits in presets}) == len(presets)


@pytest.mark.parametrize("name", device.PRESETS)
def test_an_sm_keeps_one_kibibyte_of_its_shared_memory_since_ampere(name: str) -> None:
    limits = device.PRESETS[name]
    reserved = limits.shared_bytes_per_sm - limits.shared_bytes_per_cta
    assert reserved == (1024 if limits.sm >= 80 else 0)


@pytest.mark.parametrize("name", [name for name, limits in device.PRESETS.items() if limits.sm < 100])
def test_the_float32_rate_is_cores_times_clock(name: str) -> None:
    limits = device.PRESETS[name]
    cores = {70: 64, 75: 64, 80: 64, 86: 128, 89: 128, 90: 128}[limits.sm]
    assert limits.fp32_tflops == pytest.approx(limits.sm_count * cores * 2 * limits.clock_mhz / 1e6, rel=0.04)


def test_driver_attributes_of_the_h200_match_its_preset() -> None:
    found = device.from_attributes("NVIDIA H200", H200)
    assert device.same_resources(found, device.preset("h200"))
    assert device.slug(found) == "nvidia-h200"
    assert found.l2_bytes == device.preset("h200").l2_bytes
    assert found.tensor_tflops == pytest.approx(device.preset("h200").tensor_tflops)


@pytest.mark.parametrize("name", ["NVIDIA H100 80GB HBM3", "NVIDIA H100", "some board"])
def test_a_device_is_matched_by_resources_whatever_its_name(name: str) -> None:
    assert device.same_resources(device.from_attributes(name, H100_SXM), device.preset("h100"))


@pytest.mark.parametrize("one", SISTERS)
@pytest.mark.parametrize("other", SISTERS)
def test_sister_cards_of_one_chip_are_told_apart(one: str, other: str) -> None:
    left, right = device.from_attributes("NVIDIA H100", SISTERS[one]), device.from_attributes("NVIDIA H100", SISTERS[other])
    assert device.same_resources(left, right) == (one == other)


def test_an_unlisted_card_has_the_rates_of_its_architecture_scaled() -> None:
    half = device.from_attributes("NVIDIA H100 slice", H100_SXM | {"sm_count": 66})
    assert device.nearest_preset(half).sm == 90
    assert half.tensor_tflops == pytest.approx(989.4 / 2, rel=0.02)


def test_the_nearest_preset_of_a_newer_architecture_is_still_found() -> None:
    newer = replace(device.preset("rtx5090"), sm=121, sm_count=48)
    assert device.nearest_preset(newer) is device.preset("rtx5090")


def test_a_machine_without_a_device_says_so_and_resolves_to_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> None:
        raise MissingDependency("No CUDA device can be used: no driver. Name a GPU to work without one, as in --gpu h200.")

    monkeypatch.setattr(device, "_runtime", absent)
    assert not device.is_present()
    assert device.resolve("auto") is device.preset("h200")
    with pytest.raises(MissingDependency, match="--gpu h200"):
        device.present()


def test_cuda_with_no_visible_device_is_a_missing_dependency() -> None:
    pytest.importorskip("cupy")
    code = "from flashgen import device; assert not device.is_present(); device.present()"
    run = subprocess.run([sys.executable, "-c", code], env={"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": ":".join(sys.path)},
                         capture_output=True, text=True)  # fmt: skip
    assert "flashgen.errors.MissingDependency" in run.stderr
    assert "--gpu h200" in run.stderr


def test_importing_the_module_imports_no_cupy() -> None:
    code = "import sys; import flashgen.device; assert 'cupy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": ":".join(sys.path)}, check=True)


@pytest.mark.device
def test_the_present_gpu_agrees_with_the_nearest_preset_of_its_name() -> None:
    if not device.is_present():
        pytest.skip("no CUDA device")
    found = device.present()
    named = [limits for limits in device.PRESETS.values() if limits.name == found.name]
    if not named:
        pytest.skip(f"no preset named {found.name}")
    assert device.same_resources(found, named[0])
    assert found.l2_bytes == named[0].l2_bytes
    assert found.clock_mhz == named[0].clock_mhz
