"""A fault is a replacement of text, whether in the NumPy model kernel or in a rendered source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flashgen.model import DType, MaskKind

BF16, FP16, FP32 = DType.BFLOAT16, DType.FLOAT16, DType.FLOAT32
NONE, CAUSAL, WINDOW = MaskKind.NONE, MaskKind.CAUSAL, MaskKind.WINDOW


@dataclass(frozen=True)
class Planted:
    """One fault: `old` occurs exactly once in the text and is replaced by `new`; it matters for the given element type and mask."""

    name: str
    old: str
    new: str
    mask: MaskKind = NONE
    dtype: DType = BF16

    def apply(self, text: str) -> str:
        """The text with the fault. Raises AssertionError when the text has moved on."""
        assert text.count(self.old) == 1, f"{self.name}: the text holds {self.old!r} {text.count(self.old)} times, not once"
        return text.replace(self.old, self.new)


@dataclass(frozen=True)
class PlantedInSource(Planted):
    """A fault in the rendered source of a family; `changes` are parameters that differ from the family's usual ones."""

    family: str = "ampere_forward"
    changes: Mapping[str, int] | None = None
    head_dim: int = 64
    head_dim_v: int = 64
    slow: bool = False  # arithmetic that the model kernel's faults cover too; run with --full
