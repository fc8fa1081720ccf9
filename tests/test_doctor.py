"""Verdicts of the doctor on made-up findings (every wrong pair of CUDA parts), and that it runs where things are absent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from flashgen import device, doctor
from flashgen.doctor import Advice, Findings, Library, Place

CORE = tuple(Library(name, "1.0", "/site") for name in doctor.CORE)
SOUND = Findings(
    python=Library("python", "3.11.7", "/bin/python"),
    flashgen=Library("flashgen", "0.1.0", "/site/flashgen"),
    core=CORE,
    cupy=(Library("cupy-cuda13x", "14.2.0", "/site"),),
    nvrtc=Library("NVRTC", "13.0", "/site/nvidia/cu13/lib/libnvrtc.so.13"),
    nvrtc_found=(Library("nvidia-cuda-nvrtc", "13.0.88", "/site/nvidia/cu13/lib/libnvrtc.so.13"),),
    architectures=(75, 80, 86, 89, 90, 100, 120),
    torch=Library("torch", "2.13.0", "/site"),
    torch_cuda=(13, 0),
    driver=(13, 0),
    driver_library="/usr/lib/libcuda.so.1",
    driver_version="580.65",
    gpus=(device.PRESETS["h200"],),
    telemetry=Library("nvidia-ml-py", "13.0", "/site"),
    host_compiler=Library("g++", "12.2.0", "/usr/bin/g++"),
    places=(Place("FLASHGEN_HOME", "/home/me", True),),
)
CUDA12 = Library("cupy-cuda12x", "14.2.0", "/site")


def only(found: Findings) -> Advice:
    advice = doctor.diagnose(found)
    assert len(advice) == 1, advice
    return advice[0]


def test_a_sound_machine_needs_no_advice() -> None:
    assert doctor.diagnose(SOUND) == []


def test_e02_cupy_13_with_only_nvrtc_12_names_the_library_found_and_both_fixes() -> None:
    other = Library("libnvrtc", "12", "/usr/local/cuda-12.4/lib64/libnvrtc.so.12")
    advice = only(replace(SOUND, nvrtc=None, nvrtc_error="DynamicLibNotFoundError", nvrtc_found=(other,), architectures=()))
    assert advice.fatal
    assert "cupy-cuda13x needs NVRTC 13" in advice.what
    assert "/usr/local/cuda-12.4/lib64/libnvrtc.so.12" in advice.what
    assert 'pip install "flashgen[cuda13]"' in advice.fix
    assert 'pip uninstall -y cupy-cuda13x && pip install "flashgen[cuda12]"' in advice.fix


def test_e02_no_nvrtc_at_all_is_answered_with_the_extra_of_the_wheel() -> None:
    advice = only(replace(SOUND, nvrtc=None, nvrtc_error="DynamicLibNotFoundError", nvrtc_found=(), architectures=()))
    assert advice.fix == 'pip install "flashgen[cuda13]"'


def test_e02_an_nvrtc_older_than_the_build_of_cupy_is_named_with_the_upgrade() -> None:
    old = Library("NVRTC", "12.0", "/usr/local/cuda-12.0/lib64/libnvrtc.so.12")
    advice = only(replace(SOUND, cupy=(CUDA12,), nvrtc=old, nvrtc_found=(), torch=None, torch_cuda=None, driver=(12, 8)))
    assert "NVRTC 12.0 (/usr/local/cuda-12.0/lib64/libnvrtc.so.12)" in advice.what
    assert advice.fix == 'pip install -U "cuda-toolkit[nvrtc,cudart]==12.*"'


def test_e02_two_cupy_wheels_are_removed_together_and_the_one_for_the_driver_comes_back() -> None:
    advice = only(replace(SOUND, cupy=(*SOUND.cupy, CUDA12), driver=(12, 8), nvrtc=None, torch_cuda=None, architectures=()))
    assert advice.fatal
    assert "cupy-cuda13x 14.2.0 and cupy-cuda12x 14.2.0 are both installed" in advice.what
    assert advice.fix == 'pip uninstall -y cupy-cuda13x cupy-cuda12x && pip install "flashgen[cuda12]"'


def test_e02_torch_for_12_beside_cupy_for_13_is_one_runtime_too_many() -> None:
    advice = only(replace(SOUND, torch_cuda=(12, 8)))
    assert "torch 2.13.0 is built for CUDA 12.8, cupy-cuda13x is for CUDA 13" in advice.what
    assert advice.fix == 'pip uninstall -y cupy-cuda13x && pip install "flashgen[cuda12]"'


def test_a_torch_without_cuda_is_no_conflict() -> None:
    assert doctor.diagnose(replace(SOUND, torch_cuda=None)) == []


def test_e03_a_driver_of_an_older_major_version_is_named_with_both_versions() -> None:
    advice = only(replace(SOUND, driver=(12, 4), torch=None, torch_cuda=None))
    assert advice.fatal
    assert "The driver supports CUDA 12.4" in advice.what
    assert "NVRTC 13.0" in advice.what
    assert advice.fix.startswith('pip uninstall -y cupy-cuda13x && pip install "flashgen[cuda12]"')


def test_e03_a_driver_of_an_older_minor_version_is_fine_since_only_cubins_are_loaded() -> None:
    newer = Library("NVRTC", "13.2", "/site/libnvrtc.so.13")
    assert doctor.diagnose(replace(SOUND, nvrtc=newer)) == []


def test_a_gpu_older_than_the_compiler_is_sent_to_cuda_12() -> None:
    advice = only(replace(SOUND, gpus=(device.PRESETS["v100"],)))
    assert "sm_70" in advice.what
    assert "flashgen[cuda12]" in advice.fix


def test_without_cupy_the_extra_of_the_driver_is_recommended() -> None:
    advice = only(replace(SOUND, cupy=(), nvrtc=None, driver=(12, 8), torch=None, torch_cuda=None, architectures=()))
    assert advice.fix == 'pip install "flashgen[cuda12]"'


def test_a_missing_host_compiler_matters_only_without_a_gpu() -> None:
    assert not only(replace(SOUND, host_compiler=None)).fatal
    alone = doctor.diagnose(replace(SOUND, host_compiler=None, gpus=(), driver=None, driver_error="libcuda.so.1 is absent"))
    assert [each.fatal for each in alone] == [True, False]
    assert "g++" in alone[0].what


def test_e05_an_unwritable_home_names_the_variable_to_set() -> None:
    advice = only(replace(SOUND, places=(Place("FLASHGEN_HOME", "/home/someone/x", False, "Read-only file system"),)))
    assert "Read-only file system" in advice.what
    assert advice.fix.startswith("export FLASHGEN_HOME=")


def test_e05_cupys_own_cache_is_reported_apart_with_its_own_variable() -> None:
    advice = only(replace(SOUND, places=(*SOUND.places, Place("CuPy's cache", "/home/someone/.cupy", False, "Permission denied"))))
    assert advice.fix.startswith("export CUPY_CACHE_DIR=")
    assert not advice.fatal


def doctor_in(script: str, **environment: str) -> tuple[int, dict[str, object]]:
    """Run `doctor --json` in a process that first executes `script`; the exit code and the document."""
    code = f"{script}\nfrom flashgen.cli import main\nmain(['doctor', '--json'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **environment}, check=False)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def test_e01_the_doctor_runs_without_cupy_and_torch() -> None:
    hide = """
