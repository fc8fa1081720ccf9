"""What is installed and found, with versions and paths, and which pairs do not belong together. Needs nothing but the core packages."""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import metadata, util
from pathlib import Path

from flashgen import __version__, device, paths
from flashgen.errors import ConflictingInstall, MissingDependency
from flashgen.model import DeviceLimits

CORE = ("numpy", "jinja2", "pyyaml", "msgspec", "click", "rich", "optuna", "platformdirs", "filelock")
CUPY_MAJORS = {"cupy-cuda13x": 13, "cupy-cuda12x": 12}
OTHER_CUPY = ("cupy", "cupy-cuda11x", "cupy-cuda114", "cupy-cuda115", "cupy-cuda116", "cupy-cuda117", "cupy-cuda118")
NVRTC_WHEELS = ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12", "nvidia-cuda-nvrtc-cu13")
TELEMETRY = "nvidia-ml-py"
_TOOLKITS = ("/usr/local/cuda*/lib64/libnvrtc.so.*", "/usr/local/cuda*/targets/*/lib/libnvrtc.so.*", "/usr/lib/*-linux-gnu/libnvrtc.so.*")


@dataclass(frozen=True, slots=True)
class Library:
    """Something found: name, version, path; empty where unknown."""

    name: str
    version: str
    path: str = ""


@dataclass(frozen=True, slots=True)
class Place:
    """A directory and whether it can be written; `reason` says why not."""

    name: str
    path: str
    writable: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Advice:
    """What is wrong, and the command or step that mends it. `fatal`: something flashgen does here will not work."""

    what: str
    fix: str
    fatal: bool = True


@dataclass(frozen=True, slots=True)
class Findings:
    """Everything that was looked at. CUDA versions are (major, minor); None where absent."""

    python: Library
    flashgen: Library
    core: tuple[Library, ...] = ()
    cupy: tuple[Library, ...] = ()
    cupy_error: str = ""
    nvrtc: Library | None = None
    nvrtc_error: str = ""
    nvrtc_found: tuple[Library, ...] = ()
    architectures: tuple[int, ...] = ()
    torch: Library | None = None
    torch_cuda: tuple[int, int] | None = None
    driver: tuple[int, int] | None = None
    driver_library: str = ""
    driver_version: str = ""
    driver_error: str = ""
    gpus: tuple[DeviceLimits, ...] = ()
    telemetry: Library | None = None
    host_compiler: Library | None = None
    places: tuple[Place, ...] = field(default=())

    @property
    def cupy_major(self) -> int | None:
        """CUDA major version of the one CuPy wheel."""
        majors = {CUPY_MAJORS[wheel.name] for wheel in self.cupy if wheel.name in CUPY_MAJORS}
        return majors.pop() if len(majors) == 1 and len(self.cupy) == 1 else None


def examine() -> Findings:
    """Look at everything. Never raises for what is absent; makes no CUDA context and writes nothing that stays."""
    nvrtc, nvrtc_error, architectures = _nvrtc()
    torch, torch_cuda = _torch()
    driver = _Driver()
    return Findings(
        python=Library("python", platform.python_version(), sys.executable),
        flashgen=Library("flashgen", __version__, str(Path(__file__).parent)),
        core=tuple(found for name in CORE if (found := _distribution(name)) is not None),
        cupy=tuple(found for name in (*CUPY_MAJORS, *OTHER_CUPY) if (found := _distribution(name)) is not None),
        cupy_error=_cupy_error(),
        nvrtc=nvrtc,
        nvrtc_error=nvrtc_error,
        nvrtc_found=_nvrtc_libraries(),
        architectures=architectures,
        torch=torch,
        torch_cuda=torch_cuda,
        driver=driver.cuda_version(),
        driver_library=driver.path,
        driver_version=_driver_version(),
        driver_error=driver.error,
        gpus=driver.gpus(),
        telemetry=_distribution(TELEMETRY),
        host_compiler=_host_compiler(),
        places=_places(),
    )


# Verdicts -------------------------------------------------------------------------------------------------------------


def diagnose(found: Findings) -> list[Advice]:
    """What is wrong, worst first; an empty list when all fits. Pure: the same findings give the same advice."""
    advice = [*_core_advice(found), *_cupy_advice(found), *_nvrtc_advice(found), *_driver_advice(found), *_torch_advice(found)]
    advice += _host_advice(found)
    return sorted(advice, key=lambda each: not each.fatal)


