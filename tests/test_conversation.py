"""Token in, token out: a conversation only ever grows, in each of TorchRL's input modes.

The environments are TorchRL's own, stepped as a rollout steps them.
"""

from __future__ import annotations

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from tensordict import TensorDict
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torchrl.data.llm import History
from torchrl.envs.llm import ChatEnv
from torchrl.envs.llm.datasets.countdown import CountdownEnv
from torchrl.envs.llm.transforms import (
    AddThinkingPrompt,
    ExecuteToolsInOrder,
    PythonInterpreter,
    SimpleToolTransform,
    ToolRegistry,
    XMLBlockParser,
)
from torchrl.envs.llm.transforms.tools import ToolTransformBase
from transformers import PreTrainedTokenizerFast

from torchrl_llm_async.collectors.conversation import Conversation

pytestmark = pytest.mark.inv8

_HEADER = "<start>{{ m['role'] }}\n"
_LOOP = "{% for m in messages %}"
_PROMPT = "{% endfor %}{% if add_generation_prompt %}<start>assistant\n{% endif %}"
TEMPLATES = {
    "chatml": _LOOP + _HEADER + "{{ m['content'] }}<end>\n" + _PROMPT,
    "trimmed": _LOOP + _HEADER + "{{ m['content'] | trim }}<end>\n" + _PROMPT,
    # As Qwen's: the tool's messages are one message of the user.
    "tool-as-user": _LOOP
    + "{% if m['role'] == 'tool' %}"
    + "{% if loop.first or messages[loop.index0 - 1]['role'] != 'tool' %}<start>user{% endif %}"
    + "{{ '\n' }}<tool>{{ m['content'] }}</tool>"
    + "{% if loop.last or messages[loop.index0 + 1]['role'] != 'tool' %}<end>\n{% endif %}"
    + "{% else %}"
    + _HEADER
    + "{{ m['content'] }}<end>\n{% endif %}"
    + _PROMPT,
    # As Qwen3's: what was thought is left out of former answers.
    "forgetful": _LOOP + _HEADER + "{{ m['content'].split('</think>')[-1] }}<end>\n" + _PROMPT,
    # As Llama 2's: a space before the end of an answer, nothing to ask for one.
    "spaced": _LOOP
    + "{% if m['role'] == 'assistant' %} {{ m['content'] | trim }} <end>"
    + "{% else %}[{{ m['content'] }}]{% endif %}{% endfor %}",
    "without-end": _LOOP + "{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant: ",
}


