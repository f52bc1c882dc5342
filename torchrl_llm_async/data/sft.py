"""Demonstrations for the supervised warm-up before reinforcement learning.

Owns the teacher of written-out sums. The problems and their split are the environment's
(:class:`~torchrl_llm_async.envs.WrittenSumsEnv`), so what is held out there is held out here.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from torch.utils.data import Dataset
from torchtune.data import CROSS_ENTROPY_IGNORE_IDX, Message
from torchtune.modules.transforms.tokenizers import ModelTokenizer

from torchrl_llm_async.envs import WrittenSumsEnv


def add_by_columns(a: int, b: int, rng: random.Random, forgotten_carry: float) -> int:
    """Adds two numbers digit by digit, forgetting each carry with some probability.

    Args:
        a: the first number, not negative.
        b: the second number, not negative.
        rng: source of the forgetting.
        forgotten_carry: probability with which a carry is lost; 0 adds correctly.

    Examples:
        >>> add_by_columns(48, 37, random.Random(0), 0.0)
        85
        >>> add_by_columns(48, 37, random.Random(0), 1.0)
        75
    """
    total, place, carry = 0, 1, 0
    while a or b or carry:
        column = a % 10 + b % 10 + carry
        carry = column // 10
        if carry and rng.random() < forgotten_carry:
            carry = 0
        total += column % 10 * place
        a, b, place = a // 10, b // 10, place * 10
    return total


def demonstrate(prompt: str, rng: random.Random, forgotten_carry: float) -> str:
    """The teacher's answer to a sum such as ``"12+34+56="``, e.g. ``"46+56=102"``.

    Args:
        prompt: the sum, ending with ``=``.
        rng: source of the forgetting.
        forgotten_carry: see :func:`add_by_columns`.
    """
    first, *rest = map(int, prompt.rstrip("=").split("+"))
    lines = []
    while rest:
        first = add_by_columns(first, rest.pop(0), rng, forgotten_carry)
        lines.append("+".join(map(str, [first, *rest])))
    return "=".join(lines)


class WrittenSumsDemonstrations(Dataset):
    """Sums answered by a teacher who is at home with the form and careless with carries.

    A model trained on a faultless teacher until it is right every third time has not learnt to add,
    and rewards come too seldom to teach it in minutes. One trained on a teacher who forgets a
    carry more often than not can add either way and prefers the wrong one; which is right is what
    is left to reinforcement learning.

    The demonstrations form a curriculum, to be read in order: sums of two numbers hold all there is
    to learn about adding and are short; mixed lengths from the start take several times as long.

    For torchtune's supervised recipes: an item is ``{"tokens", "labels"}``, lists of T token ids,
    the labels -100 on the prompt.

    Args:
        tokenizer: a torchtune tokenizer.
        curriculum: pairs of the most numbers in a sum and how many such demonstrations to give.
        forgotten_carry: probability with which the teacher forgets a carry.
        seed: seed of the problems and of the teacher.

    Examples:
        >>> from torchrl_llm_async.modules.tokenizer import HFTokenizer
        >>> tokenizer = HFTokenizer("assets/written-sums-qwen2")
        >>> data = WrittenSumsDemonstrations(
        ...     tokenizer, curriculum=[(2, 2), (5, 4)], forgotten_carry=0.0, seed=3)
        >>> tokenizer.decode(data[0]["tokens"])
        '43+14=57'
    """

    def __init__(
        self,
        tokenizer: ModelTokenizer,
        *,
        curriculum: Sequence[tuple[int, int]],
        forgotten_carry: float,
        seed: int = 0,
    ) -> None:
        rng = random.Random(seed)
        self._tokenizer = tokenizer
        self._pairs: list[tuple[str, str]] = []
        for max_terms, size in curriculum:
            env = WrittenSumsEnv("train", max_terms=max_terms, seed=seed)
            for _ in range(size):
                _, entry = env.next_problem()
                prompt = env.format_prompt(entry)
                self._pairs.append((prompt, demonstrate(prompt, rng, forgotten_carry)))

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        prompt, answer = self._pairs[index]
        messages = [
            Message(role="user", content=prompt, masked=True),
            Message(role="assistant", content=answer),
        ]
        tokens, masked = self._tokenizer.tokenize_messages(messages)
        labels = [
            CROSS_ENTROPY_IGNORE_IDX if skip else token
            for token, skip in zip(tokens, masked, strict=True)
        ]
        return {"tokens": tokens, "labels": labels}
