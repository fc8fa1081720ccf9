"""Drop-in functions: the signatures and the meaning of the originals, computed by `flashgen.attention`.

Head dims that are no multiple of 8 are padded with zeros, as the originals do.
What an original allows and flashgen does not is refused with the argument's name, never ignored, and never handed to another library.
"""

from __future__ import annotations

from typing import Any

import torch

from flashgen import arguments
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
    scale = arguments.resolve_scale(scale, query.shape[-1])
    lead, columns = query.shape[:-3], value.shape[-1]
    if key.shape[:-3] != lead or value.shape[:-3] != lead:
        raise InvalidProblem(
            f"query, key and value must agree in their leading dimensions; got {tuple(lead)}, {tuple(key.shape[:-3])} and "
            f"{tuple(value.shape[:-3])}."
        )
    query, key, value = (_padded(each) for each in (query, key, value))
    if query.dim() == 4:
        return _cut(attention(query, key, value, causal=is_causal, alignment="top_left", scale=scale), columns)
    folded = (each.reshape(-1, *each.shape[-3:]) for each in (query, key, value))
    o = _cut(attention(*folded, causal=is_causal, alignment="top_left", scale=scale), columns)
    return o.reshape(*query.shape[:-1], columns)


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
    log-sum-exp (batch, heads, seqlen_q), and no dropout pattern, as there is no dropout. Gradients are deterministic where the argument or
    torch's own switch says so. dropout_p, softcap and alibi_slopes are refused.
    """
    _refuse("dropout_p", dropout_p, 0.0)
    _refuse("softcap", softcap, 0.0)
    _refuse("alibi_slopes", alibi_slopes, None)
    scale, columns = arguments.resolve_scale(softmax_scale, q.shape[-1]), v.shape[-1]
    window = (int(window_size[0]), int(window_size[1]))  # flash-attn takes tensors of one element too
    o, lse = attention(
        _padded(q), _padded(k), _padded(v),
        causal=causal, window=window, scale=scale, return_lse=True, deterministic=deterministic or None, layout="bshd",
    )  # fmt: skip
    return (_cut(o, columns), lse, None) if return_attn_probs else _cut(o, columns)


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


def _padded(tensor: torch.Tensor) -> torch.Tensor:
    """With zero columns up to a multiple of 8, as the originals have it for kernels that want whole 16-byte pieces: no score changes."""
    missing = -tensor.shape[-1] % 8
    return torch.nn.functional.pad(tensor, (0, missing)) if missing else tensor


def _cut(o: torch.Tensor, columns: int) -> torch.Tensor:
    """Without the columns that `_padded` added."""
    return o if o.shape[-1] == columns else o[..., :columns]


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
