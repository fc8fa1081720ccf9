"""Generated, tuned and certified attention kernels.

Importing this package touches no GPU and needs none of CuPy, torch and Optuna.
"""

from flashgen.model import Alignment, DType, Mask, MaskKind, Op, Problem, Variant

__version__ = "0.1.0"

__all__ = ["Alignment", "DType", "Mask", "MaskKind", "Op", "Problem", "Variant", "__version__"]
