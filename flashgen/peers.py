"""Attention of other libraries, to be timed beside ours: torch's SDPA (FlashAttention-2 and cuDNN backends), FlashAttention-3 and -4.

A backward problem times the peer's backward pass alone, through torch's autograd, in the peer's default mode.

Each is imported when first asked for. One that is absent, or cannot compute the problem, says why; it is never replaced by another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from flashgen.errors import FlashgenError
from flashgen.model import UNLIMITED, Alignment, DType, MaskKind, Op, Problem

TORCH_INSTALL = 'install torch: pip install "flashgen[torch]"'


class PeerUnavailable(FlashgenError, RuntimeError):
    """A peer that is not installed here, or that cannot compute the problem."""


@dataclass(frozen=True)
class DeviceArray:
    """(batch, rows, heads, columns) elements in device memory, row-major, as torch takes them over without a copy.

    float16 and bfloat16 travel as 16-bit integers, since the interface has no bfloat16.
    """

    address: int
    shape: tuple[int, int, int, int]
    dtype: DType
    owner: object = field(repr=False, default=None)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The array as other libraries see it."""
        kind = "<f4" if self.dtype is DType.FLOAT32 else "<i2"
        return {"shape": self.shape, "typestr": kind, "data": (self.address, False), "version": 3, "strides": None}


@dataclass(frozen=True)
class PeerOperands:
    """q, k and v of one problem on one device."""

    problem: Problem
    device: int
    q: DeviceArray
    k: DeviceArray
    v: DeviceArray
    dout: DeviceArray | None = None  # of a backward problem
    leaves: tuple[Any, ...] = ()  # q, k and v as torch tensors that want gradients, in place of the arrays


@dataclass(frozen=True, eq=False)
class PeerLaunch:
    """One call of a peer, ready to be timed. `run` returns what the peer returns."""

    name: str
    run: Callable[[], Any] = field(repr=False)

    def __call__(self) -> None:
        """Enqueue it on torch's current stream, which is the default stream."""
        self.run()


def prepare(name: str, operands: PeerOperands) -> PeerLaunch:
    """A peer on given operands, called once so that everything it builds lazily is built. Raises PeerUnavailable with the reason."""
    maker = PEERS.get(name)
    if maker is None:
        raise PeerUnavailable(f"There is no peer {name!r}; the peers are {', '.join(PEERS)}.")
    torch = _torch(operands.device)
    try:
        run = _backward(torch, maker, operands) if operands.problem.op is Op.BACKWARD else _without_gradients(torch, maker(torch, operands))
        run()
        torch.cuda.synchronize(operands.device)
    except PeerUnavailable:
        raise
    except Exception as error:  # a peer may fail in any way; that is its result
        raise PeerUnavailable(f"{name} cannot compute {operands.problem} here: {_first_line(error)}") from error
    return PeerLaunch(name, run)


def as_torch(torch: Any, array: DeviceArray, device: int) -> Any:
    """The array as a torch tensor over the same memory."""
    types = {DType.FLOAT16: torch.float16, DType.BFLOAT16: torch.bfloat16, DType.FLOAT32: torch.float32}
    return torch.as_tensor(array, device=f"cuda:{device}").view(types[array.dtype])


def _torch(device: int) -> Any:
    try:
        import torch
    except ImportError as error:
        raise PeerUnavailable(f"torch is not installed; {TORCH_INSTALL}.") from error
    if not torch.cuda.is_available() or torch.cuda.device_count() <= device:
        raise PeerUnavailable(f"torch {torch.__version__} cannot use GPU {device} (a build without CUDA, or no driver).")
    return torch


def _without_gradients(torch: Any, run: Callable[[], Any]) -> Callable[[], Any]:
    def guarded() -> Any:
        with torch.no_grad():
            return run()

    return guarded


def _backward(torch: Any, maker: Callable[[Any, PeerOperands], Callable[[], Any]], operands: PeerOperands) -> Callable[[], Any]:
    """The backward pass of a peer: its forward pass once, then the gradients of q, k and v as often as asked."""
    assert operands.dout is not None
    leaves = [as_torch(torch, array, operands.device).detach().requires_grad_() for array in (operands.q, operands.k, operands.v)]
    with torch.enable_grad():
        o = maker(torch, replace(operands, leaves=tuple(leaves)))()
    o = o[0] if isinstance(o, tuple) else o
    dout = as_torch(torch, operands.dout, operands.device)
    dout = dout if o.shape == dout.shape else dout.transpose(1, 2)
    return lambda: torch.autograd.grad(o, leaves, dout, retain_graph=True)


