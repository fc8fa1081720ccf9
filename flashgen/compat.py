"""Drop-in functions: the signatures and the meaning of the originals, computed by `flashgen.attention`.

What an original allows and flashgen does not is refused with the argument's name, never ignored, and never handed to another library.
"""

from __future__ import annotations

from typing import Any

import torch

from flashgen.api import attention
from flashgen.errors import InvalidProblem, UnsupportedProblem


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """`torch.nn.functional.scaled_dot_product_attention`: query (…, heads, L, E), key (…, heads, S, E), value (…, heads, S, Ev).

    is_causal aligns top left, as there: row i sees keys 0 to i. Autocast applies. Fewer key heads than query heads need enable_gqa.
    attn_mask and dropout are refused with UnsupportedProblem; shapes that do not fit raise InvalidProblem.
    """
    if attn_mask is not None:
        raise UnsupportedProblem(
            "attn_mask must be None: kernels know full, causal and windowed masks. Use is_causal=True, or flashgen.attention with window; "
            f"got a tensor of shape {tuple(attn_mask.shape)}."
        )
    _refuse("dropout_p", dropout_p, 0.0)
    if query.dim() < 3 or key.dim() != query.dim() or value.dim() != query.dim():
        raise InvalidProblem(
            "query, key and value must have equally many dimensions, at least 3: (…, heads, rows, columns); got shapes "
            f"{tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}."
        )
    if query.shape[-3] != key.shape[-3] and not enable_gqa:
        raise InvalidProblem(
            f"query has {query.shape[-3]} heads and key {key.shape[-3]}; grouped heads must be asked for with enable_gqa=True."
        )
    query, key, value = _autocast(query, key, value)
    if query.dim() == 4:
        return attention(query, key, value, causal=is_causal, alignment="top_left", scale=scale)
    lead = query.shape[:-3]
    if key.shape[:-3] != lead or value.shape[:-3] != lead:
        raise InvalidProblem(
            f"query, key and value must agree in their leading dimensions; got {tuple(lead)}, {tuple(key.shape[:-3])} and "
            f"{tuple(value.shape[:-3])}."
        )
    folded = (each.reshape(-1, *each.shape[-3:]) for each in (query, key, value))
    return attention(*folded, causal=is_causal, alignment="top_left", scale=scale).reshape(*query.shape[:-1], value.shape[-1])


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """flash-attn 2's `flash_attn_func`: q (batch, seqlen_q, heads, head_dim), k and v (batch, seqlen_kv, heads_kv, head_dim).

    causal aligns bottom right; window_size is (left, right), -1 for no bound. With return_attn_probs the result is (out, lse, None): the
    log-sum-exp (batch, heads, seqlen_q), and no dropout pattern, as there is no dropout. dropout_p, softcap and alibi_slopes are refused.
    """
    _refuse("dropout_p", dropout_p, 0.0)
    _refuse("softcap", softcap, 0.0)
    _refuse("alibi_slopes", alibi_slopes, None)
    o, lse = attention(
        q, k, v, causal=causal, window=window_size, scale=softmax_scale, return_lse=True, deterministic=deterministic, layout="bshd"
    )
    return (o, lse, None) if return_attn_probs else o


def register_sdpa_implementation() -> None:
    """Offer flashgen under torch's own SDPA, as "flashgen", where torch has `torch.nn.attention.register_flash_attention_impl`.

    Nothing changes before `torch.nn.attention.activate_flash_attention_impl("flashgen")`; from then on CUDA calls that SDPA would give to
    its flash backend run flashgen, forward and backward, until `restore_flash_attention_impl()`. Calls with dropout are refused.
    Raises UnsupportedProblem where torch is too old.
    """
    from torch.nn import attention as registry

    if not hasattr(registry, "register_flash_attention_impl"):
        raise UnsupportedProblem(
            f"torch {torch.__version__} has no torch.nn.attention.register_flash_attention_impl. Call "
            "flashgen.compat.scaled_dot_product_attention instead, or upgrade torch."
        )
    from flashgen import sdpa_registry

    registry.register_flash_attention_impl("flashgen", register_fn=sdpa_registry.activate)


def _autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """In the type of the autocast region around, as torch's own function has it."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(each.to(dtype) if each.is_floating_point() and each.dtype != torch.float64 else each for each in tensors)


def _refuse(name: str, value: Any, neutral: Any) -> None:
    if value is not neutral and (isinstance(value, torch.Tensor) or value != neutral):
        shown = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
        raise UnsupportedProblem(f"{name} must be {neutral!r}: no kernel supports anything else; got {shown}.")
