"""Between an environment's tensordict and token ids: the prompt out, the response in.

Owns the rule *token in, token out*: a trajectory's tokens are only ever appended to. The text an
environment adds after a turn is encoded on its own; what the policy sampled is never encoded again
and, in a chat history, not even looked for. Knows TorchRL's three input modes (``"history"``,
``"tokens"``, ``"text"``). Does not generate and does not step the environment.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data.llm import History

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Stands where the answer's text would, to find what a chat template writes after an answer. Of
# letters and hyphens only, so that no template trims, escapes or splits it.
_STAND_IN = "answer-stand-in-qzxjvkwq"


class Conversation:
    """The growing token sequence of one trajectory.

    Args:
        tokenizer: a Hugging Face tokenizer; in ``"history"`` mode, with a chat template.
        observation: the environment's reset output, batch size ``()`` or ``(1,)``. It must hold
            ``("history", "prompt")``, ``("tokens", "prompt")`` or ``("text", "prompt")``; the first
            of these that is there is the input mode.

    Raises:
        KeyError: the observation holds none of the three.
        ValueError: the observation is a batch of several conversations, or an empty prompt.

    Attributes:
        mode: the input mode.
        token_ids: the whole conversation; its part up to any answer never changes again.
        prompt: the first prompt as text.
        prompt_length: number of tokens of the first prompt.
        observation: what the environment said last.

    Example, within a coroutine::

        conversation = Conversation(tokenizer, env.reset())
        generation = await engine.generate(conversation.token_ids, sampling, request_id="0")
        action = conversation.respond(generation.token_ids)
        conversation.observe(env.step(action)["next"])
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, observation: TensorDictBase):
        if observation.numel() != 1 or observation.ndim > 1:
            raise ValueError(
                f"the environment's batch size is {tuple(observation.batch_size)}, but each "
                "conversation is a trajectory of its own: make the environment with batch size "
                "(1,) (TorchRL's num_envs=1) or ()"
            )
        self._tokenizer = tokenizer
        self.observation = observation
        self.mode = _input_mode(observation)
        self._messages = _read_messages(observation) if self.mode == "history" else []
        self.token_ids: list[int] = []
        if self.mode == "tokens":
            self.token_ids = _read_tokens(observation)
            self._text = self._decode(self.token_ids)
        else:
            is_chat = self.mode == "history"
            self._text = self._render(self._messages) if is_chat else _read_text(observation)
            self.token_ids = self._encode(self._text)
        if not self.token_ids:
            raise ValueError("the environment's prompt takes no tokens at all; give it a text")
        self.prompt = self._text
        self.prompt_length = len(self.token_ids)
        self._answer = ""
        self._end_of_turn = ""

    def fork(self) -> Conversation:
        """Another conversation with the same beginning; neither sees what the other becomes."""
        other = copy.copy(self)
        other.token_ids = list(self.token_ids)
        other._messages = list(self._messages)
        return other

    @property
    def response(self) -> str:
        """Everything after the prompt, as text."""
        return self._text[len(self.prompt) :]

    def respond(self, token_ids: Sequence[int]) -> TensorDictBase:
        """Appends the policy's tokens; returns the tensordict to step the environment with.

        As TorchRL's own policies do, it fills in ``"prompt"``, ``"response"`` and ``"full"`` under
        ``"tokens"`` and ``"text"`` and, in that mode, ``"history"``; log-probabilities and masks it
        does not. The text of an answer is without the special token that ends it. Tool transforms
        change the tensordict in place: give each attempt at a step a ``clone()`` of it.
        """
        before = len(self.token_ids)
        self.token_ids.extend(token_ids)
        self._end_of_turn = self._special_text(token_ids[-1:])
        self._answer = self._decode(token_ids[:-1] if self._end_of_turn else token_ids)
        action = self.observation.copy()
        if action.ndim:
            # torchrl 0.14's AddThinkingPrompt fails on a longer history in a dense tensordict.
            action = action.to_lazystack(0)
        full = torch.tensor(self.token_ids, dtype=torch.int64)
        self._write(action, "tokens", full[:before], full[before:], full)
        self._write(action, "text", self._text, self._answer, self._text + self._answer)
        self._text += self._answer
        if self.mode == "history":
            self._messages.append({"role": "assistant", "content": self._answer})
            batch_size = (*action.batch_size, 1)
            turn = History(
                role=_fill("assistant", batch_size),
                content=_fill(self._answer, batch_size),
                batch_size=batch_size,
            )
            action["history", "response"] = turn
            action["history", "full"] = action["history", "prompt"].extend(
                turn, inplace=False, dim=-1
            )
        return action

    def observe(self, observation: TensorDictBase) -> None:
        """Appends what the environment added after the response.

        Entries of the former observation that the environment does not repeat stay part of the next
        action, as in TorchRL's :func:`~torchrl.envs.utils.step_mdp`.

        Args:
            observation: ``env.step(action)["next"]``.

        Raises:
            ValueError: the environment rewrote what was there before, so that the tokens already
                sampled would no longer be a prefix of the conversation.
        """
        if self.mode == "history":
            self._observe_messages(_read_messages(observation))
        elif self.mode == "tokens":
            self._observe_tokens(_read_tokens(observation))
        else:
            self._observe_text(_read_text(observation))
        former = self.observation.exclude(*observation.keys())
        self.observation = observation.exclude("reward").update(former)

    def _observe_messages(self, messages: list[dict[str, Any]]) -> None:
        """Takes what the template writes after the answer's content, whatever it made of that.

        The template is given a stand-in for the answer, so the sampled text, which it may trim or
        cut, plays no part.
        """
        known = len(self._messages)
        for index, message in enumerate(self._messages):
            if messages[index : index + 1] != [message]:
                found = messages[index] if index < len(messages) else "missing"
                raise ValueError(
                    f"after a turn, message {index} of the environment's history is {found}, which "
                    f"does not continue the conversation, where it was {message}; an environment "
                    "may only append messages, since tokens that were sampled are never tokenised "
                    "again (AddThinkingPrompt: set edit_last_turn=False)"
                )
        stand_in = {"role": "assistant", "content": _STAND_IN}
        rendered = self._render([*messages[: known - 1], stand_in, *messages[known:]])
        if rendered.count(_STAND_IN) != 1:
            raise ValueError(
                f"the tokenizer's chat template writes an assistant's message "
                f"{rendered.count(_STAND_IN)} times; it must write each message exactly once, for "
                "what comes after an answer to be found (tokenizer.chat_template)"
            )
        added = rendered.partition(_STAND_IN)[2]
        self._append(added)
        self._text += added
        self._messages = messages

    def _observe_tokens(self, token_ids: list[int]) -> None:
        if token_ids[: len(self.token_ids)] != self.token_ids:
            raise ValueError(
                "the environment changed tokens of earlier turns; an environment in 'tokens' "
                "mode may only append to ('tokens', 'full')"
            )
        self.token_ids = token_ids
        self._text = self.prompt + self._decode(token_ids[self.prompt_length :])

    def _observe_text(self, text: str) -> None:
        former = self._text.removesuffix(self._answer)
        # Environments with a format of their own often strip an answer.
        for answer in (self._answer, self._answer.rstrip(), self._answer.strip()):
            if text.startswith(former + answer):
                self._append(text[len(former + answer) :])
                self._text = text
                return
        raise ValueError(
            f"after a turn the environment's prompt is {text[-80:]!r}, which does not continue "
            f"{self._text[-80:]!r}; an environment may only append to ('text', 'full'), since "
            "tokens that were sampled are never tokenised again"
        )

    def _append(self, text: str) -> None:
        """Appends an environment's text, less an end of turn that was sampled already."""
        if self._end_of_turn:
            space, found, rest = text.partition(self._end_of_turn)
            if found and not space.strip():
                text = rest
        self.token_ids.extend(self._encode(text))

    def _render(self, messages: list[dict[str, Any]]) -> str:
        return self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _decode(self, token_ids: Sequence[int], *, skip_special: bool = False) -> str:
        return self._tokenizer.decode(
            token_ids, skip_special_tokens=skip_special, clean_up_tokenization_spaces=False
        )

    def _special_text(self, token_ids: Sequence[int]) -> str:
        """The text of these tokens if they are special ones, else the empty text."""
        return "" if self._decode(token_ids, skip_special=True) else self._decode(token_ids)

    def _write(
        self, action: TensorDictBase, name: str, prompt: Any, response: Any, full: Any
    ) -> None:
        entries = {"prompt": prompt, "response": response, "full": full}
        if action.ndim:
            entries = {
                key: value[None] if isinstance(value, torch.Tensor) else [value]
                for key, value in entries.items()
            }
        if name != self.mode:
            action[name] = TensorDict(entries, action.batch_size)
        else:  # The prompt is the environment's, and it may hold more beside it.
            action[name, "response"] = entries["response"]
            action[name, "full"] = entries["full"]