def _first_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]


def _tensors(torch: Any, operands: PeerOperands) -> list[Any]:
    return list(operands.leaves) or [as_torch(torch, array, operands.device) for array in (operands.q, operands.k, operands.v)]


def _sdpa(torch: Any, operands: PeerOperands, backend: str) -> Callable[[], Any]:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    problem = operands.problem
    q, k, v = (tensor.transpose(1, 2) for tensor in _tensors(torch, operands))
    if problem.mask.kind is MaskKind.WINDOW:
        raise PeerUnavailable("torch SDPA has no window mask in its fast backends.")
    options: dict[str, Any] = {"scale": problem.scale}
    if problem.gqa_group > 1:
        options["enable_gqa"] = True
    if problem.mask.kind is MaskKind.CAUSAL:
        if problem.diagonal == 0:
            options["is_causal"] = True  # torch's own diagonal starts in the top left corner
        else:
            from torch.nn.attention.bias import causal_lower_right

            options["attn_mask"] = causal_lower_right(problem.seqlen_q, problem.seqlen_kv)
    chosen = getattr(SDPBackend, backend)
    attention = torch.nn.functional.scaled_dot_product_attention

    def run() -> Any:
        with sdpa_kernel(chosen):
            return attention(q, k, v, **options)

    return run


def _sdpa_flash(torch: Any, operands: PeerOperands) -> Callable[[], Any]:
    return _sdpa(torch, operands, "FLASH_ATTENTION")


def _sdpa_cudnn(torch: Any, operands: PeerOperands) -> Callable[[], Any]:
    return _sdpa(torch, operands, "CUDNN_ATTENTION")


def _fa3(torch: Any, operands: PeerOperands) -> Callable[[], Any]:
    function = _import_any("flash_attn_func", ("fa3_fwd_interface", "flash_attn_interface"), "FlashAttention-3 (wheel fa3-fwd)")
    return _flash_call(torch, function, operands, UNLIMITED)


def _fa4(torch: Any, operands: PeerOperands) -> Callable[[], Any]:
    function = _import_any("flash_attn_func", ("flash_attn.cute.interface", "flash_attn.cute"), "FlashAttention-4 (flash_attn.cute)")
    return _flash_call(torch, function, operands, None)


def _flash_call(torch: Any, function: Callable[..., Any], operands: PeerOperands, unlimited: int | None) -> Callable[[], Any]:
    """The common call of the flash_attn family: (batch, rows, heads, columns), bottom-right alignment, window bounds inclusive."""
    mask, problem = operands.problem.mask, operands.problem
    aligned = mask.alignment is Alignment.BOTTOM_RIGHT or problem.seqlen_q == problem.seqlen_kv
    if mask.kind is not MaskKind.NONE and not aligned:
        raise PeerUnavailable("the flash_attn interface aligns masks to the bottom right corner only.")
    q, k, v = _tensors(torch, operands)
    options: dict[str, Any] = {"softmax_scale": problem.scale, "causal": mask.kind is MaskKind.CAUSAL}
    if mask.kind is MaskKind.WINDOW:
        options["window_size"] = tuple(unlimited if bound == UNLIMITED else bound for bound in (mask.left, mask.right))
    return lambda: function(q, k, v, **options)


def _import_any(name: str, modules: tuple[str, ...], product: str) -> Callable[..., Any]:
    from importlib import import_module

    failures = []
    for module in modules:
        try:
            found: Callable[..., Any] = getattr(import_module(module), name)
        except Exception as error:  # compiled extensions fail to load in many ways
            failures.append(f"{module}: {_first_line(error)}")
            continue
        return found
    raise PeerUnavailable(f"{product} cannot be imported ({'; '.join(failures)}).")


PEERS: dict[str, Callable[[Any, PeerOperands], Callable[[], Any]]] = {
    "sdpa-flash": _sdpa_flash,
    "sdpa-cudnn": _sdpa_cudnn,
    "fa3": _fa3,
    "fa4": _fa4,
}
"""By the names of `flashgen bench --against`."""
