"""Generated, tuned and certified attention kernels.

Importing this package touches no GPU and needs none of CuPy, torch and Optuna.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flashgen.model import Alignment, DType, Mask, MaskKind, Op, Problem, Variant

__version__ = "0.1.0"

__all__ = ["Alignment", "DType", "Mask", "MaskKind", "Op", "Problem", "Variant", "__version__", "explore"]

if TYPE_CHECKING:
    from flashgen.explorer import Exploration


def explore(problem: Problem, gpu: str = "auto", **options: Any) -> Exploration:
    """Which tiles fit which shared memory, where the bytes go and what binds: `flashgen.explorer.explore` for a GPU by name.

    `gpu` is a preset such as h200, or auto: the present GPU, else the default preset. Options: families, capacities, lengths,
    measured_from, compile_best, compare. Needs no GPU.
    """
    from flashgen import device, explorer

    return explorer.explore(problem, device.resolve(gpu), **options)
