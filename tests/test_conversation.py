"""Token in, token out: a conversation only ever grows, in each of TorchRL's input modes."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from tokenizers import Tokenizer, decoders, models
from torchrl.envs.llm import ChatEnv
from transformers import PreTrainedTokenizerFast

from torchrl_llm_async.collectors.conversation import Conversation

pytestmark = pytest.mark.inv8

TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ m['content'] }}<eos>"
    "{% else %}[{{ m['content'] }}]{% endif %}{% endfor %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    characters = ["<pad>", "<eos>", *map(chr, range(32, 127))]
    # "12" is one token, so that encoding decoded text again would not give the same tokens.
    vocabulary = {character: index for index, character in enumerate([*characters, "12"])}
    core = Tokenizer(models.BPE(vocabulary, [("1", "2")]))
    core.decoder = decoders.Fuse()
    core.add_special_tokens(["<pad>", "<eos>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>")
    fast.chat_template = TEMPLATE
    return fast


def ids(tokenizer, *tokens):
    return tokenizer.convert_tokens_to_ids(list(tokens))


@pytest.mark.parametrize("batch_size", [(), (1,)])
def test_text_mode(tokenizer, batch_size):
    wrap = (lambda text: [text]) if batch_size else (lambda text: text)
    observation = TensorDict(batch_size=batch_size).set(("text", "prompt"), wrap("3+4="))
    conversation = Conversation(tokenizer, observation)
    assert conversation.token_ids == ids(tokenizer, "3", "+", "4", "=")

    action = conversation.respond(ids(tokenizer, "7", "<eos>"))
    assert action["text", "response"] == wrap("7")
    assert action["text", "full"] == wrap("3+4=7")

    after = TensorDict(batch_size=batch_size).set(("text", "prompt"), wrap("3+4=7 ok?"))
    conversation.observe(after)
    assert conversation.token_ids == ids(
        tokenizer, "3", "+", "4", "=", "7", "<eos>", " ", "o", "k", "?"
    )
    assert (conversation.prompt, conversation.response) == ("3+4=", "7 ok?")


def test_sampled_tokens_are_never_tokenised_again(tokenizer):
    conversation = Conversation(tokenizer, TensorDict().set(("text", "prompt"), "="))
    conversation.respond(ids(tokenizer, "1", "2"))  # would come back as the one token "12"
    conversation.observe(TensorDict().set(("text", "prompt"), "=12+12"))
    assert conversation.token_ids == ids(tokenizer, "=", "1", "2", "+", "12")


def test_history_mode_with_torchrls_chat_env(tokenizer):
    env = ChatEnv(input_mode="history", batch_size=(1,), tokenizer=tokenizer)
    conversation = Conversation(tokenizer, env.reset(TensorDict({"query": "hi"}, batch_size=(1,))))
    assert conversation.prompt == "[hi]"

    after = env.step(conversation.respond(ids(tokenizer, "y", "o", "<eos>")))["next"]
    assert after["history"].prompt.role == [["user", "assistant"]]
    assert after["history"].prompt.content == [["hi", "yo"]]

    conversation.observe(after)
    # The template writes <eos> after an answer; it was sampled already and is not added twice.
    assert conversation.token_ids == ids(tokenizer, "[", "h", "i", "]", "y", "o", "<eos>")


def test_tokens_mode(tokenizer):
    observation = TensorDict().set(("tokens", "prompt"), torch.tensor([5, 6]))
    conversation = Conversation(tokenizer, observation)
    action = conversation.respond([7, 8])
    assert action["tokens", "full"].tolist() == [5, 6, 7, 8]
    conversation.observe(TensorDict().set(("tokens", "prompt"), torch.tensor([5, 6, 7, 8, 9])))
    assert conversation.token_ids == [5, 6, 7, 8, 9]
    with pytest.raises(ValueError, match="only append"):
        conversation.observe(TensorDict().set(("tokens", "prompt"), torch.tensor([5, 6, 1])))


def test_an_environment_that_rewrites_the_past_is_refused(tokenizer):
    conversation = Conversation(tokenizer, TensorDict().set(("text", "prompt"), "3+4="))
    conversation.respond(ids(tokenizer, "7"))
    with pytest.raises(ValueError, match="does not continue"):
        conversation.observe(TensorDict().set(("text", "prompt"), "4+3=7!"))


def test_an_observation_without_a_prompt_is_refused(tokenizer):
    with pytest.raises(KeyError, match="'text', 'prompt'"):
        Conversation(tokenizer, TensorDict(query="3+4="))