@pytest.fixture(scope="module")
def tokenizers():
    """By the name of its template, a tokenizer of the 256 bytes and the pair "12"."""
    specials = ["<pad>", "<end>", "<start>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    # "12" is one token, so that encoding decoded text again would not give the same tokens.
    vocabulary = {token: index for index, token in enumerate([*specials, *alphabet, "12"])}
    by_template = {}
    for name, template in TEMPLATES.items():
        core = Tokenizer(models.BPE(vocabulary, [("1", "2")]))
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        core.decoder = decoders.ByteLevel()
        core.add_special_tokens(specials)
        by_template[name] = PreTrainedTokenizerFast(
            tokenizer_object=core, pad_token="<pad>", eos_token="<end>", chat_template=template
        )
    return by_template


@pytest.fixture(scope="module")
def tokenizer(tokenizers):
    return tokenizers["chatml"]


def encode(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False)


class Replies(ToolTransformBase):
    """A tool that answers whatever is written, with the next of the given lists of results."""

    def __init__(self, *replies):
        super().__init__()
        self.replies = list(replies)

    def _process_batch_item(self, content, index):
        return self.replies.pop(0)


def begin(tokenizer, *transforms, query="hi", env=None):
    """An environment, and the conversation its reset begins."""
    env = env or ChatEnv(tokenizer=tokenizer)
    for transform in transforms:
        env = env.append_transform(transform)
    observation = env.reset(TensorDict({"query": query}, batch_size=(1,)))
    return env, Conversation(tokenizer, observation)


def turn(env, conversation, token_ids):
    """One turn of a rollout; the text of the tokens that the environment added."""
    known = [*conversation.token_ids, *token_ids]
    after = env.step(conversation.respond(token_ids))["next"]
    conversation.observe(after)
    assert conversation.token_ids[: len(known)] == known
    return env.tokenizer.decode(conversation.token_ids[len(known) :])


# ---------------------------------------------------------------------- one turn after another


@pytest.mark.parametrize(
    ("answer", "added"),
    [
        pytest.param("yo<end>", "\n<start>assistant\n", id="ended"),
        # No token of its own ends it: the template's are the environment's.
        pytest.param("yo", "<end>\n<start>assistant\n", id="cut"),
        pytest.param("<end>", "\n<start>assistant\n", id="empty"),
        pytest.param("", "<end>\n<start>assistant\n", id="nothing"),
        pytest.param("yo<pad>", "<end>\n<start>assistant\n", id="another-end"),
        pytest.param("y<end>\no<start>user<end>", "\n<start>assistant\n", id="specials-inside"),
        pytest.param(" yo\n\n<end>", "\n<start>assistant\n", id="spaces-at-the-edges"),
        pytest.param("<think>12</think>12<end>", "\n<start>assistant\n", id="thinking"),
    ],
)
@pytest.mark.parametrize("template", ["chatml", "trimmed", "tool-as-user", "forgetful"])
def test_what_the_template_writes_after_an_answer(tokenizers, template, answer, added):
    tokenizer = tokenizers[template]
    env, conversation = begin(tokenizer)
    assert conversation.prompt == "<start>user\nhi<end>\n<start>assistant\n"
    assert turn(env, conversation, encode(tokenizer, answer)) == added
    assert turn(env, conversation, encode(tokenizer, "12<end>")) == "\n<start>assistant\n"


@pytest.mark.parametrize(
    ("template", "answer", "added"),
    [
        ("spaced", "yo<end>", ""),
        ("spaced", "yo", " <end>"),
        # The last token is no special one: the template's line break is not taken for it.
        ("without-end", "yo\n", "\nassistant: "),
        ("without-end", "yo", "\nassistant: "),
    ],
)
def test_templates_with_ends_of_their_own(tokenizers, template, answer, added):
    env, conversation = begin(tokenizers[template])
    assert turn(env, conversation, encode(tokenizers[template], answer)) == added


def test_sampled_tokens_are_never_tokenised_again(tokenizer):
    env, conversation = begin(tokenizer)
    one, two, both = tokenizer.convert_tokens_to_ids(["1", "2", "12"])
    turn(env, conversation, [one, two])  # would come back as the one token "12"
    assert conversation.token_ids[conversation.prompt_length :][:2] == [one, two]
    assert both not in conversation.token_ids
    assert conversation.response.startswith("12<end>")


def test_bytes_that_are_no_text_stay_as_sampled(tokenizer):
    """Two halves of a character in two answers, each of which decodes to a replacement."""
    env, conversation = begin(tokenizer)
    first, second = tokenizer.convert_tokens_to_ids(["Ã", "©"])  # bytes C3 A9, in UTF-8 an "é"
    assert turn(env, conversation, [first]) == "<end>\n<start>assistant\n"
    assert turn(env, conversation, [second]) == "<end>\n<start>assistant\n"
    assert conversation.response.count("\ufffd") == 2


def test_the_environment_sees_what_was_sampled(tokenizer):
    """Special tokens inside an answer are in its text; only the one that ends it is not."""
    _, conversation = begin(tokenizer)
    action = conversation.respond(encode(tokenizer, "7<pad>8<end>"))
    assert action["history"].response.content == [["7<pad>8"]]
    assert action["text", "response"] == ["7<pad>8"]
    assert action["text", "full"] == [conversation.prompt + "7<pad>8"]
    assert action["tokens", "response"].tolist() == [encode(tokenizer, "7<pad>8<end>")]
    assert action["tokens", "full"].tolist() == [conversation.token_ids]


# ---------------------------------------------------------------------- tools


def test_several_results_of_a_tool(tokenizers):
    results = Replies(["1", "2"], None, ["3"])
    env, conversation = begin(tokenizers["tool-as-user"], results)
    tokenizer = tokenizers["tool-as-user"]
    assert turn(env, conversation, encode(tokenizer, "a<end>")) == (
        "\n<start>user\n<tool>1</tool>\n<tool>2</tool><end>\n<start>assistant\n"
    )
    assert turn(env, conversation, encode(tokenizer, "b<end>")) == "\n<start>assistant\n"
    assert turn(env, conversation, encode(tokenizer, "c")) == (
        "<end>\n<start>user\n<tool>3</tool><end>\n<start>assistant\n"
    )


def test_torchrls_simple_tools(tokenizer):
    counts = iter(range(10))
    tools = SimpleToolTransform(tools={"count": lambda: next(counts)})
    env, conversation = begin(tokenizer, tools)
    answer = "<tool>count\n{}</tool> and <tool>count\n{}</tool><end>"
    assert turn(env, conversation, encode(tokenizer, answer)) == (
        "\n<start>tool\nTool count executed successfully:\n0<end>"
        "\n<start>tool\nTool count executed successfully:\n1<end>\n<start>assistant\n"
    )


def test_torchrls_tools_in_order(tokenizer):
    class Add:
        name, schema_in, schema_out = "add", {}, {}

        def __call__(self, a, b, _state):
            return {"sum": a + b}

    tools = ExecuteToolsInOrder(registry=ToolRegistry([Add()]), parser=XMLBlockParser())
    env, conversation = begin(tokenizer, tools)
    answer = '<tool name="add">{"a": 1, "b": 2}</tool><tool name="subtract"></tool><end>'
    added = turn(env, conversation, encode(tokenizer, answer))
    assert added.startswith("\n<start>tool\n<tool_results>\nTool add (call 1) succeeded:")
    assert '"sum": 3' in added
    assert "Unknown tool: subtract" in added


def test_an_interpreter_keeps_its_variables_until_the_next_reset(tokenizer):
    interpreter = PythonInterpreter(persistent=True)
    env, conversation = begin(tokenizer, interpreter)
    try:
        turn(env, conversation, encode(tokenizer, "```python\na = 3\n```<end>"))
        ask = encode(tokenizer, "```python\nprint(a)\n```<end>")
        assert "successfully:\n3\n<end>" in turn(env, conversation, ask)
        env.reset(TensorDict({"query": "hi"}, batch_size=(1,)))
        assert "name 'a' is not defined" in turn(env, conversation, ask)
    finally:
        interpreter.close()


def test_a_prompt_to_think_again(tokenizer):
    again = AddThinkingPrompt(cond=lambda _: True, prompt="Hm.", role="user", edit_last_turn=False)
    env, conversation = begin(tokenizer, again)
    added = "\n<start>user\nHm.<end>\n<start>assistant\n"
    assert turn(env, conversation, encode(tokenizer, "7<end>")) == added


def test_a_step_can_be_tried_again_on_a_copy(tokenizer):
    """Tools add their results in place, also to the action."""
    env, conversation = begin(tokenizer, Replies(["lost"], ["kept"]))
    action = conversation.respond(encode(tokenizer, "a<end>"))
    env.step(action.copy())
    conversation.observe(env.step(action.copy())["next"])
    assert conversation.response.endswith("<start>tool\nkept<end>\n<start>assistant\n")


# ---------------------------------------------------------------------- any answers at all


@hypothesis.settings(deadline=None, max_examples=25)
@hypothesis.given(data=st.data())
@pytest.mark.parametrize("template", TEMPLATES)
def test_any_tokens_stay_at_their_places(tokenizers, template, data):
    tokenizer = tokenizers[template]
    answers = data.draw(st.lists(st.lists(st.integers(0, len(tokenizer) - 1), max_size=6)))
    replies = [data.draw(st.sampled_from([None, ["1"], ["1", "2 "]])) for _ in answers]
    env, conversation = begin(tokenizer, Replies(*replies))
    sampled = [False] * conversation.prompt_length
    for answer in answers:
        prompt = list(conversation.token_ids)
        after = env.step(conversation.respond(answer))["next"]
        conversation.observe(after)
        assert conversation.token_ids[: len(prompt)] == prompt
        sampled += [True] * len(answer)
        sampled += [False] * (len(conversation.token_ids) - len(sampled))
    kept = torch.tensor(conversation.token_ids)[torch.tensor(sampled)].tolist()
    assert kept == [token for answer in answers for token in answer]


@hypothesis.settings(deadline=None, max_examples=25)
@hypothesis.given(
    turns=st.lists(
        st.tuples(
            st.text("ab12é ", min_size=1).map(lambda text: text.strip() or "a"),
            st.booleans(),
            st.lists(st.text("ab12é ", max_size=3), max_size=2),
        ),
        max_size=4,
    )
)
@pytest.mark.parametrize("template", ["chatml", "tool-as-user", "trimmed", "forgetful"])
def test_the_conversation_reads_as_the_template_writes_it(tokenizers, template, turns):
    """Of answers that are plain text, whether or not they were cut short."""
    tokenizer = tokenizers[template]
    env, conversation = begin(tokenizer, Replies(*(results or None for *_, results in turns)))
    messages = [{"role": "user", "content": "hi"}]
    for answer, cut, results in turns:
        turn(env, conversation, encode(tokenizer, answer if cut else answer + "<end>"))
        messages.append({"role": "assistant", "content": answer})
        messages += [{"role": "tool", "content": result} for result in results]
    written = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(conversation.token_ids) == written
    assert conversation.prompt + conversation.response == written


# ---------------------------------------------------------------------- the other input modes


@pytest.mark.parametrize("batch_size", [(), (1,)])
def test_text_mode(tokenizer, batch_size):
    wrap = (lambda text: [text]) if batch_size else (lambda text: text)
    observation = TensorDict(batch_size=batch_size).set(("text", "prompt"), wrap("3+4="))
    conversation = Conversation(tokenizer, observation)
    assert conversation.token_ids == encode(tokenizer, "3+4=")

    action = conversation.respond(encode(tokenizer, "7<end>"))
    assert action["text", "response"] == wrap("7")
    assert action["text", "full"] == wrap("3+4=7")

    after = TensorDict(batch_size=batch_size).set(("text", "prompt"), wrap("3+4=7 ok?"))
    conversation.observe(after)
    assert conversation.token_ids == encode(tokenizer, "3+4=7<end> ok?")
    assert (conversation.prompt, conversation.response) == ("3+4=", "7 ok?")


@pytest.mark.parametrize(
    ("answer", "after", "added"),
    [
        ("7 \n", "=7 \n ok?", " ok?"),
        ("7 \n", "=7\nok?", "\nok?"),
        (" 7 ", "=7 ok?", " ok?"),
        ("7<end>", "=7<end>\nok?", "\nok?"),
        ("7", "=7 7", " 7"),
        ("<pad>7<end>", "=<pad>7 ok?", " ok?"),
    ],
)
def test_text_of_environments_that_strip_or_end_answers(tokenizer, answer, after, added):
    conversation = Conversation(tokenizer, TensorDict().set(("text", "prompt"), "="))
    conversation.respond(encode(tokenizer, answer))
    conversation.observe(TensorDict().set(("text", "prompt"), after))
    assert conversation.token_ids == [
        token for text in ("=", answer, added) for token in encode(tokenizer, text)
    ]


def test_history_mode_without_a_batch(tokenizer):
    observation = TensorDict()
    observation["history", "prompt"] = History.from_chats([{"role": "user", "content": "hi"}])
    conversation = Conversation(tokenizer, observation)
    action = conversation.respond(encode(tokenizer, "yo<end>"))
    full = action["history", "full"]
    assert (full.role, full.content) == (["user", "assistant"], ["hi", "yo"])
    after = TensorDict()
    after["history", "prompt"] = full.append(History(role="user", content="12"), inplace=False)
    conversation.observe(after)
    assert conversation.response == "yo<end>\n<start>user\n12<end>\n<start>assistant\n"


def test_tokens_mode(tokenizer):
    observation = TensorDict().set(("tokens", "prompt"), torch.tensor([5, 6]))
    conversation = Conversation(tokenizer, observation)
    action = conversation.respond([7, 8])
    assert action["tokens", "full"].tolist() == [5, 6, 7, 8]
    conversation.observe(TensorDict().set(("tokens", "prompt"), torch.tensor([5, 6, 7, 8, 9])))
    assert conversation.token_ids == [5, 6, 7, 8, 9]
    assert conversation.prompt + conversation.response == tokenizer.decode([5, 6, 7, 8, 9])
    with pytest.raises(ValueError, match="only append"):
        conversation.observe(TensorDict().set(("tokens", "prompt"), torch.tensor([5, 6, 1])))


@pytest.mark.parametrize("mode", ["text", "tokens"])
def test_torchrls_chat_env_in_the_other_modes(tokenizer, mode):
    """It adds nothing of its own there: the next answer follows the former one."""
    env, conversation = begin(tokenizer, env=ChatEnv(tokenizer=tokenizer, input_mode=mode))
    assert conversation.mode == mode
    assert conversation.prompt.count("hi") == 1
    assert turn(env, conversation, tokenizer.convert_tokens_to_ids(["1", "2", "<end>"])) == ""
    assert turn(env, conversation, encode(tokenizer, "cut")) == ""


def test_an_environment_that_keeps_tokens_beside_its_history(tokenizer):
    """They are those of the prompt's first turn and of the answers, without a tool's results."""
    env, conversation = begin(
        tokenizer, Replies(["1"]), env=ChatEnv(tokenizer=tokenizer, with_tokenizer=True)
    )
    assert conversation.mode == "history"
    added = turn(env, conversation, encode(tokenizer, "yo<end>"))
    assert added == "\n<start>tool\n1<end>\n<start>assistant\n"


def test_entries_that_a_step_does_not_repeat_stay(tokenizer):
    """ChatEnv's step leaves out the query, TorchRL's own rollouts carry it along."""
    env, conversation = begin(tokenizer)
    turn(env, conversation, encode(tokenizer, "a<end>"))
    action = conversation.respond(encode(tokenizer, "b<end>"))
    assert action["query"] == ["hi"]
    assert action["history"].full.content == [["hi", "a", "b"]]


def test_an_environment_with_problems_and_rewards(tokenizer):
    env = CountdownEnv(tokenizer=tokenizer, seed=0, max_steps=2)
    observation = env.reset()
    conversation = Conversation(tokenizer, observation)
    after = env.step(conversation.respond(encode(tokenizer, "what?<end>")))["next"]
    assert (after["reward"].sum(), after["done"].any()) == (0, False)
    conversation.observe(after)
    action = conversation.respond(encode(tokenizer, "<answer>1</answer><end>"))
    assert action.get("reward", None) is None
    after = env.step(action)["next"]
    assert after["answer"] == observation["answer"]
    assert after["step_count"].item() == 2
    assert after["reward"].sum() > 0
    assert after["terminated"].all()


# ---------------------------------------------------------------------- what is refused


def test_an_environment_that_rewrites_the_past_is_refused(tokenizer):
    conversation = Conversation(tokenizer, TensorDict().set(("text", "prompt"), "3+4="))
    conversation.respond(encode(tokenizer, "7"))
    with pytest.raises(ValueError, match="does not continue"):
        conversation.observe(TensorDict().set(("text", "prompt"), "4+3=7!"))


def test_an_environment_that_rewrites_an_answer_is_refused(tokenizer):
    env, conversation = begin(tokenizer, AddThinkingPrompt(cond=lambda _: True))
    with pytest.raises(ValueError, match=r"(?s)message 1 .* was .*'7'.*edit_last_turn=False"):
        turn(env, conversation, encode(tokenizer, "7<end>"))


def test_an_environment_that_drops_an_answer_is_refused(tokenizer):
    env, conversation = begin(tokenizer)
    before = env.reset(TensorDict({"query": "hi"}, batch_size=(1,)))
    conversation.respond(encode(tokenizer, "7<end>"))
    with pytest.raises(ValueError, match="message 1 of the environment's history is missing"):
        conversation.observe(before)


def test_a_template_that_leaves_answers_out_is_refused(tokenizer):
    env, conversation = begin(tokenizer)
    after = env.step(conversation.respond(encode(tokenizer, "7<end>")))["next"]
    conversation._tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer, chat_template="{{ messages[0]['content'] }}"
    )
    with pytest.raises(ValueError, match="writes an assistant's message 0 times"):
        conversation.observe(after)


def test_an_observation_without_a_prompt_is_refused(tokenizer):
    with pytest.raises(KeyError, match="'text', 'prompt'"):
        Conversation(tokenizer, TensorDict(query="3+4="))


def test_several_conversations_at_once_are_refused(tokenizer):
    observation = TensorDict(batch_size=(2,)).set(("text", "prompt"), ["1", "2"])
    with pytest.raises(ValueError, match=r"batch size is \(2,\).*make the environment with"):
        Conversation(tokenizer, observation)
