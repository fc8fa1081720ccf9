"""flashgen.attention on torch tensors: the whole way to real kernels, emulated on the CPU, and what torch's tools demand of an operator."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install torch")

import flashgen  # noqa: E402
from flashgen import dispatch, recompute, torch_face, torch_gradients, untuned  # noqa: E402
from flashgen.errors import InvalidProblem, UnsupportedProblem, UntunedProblem  # noqa: E402
from flashgen.model import Alignment, Mask  # noqa: E402
from flashgen.testing import emulated  # noqa: E402

pytestmark = [pytest.mark.emulated, pytest.mark.filterwarnings("ignore::flashgen.errors.UntunedProblemWarning")]
BOUND = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@pytest.fixture(scope="module", autouse=True)
def _emulated() -> Iterator[None]:
    with emulated():
        yield


def tensors(
    heads: int = 4, heads_kv: int = 2, seqlen_q: int = 20, seqlen_kv: int = 33, dim: int = 64, dtype: Any = torch.bfloat16, batch: int = 1,
    seed: int = 0, grad: tuple[bool, bool, bool] = (False, False, False),
) -> list[torch.Tensor]:  # fmt: skip
    torch.manual_seed(seed)
    shapes = ((batch, heads, seqlen_q, dim), (batch, heads_kv, seqlen_kv, dim), (batch, heads_kv, seqlen_kv, dim))
    return [torch.randn(shape).to(dtype).requires_grad_(need) for shape, need in zip(shapes, grad, strict=True)]


def textbook(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask | None = None, scale: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 attention and log-sum-exp, differentiable; rows without keys are 0 and −inf."""
    group = q.shape[1] // k.shape[1]
    q, k, v = q.double(), k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
    scores = q @ k.mT * (scale or q.shape[-1] ** -0.5)
    seen = recompute.visible(mask or Mask(), 0, q.shape[2], q.shape[2], k.shape[2], q.device)
    if seen is None:
        return scores.softmax(-1) @ v, scores.logsumexp(-1)
    scores = scores.masked_fill(~seen, float("-inf"))
    weights = scores.softmax(-1).masked_fill(~seen.any(-1, keepdim=True), 0.0)
    return weights @ v, scores.logsumexp(-1)


def error(found: torch.Tensor, right: torch.Tensor) -> float:
    return float((found.double() - right).abs().max())


# Values, layouts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, dtype",
    [
        ({}, torch.float32), ({}, torch.float16), ({}, torch.bfloat16), ({"causal": True}, torch.bfloat16),
        ({"scale": 0.3}, torch.bfloat16), ({"window": (7, 3)}, torch.bfloat16), ({"causal": True, "window": (5, -1)}, torch.bfloat16),
    ],
)  # fmt: skip
def test_every_option_reaches_the_kernel(options: dict[str, Any], dtype: Any) -> None:
    q, k, v = tensors(dtype=dtype)
    mask = {
        "causal": Mask.causal(), "window": Mask.window(7, 3), "causalwindow": Mask.window(5, 0), "scale": Mask(), "": Mask(),
    }["".join(options)]  # fmt: skip
    o, lse = flashgen.attention(q, k, v, return_lse=True, **options)
    right, right_lse = textbook(q, k, v, mask, options.get("scale"))
    assert error(o, right) < BOUND[dtype] and error(lse, right_lse) < 1e-5
    assert o.dtype is dtype and lse.dtype is torch.float32


def test_causal_alignment_is_a_choice() -> None:
    q, k, v = tensors()
    for alignment in Alignment:
        right, _ = textbook(q, k, v, Mask.causal(alignment))
        assert error(flashgen.attention(q, k, v, causal=True, alignment=str(alignment)), right) < 2e-2


def test_the_layout_bshd_is_the_same_computation() -> None:
    q, k, v = tensors()
    o = flashgen.attention(q, k, v, causal=True)
    swapped = flashgen.attention(*(each.transpose(1, 2).contiguous() for each in (q, k, v)), causal=True, layout="bshd")
    assert swapped.is_contiguous() and torch.equal(swapped.transpose(1, 2), o)


