"""The public functions: `attention`, `explain`, `lookup`, `tune`. Arrays of torch, CuPy, or any library that speaks DLPack."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashgen import arguments
from flashgen.model import DeviceLimits, ExecutorName, Problem

if TYPE_CHECKING:
    from flashgen.dispatch import Answer
    from flashgen.search import TuneResult
    from flashgen.table import Lookup


def _torch_face() -> Any:
    """The module for torch tensors; None without torch, which is optional."""
    try:
        from flashgen import torch_face
    except ImportError as missing:
        if (missing.name or "").split(".")[0] != "torch":
            raise
        return None
    return torch_face


torch_face: Any = _torch_face()


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    alignment: str = "bottom_right",
    window: Sequence[int] | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    layout: str = "bhsd",
    strict: bool = False,
) -> Any:
    """softmax(q·kᵀ·scale + mask)·v, exactly, by the kernel that the tables name for these shapes on this GPU.

    Shapes with layout "bhsd": q (batch, heads, seqlen_q, head_dim), k (batch, heads_kv, seqlen_kv, head_dim), v (…, head_dim_v); with
    "bshd" heads and lengths change places. heads must be a multiple of heads_kv. Returns o like q with head_dim_v columns, in memory order
    batch, row, head, column; with `return_lse` also the log-sum-exp, natural logarithm, float32, (batch, heads, seqlen_q).

    causal: row i sees keys up to i + d, where d aligns the diagonal: seqlen_kv − seqlen_q ("bottom_right") or 0 ("top_left").
    window: (left, right) keys around the diagonal, -1 for no bound; with causal the right bound is 0. A row that sees no key is 0.
    scale: 1/sqrt(head_dim) by default. strict: raise UntunedProblem where no table entry serves, instead of the certified fallback.
    deterministic: gradients with the same bits every time and in any batch; None follows torch.use_deterministic_algorithms as it stands
    when they are computed. The forward pass always is.

    Operands whose last stride is not 1 are copied; any other strides are taken as they are. Runs on the current stream of the inputs'
    device. torch tensors have first-order gradients for o and lse.

    Raises InvalidProblem, UnsupportedProblem, UntunedProblem, LaunchError, CompileError, MissingDependency.
    """
    arguments.check_layout(layout)
    if torch_face is not None and isinstance(q, torch_face.Tensor):
        return torch_face.attention(q, k, v, causal, alignment, window, scale, return_lse, layout, strict, deterministic)
    from flashgen import arrays

    return arrays.attention(q, k, v, causal, alignment, window, scale, return_lse, layout, strict)


def explain(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    alignment: str = "bottom_right",
    window: Sequence[int] | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    layout: str = "bhsd",
    strict: bool = False,
) -> Answer:
    """What `attention` with the same arguments would run, and why; nothing is launched. Print the result.

    Where a torch tensor requires a gradient, `gradients` tells the same of the backward pass. Compiles and loads as the first call would;
    scale and return_lse do not change the choice. Raises as `attention` does.
    """
    arguments.check_layout(layout)
    kind, left, right = arguments.resolve_mask(causal, window, alignment)
    if torch_face is not None and isinstance(q, torch_face.Tensor):
        torch_face.check_tensors(q, k, v)
        if layout == "bshd":
            q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        options = torch_face.Options(1.0, kind, alignment, left, right, strict, deterministic)
        answer: Answer = torch_face.explain(q, k, v, options)
        return answer
    from flashgen import arrays

    return arrays.explain(q, k, v, kind, alignment, left, right, layout, strict)


def lookup(problem: Problem, *, gpu: str | DeviceLimits = "auto", table: Path | None = None) -> Lookup:
    """The table entry that serves `problem`, and how it was found; `.explain()` tells. No GPU is needed: name one, as in gpu="h200".

    Raises UnknownDevice, InvalidTable.
    """
    from flashgen import dispatch, near

    limits = _limits(gpu)
    return near.look_up(problem, limits, dispatch.tables_of(table))


def tune(problem: Problem, *, gpu: str | DeviceLimits = "auto", executor: ExecutorName | str | None = None, **options: Any) -> TuneResult:
    """Search the fastest exact variant of `problem`, write it to the table, and let this process use it from its next call on.

    What `flashgen tune` does. `executor` is device where there is a GPU, else emulated (predicted times). `options` are those of
    `flashgen.search.tune`: budget, seconds, seed, fresh, table, families, progress. Raises as that does.
    """
    from flashgen import device, dispatch, search

    if executor is None:
        executor = ExecutorName.DEVICE if gpu == "auto" and device.is_present() else ExecutorName.EMULATED
    result = search.tune(problem, _limits(gpu), executor=ExecutorName(executor), **options)
    dispatch.forget()
    return result


def _limits(gpu: str | DeviceLimits) -> DeviceLimits:
    if isinstance(gpu, DeviceLimits):
        return gpu
    from flashgen import device

    return device.resolve(gpu)
