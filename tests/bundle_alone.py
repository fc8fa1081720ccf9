"""A bundle in a process that has no compiler: an environment without NVRTC, a guard that notices every attempt to get one, and operands.

The environment is a folder of links to the packages that a bundle needs. Python started there with `-I -S` sees no other package. This
module runs in such a process too, so it imports no more than a bundle does.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from flashgen import reference
from flashgen.model import ForwardTensors, Problem, Tensor

NEEDED = ("numpy", "numpy.libs", "msgspec", "yaml", "_yaml", "platformdirs")
CUPY = ("cupy", "cupy_backends", "cupyx", "fastrlock", "cuda.pathfinder")
ABSENT = ("cuda.bindings.nvrtc", "nvidia.cuda_nvrtc", "cuda.nvrtc", "jinja2", "optuna", "torch")
WRAPPER = "cupy_backends.cuda.libs.nvrtc"
"""A part of CuPy that every `import cupy` loads; it opens libnvrtc when something is first asked of it."""


# Where the bundle runs ------------------------------------------------------------------------------------------------


def environment(folder: Path, *, gpu: bool) -> Path:
    """`folder` with links to this project and to what it needs for bundles, and to CuPy with the libraries it opens where `gpu`."""
    for name in ("flashgen", Path(__file__).stem):
        _link(folder, name)
    for name in (*NEEDED, *(CUPY if gpu else ())):
        _link(folder, name)
    (folder / "lib").mkdir()
    for path in _cuda_libraries() if gpu else ():
        (folder / "lib" / path.name).symlink_to(path)
    return folder


def _link(folder: Path, name: str) -> None:
    place = _place(name)
    if place is not None:
        target = folder.joinpath(*(name.split(".") if name in CUPY else (name,))).with_suffix(place.suffix)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(place)


def _place(name: str) -> Path | None:
    if name.endswith(".libs"):  # no package: libraries that lie beside one
        beside = Path(np.__file__).parents[1] / name
        return beside if beside.is_dir() else None
    try:
        spec = find_spec(name)
    except ModuleNotFoundError:
        return None
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent if spec.submodule_search_locations else Path(spec.origin)


def _cuda_libraries() -> list[Path]:
    """The CUDA runtime of the nvidia wheels, by whose names CuPy opens it."""
    roots = [Path(root) / "nvidia" for root in sys.path if root]
    return [path for root in roots for path in sorted(root.glob("*/lib/libcudart.so*"))]


def start(folder: Path, script: str, *arguments: str, limit: float = 300) -> subprocess.CompletedProcess[str]:
    """Run a script there, after the guard has been put up."""
    begin = f"import sys; sys.path.insert(0, {str(folder)!r}); import bundle_alone; guard = bundle_alone.Guard()\n"
    command = [sys.executable, "-I", "-S", "-c", begin + script, *arguments]
    found = {"LD_LIBRARY_PATH": os.pathsep.join([str(folder / "lib"), *os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)])}
    return subprocess.run(command, capture_output=True, text=True, timeout=limit, env=os.environ | found, cwd=folder)


# The guard ------------------------------------------------------------------------------------------------------------


class Guard:
    """Refuses, and counts, every import of NVRTC bindings and every opening of its library in this process, and of what needs none."""

    def __init__(self) -> None:
        self.attempts: list[str] = []
        sys.addaudithook(self._look)

    def _look(self, event: str, arguments: tuple[Any, ...]) -> None:
        name = str(arguments[0]) if arguments else ""
        if event == "import" and name != WRAPPER and ("nvrtc" in name or name.split(".")[0] in ABSENT):
            self.attempts.append(name)
            raise ImportError(f"{name} is refused here")
        if event == "ctypes.dlopen" and "nvrtc" in name:
            self.attempts.append(name)
            raise OSError(f"{name} is refused here")

    def verdict(self) -> None:
        """Fails when NVRTC was asked for or is in memory, and when this guard does not notice an attempt."""
        assert self.attempts == [], f"asked for {self.attempts}"
        assert not (found := mapped("libnvrtc")), f"{found} is in memory"
        for name in ABSENT:
            try:
                __import__(name)
            except ImportError:
                continue
            raise AssertionError(f"{name} can be imported")
        if "cupy" in sys.modules:
            self._try_cupy()

    def _try_cupy(self) -> None:
        from cupy.cuda import nvrtc

        self.attempts.clear()
        try:
            nvrtc.getVersion()
        except Exception:
            assert any("libnvrtc" in name for name in self.attempts), "CuPy opens NVRTC by a way that the guard does not see"
            return
        raise AssertionError("CuPy has an NVRTC")


def mapped(library: str) -> list[str]:
    """Files in this process's memory whose name begins with that of a library."""
    fields = (line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines())
    return sorted({each[5] for each in fields if len(each) == 6 and Path(each[5]).name.startswith(library)})


# Operands -------------------------------------------------------------------------------------------------------------


def operands(asked: Problem, seed: int = 4) -> ForwardTensors:
    """Random inputs and NaN where the outputs go, in order BHSD; the same in every process."""
    draw = np.random.default_rng(seed)
    shapes = {"q": (asked.heads_q, asked.seqlen_q, asked.head_dim), "k": (asked.heads_kv, asked.seqlen_kv, asked.head_dim)}
    shapes |= {"v": (asked.heads_kv, asked.seqlen_kv, asked.head_dim_v), "o": (asked.heads_q, asked.seqlen_q, asked.head_dim_v)}
    drawn = {name: draw.standard_normal((asked.batch, *shape), np.float32) for name, shape in shapes.items()}
    made = {name: contiguous(reference.encode(values, asked.dtype)) for name, values in drawn.items()}
    lse = contiguous(np.full((asked.batch, asked.heads_q, asked.seqlen_q, 1), np.nan, np.float32))
    return ForwardTensors(**made, lse=lse)


def contiguous(values: np.ndarray) -> Tensor:
    """(batch, heads, rows, columns) as a tensor without gaps."""
    _, heads, rows, columns = values.shape
    return Tensor(np.ascontiguousarray(values).reshape(-1), 0, values.shape, (heads * rows * columns, rows * columns, columns, 1))


def digest(data: ForwardTensors) -> str:
    """sha256 of output and log-sum-exp."""
    return hashlib.sha256(data.o.buffer.tobytes() + data.lse.buffer.tobytes()).hexdigest()