import importlib.metadata as metadata, importlib.util as util, sys
hidden = ('cupy', 'torch', 'nvidia', 'pynvml')
real, spec = metadata.distribution, util.find_spec
def distribution(name):
    if name.startswith(hidden): raise metadata.PackageNotFoundError(name)
    return real(name)
metadata.distribution, metadata.version = distribution, lambda name: distribution(name).version
util.find_spec = lambda name, *rest: None if name.startswith(hidden) else spec(name, *rest)
for name in hidden: sys.modules[name] = None
"""
    code, document = doctor_in(hide)
    findings = document["findings"]
    assert isinstance(findings, dict)
    assert (findings["cupy"], findings["torch"], findings["nvrtc"]) == ([], None, None)
    advice = document["advice"]
    assert isinstance(advice, list)
    assert any("CuPy is not installed" in each["what"] for each in advice)
    assert code == 1


def test_e02_two_installed_wheels_are_seen_by_their_metadata(tmp_path: Path) -> None:
    for name in ("cupy_cuda12x", "cupy_cuda13x"):
        folder = tmp_path / f"{name}-14.2.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 14.2.0\n")
    code, document = doctor_in(f"import sys; sys.path.insert(0, {str(tmp_path)!r})")
    advice = document["advice"]
    assert isinstance(advice, list)
    assert code == 1
    assert any("are both installed" in each["what"] and each["fix"].startswith("pip uninstall -y") for each in advice)


def test_e05_the_doctor_sees_a_home_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, document = doctor_in("", FLASHGEN_HOME=str(tmp_path / "file" / "home"))
    findings = document["findings"]
    assert isinstance(findings, dict)
    assert [place["writable"] for place in findings["places"] if place["name"] == "FLASHGEN_HOME"] == [False]
    assert code == 1
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


def test_the_doctor_names_the_path_of_every_library_in_use() -> None:
    found = doctor.examine()
    assert found.python.path == sys.executable
    assert {library.name for library in found.core} == set(doctor.CORE)
    if found.nvrtc is not None:
        assert Path(found.nvrtc.path).name.startswith("libnvrtc.so")
    if found.host_compiler is not None:
        assert Path(found.host_compiler.path).exists()
