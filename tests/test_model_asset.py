"""The demo's model: the same in transformers, torchtune and vLLM, and as good as it should be."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import EngineHost
from omegaconf import OmegaConf
from torchtune import config
from torchtune.training import FullModelHFCheckpointer
from transformers import AutoModelForCausalLM, AutoTokenizer

from torchrl_llm_async.engines import SamplingConfig, VLLMEngine
from torchrl_llm_async.envs import WrittenSumsEnv
from torchrl_llm_async.modules.tokenizer import HFTokenizer

ROOT = Path(__file__).parents[1]
MODEL = ROOT / "assets" / "written-sums-qwen2"
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def tokenizer() -> HFTokenizer:
    return HFTokenizer(MODEL)


@pytest.fixture(scope="module")
def hf_model():
    return AutoModelForCausalLM.from_pretrained(MODEL).eval()


def heldout_prompts(n: int) -> list[str]:
    env = WrittenSumsEnv("heldout", seed=7)
    return [env.format_prompt(env.next_problem()[1]) for _ in range(n)]


def test_folder():
    assert sum(file.stat().st_size for file in MODEL.iterdir()) <= 3 * 2**20
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= {
        file.name for file in MODEL.iterdir()
    }


@torch.no_grad()
def test_torchtune_and_transformers_give_equal_logits(hf_model, tokenizer, tmp_path):
    warmup = OmegaConf.load(ROOT / "torchrl_llm_async/recipes/configs/warmup_sft.yaml")
    checkpoint = FullModelHFCheckpointer(
        checkpoint_dir=str(MODEL),
        checkpoint_files=["model.safetensors"],
        output_dir=str(tmp_path),
        model_type="QWEN2",
    ).load_checkpoint()
    model = config.instantiate(warmup.model).eval()
    model.load_state_dict(checkpoint["model"])
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    for prompt in heldout_prompts(20):
        tokens = torch.tensor([tokenizer.encode(prompt + "46+56=102", add_eos=True)])
        torch.testing.assert_close(model(tokens), hf_model(tokens).logits, rtol=0, atol=TOLERANCE)


@torch.no_grad()
def test_starting_point_of_the_demo(hf_model):
    """20 to 50 % right, and what is wrong is not the form."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    env = WrittenSumsEnv("heldout", seed=7)
    problems = [env.reset() for _ in range(250)]
    prompts = [problem["text", "prompt"] for problem in problems]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True)
    outputs = hf_model.generate(**inputs, max_new_tokens=48, do_sample=False)
    answers = outputs[:, inputs["input_ids"].shape[1] :]
    texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
    rewards = [
        env.score(int(problem["problem"]), text)
        for problem, text in zip(problems, texts, strict=True)
    ]
    ended = (answers == tokenizer.eos_token_id).any(1).tolist()
    formed = [
        end and env.extract_answer(text) is not None for end, text in zip(ended, texts, strict=True)
    ]
    assert 0.2 <= sum(reward == 1 for reward in rewards) / len(rewards) <= 0.5
    assert sum(formed) / len(formed) >= 0.95


@pytest.mark.engine
def test_vllm_and_transformers_give_equal_log_probs(hf_model, tokenizer, tmp_path):
    """Through the engine's own interface: the log-probs of what it samples at temperature 1."""
    host = EngineHost(VLLMEngine(MODEL, log_file=tmp_path / "vllm.log"))
    try:
        for number, prompt in enumerate(heldout_prompts(12)):
            ids = tokenizer.encode(prompt)
            answer = host.run(
                host.engine.generate(
                    ids, SamplingConfig(max_new_tokens=48), request_id=str(number), seed=number
                )
            )
            assert answer.finish_reason == "stop"
            assert answer.token_ids[-1] == tokenizer.eos_id
            tokens = torch.tensor([[*ids, *answer.token_ids]])
            with torch.no_grad():
                log_probs = hf_model(tokens).logits[0, len(ids) - 1 : -1].log_softmax(-1)
            expected = log_probs.gather(1, tokens[0, len(ids) :, None])[:, 0]
            torch.testing.assert_close(
                torch.tensor(answer.log_probs), expected, rtol=0, atol=TOLERANCE
            )
    finally:
        host.run(host.engine.shutdown())
        host.loop.call_soon_threadsafe(host.loop.stop)
