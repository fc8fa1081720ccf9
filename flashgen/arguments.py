"""Rules for the arguments of `flashgen.attention`, on plain numbers and words, shared by all kinds of arrays.

Shapes are (batch, heads, rows, columns) from here on. Every refusal names the argument, the rule and the value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flashgen.errors import InvalidProblem, UnsupportedProblem
from flashgen.launch import map_obstacle

LAYOUTS = ("bhsd", "bshd")
ALIGNMENTS = ("bottom_right", "top_left")
DTYPES = ("float32", "float16", "bfloat16")


def check_layout(layout: str) -> None:
    """Raises InvalidProblem."""
    if layout not in LAYOUTS:
        raise InvalidProblem(f"layout must be 'bhsd' or 'bshd'; got {layout!r}.")


def check_rank(name: str, shape: Sequence[Any]) -> None:
    """Raises InvalidProblem for anything but four dimensions."""
    if len(shape) != 4:
        raise InvalidProblem(
            f"{name} must have 4 dimensions, batch, heads, rows and columns in the order of `layout`; got shape {tuple(shape)}."
        )


def check_shapes(q: Sequence[Any], k: Sequence[Any], v: Sequence[Any]) -> None:
    """Raises InvalidProblem when (batch, heads, rows, columns) shapes contradict each other."""
    for name, shape in (("q", q), ("k", k), ("v", v)):
        check_rank(name, shape)
    if k[0] != q[0] or v[0] != q[0]:
        raise InvalidProblem(f"q, k and v must have the same batch; got {q[0]}, {k[0]} and {v[0]}.")
    if k[1] != v[1]:
        raise InvalidProblem(f"k and v must have the same heads; got {k[1]} and {v[1]}.")
    if k[1] == 0 or q[1] % k[1] != 0:
        raise InvalidProblem(f"The heads of q must be a multiple of those of k and v; got {q[1]} heads of q and {k[1]} of k.")
    if k[2] != v[2]:
        raise InvalidProblem(f"k and v must have the same rows; got {k[2]} and {v[2]}.")
    if k[3] != q[3]:
        raise InvalidProblem(f"q and k must have the same head dim; got {q[3]} and {k[3]}.")


def check_dtypes(q: str, k: str, v: str) -> None:
    """Raises InvalidProblem for mixed types, UnsupportedProblem for a type that no kernel computes with."""
    if k != q or v != q:
        raise InvalidProblem(f"q, k and v must have the same dtype; got {q}, {k} and {v}.")
    if q not in DTYPES:
        raise UnsupportedProblem(f"The dtype of q, k and v must be one of {', '.join(DTYPES)}; got {q}. Cast them first.")


def check_devices(q: Any, k: Any, v: Any) -> None:
    """Raises InvalidProblem when the inputs lie on several devices."""
    if k != q or v != q:
        raise InvalidProblem(f"q, k and v must be on the same device; got {q}, {k} and {v}.")


def refuse_cpu(name: str, device: Any) -> None:
    """Raises UnsupportedProblem: there is no silent way to the CPU."""
    raise UnsupportedProblem(
        f"{name} must be on a CUDA device; got {device}. Move it there, or run tests inside `flashgen.testing.emulated()`."
    )


def resolve_scale(scale: float | None, head_dim: Any) -> float:
    """The softmax scale; 1/sqrt(head_dim) by default. Raises InvalidProblem unless it is a positive finite number."""
    if scale is None:
        return float(head_dim**-0.5) if head_dim else 1.0
    if not 0.0 < scale < float("inf"):
        raise InvalidProblem(f"scale must be a positive finite number; got {scale}.")
    return float(scale)


def resolve_mask(causal: bool, window: Sequence[int] | None, alignment: str) -> tuple[str, int, int]:
    """(kind, left, right) of a mask: a window is (keys to the left, keys to the right), -1 for no bound; causal allows none to the right.

    Raises InvalidProblem.
    """
    if alignment not in ALIGNMENTS:
        raise InvalidProblem(f"alignment must be 'bottom_right' or 'top_left'; got {alignment!r}.")
    left, right = -1, -1
    if window is not None:
        if len(window) != 2:
            raise InvalidProblem(f"window must be (left, right), the keys on both sides of the diagonal; got {tuple(window)}.")
        left, right = window[0], window[1]
        if left < -1 or right < -1:
            raise InvalidProblem(f"window bounds are counts of keys, or -1 for no bound; got ({left}, {right}).")
    if causal:
        return ("causal", -1, -1) if left == -1 else ("window", left, 0)
    return ("none", -1, -1) if left == -1 and right == -1 else ("window", left, right)


def why_copied(name: str, address: int, shape: Sequence[int], strides: Sequence[int], element_bytes: int, mapped: bool) -> str:
    """Why a kernel gets a copy of an operand, in words, or ''. Strides are in elements; `mapped` kernels read through tensor maps."""
    if strides[3] != 1 and shape[3] > 1:
        return f"{name} is copied first: its last stride is {strides[3]} elements, and kernels read whole rows."
    obstacle = map_obstacle(address, shape, strides, element_bytes) if mapped else ""
    return f"{name} is copied first: {obstacle}, where a kernel reads through tensor maps." if obstacle else ""
