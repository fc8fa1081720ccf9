"""Hugging Face transformers: `register()`, then `attn_implementation="flashgen"`.

Two functions are registered. The mask function sees which mask the model means and refuses what no kernel computes (padding, packed or
chunked sequences, a static cache); the attention function computes what is left: full, causal and sliding-window attention.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flashgen.errors import MissingDependency, UnsupportedProblem

NAME = "flashgen"
_UNSUPPORTED = ("softcap", "s_aux", "sinks", "position_bias", "cu_seq_lens_q", "cu_seq_lens_k", "head_mask")
"""Keywords that change the result and that no kernel computes; given as None they mean nothing."""


def register() -> None:
    """Make attn_implementation="flashgen" known, attention and mask. Raises MissingDependency without a transformers that has both."""
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as error:
        raise MissingDependency(
            f"This needs transformers 4.57 or newer, with AttentionInterface and AttentionMaskInterface ({error}). "
            "Install it: pip install -U transformers."
        ) from error
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, attention_mask)
    _spare_the_import()


def _spare_the_import() -> None:
    """Newer versions take every name with "flash" in it for a flash-attn package and import that first; ours is imported already."""
    from transformers import modeling_utils

    original = getattr(modeling_utils, "lazy_import_flash_attention", None)
    if original is None or getattr(original, "spares", None) == NAME:
        return

    def lazy_import_flash_attention(implementation: str | None, *arguments: Any, **options: Any) -> Any:
        return None if implementation == NAME else original(implementation, *arguments, **options)

    lazy_import_flash_attention.spares = NAME  # type: ignore[attr-defined]
    modeling_utils.lazy_import_flash_attention = lazy_import_flash_attention


def attention_forward(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, dropout: float = 0.0, scaling: float | None = None,
    is_causal: bool | None = None, sliding_window: int | None = None, **options: Any,
) -> tuple[Any, None]:  # fmt: skip
    """query (batch, heads, rows, columns), key and value with fewer heads where grouped; returns (batch, rows, heads, columns).

    Raises UnsupportedProblem for a materialised mask, dropout, and every option in `_UNSUPPORTED`.
    """
    from flashgen.api import attention

    if attention_mask is not None:
        raise UnsupportedProblem(
            f"attention_mask must be None for attn_implementation='{NAME}'; got {_shape(attention_mask)}. {_ADVICE}"
        )  # fmt: skip
    if dropout:
        raise UnsupportedProblem(
            f"dropout must be 0 for attn_implementation='{NAME}'; got {dropout}. Set attention_dropout=0 or use eval()."
        )
    for name in _UNSUPPORTED:
        if options.get(name) is not None:
            raise UnsupportedProblem(f"{name} must be None: no kernel computes it; got {_shape(options[name])}. {_ADVICE}")
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    window = None
    if sliding_window is not None:
        # A causal window of W keys holds oneself; a bidirectional one reaches W keys to both sides.
        window = (sliding_window - 1, 0) if causal else (sliding_window, sliding_window)
    o = attention(query, key, value, causal=bool(causal), window=window, scale=scaling)
    return o.transpose(1, 2).contiguous(), None


def attention_mask(
    batch_size: int, *, kv_length: int, q_length: int = 0, q_offset: Any = 0, kv_offset: Any = 0, cache_position: Any = None,
    mask_function: Callable[..., Any] | None = None, attention_mask: Any = None, **options: Any,
) -> None:  # fmt: skip
    """None, after making sure that causality, or the window, is all that the model's mask says.

    Versions before 5 give `cache_position`, the positions of the queries, in the place of q_length and q_offset. Raises
    UnsupportedProblem for padding, for mask functions other than causal, bidirectional and their windows, and for a cache that is longer
    than what it holds.
    """
    if cache_position is not None:
        q_length, q_offset = int(cache_position.shape[0]), int(cache_position[0])
    kind = _kind(mask_function)
    if kind is None:
        name = getattr(mask_function, "__qualname__", mask_function)
        raise UnsupportedProblem(f"The model's mask is neither full, nor causal, nor a sliding window ({name}). {_ADVICE}")
    if kind == "causal" and not _ends_together(q_length, kv_length, q_offset, kv_offset):
        raise UnsupportedProblem(
            f"The last query must see the last key; got {q_length} queries from position {q_offset} and {kv_length} keys from position "
            f"{kv_offset}: a static cache is longer than what it holds. Use the dynamic cache, or another attn_implementation."
        )
    if attention_mask is not None:
        held = attention_mask[:, -kv_length:]
        if held.shape[1] != kv_length or not bool(held.all()):
            raise UnsupportedProblem(f"attention_mask must have no padding; got a mask of shape {tuple(held.shape)} with zeros. {_ADVICE}")


_ADVICE = "Use inputs without padding, or another attn_implementation, such as 'sdpa'."


def _kind(function: Any) -> str | None:
    """`causal` or `both` for the mask functions of transformers that a kernel can play, with or without a window; else None."""
    from transformers import masking_utils

    if function is None or function is masking_utils.causal_mask_function:
        return "causal"
    if function is getattr(masking_utils, "bidirectional_mask_function", object()):
        return "both"
    parts = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    if getattr(function, "__qualname__", "") != "and_masks.<locals>.and_mask" or len(parts) != 1 or len(parts[0]) != 2:
        return None
    overlay, base = parts[0]
    names = {"sliding_window_overlay": "causal", "sliding_window_bidirectional_overlay": "both"}
    kind = names.get(getattr(overlay, "__qualname__", "").removesuffix(".<locals>.inner_mask"))
    return kind if kind is not None and _kind(base) == kind else None


def _ends_together(q_length: int, kv_length: int, q_offset: Any, kv_offset: Any) -> bool:
    """Whether the diagonal meets the bottom right corner. Offsets of a static cache are tensors, whose values would cost a wait."""
    try:
        return isinstance(q_offset, int) and isinstance(kv_offset, int) and q_offset + q_length == kv_offset + kv_length
    except TypeError:
        return False


def _shape(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if hasattr(value, "shape") else repr(value)
