"""Generated, tuned and certified attention kernels.

Importing this package touches no GPU and needs none of CuPy, torch and Optuna; the functions load what they need when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from flashgen.model import Alignment, DType, Mask, MaskKind, Op, Problem, Variant

__version__ = "0.1.0"

if TYPE_CHECKING:
    from flashgen.api import attention, explain, lookup, tune
    from flashgen.bundle_reader import load_bundle
    from flashgen.explorer import Exploration
    from flashgen.traffic import record as record_problems

__all__ = [
    "Alignment",
    "DType",
    "Mask",
    "MaskKind",
    "Op",
    "Problem",
    "Variant",
    "__version__",
    "attention",
    "explain",
    "explore",
    "load_bundle",
    "lookup",
    "record_problems",
    "tune",
]

_LAZY = {
    "attention": ("api", "attention"),
    "explain": ("api", "explain"),
    "load_bundle": ("bundle_reader", "load_bundle"),
    "lookup": ("api", "lookup"),
    "record_problems": ("traffic", "record"),
    "tune": ("api", "tune"),
}
"""Public functions by the module and name that they are imported from when first used."""


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _LAZY[name]
    found = globals()[name] = getattr(import_module(f"{__name__}.{module}"), attribute)  # later uses come straight here
    return found


def explore(problem: Problem, gpu: str = "auto", **options: Any) -> Exploration:
    """Which tiles fit which shared memory, where the bytes go and what binds: `flashgen.explorer.explore` for a GPU by name.

    `gpu` is a preset such as h200, or auto: the present GPU, else the default preset. Options: families, capacities, lengths,
    measured_from, compile_best, compare. Needs no GPU.
    """
    from flashgen import device, explorer

    return explorer.explore(problem, device.resolve(gpu), **options)
