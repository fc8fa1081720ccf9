"""Calls of torch's SDPA drawn by hypothesis, and what they have to agree with: torch's math backend in float64."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashgen import compat

TYPES = (torch.float32, torch.float16, torch.bfloat16)


@st.composite
def calls(
    draw: Any, dims: tuple[tuple[int, int], ...], longest: int = 40, device: str = "cpu"
) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Operands and options that torch's SDPA takes; `dims` are pairs of head_dim and head_dim_v."""
    dtype = draw(st.sampled_from(TYPES))
    heads_kv, group = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    lead = draw(st.sampled_from([(), (1,), (2,), (2, 1)]))
    rows, keys = draw(st.integers(1, longest)), draw(st.integers(1, longest))
    dim, dim_v = draw(st.sampled_from(dims))
    torch.manual_seed(draw(st.integers(0, 99)))
    shapes = ((heads_kv * group, rows, dim), (heads_kv, keys, dim), (heads_kv, keys, dim_v))
    options: dict[str, Any] = {"is_causal": draw(st.booleans()), "scale": draw(st.sampled_from([None, 0.3, 2.0]))}
    if group > 1 or draw(st.booleans()):
        options["enable_gqa"] = True
    tensors = [torch.randn(*lead, *shape).to(device, dtype) for shape in shapes]
    if draw(st.booleans()):
        tensors = [each.transpose(-3, -2).contiguous().transpose(-3, -2) for each in tensors]
    return tensors, options


def textbook(tensors: list[torch.Tensor], options: dict[str, Any]) -> torch.Tensor:
    """Standard attention in the type of the tensors: scores, probabilities and output rounded to it."""
    q, k, v = tensors
    k, v = (each.repeat_interleave(q.shape[-3] // each.shape[-3], -3) for each in (k, v))
    scores = q @ k.mT * (options["scale"] or q.shape[-1] ** -0.5)
    if options["is_causal"]:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    return scores.softmax(-1) @ v


def compare_with_math(tensors: list[torch.Tensor], options: dict[str, Any]) -> None:
    """No further from the float64 result than twice the textbook's error in this type, and an ulp."""
    found = compat.scaled_dot_product_attention(*tensors, **options)
    with sdpa_kernel(SDPBackend.MATH):
        right = torch.nn.functional.scaled_dot_product_attention(*(each.double() for each in tensors), **options)
    assert found.shape == right.shape and found.dtype == tensors[0].dtype
    plain = float((textbook(tensors, options).double() - right).abs().max())
    ulp = float(right.abs().max()) * torch.finfo(found.dtype).eps
    assert float((found.double() - right).abs().max()) <= 2 * (plain + ulp)
