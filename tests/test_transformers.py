"""The bridge to transformers: whole models where it is installed, and the mask rules by themselves."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install torch")
transformers = pytest.importorskip("transformers", reason="needs transformers: pip install transformers")

from flashgen.errors import UnsupportedProblem  # noqa: E402
from flashgen.integrations import transformers as bridge  # noqa: E402
from flashgen.testing import emulated  # noqa: E402

pytestmark = [pytest.mark.emulated, pytest.mark.filterwarnings("ignore::flashgen.errors.UntunedProblemWarning")]


@pytest.fixture(scope="module", autouse=True)
def _emulated() -> Iterator[None]:
    bridge.register()
    with emulated():
        yield


def pair(kind: str, **options: Any) -> tuple[Any, Any]:
    """The same small model with sdpa and with flashgen."""
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=101, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=128, **options,
    )  # fmt: skip
    model = getattr(transformers, f"{kind}ForCausalLM")
    torch.manual_seed(0)
    theirs = model._from_config(copy.deepcopy(config), attn_implementation="sdpa").eval()
    ours = model._from_config(copy.deepcopy(config), attn_implementation="flashgen").eval()
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


MODELS = {"Llama": {}, "Mistral": {"sliding_window": 8}}


@pytest.mark.parametrize("kind", MODELS)
def test_a_model_gives_the_logits_gradients_and_tokens_of_sdpa(kind: str) -> None:
    theirs, ours = pair(kind, **MODELS[kind])
    ids = torch.randint(0, 101, (1, 21), generator=torch.Generator().manual_seed(1))
    results = [model(ids, labels=ids) for model in (theirs, ours)]
    torch.testing.assert_close(results[0].logits, results[1].logits, rtol=1e-4, atol=1e-5)
    assert not torch.equal(results[0].logits, results[1].logits), "two different kernels differ in the last bits"
    for result in results:
        result.loss.backward()
    for one, other in zip(theirs.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-5)
    tokens = [model.generate(ids, max_new_tokens=8, do_sample=False) for model in (theirs, ours)]
    assert torch.equal(*tokens)


def test_padding_a_static_cache_and_prepared_masks_are_refused_by_name() -> None:
    _, ours = pair("Llama")
    ids = torch.randint(0, 101, (1, 9))
    with pytest.raises(UnsupportedProblem, match="attention_mask must have no padding"):
        ours(ids, attention_mask=torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1]]))
    with pytest.raises(UnsupportedProblem, match="static cache"):
        ours.generate(ids, max_new_tokens=3, do_sample=False, cache_implementation="static")
    with pytest.raises(UnsupportedProblem, match="attention_mask must be None"):
        ours(ids, attention_mask=torch.ones(1, 1, 9, 9, dtype=torch.bool))


def test_packed_sequences_are_refused() -> None:
    _, ours = pair("Llama")
    ids = torch.randint(0, 101, (1, 9))
    with pytest.raises(UnsupportedProblem, match="neither full, nor causal"):
        ours(ids, position_ids=torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]]), use_cache=False)


@pytest.mark.parametrize("name", ["softcap", "s_aux", "position_bias"])
def test_options_that_change_the_result_are_refused_by_name(name: str) -> None:
    q = torch.zeros(1, 2, 4, 16)
    with pytest.raises(UnsupportedProblem, match=f"{name} must be None"):
        bridge.attention_forward(torch.nn.Identity(), q, q, q, None, **{name: torch.ones(2)})
    with pytest.raises(UnsupportedProblem, match="dropout must be 0"):
        bridge.attention_forward(torch.nn.Identity(), q, q, q, None, dropout=0.1)


def test_registering_twice_changes_nothing() -> None:
    from transformers import modeling_utils

    once = modeling_utils.lazy_import_flash_attention
    bridge.register()
    assert modeling_utils.lazy_import_flash_attention is once
