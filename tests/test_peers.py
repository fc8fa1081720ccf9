"""Peers that are absent or unfit say why; what a peer is called with is decided without a GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from flashgen import peers
from flashgen.model import Alignment, DType, Mask, Problem
from flashgen.peers import DeviceArray, PeerOperands, PeerUnavailable


def problem(mask: Mask | None = None, seqlen_q: int = 64, seqlen_kv: int = 64, heads_kv: int = 4) -> Problem:
    return Problem(DType.BFLOAT16, 64, 64, 2, 4, heads_kv, seqlen_q, seqlen_kv, mask or Mask())


def operands(of: Problem) -> PeerOperands:
    array = DeviceArray(4096, (2, 64, 4, 64), DType.BFLOAT16)
    return PeerOperands(of, 0, array, array, array)


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A simulated FlashAttention-3 and -4 that record how they are called."""
    seen: dict[str, Any] = {}

    def flash_attn_func(q: object, k: object, v: object, **options: object) -> str:
        seen.update(options)
        return "output"

    for name in ("fa3_fwd_interface", "flash_attn", "flash_attn.cute", "flash_attn.cute.interface"):
        module = ModuleType(name)
        module.flash_attn_func = flash_attn_func  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(peers, "_tensors", lambda torch, operands: ["q", "k", "v"])
    return seen


def run(name: str, of: Problem) -> object:
    maker: Callable[[Any, PeerOperands], Callable[[], Any]] = peers.PEERS[name]
    return maker(SimpleNamespace(), operands(of))()


def test_an_unknown_peer_lists_the_known_ones() -> None:
    with pytest.raises(PeerUnavailable, match="sdpa-flash, sdpa-cudnn, fa3, fa4"):
        peers.prepare("xformers", operands(problem()))


def test_without_torch_every_peer_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    for name in peers.PEERS:
        with pytest.raises(PeerUnavailable, match="torch is not installed"):
            peers.prepare(name, operands(problem()))


def test_a_torch_without_a_gpu_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu_only = SimpleNamespace(__version__="2.11", cuda=SimpleNamespace(is_available=lambda: False))
    monkeypatch.setitem(sys.modules, "torch", cpu_only)
    with pytest.raises(PeerUnavailable, match=r"torch 2\.11 cannot use GPU 0"):
        peers.prepare("sdpa-flash", operands(problem()))


@pytest.mark.parametrize("name", ["fa3", "fa4"])
def test_a_missing_flash_attention_names_the_modules_that_were_tried(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("fa3_fwd_interface", "flash_attn_interface", "flash_attn"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(PeerUnavailable, match=r"FlashAttention-[34] .* cannot be imported"):
        run(name, problem())


@pytest.mark.parametrize(("name", "unlimited"), [("fa3", -1), ("fa4", None)])
def test_flash_attention_gets_scale_mask_and_window_in_its_own_words(called: dict[str, Any], name: str, unlimited: int | None) -> None:
    assert run(name, problem(Mask.causal())) == "output"
    assert called == {"softmax_scale": 0.125, "causal": True}
    called.clear()
    run(name, problem(Mask.window(31, -1)))
    assert called == {"softmax_scale": 0.125, "causal": False, "window_size": (31, unlimited)}


def test_flash_attention_refuses_a_mask_that_it_would_align_otherwise(called: dict[str, Any]) -> None:
    top_left = Mask.causal(Alignment.TOP_LEFT)
    with pytest.raises(PeerUnavailable, match="bottom right"):
        run("fa3", problem(top_left, seqlen_q=32))
    run("fa3", problem(top_left))  # equal lengths: the corners agree
    assert called["causal"] is True


def test_device_memory_is_described_as_sixteen_bit_integers() -> None:
    array = DeviceArray(4096, (2, 3, 4, 5), DType.BFLOAT16)
    assert array.__cuda_array_interface__ == {
        "shape": (2, 3, 4, 5), "typestr": "<i2", "data": (4096, False), "version": 3, "strides": None,
    }  # fmt: skip


class Recorder:
    """A torch that records how its attention is called."""

    def __init__(self) -> None:
        self.options: dict[str, Any] = {}
        self.nn = SimpleNamespace(functional=SimpleNamespace(scaled_dot_product_attention=self.attention))

    def attention(self, q: object, k: object, v: object, **options: object) -> None:
        self.options = options


@pytest.fixture
def sdpa(monkeypatch: pytest.MonkeyPatch) -> Callable[[Problem], dict[str, Any]]:
    pytest.importorskip("torch")
    transposable = SimpleNamespace(transpose=lambda *_: "t")
    monkeypatch.setattr(peers, "_tensors", lambda torch, operands: [transposable] * 3)

    def options_for(of: Problem) -> dict[str, Any]:
        torch = Recorder()
        peers.PEERS["sdpa-flash"](torch, operands(of))()
        return torch.options

    return options_for


def test_sdpa_gets_the_alignment_that_was_asked_for(sdpa: Callable[[Problem], dict[str, Any]]) -> None:
    assert sdpa(problem()) == {"scale": 0.125}
    assert sdpa(problem(Mask.causal()))["is_causal"] is True
    assert sdpa(problem(Mask.causal(Alignment.TOP_LEFT), seqlen_q=32))["is_causal"] is True
    bottom_right = sdpa(problem(Mask.causal(), seqlen_q=32))
    assert "is_causal" not in bottom_right and bottom_right["attn_mask"].variant.name == "LOWER_RIGHT"


def test_sdpa_is_told_of_grouped_heads_and_refuses_windows(sdpa: Callable[[Problem], dict[str, Any]]) -> None:
    assert sdpa(problem(heads_kv=2))["enable_gqa"] is True
    with pytest.raises(PeerUnavailable, match="window"):
        sdpa(problem(Mask.window(8, 0)))
