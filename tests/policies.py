"""What transformers says of an engine's answers, and weights to switch between."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from torchrl_llm_async.engines import Generation

Weights = dict[str, torch.Tensor]


def initial_weights(folder: Path) -> Weights:
    return load_file(folder / "model.safetensors")


def overwrite_weights(folder: Path, weights: Weights) -> None:
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def changed(weights: Weights, seed: int) -> Weights:
    """Other weights, whose log-probabilities differ by far more than any tolerance here."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: tensor + 0.1 * torch.randn(tensor.shape, generator=generator)
        for name, tensor in weights.items()
    }


def load_policy(folder: Path, weights: Weights):
    from transformers import Qwen2ForCausalLM

    policy = Qwen2ForCausalLM.from_pretrained(folder)
    policy.load_state_dict(weights, strict=False)
    return policy


def log_probs_of(
    folder: Path,
    weights_of: Mapping[int, Weights],
    prompt: list[int],
    answer: Generation,
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    keep_cache: bool = False,
) -> torch.Tensor:
    """log p of each token of the answer, [T], under the weights of its version.

    Args:
        folder: the model's configuration.
        weights_of: weights of each version.
        prompt: token ids of the context.
        answer: the rest, and the version of each of its tokens.
        temperature: of the softmax.
        top_p: mass of the nucleus.
        keep_cache: whether the KV cache survives a switch; otherwise every version has its own.
    """
    ids = torch.tensor([prompt + answer.token_ids])
    first, begun, cache, found = len(prompt) - 1, 0, None, []
    for version, tokens in groupby(answer.versions):
        end = begun + len(list(tokens))
        policy = load_policy(folder, weights_of[version])
        seen = first + begun if keep_cache and begun else 0  # what other weights have read
        with torch.no_grad():
            output = policy(ids[:, seen : first + end], past_key_values=cache, use_cache=True)
        cache = output.past_key_values if keep_cache else None
        log_probs = _nucleus(output.logits[0, begun - end :] / temperature, top_p).log_softmax(-1)
        found.append(log_probs.gather(-1, ids[0, first + 1 + begun : first + 1 + end, None])[:, 0])
        begun = end
    return torch.cat(found)


def _nucleus(logits: torch.Tensor, top_p: float) -> torch.Tensor:
    """The likeliest tokens that reach mass ``top_p``; the others at minus infinity."""
    probs, order = logits.softmax(-1).sort(-1, descending=True)
    outside = (probs.cumsum(-1) - probs >= top_p).gather(-1, order.argsort(-1))
    return logits.masked_fill(outside & (top_p < 1), -torch.inf)


def assert_true(
    answer: Generation,
    folder: Path,
    weights_of: Mapping[int, Weights],
    prompt: list[int],
    atol: float = 1e-4,
    **how,
) -> None:
    """The answer's log-probabilities are those of the policies its versions name."""
    wanted = log_probs_of(folder, weights_of, prompt, answer, **how)
    torch.testing.assert_close(torch.tensor(answer.log_probs), wanted, atol=atol, rtol=0)