def _core_advice(found: Findings) -> list[Advice]:
    names = {library.name for library in found.core}
    missing = [name for name in CORE if name not in names]
    if not missing:
        return []
    return [Advice(f"Core packages are not installed: {', '.join(missing)}.", f"pip install {' '.join(missing)}")]


def _cupy_advice(found: Findings) -> list[Advice]:
    extra = _extra(found)
    if len(found.cupy) > 1:
        named = " and ".join(f"{wheel.name} {wheel.version}" for wheel in found.cupy)
        names = " ".join(wheel.name for wheel in found.cupy)
        return [
            Advice(
                f"{named} are both installed; they provide the same module, and one has overwritten files of the other.",
                f'pip uninstall -y {names} && pip install "flashgen[{extra}]"',
            )
        ]
    if not found.cupy:
        return [Advice("CuPy is not installed: nothing can be compiled for a GPU or run on one.", f'pip install "flashgen[{extra}]"')]
    wheel = found.cupy[0]
    if wheel.name not in CUPY_MAJORS and wheel.name != "cupy":
        return [Advice(f"{wheel.name} {wheel.version} is too old.", f'pip uninstall -y {wheel.name} && pip install "flashgen[{extra}]"')]
    if found.cupy_error:
        return [
            Advice(
                f"{wheel.name} {wheel.version} cannot be imported: {found.cupy_error}.",
                f'pip install --force-reinstall --no-deps "{wheel.name}=={wheel.version}"',
            )
        ]
    return []


def _nvrtc_advice(found: Findings) -> list[Advice]:
    major = found.cupy_major
    if major is None or found.cupy_error:
        return []
    install = f'pip install "flashgen[cuda{major}]"'
    others = [library for library in found.nvrtc_found if _major(library.version) not in (None, major)]
    if found.nvrtc is None:
        seen = "; ".join(f"{library.name} {library.version} at {library.path}" for library in others)
        what = f"{found.cupy[0].name} needs NVRTC {major}, which cannot be loaded ({found.nvrtc_error or 'not found'})."
        if not seen:
            return [Advice(what, install)]
        other = _major(others[0].version)
        return [Advice(f"{what} Found instead: {seen}.", f"{install} (or keep that NVRTC: {_swap(found, f'cuda{other}')})")]
    if _major(found.nvrtc.version) != major:
        what = f"{found.cupy[0].name} is for CUDA {major}, but loads NVRTC {found.nvrtc.version} from {found.nvrtc.path}."
        return [Advice(what, install)]
    minor = _minor(found.nvrtc.version)
    if major == 12 and minor is not None and minor < 2:  # CuPy 14 is built with 12.9, and breaks on the first toolkits of the series
        built = f"{found.cupy[0].name} {found.cupy[0].version} was built with"
        what = f"NVRTC {found.nvrtc.version} ({found.nvrtc.path}) is older than what {built}."
        return [Advice(what, 'pip install -U "cuda-toolkit[nvrtc,cudart]==12.*"', fatal=False)]
    return []


def _driver_advice(found: Findings) -> list[Advice]:
    if found.driver is None:
        if not found.driver_error:
            return []
        return [
            Advice(
                f"No NVIDIA driver: {found.driver_error}. Tuning predicts for a named GPU, kernels run emulated.",
                "Nothing to do on a machine without a GPU; else install NVIDIA's driver.",
                fatal=False,
            )
        ]
    advice = []
    version = _major(found.nvrtc.version) if found.nvrtc else found.cupy_major
    if version is not None and found.driver[0] < version:
        name = f"NVRTC {found.nvrtc.version}" if found.nvrtc else f"{found.cupy[0].name}"
        advice.append(
            Advice(
                f"The driver supports CUDA {_dotted(found.driver)} and loads nothing made by {name}.",
                f"{_swap(found, f'cuda{found.driver[0]}')} (or install a driver for CUDA {version})",
            )
        )
    if not found.gpus:
        advice.append(Advice("The driver shows no GPU.", "Unset CUDA_VISIBLE_DEVICES, or give the container or job a GPU.", fatal=False))
    for gpu in found.gpus:
        if found.architectures and gpu.sm not in found.architectures:
            known = f"sm_{min(found.architectures)} to sm_{max(found.architectures)}"
            other = "cuda12" if gpu.sm < min(found.architectures) else "cuda13"
            advice.append(Advice(f"{gpu.name} is sm_{gpu.sm}; this NVRTC compiles for {known}.", _swap(found, other)))
    if found.gpus and found.telemetry is None:
        what = "nvidia-ml-py is not installed: clocks, throttling and other work on the GPU cannot be seen."
        advice.append(Advice(what, f"pip install {TELEMETRY}", fatal=False))
    return advice