def strided(layout: str) -> list[torch.Tensor]:
    """q, k, v (1, 4, 32, 64) as views that are not contiguous."""
    torch.manual_seed(1)
    if layout == "fused projection":
        return list(torch.randn(1, 32, 3, 4, 64).bfloat16().permute(2, 0, 3, 1, 4).unbind(0))
    if layout == "bshd memory":
        return [torch.randn(1, 32, 4, 64).bfloat16().transpose(1, 2) for _ in range(3)]
    if layout == "expanded heads":
        return [torch.randn(1, heads, 32, 64).bfloat16().expand(1, 4, 32, 64) for heads in (4, 1, 1)]
    if layout == "every other column":
        return [torch.randn(1, 4, 32, 128).bfloat16()[..., ::2] for _ in range(3)]
    return [torch.randn(4 * 32 * 64 + 1).bfloat16()[1:].view(1, 4, 32, 64) for _ in range(3)]


LAYOUTS = ("fused projection", "bshd memory", "expanded heads", "every other column", "odd base pointer")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides_give_the_bits_and_gradients_of_contiguous_copies(layout: str) -> None:
    plain = [each.contiguous().clone() for each in strided(layout)]
    for each in plain:
        each.requires_grad_()
    views = [each.requires_grad_() for each in strided(layout)]
    found, wanted = flashgen.attention(*views, causal=True), flashgen.attention(*plain, causal=True)
    assert torch.equal(found, wanted)
    left, right = torch.autograd.grad(found.float().square().sum(), views), torch.autograd.grad(wanted.float().square().sum(), plain)
    assert all(one.shape == other.shape and torch.equal(one, other) for one, other in zip(left, right, strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_kernel_that_reads_through_tensor_maps_takes_them_all_too(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def of_hopper(*about: Any) -> list[Any]:
        return [pair for pair in untuned.fallbacks(*about) if pair[1].family == "hopper_forward"]

    monkeypatch.setattr(dispatch, "fallbacks", of_hopper)
    with emulated("h200", tables=[]):
        plain, views = [each.contiguous().clone() for each in strided(layout)], strided(layout)
        assert flashgen.explain(*views, causal=True).variant.family == "hopper_forward"
        wanted = flashgen.attention(*plain, causal=True)
        assert all(torch.equal(flashgen.attention(*views, causal=True), wanted) for _ in range(2))  # the second time by a known plan


def test_empty_batches_and_lengths_have_results_of_the_right_shape() -> None:
    assert flashgen.attention(*tensors(batch=0)).shape == (0, 4, 20, 64)
    assert flashgen.attention(*tensors(seqlen_q=0)).shape == (1, 4, 0, 64)
    o, lse = flashgen.attention(*tensors(seqlen_kv=0), return_lse=True)
    assert not o.any() and torch.isneginf(lse).all()


@pytest.mark.parametrize("split", [0, 1, 13, 33])
def test_two_parts_merge_by_their_lse_into_the_whole(split: int) -> None:
    q, k, v = tensors()
    whole, whole_lse = flashgen.attention(q, k, v, return_lse=True)
    parts = [flashgen.attention(q, k[:, :, part], v[:, :, part], return_lse=True) for part in (slice(0, split), slice(split, None))]
    lse = torch.logaddexp(parts[0][1], parts[1][1])
    merged = sum((part.float() * (part_lse - lse).exp()[..., None] for part, part_lse in parts), torch.zeros(()))
    assert error(merged, whole.double()) < 2e-2 and error(lse, whole_lse.double()) < 1e-5


# Gradients ------------------------------------------------------------------------------------------------------------

MASKS = {
    "full": ({}, Mask()), "causal": ({"causal": True}, Mask.causal()), "window": ({"window": (17, 0)}, Mask.window(17, 0)),
    "scale": ({"scale": 0.3}, Mask()), "all": ({"causal": True, "window": (9, -1), "scale": 0.3}, Mask.window(9, 0)),
    "top left": ({"causal": True, "alignment": "top_left"}, Mask.causal(Alignment.TOP_LEFT)),
}  # fmt: skip


@pytest.mark.parametrize("needs", [(True, False, False), (False, True, False), (False, False, True), (True, True, True)])
@pytest.mark.parametrize("options", MASKS)
def test_each_option_reaches_the_gradients_and_frozen_inputs_get_none(options: str, needs: tuple[bool, bool, bool]) -> None:
    arguments, mask = MASKS[options]
    q, k, v = tensors(seqlen_q=40, seqlen_kv=33, grad=needs)
    wide = [each.detach().double().requires_grad_(need) for each, need in zip((q, k, v), needs, strict=True)]
    weight, weight_lse = torch.randn(1, 4, 40, 64).double(), torch.randn(1, 4, 40).double()
    for inputs, (o, lse) in (
        ((q, k, v), flashgen.attention(q, k, v, return_lse=True, **arguments)),
        (wide, textbook(*wide, mask, arguments.get("scale"))),
    ):
        finite = torch.isfinite(lse)
        ((o.double() * weight).sum() + (lse.double() * weight_lse)[finite].sum()).backward()
        assert [each.grad is not None for each in inputs] == list(needs)
    for found, right in zip((q, k, v), wide, strict=True):
        if found.grad is not None and right.grad is not None:
            assert error(found.grad, right.grad.nan_to_num()) < 2e-2 * max(1.0, float(right.grad.nan_to_num().abs().max()))


def test_without_gradients_nothing_is_saved() -> None:
    q, k, v = tensors()
    assert flashgen.attention(q, k, v).grad_fn is None
    with torch.no_grad():
        assert flashgen.attention(*tensors(grad=(True, True, True))).grad_fn is None
    gc.collect()


def test_an_expanded_gradient_equals_a_contiguous_one() -> None:
    q, k, v = tensors(heads=2, heads_kv=2, seqlen_q=5, seqlen_kv=5, dim=8, grad=(True, True, True))
    summed = torch.autograd.grad(flashgen.attention(q, k, v, causal=True).sum(), (q, k, v))
    o = flashgen.attention(q, k, v, causal=True)
    ones = torch.autograd.grad(o, (q, k, v), torch.ones_like(o).contiguous())
    assert all(torch.equal(one, other) for one, other in zip(summed, ones, strict=True))


def test_a_backward_kernel_that_reads_through_tensor_maps_is_prepared_for_copies_where_they_are_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No family of this kind is offered yet, so its dispatcher is played."""
    seen, launched = list[list[tuple[int, ...]]](), list[dict[str, int]]()

    def prepare(served: Any, scale: float, strides: list[tuple[int, ...]]) -> Any:
        seen.append(strides)
        return lambda addresses, stream: launched.append(addresses)

    plans = dict[Any, Any]()
    played = SimpleNamespace(
        plans=plans,
        keep=plans.__setitem__,
        serve=lambda *_, **__: SimpleNamespace(mapped=True, workspace_bytes=0),
        prepare_backward=prepare,
    )
    monkeypatch.setattr(torch_gradients, "dispatcher_of", lambda _: played)
    q, k, v = strided("expanded heads")
    o, lse = torch.zeros_like(q), torch.zeros(1, 4, 32)
    options = torch_face.Options(0.125, "none", "bottom_right", -1, -1, False, None)
    for _ in range(2):
        torch_gradients.run(torch.ones(1, 1, 1, 1).bfloat16().expand(q.shape).contiguous(), None, q, k, v, o, lse, options)
    assert len(seen) == 1 and all(0 not in strides for strides in seen[0])
    assert len(launched) == 2 and all(each["k"] != k.data_ptr() and each["q"] == q.data_ptr() for each in launched)


@pytest.fixture
def no_backward_family(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if no family had a backward kernel for anything."""
    every = untuned.load_spaces
    monkeypatch.setattr(untuned, "load_spaces", lambda op: () if op == "backward" else every(op))
    dispatch.forget()
    yield
    dispatch.forget()


def test_gradients_come_from_the_kernel_that_explain_names() -> None:
    q, k, v = tensors(grad=(False, True, False))
    answer = flashgen.explain(q, k, v, causal=True)
    assert str(answer.gradients).startswith("backward bfloat16 d64 s20x33 b1 h4:2 causal on")
    assert "Gradients: backward" in str(answer)
    assert ": hopper_backward[" in str(answer.gradients)
    assert "Takes 8,192 bytes of memory beyond its results" in str(answer)  # 8 bytes per row of 4 heads, rows padded to 256
    assert flashgen.explain(*tensors(), causal=True).gradients == ""


@pytest.mark.parametrize(
    ("gpu", "dtype", "family"),
    [
        ("h200", torch.bfloat16, "hopper_backward"), ("h200", torch.float32, "simt_backward"),
        ("a100", torch.float16, "ampere_backward"), ("a100", torch.bfloat16, "ampere_backward"),
    ],
    ids=["hopper", "simt", "ampere-fp16", "ampere-bf16"],
)  # fmt: skip
def test_the_backward_pass_runs_the_kernel_that_explain_names(monkeypatch: pytest.MonkeyPatch, gpu: str, dtype: Any, family: str) -> None:
    from flashgen.emulate import EmulatedExecutor

    ran = list[str]()
    kept = EmulatedExecutor.backward
    monkeypatch.setattr(
        EmulatedExecutor, "backward", lambda self, source, *rest: ran.append(str(source.variant)) or kept(self, source, *rest)
    )
    q, k, v = tensors(dtype=dtype, grad=(True, True, True))
    with emulated(gpu):
        flashgen.attention(q, k, v, causal=True).sum().backward()
        assert len(ran) == 1 and ran[0].startswith(f"{family}[")
        assert f": {ran[0]}" in str(flashgen.explain(q, k, v, causal=True).gradients)


@pytest.mark.parametrize("asked", [None, False, True])
@pytest.mark.parametrize("switch", [False, True])
def test_determinism_is_the_callers_word_else_torchs_switch(asked: bool | None, switch: bool) -> None:
    q, k, v = tensors(grad=(True, True, True))
    torch.use_deterministic_algorithms(switch)
    try:
        found = flashgen.explain(q, k, v, deterministic=asked).gradients
    finally:
        torch.use_deterministic_algorithms(False)
    assert not isinstance(found, str)
    assert found.problem.deterministic is (switch if asked is None else asked)


def test_every_option_of_the_forward_pass_reaches_the_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    from flashgen import torch_gradients

    seen = []
    kept = torch_gradients.run
    monkeypatch.setattr(torch_gradients, "run", lambda *inputs: seen.append(inputs[7]) or kept(*inputs))
    q, k, v = tensors(grad=(True, True, True))
    flashgen.attention(q, k, v, window=(5, 2), alignment="top_left", scale=0.3, deterministic=True).sum().backward()
    assert seen == [torch_face.Options(0.3, "window", "top_left", 5, 2, False, True)]


def test_a_gradient_lies_in_memory_as_its_input_does() -> None:
    q, k, v = (each.requires_grad_() for each in strided("bshd memory"))
    flashgen.attention(q, k, v).sum().backward()
    assert all(each.grad is not None and each.grad.stride() == each.stride() for each in (q, k, v))


def test_without_a_backward_family_torch_computes_the_gradients_and_explain_says_so(no_backward_family: None) -> None:
    q, k, v = tensors(grad=(True, True, True))
    assert "recomputed by torch" in str(flashgen.explain(q, k, v).gradients)
    flashgen.attention(q, k, v, causal=True).float().square().sum().backward()
    wide = [each.detach().double().requires_grad_() for each in (q, k, v)]
    textbook(*wide, Mask.causal())[0].square().sum().backward()
    for found, right in zip((q, k, v), wide, strict=True):
        assert found.grad is not None and right.grad is not None
        assert error(found.grad, right.grad) < 2e-2 * max(1.0, float(right.grad.abs().max()))


def test_blocks_of_query_rows_do_not_change_gradients(monkeypatch: pytest.MonkeyPatch, no_backward_family: None) -> None:
    q, k, v = tensors(seqlen_q=37, grad=(True, True, True))
    o = flashgen.attention(q, k, v, causal=True)
    whole = torch.autograd.grad(o, (q, k, v), torch.ones_like(o), retain_graph=True)
    monkeypatch.setattr(recompute, "BLOCK_ELEMENTS", 4 * 33 * 5)
    parts = torch.autograd.grad(o, (q, k, v), torch.ones_like(o))
    assert all(error(one, other.double()) < 1e-2 for one, other in zip(whole, parts, strict=True))


def test_second_order_gradients_are_refused_by_name() -> None:
    q, k, v = tensors(grad=(True, True, True))
    (dq,) = torch.autograd.grad(flashgen.attention(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(UnsupportedProblem, match="second-order gradients"):
        dq.sum().backward()


# What torch's tools demand of an operator -----------------------------------------------------------------------------


@pytest.mark.parametrize("grad", [False, True])
def test_the_operator_passes_torchs_own_checks(grad: bool) -> None:
    q, k, v = tensors(heads=2, heads_kv=1, seqlen_q=8, seqlen_kv=16, dim=16, dtype=torch.float32, grad=(grad, grad, grad))
    arguments = (q, k, v, 0.25, "causal", "bottom_right", -1, -1, False, None)
    torch.library.opcheck(torch_face.forward_op, arguments)
    if not grad:
        o, lse = torch_face.forward_op(*arguments)
        backward = (torch.ones_like(o), torch.zeros_like(lse), q, k, v, o, lse, *arguments[3:], True, True, True)
        torch.library.opcheck(torch_face.backward_op, backward, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_fake_outputs_have_the_strides_of_real_ones(layout: str) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    inputs = strided(layout)
    real = flashgen.attention(*inputs, return_lse=True)
    with FakeTensorMode() as mode:
        fake = flashgen.attention(*(mode.from_tensor(each) for each in inputs), return_lse=True)
    facts = [[(each.shape, each.stride(), each.dtype, each.device) for each in group] for group in (real, fake)]
    assert facts[0] == facts[1]


def test_meta_tensors_have_shapes_and_touch_no_device() -> None:
    q, k, v = (each.to("meta") for each in tensors())
    o, lse = flashgen.attention(q, k, v, causal=True, return_lse=True)
    assert o.shape == (1, 4, 20, 64) and lse.shape == (1, 4, 20) and o.device.type == "meta"


def test_compilation_has_no_graph_break_equals_eager_and_does_not_recompile_per_length() -> None:
    graphs = 0

    def backend(graph: Any, _: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return graph.forward

    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return flashgen.attention(q, k, v, causal=True, window=(9, -1)) * 2

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    for length in range(3, 23):
        torch.manual_seed(length)
        q, k, v = (torch.randn(1, length, 12, 16).bfloat16().transpose(1, 2) for _ in range(3))
        assert torch.equal(compiled(q, k, v), step(q, k, v))
    assert graphs <= 2


def test_compilation_carries_gradients() -> None:
    torch._dynamo.reset()
    q, k, v = tensors(grad=(True, True, True))
    compiled = torch.compile(lambda *each: flashgen.attention(*each, causal=True), fullgraph=True, backend="aot_eager")
    for function in (compiled, lambda *each: flashgen.attention(*each, causal=True)):
        function(q, k, v).float().square().sum().backward()
    doubled = [each.grad.clone() for each in (q, k, v) if each.grad is not None]
    q.grad = k.grad = v.grad = None
    flashgen.attention(q, k, v, causal=True).float().square().sum().backward()
    for twice, once in zip(doubled, (q, k, v), strict=True):
        assert once.grad is not None and error(twice, 2 * once.grad.double()) < 1e-2 * max(1.0, float(twice.abs().max()))


def test_vmap_folds_into_the_batch() -> None:
    q = torch.randn(3, 1, 4, 8, 16)
    k, v = torch.randn(1, 2, 16, 16), torch.randn(3, 1, 2, 16, 16)
    mapped = torch.func.vmap(lambda one, other: flashgen.attention(one, k, other), in_dims=(0, 0))(q, v)
    singly = torch.stack([flashgen.attention(q[i], k, v[i]) for i in range(3)])
    assert torch.equal(mapped, singly)


@pytest.mark.parametrize("nested", [False, True])
def test_torch_func_gradients_are_refused_by_name(nested: bool) -> None:
    q, k, v = tensors(dtype=torch.float32)

    def loss(each: torch.Tensor) -> torch.Tensor:
        return flashgen.attention(each, k, v).sum()

    with pytest.raises(UnsupportedProblem, match=r"torch\.func"):
        torch.func.grad(lambda each: torch.func.vmap(loss)(each[None]).sum() if nested else loss(each))(q)


def test_forward_mode_is_never_silently_without_tangents() -> None:
    q, k, v = tensors(dtype=torch.float32)
    with pytest.raises(UnsupportedProblem, match="forward-mode"):
        torch.func.jvp(lambda each: flashgen.attention(each, k, v), (q,), (q,))
    with torch.autograd.forward_ad.dual_level(), pytest.raises(UnsupportedProblem, match="forward-mode"):
        flashgen.attention(torch.autograd.forward_ad.make_dual(q, q), k, v)


# Refusals -------------------------------------------------------------------------------------------------------------

Q, K, V = (torch.zeros(1, 2, 8, 16) for _ in range(3))


@pytest.mark.parametrize(
    "arguments, options, words",
    [
        ((Q.half(), K, V), {}, r"same dtype; got float16, float32"),
        ((Q.double(), K.double(), V.double()), {}, r"dtype of q, k and v must be one of.*got float64"),
        ((Q[0], K, V), {}, r"q must have 4 dimensions"),
        ((Q, K, V[..., :5]), {}, r"head_dim_v"),
        ((Q, K[..., :8], V), {}, r"same head dim; got 16 and 8"),
        ((Q, K, V[:, :, :4]), {}, r"same rows; got 8 and 4"),
        ((Q, K[:, :1], V), {}, r"k and v must have the same heads"),
        ((torch.zeros(1, 3, 8, 16), K, V), {}, r"heads of q must be a multiple.*got 3 .* 2"),
        ((Q.expand(2, -1, -1, -1), K, V), {}, r"same batch; got 2, 1"),
        ((torch.zeros(1, 1, 8, 264),) * 3, {}, r"head_dim.*264"),
        ((Q, K, V), {"layout": "sbhd"}, r"layout must be .* got 'sbhd'"),
        ((Q, K, V), {"alignment": "left"}, r"alignment must be .* got 'left'"),
        ((Q, K, V), {"window": (-2, 0)}, r"window bounds are counts.*got \(-2, 0\)"),
        ((Q, K, V), {"window": (1, 2, 3)}, r"window must be \(left, right\)"),
        ((Q, K, V), {"scale": 0.0}, r"scale must be a positive finite number; got 0.0"),
        ((Q, K.numpy(), V), {}, r"q is a torch tensor, k is ndarray"),
        ((Q, K.to("meta"), V), {}, r"same device; got cpu, meta and cpu"),
    ],
)  # fmt: skip
def test_a_bad_argument_is_named_with_rule_and_value(arguments: tuple[Any, ...], options: dict[str, Any], words: str) -> None:
    with pytest.raises((InvalidProblem, UnsupportedProblem), match=words):
        flashgen.attention(*arguments, **options)


def test_cpu_tensors_are_refused_by_name_outside_the_emulation() -> None:
    before = dispatch.set_emulated(None)
    try:
        with pytest.raises(UnsupportedProblem, match="q must be on a CUDA device; got cpu"):
            flashgen.attention(Q, K, V)
    finally:
        dispatch.set_emulated(before)


def test_strict_demands_a_table_entry() -> None:
    with pytest.raises(UntunedProblem, match="flashgen tune --head-dim 16"):
        flashgen.attention(Q, K, V, strict=True)


def test_explain_says_which_operands_a_kernel_with_tensor_maps_gets_as_copies() -> None:
    q = torch.zeros(1, 16, 1024, 64, dtype=torch.float16)
    odd = torch.zeros(1, 16, 1024, 68, dtype=torch.float16)[..., :64]
    found = flashgen.explain(q, q, odd)
    assert found.variant.family == "hopper_forward"
    assert [line for line in str(found).splitlines() if "copied" in line] == [
        "v is copied first: its row stride is 68 elements, and must be a positive multiple of 16 bytes, where a kernel reads through "
        "tensor maps."
    ]


def test_explain_takes_the_arguments_of_attention_and_no_others() -> None:
    options = {"causal": True, "scale": 0.3, "return_lse": True, "deterministic": True, "window": (3, -1), "alignment": "top_left"}
    assert "window(3,0), top left" in str(flashgen.explain(Q, K, V, **options))
    with pytest.raises(UntunedProblem):
        flashgen.explain(Q, K, V, strict=True)
    with pytest.raises(TypeError):
        flashgen.explain(Q, K, V, dropout=0.1)  # type: ignore[call-arg]


def test_the_warning_for_an_untuned_problem_comes_once_and_points_to_the_caller() -> None:
    with emulated(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            flashgen.attention(Q, K, V)
    told = [each for each in caught if "No table entry" in str(each.message)]
    assert len(told) == 1 and told[0].filename == __file__
    assert "flashgen tune --head-dim 16 --dtype float32 --seqlen 8 --batch 1 --heads 2 --no-causal" in str(told[0].message)
