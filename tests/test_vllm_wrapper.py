"""A loss on what TorchRL's ``vLLMWrapper`` sampled, with the engine that it is given."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import pytest
import torch
from decoders import tiny_decoder
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torchrl.modules.llm import vLLMWrapper
from transformers import AutoModelForCausalLM, AutoTokenizer

from torchrl_llm_async.modules import TorchtuneActor
from torchrl_llm_async.objectives import DecoupledPPOLoss, OnlineDPOLoss
from torchrl_llm_async.packing import pack_rows, pad_rows

pytestmark = pytest.mark.engine


def sample(model: Path, tokenizer: Path) -> TensorDictBase:
    """Two answers to each of two prompts, ragged, in the classes that the wrapper writes."""
    # The engine in this very process, and nothing compiled: seconds saved.
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCHDYNAMO_DISABLE": "1"}
    from vllm import LLM

    engine = LLM(
        str(model),
        dtype="float32",
        max_model_len=64,
        enforce_eager=True,
        skip_tokenizer_init=True,
        kv_cache_memory_bytes=64 << 20,
    )
    wrapper = vLLMWrapper(
        engine,
        # torchrl 0.14.1 cuts prompts wrongly without one that has a token to pad with.
        tokenizer=AutoTokenizer.from_pretrained(tokenizer),
        input_mode="tokens",
        generate=True,
        return_log_probs=True,
        pad_output=False,
        generate_kwargs={"max_new_tokens": 6, "temperature": 1.0, "seed": 0},
    )
    prompts = [torch.tensor([5, 6]), torch.tensor([7, 8, 9, 10])]
    return wrapper(
        lazy_stack(
            [
                TensorDict(
                    {
                        "tokens": {"prompt": prompt},
                        "masks": {"all_attention_mask": torch.ones(len(prompt), dtype=torch.bool)},
                    }
                )
                for prompt in prompts
                for _ in range(2)
            ]
        )
    )


def train(model: Path, tokenizer: Path, results) -> None:
    """Losses and gradients of the rows as they are, padded and packed."""
    rows = sample(model, tokenizer)
    for index, row in enumerate(rows.unbind(0)):
        length = len(row["tokens", "full"])
        row["policy_version"] = TensorDict({"full": torch.zeros(length, dtype=torch.int64)})
        row["next"] = TensorDict({"reward": torch.tensor([float(index % 2)])})
        row["group"] = TensorDict({"id": torch.tensor(index // 2)})
        row["advantage"] = torch.tensor([index % 2 - 0.5])
    weights = AutoModelForCausalLM.from_pretrained(model).state_dict()
    for make in (DecoupledPPOLoss, OnlineDPOLoss):
        for form in ("as written", "padded", "packed"):
            decoder = tiny_decoder(weights)
            actor = TorchtuneActor(decoder)
            loss = make(actor)
            if loss.needs_reference:
                loss.reference_network = TorchtuneActor(tiny_decoder(weights))
            chosen = loss.select(rows, target_version=1)
            micro = {
                "as written": lambda rows: rows,
                "padded": lambda rows: pad_rows(rows, pad_id=0),
                "packed": lambda rows: pack_rows(rows, pad_id=0),
            }[form](chosen)
            output = loss(loss.anchor(micro), normalizer=loss.denominator(chosen))
            output.total().backward()
            gradient = torch.cat([p.grad.flatten() for p in decoder.parameters()])
            mismatch, count = output.mismatch_lag_0.tolist()
            results[make.__name__, form] = (
                output.total().item(),
                gradient,
                mismatch / count,
                count,
            )


def test_a_loss_on_what_the_wrapper_sampled(tiny_model: Path, tokenizer_path: Path) -> None:
    # In a process of its own: the engine leaves a process group behind.
    with multiprocessing.Manager() as manager:
        results = manager.dict()
        process = multiprocessing.get_context("spawn").Process(
            target=train, args=(tiny_model, tokenizer_path, results)
        )
        process.start()
        process.join(120)
        assert process.exitcode == 0
        results = dict(results)
    for name in ("DecoupledPPOLoss", "OnlineDPOLoss"):
        total, gradient, mismatch, count = results[name, "as written"]
        # Engine and trainer agree about all of 6 tokens in 4 answers.
        assert count == 24 and mismatch < 1e-4
        assert gradient.norm() > 1e-3
        for form in ("padded", "packed"):
            assert results[name, form][0] == pytest.approx(total, abs=1e-5)
            torch.testing.assert_close(results[name, form][1], gradient, atol=1e-5, rtol=1e-4)