def _input_mode(observation: TensorDictBase) -> str:
    # History first: ChatEnv(with_tokenizer=True) gives tokens too, but steps on the history.
    for mode in ("history", "tokens", "text"):
        entry = observation.get(mode, None)
        if entry is not None and entry.get("prompt", None) is not None:
            return mode
    raise KeyError(
        "the environment's reset gave none of ('history', 'prompt'), ('tokens', 'prompt') and "
        f"('text', 'prompt'); it gave {sorted(map(str, observation.keys(True)))}"
    )


def _read_messages(observation: TensorDictBase) -> list[dict[str, Any]]:
    """The conversation as chat templates take it, without TorchRL's padding and empty fields."""
    messages = observation["history", "prompt"].view(-1).tolist(tolist_first=True)
    return [
        {k: v for k, v in message.items() if v is not None and k != "is_complete"}
        for message in messages
        if message["role"] != "<none>"
    ]


def _read_tokens(observation: TensorDictBase) -> list[int]:
    return observation["tokens", "prompt"].flatten().tolist()


def _read_text(observation: TensorDictBase) -> str:
    text = observation["text", "prompt"]
    return text if isinstance(text, str) else text[0]


def _fill(value: str, batch_size: Sequence[int]) -> list | str:
    for size in reversed(batch_size):
        value = [value] * size
    return value