def _torch_advice(found: Findings) -> list[Advice]:
    if found.torch is None or found.torch_cuda is None or found.cupy_major in (None, found.torch_cuda[0]):
        return []
    what = (
        f"torch {found.torch.version} is built for CUDA {_dotted(found.torch_cuda)}, {found.cupy[0].name} is for CUDA {found.cupy_major}: "
        "two CUDA runtimes in one process."
    )
    return [Advice(what, _swap(found, f"cuda{found.torch_cuda[0]}"))]


def _host_advice(found: Findings) -> list[Advice]:
    advice = []
    if found.host_compiler is None:
        what = "g++ is not on PATH: the emulated executor cannot build kernels, so nothing is certified without a GPU."
        advice.append(Advice(what, "apt-get install g++ (or your system's package of it)", fatal=not found.gpus))
    for place in found.places:
        if not place.writable:
            variable = "CUPY_CACHE_DIR" if place.name.startswith("CuPy") else paths.ENVIRONMENT_VARIABLE
            what = f"{place.name} {place.path} cannot be written ({place.reason}): tables and kernels are not kept."
            if variable == "CUPY_CACHE_DIR":
                what = f"{place.name} {place.path} cannot be written ({place.reason})."
            fix = f"export {variable}=/a/writable/directory"
            advice.append(Advice(what, fix, fatal=variable == paths.ENVIRONMENT_VARIABLE))
    return advice


def _swap(found: Findings, extra: str) -> str:
    names = " ".join(wheel.name for wheel in found.cupy)
    removal = f"pip uninstall -y {names} && " if names else ""
    return f'{removal}pip install "flashgen[{extra}]"'


def _extra(found: Findings) -> str:
    """The extra that fits this machine: the driver decides, then torch, then the newest."""
    for version in (found.driver, found.torch_cuda):
        if version is not None:
            return "cuda12" if version[0] <= 12 else "cuda13"
    return "cuda13"


# Looking --------------------------------------------------------------------------------------------------------------


def _distribution(name: str) -> Library | None:
    try:
        found = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return None
    return Library(name, found.version, str(found.locate_file("")))


def _cupy_error() -> str:
    """Why CuPy cannot be imported, or ''. Its own loud warning about several wheels is the same as our advice."""
    import warnings

    if util.find_spec("cupy") is None:
        return ""
    from flashgen.gpu import cupy

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            cupy()
    except Exception as problem:  # a broken installation fails in any way
        return _one_line(problem)
    return ""


def _nvrtc() -> tuple[Library | None, str, tuple[int, ...]]:
    from flashgen import compiler

    try:
        version, architectures = compiler.nvrtc_version(), compiler.supported_architectures()
    except (MissingDependency, ConflictingInstall) as problem:
        return None, _one_line(problem.__cause__ or problem), ()
    except Exception as problem:  # a broken installation fails in any way
        return None, _one_line(problem), ()
    return Library("NVRTC", version, _loaded_path("nvrtc")), "", architectures


def _loaded_path(name: str) -> str:
    """Path of a CUDA library that this process has loaded."""
    maps = Path("/proc/self/maps")
    if maps.is_file():
        for line in maps.read_text().splitlines():
            path = line.split(maxsplit=5)[-1] if "/" in line else ""
            if re.search(rf"/lib{name}\.so[.\d]*$", path):
                return path
    return ""


def _nvrtc_libraries() -> tuple[Library, ...]:
    """NVRTC in wheels and toolkits, used or not."""
    found: dict[str, Library] = {}
    for name in NVRTC_WHEELS:
        wheel = _distribution(name)
        if wheel is not None:
            files = [str(each.locate()) for each in metadata.distribution(name).files or () if re.search(r"libnvrtc\.so\.\d+$", each.name)]
            found[files[0] if files else name] = Library(name, wheel.version, files[0] if files else wheel.path)
    for pattern in _TOOLKITS:
        for path in sorted(Path("/").glob(pattern.lstrip("/"))):
            match = re.search(r"libnvrtc\.so\.(\d+(?:\.\d+)*)$", path.name)
            if match and str(path.resolve()) not in {str(Path(known).resolve()) for known in found}:
                found[str(path)] = Library("libnvrtc", match[1], str(path))
    return tuple(found.values())


