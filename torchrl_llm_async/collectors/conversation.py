"""Between an environment's tensordict and token ids: the prompt out, the response in.

Owns the rule *token in, token out*: a trajectory's tokens are only ever appended to. The text an
environment adds after a turn is encoded on its own; what the policy sampled is never encoded again.
Knows TorchRL's three input modes (``"text"``, ``"history"``, ``"tokens"``). Does not generate and
does not step the environment.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from tensordict import TensorDictBase
from torchrl.data.llm import History

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Conversation:
    """The growing token sequence of one trajectory.

    Args:
        tokenizer: a Hugging Face tokenizer.
        observation: the environment's reset output, batch size ``()`` or ``(1,)``. It must hold
            ``("tokens", "prompt")``, ``("text", "prompt")`` or ``("history", "prompt")``; the first
            of these that is there is the input mode.

    Raises:
        KeyError: the observation holds none of the three.

    Examples:
        >>> conversation = Conversation(tokenizer, env.reset())
        >>> generation = await engine.generate(conversation.token_ids, sampling, request_id="0")
        >>> action = conversation.respond(generation.token_ids)
        >>> conversation.observe(env.step(action)["next"])
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, observation: TensorDictBase):
        self._tokenizer = tokenizer
        self._observation = observation
        self.mode = _input_mode(observation)
        self._text = self._read_text(observation)
        self.token_ids: list[int] = (
            _read_tokens(observation)
            if self.mode == "tokens"
            else tokenizer.encode(self._text, add_special_tokens=False)
        )
        self.prompt = self._text
        self.prompt_length = len(self.token_ids)
        self._end_of_turn = ""

    @property
    def response(self) -> str:
        """Everything after the prompt, as text."""
        return self._text[len(self.prompt) :]

    def respond(self, token_ids: Sequence[int]) -> TensorDictBase:
        """Appends the policy's tokens; returns the tensordict to step the environment with."""
        self.token_ids.extend(token_ids)
        response = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        self._text += response
        # A chat template writes the end-of-turn token out again; `observe` must not add it twice.
        self._end_of_turn = self._tokenizer.decode(token_ids[-1:]) if token_ids else ""
        action = self._observation.copy()
        batched = bool(action.batch_size)
        if self.mode == "tokens":
            full = torch.tensor(self.token_ids)
            answer = torch.tensor(token_ids, dtype=torch.int64)
            action["tokens", "response"] = answer[None] if batched else answer
            action["tokens", "full"] = full[None] if batched else full
        elif self.mode == "text":
            action["text", "response"] = [response] if batched else response
            action["text", "full"] = [self._text] if batched else self._text
        else:
            batch_size = (*action.batch_size, 1)
            turn = History(
                role=_fill("assistant", batch_size),
                content=_fill(response, batch_size),
                batch_size=batch_size,
            )
            history = action["history"]
            history.response = turn
            history.full = history.prompt.extend(turn, inplace=False, dim=-1)
        return action

    def observe(self, observation: TensorDictBase) -> None:
        """Appends what the environment added after the response.

        Raises:
            ValueError: the environment rewrote what was there before, so that the tokens already
                sampled would no longer be a prefix of the conversation.
        """
        self._observation = observation
        if self.mode == "tokens":
            tokens = _read_tokens(observation)
            if tokens[: len(self.token_ids)] != self.token_ids:
                raise ValueError(
                    "the environment changed tokens of earlier turns; an environment in 'tokens' "
                    "mode may only append to ('tokens', 'full')"
                )
            self.token_ids = tokens
            self._text = self._tokenizer.decode(tokens, skip_special_tokens=True)
            return
        text = self._read_text(observation)
        if not text.startswith(self._text):
            raise ValueError(
                f"after a turn the environment's prompt is {text[-80:]!r}, which does not continue "
                f"{self._text[-80:]!r}; an environment (or chat template) may only append to the "
                "conversation, since tokens that were sampled are never tokenised again"
            )
        added = text[len(self._text) :]
        if not self._text.endswith(self._end_of_turn):
            added = added.removeprefix(self._end_of_turn)
        self.token_ids.extend(self._tokenizer.encode(added, add_special_tokens=False))
        self._text = text

    def _read_text(self, observation: TensorDictBase) -> str:
        if self.mode == "tokens":
            return self._tokenizer.decode(_read_tokens(observation), skip_special_tokens=True)
        if self.mode == "text":
            text = observation["text", "prompt"]
        else:
            # TorchRL 0.14 guesses a template from the model's name; the tokenizer's own is right.
            text = observation["history"].prompt.apply_chat_template(
                tokenizer=self._tokenizer,
                chat_template=self._tokenizer.chat_template,
                add_generation_prompt=True,
            )
        return text if isinstance(text, str) else text[0]


def _input_mode(observation: TensorDictBase) -> str:
    for mode in ("tokens", "text", "history"):
        entry = observation.get(mode, None)
        if entry is not None and entry.get("prompt", None) is not None:
            return mode
    raise KeyError(
        "the environment's reset gave none of ('tokens', 'prompt'), ('text', 'prompt') and "
        f"('history', 'prompt'); it gave {sorted(map(str, observation.keys(True)))}"
    )


def _read_tokens(observation: TensorDictBase) -> list[int]:
    return observation["tokens", "prompt"].flatten().tolist()


def _fill(value: str, batch_size: Sequence[int]) -> list | str:
    for size in reversed(batch_size):
        value = [value] * size
    return value
