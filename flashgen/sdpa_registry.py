"""flashgen in the place of torch's own flash kernels: what `torch.nn.attention.activate_flash_attention_impl("flashgen")` calls.

The functions have the signatures of the aten operators that they stand for, so that torch's autograd, compiler and checks stay in charge.
"""

from __future__ import annotations

from typing import Any

import torch

from flashgen import arguments, torch_face, torch_gradients
from flashgen.errors import UnsupportedProblem
from flashgen.torch_tensors import Options, check_tensors


class Handle:
    """Keeps the registration alive; torch calls `remove` to go back to its own kernels."""

    def __init__(self) -> None:
        """Register for CUDA tensors."""
        self._library: Any = torch.library.Library("aten", "IMPL", "CUDA")
        self._library.impl("_scaled_dot_product_flash_attention", forward, "CUDA")
        self._library.impl("_scaled_dot_product_flash_attention_backward", backward, "CUDA")

    def remove(self) -> None:
        """Torch's own kernels from now on."""
        self._library = None


def activate() -> Handle:
    """Take over SDPA's flash backend."""
    return Handle()


def forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout_p: float = 0.0, is_causal: bool = False,
    return_debug_mask: bool = False, *, scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """aten::_scaled_dot_product_flash_attention. Causal aligns top left. Raises UnsupportedProblem for dropout and a debug mask."""
    if dropout_p != 0.0 or return_debug_mask:
        raise UnsupportedProblem(
            f"dropout_p must be 0 and return_debug_mask False; got {dropout_p} and {return_debug_mask}. Call "
            "torch.nn.attention.restore_flash_attention_impl() to go back to torch's own kernels."
        )
    check_tensors(query, key, value)
    scale = arguments.resolve_scale(scale, query.shape[3])
    o, lse = torch_face.run(query, key, value, _options(scale, is_causal))
    random = (torch.zeros(2, dtype=torch.uint64, device=query.device), torch.zeros((), dtype=torch.uint64, device=query.device))
    return (_laid_out_as(o, query), lse, None, None, query.shape[2], key.shape[2], *random, query.new_empty(0))


def backward(
    grad_out: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor, logsumexp: torch.Tensor,
    cum_seq_q: Any, cum_seq_k: Any, max_q: int, max_k: int, dropout_p: float, is_causal: bool, philox_seed: Any, philox_offset: Any,
    *, scale: float | None = None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """aten::_scaled_dot_product_flash_attention_backward."""
    options = _options(arguments.resolve_scale(scale, query.shape[3]), is_causal)
    found = torch_gradients.run(grad_out, None, query, key, value, out, logsumexp, options)
    return tuple(_laid_out_as(each, like) for each, like in zip(found, (query, key, value), strict=True))


def _options(scale: float, is_causal: bool) -> Options:
    return Options(scale, "causal" if is_causal else "none", "top_left", -1, -1, False, None)


def _laid_out_as(tensor: Any, like: torch.Tensor) -> torch.Tensor:
    """The tensor in the memory order that torch promises for this operator: that of `like`."""
    wanted = torch.empty_like(like) if like.shape == tensor.shape else torch.empty_like(tensor)
    return tensor if tensor.stride() == wanted.stride() else wanted.copy_(tensor)
