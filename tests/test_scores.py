"""TorchRL's own wrapper as the actor of a loss, beside ``TorchtuneActor`` on the same weights."""

from __future__ import annotations

import pytest
import torch
from conftest import TINY_QWEN2
from decoders import tiny_decoder
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torch import nn
from torchrl.modules.llm import TransformersWrapper
from torchtune.models.qwen2._convert_weights import qwen2_hf_to_tune
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from torchrl_llm_async.modules import TorchtuneActor, add_value_head, score_tokens, scores
from torchrl_llm_async.objectives import DecoupledPPOLoss
from torchrl_llm_async.packing import blank_rows, pack_rows, pad_rows

TEMPERATURE = 0.7
AS_ACTOR = {"generate": False, "input_mode": "tokens", "input_key": ("tokens", "full")}


@pytest.fixture
def hf_model(tiny_model):
    return AutoModelForCausalLM.from_pretrained(tiny_model).eval()


@pytest.fixture(scope="module")
def tokenizer(tokenizer_path):
    return PreTrainedTokenizerFast.from_pretrained(tokenizer_path)


@pytest.fixture
def make_wrapper(hf_model, tokenizer):
    def make(**options) -> TransformersWrapper:
        defaults = {"tokenizer": tokenizer, "input_mode": "tokens", "generate": False}
        return TransformersWrapper(hf_model, **(defaults | options))

    return make


def make_rows(lengths=(5, 9, 1, 7)) -> TensorDictBase:
    """Ragged rows whose first two tokens are the prompt."""
    return lazy_stack(
        [
            TensorDict(
                {
                    "tokens": {"full": torch.randint(2, 64, (length,))},
                    "masks": {
                        "all_attention_mask": torch.ones(length, dtype=torch.bool),
                        "all_assistant_mask": torch.arange(length) >= 2,
                    },
                }
            )
            for length in lengths
        ]
    )


def padded_on_the_right(rows: TensorDictBase) -> TensorDictBase:
    left = pad_rows(rows, pad_id=0)
    order = left["masks", "all_attention_mask"].long().argsort(descending=True, stable=True)
    return left.apply(lambda entry: entry.gather(1, order))


FORMS = {
    "ragged": lambda rows: rows,
    "padded": lambda rows: pad_rows(rows, pad_id=0),
    "padded on the right": padded_on_the_right,
    "packed": lambda rows: pack_rows(rows, pad_id=0, row_tokens=12),
    "blank": lambda rows: blank_rows(rows, pad_id=0),
    "single tokens": lambda rows: pad_rows(rows[2:3], pad_id=0),
}


def mask_of(micro: TensorDictBase) -> torch.Tensor:
    return micro.get(
        ("masks", "all_assistant_mask"),
        as_padded_tensor=True,
        padding_side="left",
        padding_value=False,
    )


def assert_same_gradients(hf_model: nn.Module, decoder: nn.Module) -> None:
    theirs = qwen2_hf_to_tune(
        {name: p.grad for name, p in hf_model.named_parameters()},
        num_heads=TINY_QWEN2["num_attention_heads"],
        num_kv_heads=TINY_QWEN2["num_key_value_heads"],
        dim=TINY_QWEN2["hidden_size"],
        tie_word_embeddings=True,
    )
    ours = {name: p.grad for name, p in decoder.named_parameters()}
    assert theirs.keys() == ours.keys()
    largest = max(float(gradient.abs().max()) for gradient in ours.values())
    for name, gradient in ours.items():
        torch.testing.assert_close(theirs[name], gradient, atol=1e-5 * largest, rtol=0, msg=name)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "options", [{}, {"pad_output": True}, {"inplace": "empty"}], ids=["plain", "padded", "empty"]
)
def test_the_wrapper_scores_like_the_decoder(hf_model, make_wrapper, form, options):
    """Log-probs, entropies and the gradients of both, at a temperature."""
    micro = FORMS[form](make_rows())
    mask = mask_of(micro)
    wrapper = make_wrapper(generate_kwargs={"temperature": TEMPERATURE}, **options)
    actor = TorchtuneActor(tiny_decoder(hf_model.state_dict()), temperature=TEMPERATURE)
    results = []
    for policy in (wrapper, actor):
        found = score_tokens(policy, micro, mask=mask, entropy="differentiable")
        (found.log_probs + found.entropy.square()).sum().backward()
        results.append(found)
    theirs, ours = results
    for name in ("log_probs", "entropy"):
        torch.testing.assert_close(
            getattr(theirs, name), getattr(ours, name), atol=1e-5, rtol=0, msg=name
        )
    assert theirs.values is None
    assert theirs.log_probs[~mask].eq(0).all()
    assert_same_gradients(hf_model, actor.model)


def test_entropy_comes_as_asked_for_and_rows_stay_as_they_are(make_wrapper):
    micro = pad_rows(make_rows(), pad_id=0)
    before = micro.clone()
    mask = mask_of(micro)
    wrapper = make_wrapper()
    assert score_tokens(wrapper, micro, mask=mask).entropy is None
    detached = score_tokens(wrapper, micro, mask=mask, entropy="detached")
    assert not detached.entropy.requires_grad and detached.log_probs.requires_grad
    assert set(micro.keys(True, True)) == set(before.keys(True, True))
    assert (micro == before).all()


