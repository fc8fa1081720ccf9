"""Calls of torch's SDPA drawn by hypothesis, and what they have to agree with: torch's math backend in float64."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashgen import compat
from flashgen.certify import BOUND, error_unit
from flashgen.model import Alignment, DType, Mask, Problem
from flashgen.reference import plain_error

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


def allowed_error(tensors: list[torch.Tensor], options: dict[str, Any], right: torch.Tensor) -> float:
    """By the rule of the exactness gate, from the error of the plain computation in the type of the tensors."""
    q, k, v = (each.cpu().reshape(-1, *each.shape[-3:]) for each in tensors)  # all leading dimensions are the batch
    (batch, heads, rows, dim), (_, heads_kv, keys, dim_v) = q.shape, v.shape
    mask = Mask.causal(Alignment.TOP_LEFT) if options["is_causal"] else Mask()
    problem = Problem(DType(str(q.dtype).removeprefix("torch.")), dim, dim_v, batch, heads, heads_kv, rows, keys, mask)
    exact = right.cpu().reshape(batch, heads, rows, dim_v).numpy()
    operands = (each.float().numpy() for each in (q, k, v))
    return BOUND * error_unit(exact, plain_error(*operands, problem, options["scale"] or problem.scale, exact), problem.dtype)


def compare_with_math(tensors: list[torch.Tensor], options: dict[str, Any]) -> None:
    """The drop-in against torch's math backend in float64."""
    found = compat.scaled_dot_product_attention(*tensors, **options)
    with sdpa_kernel(SDPBackend.MATH):
        right = torch.nn.functional.scaled_dot_product_attention(*(each.double() for each in tensors), **options)
    assert found.shape == right.shape and found.dtype == tensors[0].dtype
    assert float((found.double() - right).abs().max()) <= allowed_error(tensors, options, right)
