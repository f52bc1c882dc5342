"""The torchtune tokenizer over tokenizer.json."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torchtune.data import Message, padded_collate_sft
from transformers import AutoTokenizer

from torchrl_llm_async.data.sft import WrittenSumsDemonstrations, add_by_columns, demonstrate
from torchrl_llm_async.envs import WrittenSumsEnv
from torchrl_llm_async.modules.tokenizer import HFTokenizer

MODEL = Path(__file__).parents[1] / "assets" / "written-sums-qwen2"
TEXT = st.text(max_size=40).filter(lambda text: "<pad>" not in text and "<eos>" not in text)


@pytest.fixture(scope="module")
def tokenizer() -> HFTokenizer:
    return HFTokenizer(MODEL)


@pytest.fixture(scope="module")
def hf_tokenizer():
    return AutoTokenizer.from_pretrained(MODEL)


@given(text=TEXT)
@settings(max_examples=200, deadline=None)
def test_round_trip(tokenizer, text):
    ids = tokenizer.encode(text)
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text


@given(text=st.text(alphabet=[chr(code) for code in range(32, 127)] + ["\n"], max_size=40))
@settings(max_examples=200, deadline=None)
def test_one_token_per_character_whoever_loads_it(tokenizer, hf_tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert hf_tokenizer(text)["input_ids"] == ids
    assert hf_tokenizer.decode(ids, skip_special_tokens=True) == text


def test_special_tokens(tokenizer, hf_tokenizer):
    assert (tokenizer.pad_id, tokenizer.eos_id, tokenizer.vocab_size) == (0, 1, 258)
    assert (hf_tokenizer.pad_token_id, hf_tokenizer.eos_token_id, len(hf_tokenizer)) == (0, 1, 258)
    assert tokenizer.encode("1", add_eos=True) == [*tokenizer.encode("1"), 1]
    assert tokenizer.decode([0, 0, *tokenizer.encode("1\n"), 1]) == "1\n"
    assert tokenizer.decode([1], skip_special_tokens=False) == "<eos>"


def test_chat_template_concatenates(hf_tokenizer):
    messages = [{"role": "user", "content": "1+2="}, {"role": "assistant", "content": "3"}]
    assert hf_tokenizer.apply_chat_template(messages, tokenize=False) == "1+2=3"


def test_messages_mask_and_truncation(tokenizer):
    messages = [
        Message(role="user", content="1+2=", masked=True),
        Message(role="assistant", content="3"),
    ]
    tokens, mask = tokenizer.tokenize_messages(messages)
    assert tokens == tokenizer.encode("1+2=3", add_eos=True)
    assert mask == [True] * 4 + [False] * 2
    sample = {"messages": messages, "other": 1}
    assert tokenizer(sample, inference=True)["tokens"] == tokenizer.encode("1+2=3")
    assert tokenizer(sample) == {"tokens": tokens, "mask": mask, "other": 1}
    short = HFTokenizer(MODEL / "tokenizer.json", max_seq_len=3)
    assert short(sample) == {"tokens": [*tokenizer.encode("1+"), 1], "mask": [True] * 3, "other": 1}


def test_wrong_arguments(tmp_path):
    with pytest.raises(ValueError, match=r"no tokenizer\.json"):
        HFTokenizer(tmp_path)
    with pytest.raises(ValueError, match="eos_token='</s>'"):
        HFTokenizer(MODEL, eos_token="</s>")


def test_teacher():
    rng = random.Random(0)
    for _ in range(500):
        a, b = rng.randrange(500), rng.randrange(500)
        assert add_by_columns(a, b, rng, 0.0) == a + b
    assert demonstrate("12+34+56+7=", rng, 0.0) == "46+56+7=102+7=109"
    assert demonstrate("12+39+56+7=", rng, 1.0) == "41+56+7=97+7=94"
    forgot = sum(demonstrate("8+7=", rng, 0.6) == "5" for _ in range(1000))
    assert 550 < forgot < 650


def test_demonstrations_are_training_problems_with_masked_prompts(tokenizer):
    kwargs = {"curriculum": [(2, 20), (5, 30)], "forgotten_carry": 0.6, "seed": 3}
    data = WrittenSumsDemonstrations(tokenizer, **kwargs)
    again = WrittenSumsDemonstrations(tokenizer, **kwargs)
    assert len(data) == 50
    envs = [WrittenSumsEnv("train", max_terms=2, seed=3)] * 20
    envs += [WrittenSumsEnv("train", seed=3)] * 30
    for i, env in enumerate(envs):
        assert data[i] == again[i]
        tokens, labels = data[i]["tokens"], data[i]["labels"]
        prompt = env.format_prompt(env.next_problem()[1])
        text = tokenizer.decode(tokens)
        assert text.startswith(prompt) and tokens[-1] == tokenizer.eos_id
        assert env.extract_answer(text[len(prompt) :]) is not None
        n = len(prompt)
        assert labels == [-100] * n + tokens[n:]
    batch = padded_collate_sft([data[i] for i in range(4)], padding_idx=tokenizer.pad_id)
    assert batch["tokens"].shape == batch["labels"].shape
