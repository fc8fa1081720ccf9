"""The drop-ins mean what the originals mean: torch's SDPA over its options, flash-attn's function, and what replaces torch's kernels."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install torch")
from hypothesis import HealthCheck, given, settings  # noqa: E402
from sdpa_calls import calls, compare_with_math  # noqa: E402

from flashgen import compat, sdpa_registry  # noqa: E402
from flashgen.errors import InvalidProblem, UnsupportedProblem  # noqa: E402
from flashgen.testing import emulated  # noqa: E402

pytestmark = [pytest.mark.emulated, pytest.mark.filterwarnings("ignore::flashgen.errors.UntunedProblemWarning")]


@pytest.fixture(scope="module", autouse=True)
def _emulated() -> Iterator[None]:
    with emulated():
        yield


@settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(calls(((16, 16),)))
def test_sdpa_is_torchs_own_function_over_all_options(call: tuple[list[torch.Tensor], dict[str, Any]]) -> None:
    compare_with_math(*call)


@pytest.mark.slow
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(calls(tuple(itertools.product((8, 16, 40), repeat=2))))
def test_sdpa_is_torchs_own_function_over_all_options_and_head_dims(call: tuple[list[torch.Tensor], dict[str, Any]]) -> None:
    compare_with_math(*call)


Q, K, V = (torch.zeros(1, 2, 8, 16) for _ in range(3))


@pytest.mark.parametrize(
    "options, words",
    [
        ({"attn_mask": torch.ones(8, 8, dtype=torch.bool)}, r"attn_mask must be None.*\(8, 8\)"),
        ({"attn_mask": torch.zeros(8, 8), "is_causal": True}, "attn_mask must be None"),
        ({"dropout_p": 0.1}, "dropout_p must be 0.0.*got 0.1"),
    ],
)
def test_sdpa_refuses_by_name_what_it_does_not_compute(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedProblem, match=words):
        compat.scaled_dot_product_attention(Q, K, V, **options)


def test_sdpa_wants_grouped_heads_to_be_asked_for() -> None:
    with pytest.raises(InvalidProblem, match="enable_gqa=True"):
        compat.scaled_dot_product_attention(Q, K[:, :1], V[:, :1])


def test_sdpa_obeys_autocast_as_torchs_own_function_does() -> None:
    q, k, v = (torch.randn(1, 2, 8, 16) for _ in range(3))
    with torch.autocast("cpu", torch.bfloat16):
        found = compat.scaled_dot_product_attention(q, k.bfloat16(), v)
        right = torch.nn.functional.scaled_dot_product_attention(q, k.bfloat16(), v)
    assert found.dtype is right.dtype is torch.bfloat16
    torch.testing.assert_close(found, right, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("function", [compat.scaled_dot_product_attention, compat.flash_attn_func])
def test_drop_ins_compile_without_a_graph_break(function: Any) -> None:
    torch._dynamo.reset()
    q, k, v = (torch.randn(1, 8, 8, 16) for _ in range(3))
    compiled = torch.compile(lambda *each: function(*each, scale_or(function)), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(q, k, v), function(q, k, v, scale_or(function)))


def scale_or(function: Any) -> Any:
    """A neutral fourth positional argument: attn_mask of one function, dropout_p of the other."""
    return None if function is compat.scaled_dot_product_attention else 0.0


def test_sdpa_gradients_are_torchs_own() -> None:
    torch.manual_seed(0)
    ours = [torch.randn(2, 4, 17, 16, requires_grad=True) for _ in range(3)]
    theirs = [each.detach().clone().requires_grad_() for each in ours]
    compat.scaled_dot_product_attention(*ours, is_causal=True).square().sum().backward()
    torch.nn.functional.scaled_dot_product_attention(*theirs, is_causal=True).square().sum().backward()
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-4)


def flash_reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, window: tuple[int, int]) -> torch.Tensor:
    """(batch, rows, heads, columns), as flash-attn documents it: diagonal bottom right, window bounds inclusive."""
    rows, keys = q.shape[1], k.shape[1]
    place = torch.arange(rows)[:, None] + keys - rows - torch.arange(keys)[None, :]
    left, right = window[0] if window[0] >= 0 else keys + rows, 0 if causal else window[1] if window[1] >= 0 else keys + rows
    seen = (place <= left) & (place >= -right)
    group = q.shape[2] // k.shape[2]
    q, k, v = (each.double().transpose(1, 2) for each in (q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)))
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~seen, float("-inf"))
    return (scores.softmax(-1).nan_to_num() @ v).transpose(1, 2)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [(-1, -1), (5, 2), (3, -1), (-1, 4)])
def test_flash_attn_func_aligns_bottom_right_with_inclusive_windows(causal: bool, window: tuple[int, int]) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, rows, heads, 16).half() for rows, heads in ((11, 4), (19, 2), (19, 2)))
    found = compat.flash_attn_func(q, k, v, causal=causal, window_size=window)
    assert found.shape == q.shape
    assert float((found.double() - flash_reference(q, k, v, causal, window)).abs().max()) < 2e-3


@pytest.mark.parametrize("dim, dim_v", [(5, 5), (59, 59), (16, 12)])
def test_odd_head_dims_are_padded_as_the_originals_do(dim: int, dim_v: int) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 9, 2, columns, requires_grad=True) for columns in (dim, dim, dim_v))
    leaves = [each.detach().clone().requires_grad_() for each in (q, k, v)]
    found = compat.flash_attn_func(q, k, v)
    right = torch.nn.functional.scaled_dot_product_attention(*(each.transpose(1, 2) for each in leaves))
    torch.testing.assert_close(found, right.transpose(1, 2), rtol=1e-5, atol=1e-5)
    swapped = compat.scaled_dot_product_attention(*(each.transpose(1, 2) for each in (q, k, v)))
    assert torch.equal(swapped, found.transpose(1, 2))
    for one, other in zip(
        torch.autograd.grad(found.square().sum(), (q, k, v)), torch.autograd.grad(right.square().sum(), leaves), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_flash_attn_func_takes_window_bounds_as_tensors() -> None:
    q, k, v = (torch.randn(1, 8, 2, 16) for _ in range(3))
    assert torch.equal(
        compat.flash_attn_func(q, k, v, window_size=torch.tensor([3, 2])), compat.flash_attn_func(q, k, v, window_size=(3, 2))
    )  # fmt: skip


def test_flash_attn_func_returns_the_log_sum_exp_when_asked() -> None:
    q, k, v = (torch.randn(1, 8, 2, 16) for _ in range(3))
    out, lse, probabilities = compat.flash_attn_func(q, k, v, return_attn_probs=True)
    right = (q.transpose(1, 2) @ k.transpose(1, 2).mT / 4).logsumexp(-1)
    assert out.shape == q.shape and probabilities is None
    torch.testing.assert_close(lse, right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"dropout_p": 0.1}, "dropout_p must be 0.0.*got 0.1"),
        ({"softcap": 5.0}, "softcap must be 0.0.*got 5.0"),
        ({"alibi_slopes": torch.ones(2)}, r"alibi_slopes must be None.*\(2,\)"),
    ],
)
def test_flash_attn_func_refuses_by_name_what_it_does_not_compute(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedProblem, match=words):
        compat.flash_attn_func(Q, K, V, **options)


def test_torch_lists_flashgen_among_its_flash_implementations() -> None:
    registry = torch.nn.attention
    if not hasattr(registry, "list_flash_attention_impls"):
        pytest.skip("this torch has no registry of flash implementations")
    compat.register_sdpa_implementation()
    assert "flashgen" in registry.list_flash_attention_impls()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("bshd", [False, True])
def test_what_takes_the_place_of_torchs_flash_operators_equals_them(causal: bool, bshd: bool) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, 17, 16) for _ in range(3))
    if bshd:
        q, k, v = (each.transpose(1, 2).contiguous().transpose(1, 2) for each in (q, k, v))
    o, lse, *_ = sdpa_registry.forward(q, k, v, 0.0, causal)
    dout = torch.randn(2, 3, 17, 16)
    found = sdpa_registry.backward(dout, q, k, v, o, lse, None, None, 17, 17, 0.0, causal, None, None)
    leaves = [each.clone().requires_grad_() for each in (q, k, v)]
    right = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=causal)
    torch.testing.assert_close(o, right.detach(), rtol=1e-5, atol=1e-5)
    for one, other, like in zip(found, torch.autograd.grad(right, leaves, dout), (q, k, v), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
        assert one.stride() == like.stride()
    assert o.stride() == q.stride()


def test_the_registered_operators_refuse_dropout() -> None:
    with pytest.raises(UnsupportedProblem, match="dropout_p must be 0"):
        sdpa_registry.forward(Q, K, V, 0.1)