def _torch() -> tuple[Library | None, tuple[int, int] | None]:
    """torch and the CUDA version of its build, read from its version file: importing it would take seconds."""
    found = _distribution("torch")
    if found is None:
        return None, None
    spec = util.find_spec("torch")
    version_file = Path(spec.origin).with_name("version.py") if spec and spec.origin else None
    text = version_file.read_text(encoding="utf-8") if version_file and version_file.is_file() else ""
    match = re.search(r"^cuda[^=\n]*=\s*'(\d+)\.(\d+)", text, re.MULTILINE)
    return found, (int(match[1]), int(match[2])) if match else None


class _Driver:
    """The CUDA driver library, asked directly: it works without CuPy and makes no context."""

    def __init__(self) -> None:
        self.path, self.error = "", ""
        self._library: ctypes.CDLL | None = None
        for name in ("libcuda.so.1", "nvcuda.dll"):
            try:
                self._library = ctypes.CDLL(name)
                break
            except OSError as problem:
                self.error = self.error or f"{name} cannot be loaded ({_one_line(problem)})"
        if self._library is not None:
            self.path, self.error = _loaded_path("cuda"), ""

    def cuda_version(self) -> tuple[int, int] | None:
        version = ctypes.c_int()
        if self._library is None or self._library.cuDriverGetVersion(ctypes.byref(version)) != 0:
            return None
        return version.value // 1000, version.value % 1000 // 10

    def gpus(self) -> tuple[DeviceLimits, ...]:
        library, count = self._library, ctypes.c_int()
        if library is None or library.cuInit(0) != 0 or library.cuDeviceGetCount(ctypes.byref(count)) != 0:
            return ()
        return tuple(self._limits(library, index) for index in range(count.value))

    def _limits(self, library: ctypes.CDLL, index: int) -> DeviceLimits:
        handle, name, value = ctypes.c_int(), ctypes.create_string_buffer(256), ctypes.c_int()
        library.cuDeviceGet(ctypes.byref(handle), index)
        library.cuDeviceGetName(name, 256, handle)
        read = {}
        for attribute, number in device.ATTRIBUTES.items():
            library.cuDeviceGetAttribute(ctypes.byref(value), number, handle)
            read[attribute] = value.value
        return device.from_attributes(name.value.decode(errors="replace"), read)


def _driver_version() -> str:
    """The kernel module's version, such as 580.65."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return ""
    match = re.search(r"\b(\d{3}\.\d+(?:\.\d+)?)\b", text)
    return match[1] if match else ""


def _host_compiler() -> Library | None:
    path = shutil.which("g++")
    if path is None:
        return None
    try:
        done = subprocess.run([path, "-dumpfullversion", "-dumpversion"], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return Library("g++", done.stdout.strip(), path)


def _places() -> tuple[Place, ...]:
    found = [_place(paths.ENVIRONMENT_VARIABLE, paths.home())]
    if util.find_spec("cupy") is not None:
        found.append(_place("CuPy's cache", paths.cupy_cache()))
    return tuple(found)


def _place(name: str, path: Path) -> Place:
    """Whether `path`, or where it would be created, can be written."""
    at = path
    while not at.exists() and at != at.parent:
        at = at.parent
    try:
        with tempfile.TemporaryFile(dir=at) as probe:
            probe.write(b"\0" * 4096)
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as problem:
        return Place(name, str(path), False, problem.strerror or str(problem))
    return Place(name, str(path), True)


def _major(version: str) -> int | None:
    match = re.match(r"\d+", version)
    return int(match[0]) if match else None


def _minor(version: str) -> int | None:
    match = re.match(r"\d+\.(\d+)", version)
    return int(match[1]) if match else None


def _dotted(version: Sequence[int]) -> str:
    return ".".join(map(str, version))


def _one_line(problem: BaseException) -> str:
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    return f"{type(problem).__name__}: {lines[0]}" if lines else type(problem).__name__