def generate(make_wrapper, tokenizer, **options) -> tuple[TransformersWrapper, TensorDictBase]:
    """Answers to prompts of 2, 4 and 3 tokens, as TorchRL's wrapper writes them."""
    prompts = [torch.randint(2, 64, (length,)) for length in (2, 4, 3)]
    wrapper = make_wrapper(generate=True, **options)
    rows = lazy_stack(
        [
            TensorDict(
                {
                    "tokens": {"prompt": prompt},
                    "masks": {"all_attention_mask": torch.ones(len(prompt), dtype=torch.bool)},
                }
            )
            for prompt in prompts
        ]
    )
    return wrapper, wrapper(rows)


@pytest.mark.parametrize("pad_output", [False, True])
@pytest.mark.parametrize("temperature", [1.0, TEMPERATURE])
def test_a_loss_on_what_the_wrapper_generated(
    hf_model, make_wrapper, tokenizer, pad_output, temperature
):
    """Data and actor are TorchRL's; loss and gradient are those of our own actor."""
    wrapper, rows = generate(
        make_wrapper,
        tokenizer,
        pad_output=pad_output,
        # All tokens of the vocabulary: by default transformers samples from the likeliest 50.
        generate_kwargs={
            "max_new_tokens": 6,
            "do_sample": True,
            "temperature": temperature,
            "top_k": TINY_QWEN2["vocab_size"],
        },
    )
    # In token mode it leaves to others which tokens are the answer's.
    for row in rows.unbind(0):
        attention = row["masks", "all_attention_mask"]
        answer = row["tokens", "response"].shape[-1]
        row["masks", "all_assistant_mask"] = attention & (
            torch.arange(len(attention)) >= len(attention) - answer
        )
    mask = mask_of(rows)
    assert mask.sum() == 18
    actor = wrapper.get_new_version(**AS_ACTOR)
    with torch.no_grad():
        recorded = torch.stack([row["log_probs", "response"] for row in rows.unbind(0)])
        plain = score_tokens(make_wrapper(), rows, mask=mask).log_probs[mask].view(3, 6)
        # Before the temperature, and without the first (torchrl 0.14.1).
        torch.testing.assert_close(recorded[:, 1:], plain[:, 1:], atol=1e-5, rtol=0)
        mu = score_tokens(actor, rows, mask=mask).log_probs
    assert torch.allclose(mu[mask].view(3, 6), plain, atol=1e-5) == (temperature == 1.0)

    # Where it knows no log-prob, it writes NaN.
    noise = torch.where(mask, 0.2 * torch.randn(mu.shape), torch.nan)
    for row, value in zip(rows.unbind(0), mu + noise, strict=True):
        row["log_probs", "full"] = value[-row["tokens", "full"].shape[-1] :]
        row["advantage"] = torch.randn(1)
    micro = pad_rows(rows, pad_id=0)
    decoder = tiny_decoder(hf_model.state_dict())
    totals = []
    for policy in (actor, TorchtuneActor(decoder, temperature=temperature)):
        loss = DecoupledPPOLoss(policy, entropy_coeff=0.1)
        output = loss(loss.anchor(micro), normalizer=loss.denominator(micro))
        output.total().backward()
        # As they are: ragged, or in TorchRL's own entries, which take no others beside them.
        as_written = loss(loss.anchor(rows), normalizer=loss.denominator(rows)).total()
        torch.testing.assert_close(as_written, output.total(), atol=1e-6, rtol=0)
        totals.append(output.total().detach())
    torch.testing.assert_close(*totals, atol=1e-5, rtol=0)
    assert_same_gradients(hf_model, decoder)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"generate": True}, r"generate=True.*get_new_version\(generate=False"),
        ({"input_mode": "text"}, "input_mode='text'"),
        ({"input_mode": "history"}, "input_mode='history'"),
        ({"pad_model_input": False}, "pad_model_input=False"),
        ({"inplace": False}, "inplace=False"),
        ({"num_samples": 2}, "num_samples=2"),
        ({"tokenizer": None}, "tokenizer=None"),
        ({"generate_kwargs": {"temperature": 0.0}}, r"temperature'\]=0\.0"),
    ],
)
def test_a_wrapper_that_cannot_score_tokens_is_refused(make_wrapper, options, message):
    micro = pad_rows(make_rows(), pad_id=0)
    with pytest.raises(ValueError, match=message):
        score_tokens(make_wrapper(**options), micro, mask=mask_of(micro))


def test_why_two_options_are_refused(make_wrapper):
    """Where this fails, torchrl has mended them: take them out of ``WRAPPER_OPTIONS``."""
    rows = make_rows((5, 9))
    with torch.no_grad():
        packed, padded = (
            make_wrapper(pad_model_input=pad)(rows.clone())[1]["log_probs", "full"]
            for pad in (False, True)
        )
        assert (packed - padded).abs().max() > 0.1
        with pytest.raises(KeyError, match="log_probs"):
            make_wrapper(inplace=False).get_dist(rows, mask_key=scores.ATTENTION_MASK)


def test_other_requests_that_cannot_be_met(hf_model, make_wrapper):
    micro = pad_rows(make_rows(), pad_id=0)
    mask = mask_of(micro)
    with pytest.raises(ValueError, match=r"has no critic.*add_value_head"):
        score_tokens(make_wrapper(), micro, mask=mask, values=True)
    with pytest.raises(TypeError, match=r"Linear is no actor.*TransformersWrapper"):
        score_tokens(nn.Linear(1, 1), micro, mask=mask)
    with pytest.raises(KeyError, match="all_attention_mask"):
        score_tokens(make_wrapper(), micro.select("tokens"), mask=mask)
    actor = TorchtuneActor(add_value_head(tiny_decoder(hf_model.state_dict())))
    assert score_tokens(actor, micro, mask=mask, values=True).values.shape == mask.shape
