"""Gradients of attention by recomputation in torch: the backward pass until there are kernels for it.

For each block of query rows the probabilities are computed again from q, k and the log-sum-exp, in float32; memory is
O(rows of a block × seqlen_kv), never n × n. With P = exp(scale·QKᵀ − lse) on visible keys, else 0:

    dV = Pᵀ·dO      dP = dO·Vᵀ      dS = P∘(dP − rowsum(dO∘O) + dlse)      dQ = scale·dS·K      dK = scale·dSᵀ·Q

On Hopper and Ampere float32 products obey torch's own switch `torch.backends.cuda.matmul.allow_tf32`.
"""

from __future__ import annotations

import torch

from flashgen.model import Mask, MaskKind

BLOCK_ELEMENTS = 2**24
"""Scores that are alive at once: 64 MiB in float32."""


def gradients(
    dout: torch.Tensor, dlse: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, lse: torch.Tensor,
    *, scale: float, mask: Mask, needs: tuple[bool, bool, bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
    """dq, dk, dv in the types and shapes of q, k, v (batch, heads, rows, columns); None where not needed."""
    batch, heads, seqlen_q, head_dim = q.shape
    heads_kv, seqlen_kv = k.shape[1], k.shape[2]
    group = heads // heads_kv
    grouped = (batch, heads_kv, group)
    keys, values = k.float().unsqueeze(2), v.float().unsqueeze(2)
    dq = torch.empty(q.shape, dtype=torch.float32, device=q.device) if needs[0] else None
    dk = torch.zeros(k.shape, dtype=torch.float32, device=q.device) if needs[1] else None
    dv = torch.zeros(v.shape, dtype=torch.float32, device=q.device) if needs[2] else None
    rows = max(1, BLOCK_ELEMENTS // max(1, batch * heads * seqlen_kv))
    for start in range(0, seqlen_q, rows):
        stop = min(seqlen_q, start + rows)
        count = stop - start
        queries = q[:, :, start:stop].reshape(*grouped, count, head_dim).float()
        outer = dout[:, :, start:stop].reshape(*grouped, count, v.shape[3]).float()
        inner = o[:, :, start:stop].reshape(*grouped, count, v.shape[3]).float()
        base = lse[:, :, start:stop].reshape(*grouped, count, 1)
        scores = queries @ keys.mT * scale
        seen = visible(mask, start, stop, seqlen_q, seqlen_kv, q.device)
        weights = (scores - base).exp()
        weights = weights if seen is None else weights.masked_fill(~seen, 0.0)
        if dv is not None:
            dv += (weights.mT @ outer).sum(2)
        if dq is None and dk is None:
            continue
        offset = (outer * inner).sum(-1, keepdim=True)
        if dlse is not None:
            offset = offset - dlse[:, :, start:stop].reshape(*grouped, count, 1).float()
        dscores = weights * (outer @ values.mT - offset) * scale
        dscores = dscores if seen is None else dscores.masked_fill(~seen, 0.0)  # also where v holds NaN
        if dq is not None:
            dq[:, :, start:stop] = (dscores @ keys).reshape(batch, heads, count, head_dim)
        if dk is not None:
            dk += (dscores.mT @ queries).sum(2)
    return tuple(None if each is None else each.to(q.dtype) for each in (dq, dk, dv))  # type: ignore[return-value]


def visible(mask: Mask, start: int, stop: int, seqlen_q: int, seqlen_kv: int, device: torch.device) -> torch.Tensor | None:
    """Which keys the query rows start to stop see: (rows, seqlen_kv); None for all."""
    if mask.kind is MaskKind.NONE:
        return None
    row = torch.arange(start, stop, device=device)[:, None] + mask.diagonal(seqlen_q, seqlen_kv)
    key = torch.arange(seqlen_kv, device=device)[None, :]
    if mask.kind is MaskKind.CAUSAL:
        return key <= row
    seen = torch.ones((stop - start, seqlen_kv), dtype=torch.bool, device=device)
    if mask.left >= 0:
        seen &= key >= row - mask.left
    if mask.right >= 0:
        seen &= key <= row + mask.right
    return seen
