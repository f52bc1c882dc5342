"""The examples in the documentation run."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest
from scripted import ScriptedEngine, save_tokenizer
from transformers import AutoTokenizer

from torchrl_llm_async.engines import Generation, SamplingConfig

DOCS = Path(__file__).parents[1] / "docs"


class SaysASum(ScriptedEngine):
    """Answers "1+2" and the end token."""

    max_model_len = 512

    async def generate(self, prompt_ids, sampling, **request):
        tokens = [*(ord(c) - 30 for c in "1+2"), 1]
        return Generation(tokens, [-0.5] * 4, [self.version] * 4, "stop")


@pytest.mark.inv8
def test_the_chat_with_a_tool(make_collector, tmp_path):
    page = (DOCS / "environments.md").read_text()
    (example,) = (code for code in re.findall(r"```python\n(.*?)```", page, re.S) if "Calc" in code)
    module: dict = {}
    exec(example, module)
    folder = save_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] | trim }}<eos>{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    tokenizer.save_pretrained(folder)
    collector = make_collector(
        functools.partial(module["make_env"], folder, problems=("7+8",)),
        SaysASum(),
        tokenizer=folder,
        sampling=SamplingConfig(max_new_tokens=8),
        max_turns=3,
        total_steps=1,
    )
    for row in next(iter(collector)):
        text = tokenizer.decode(row["tokens", "full"])
        turn = "assistant: 1+2<eos>"
        assert text == f"user: 7+8<eos>{turn}" + f"tool: 3<eos>{turn}" * 2
        mask = row["masks", "all_assistant_mask"]
        assert tokenizer.decode(row["tokens", "full"][mask]) == "1+2<eos>" * 3
        assert row["next", "reward"] == 3 and row["next", "truncated"]
