"""What a checkpoint keeps of a collector's parts, as trees of plain values.

Owns the translation of observations, trajectories and answers, and :class:`Progress`, how far an
episode has come. What belongs to the collector's state as a whole is :mod:`.rollouts`' affair, and
files are :mod:`torchrl_llm_async.checkpoint`'s.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import (
    NonTensorData,
    NonTensorStack,
    TensorDict,
    TensorDictBase,
    is_non_tensor,
    is_tensor_collection,
    is_tensorclass,
    lazy_stack,
)
from torchrl.data.llm import History

from torchrl_llm_async.checkpoint.tree import Tree
from torchrl_llm_async.collectors.conversation import Conversation
from torchrl_llm_async.data.trajectory import Trajectory
from torchrl_llm_async.engines import Generation, GenerationEngine

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Progress:
    """How far an episode has come: the answer of each turn, and the context that it answers.

    An episode that is begun from a checkpoint goes through the same turns once more, with the
    answers recorded; the last of them may be a beginning. Where the context is another one than was
    answered then, because the environment does not repeat itself, what is recorded counts no more.

    Args:
        turns: digest of the context, and the answer, of each turn.

    Attributes:
        request_id: of the answer that the engine is at work on.
        discarded: sampled tokens that were recorded and don't count.
    """

    def __init__(self, turns: Sequence[tuple[str, Generation]] = ()):
        self._turns = list(turns)
        self._next = 0
        self._context = ""
        self.request_id: str | None = None
        self.discarded = 0

    def recall(self, context: Sequence[int]) -> Generation | None:
        """The answer recorded for the turn that is next, or its beginning, if there is one."""
        self._context = _digest(context)
        recorded = self._turns[self._next :]
        if recorded and recorded[0][0] != self._context:
            self.discarded += sum(len(answer.token_ids) for _, answer in recorded)
            del self._turns[self._next :]
            return None
        return recorded[0][1] if recorded else None

    def record(self, answer: Generation) -> None:
        """The turn's answer is whole."""
        self._turns[self._next : self._next + 1] = [(self._context, answer)]
        self._next += 1
        self.request_id = None

    def sampled_tokens(self, engine: GenerationEngine) -> int:
        """Of all turns, the one that is under way included as far as it has come."""
        return sum(len(answer.token_ids) for _, answer in self._so_far(engine))

    def _so_far(self, engine: GenerationEngine) -> list[tuple[str, Generation]]:
        turns = list(self._turns)
        if self.request_id is not None:
            begun = engine.partial_answer(self.request_id)
            turns[self._next :] = [] if begun is None else [(self._context, begun)]
        return turns

    def state(self, engine: GenerationEngine) -> Tree:
        """All turns, the one that is under way included as far as it has come."""
        return [
            {
                "context": context,
                "token_ids": np.asarray(answer.token_ids, dtype=np.int64),
                # In double precision, as the engine gave them.
                "log_probs": np.asarray(answer.log_probs, dtype=np.float64),
                "versions": np.asarray(answer.versions, dtype=np.int64),
                "finish_reason": answer.finish_reason,
            }
            for context, answer in self._so_far(engine)
        ]

    @classmethod
    def restored(cls, state: Tree) -> Progress:
        """From what :meth:`state` gave."""
        return cls(
            [
                (
                    turn["context"],
                    Generation(
                        turn["token_ids"].tolist(),
                        turn["log_probs"].tolist(),
                        turn["versions"].tolist(),
                        turn["finish_reason"],
                    ),
                )
                for turn in state
            ]
        )


def _digest(token_ids: Sequence[int]) -> str:
    data = np.asarray(token_ids, dtype=np.int64).tobytes()
    return hashlib.blake2b(data, digest_size=8).hexdigest()


# ---------------------------------------------------------------------- trajectories and problems
def pack_trajectory(trajectory: Trajectory) -> Tree:
    """A finished trajectory as a tree."""
    return dict(vars(trajectory))


def unpack_trajectory(state: Tree) -> Trajectory:
    """From what :func:`pack_trajectory` gave."""
    arrays = ("token_ids", "sampled", "log_probs", "versions")
    return Trajectory(**{k: v.numpy() if k in arrays else v for k, v in state.items()})


def pack_problem(problem: Conversation) -> Tree:
    """A problem, by the environment's observation and the tokens that it became."""
    return {
        "observation": pack_observation(problem.observation),
        "prompt_ids": np.asarray(problem.token_ids, dtype=np.int64),
    }


def unpack_problem(state: Tree, tokenizer: PreTrainedTokenizerBase) -> Conversation:
    """From what :func:`pack_problem` gave.

    Raises:
        ValueError: the tokenizer makes other tokens of the prompt than those answered so far.
    """
    problem = Conversation(tokenizer, unpack_observation(state["observation"]))
    if problem.token_ids != state["prompt_ids"].tolist():
        raise ValueError(
            f"the tokenizer makes {problem.token_ids} of a prompt that was "
            f"{state['prompt_ids'].tolist()} when it was answered; resume with the same tokenizer"
        )
    return problem


def pack_observation(data: Any, name: str = "the environment's observation") -> Tree:
    """A tensordict of tensors, plain values and TorchRL's classes for LLM data as a tree.

    Raises:
        TypeError: it holds something else; the message says where. (Whether a NonTensorData's value
            is plain is for :func:`~torchrl_llm_async.checkpoint.save_tree` to say.)
    """
    if isinstance(data, torch.Tensor):
        return {"tensor": data}
    if isinstance(data, NonTensorStack | History) and data.batch_dims:
        return {"stack": [pack_observation(item, name) for item in data.unbind(0)]}
    if is_non_tensor(data):
        return {"value": data.data, "batch_size": list(data.batch_size)}
    if is_tensorclass(data) and type(data).__name__ in _llm_classes():
        fields = {field.name: getattr(data, field.name) for field in dataclasses.fields(data)}
        return {
            "class": type(data).__name__,
            "fields": {
                key: pack_observation(value, f"{name}.{key}")
                if is_tensor_collection(value)
                else value
                for key, value in fields.items()
                if value is not None
            },
            "batch_size": list(data.batch_size),
        }
    if isinstance(data, TensorDictBase):
        if data.batch_dims and not isinstance(data, TensorDict):  # lazily stacked
            return {"stack": [pack_observation(item, name) for item in data.unbind(0)]}
        entries = {key: pack_observation(value, f"{name}[{key!r}]") for key, value in data.items()}
        return {"entries": entries, "batch_size": list(data.batch_size)}
    raise TypeError(
        f"{name} is a {type(data).__qualname__}, which can't be written to a checkpoint; make it a "
        "tensor or plain values (NonTensorData)"
    )


def unpack_observation(state: Tree) -> Any:
    """From what :func:`pack_observation` gave."""
    match state:
        case {"tensor": tensor}:
            return tensor
        case {"value": value, "batch_size": batch_size}:
            return NonTensorData(value, batch_size=batch_size)
        case {"class": name, "fields": fields, "batch_size": batch_size}:
            values = {
                key: unpack_observation(value) if isinstance(value, dict) else value
                for key, value in fields.items()
            }
            return _llm_classes()[name](**values, batch_size=batch_size)
        case {"stack": items}:
            return lazy_stack([unpack_observation(item) for item in items])
    data = TensorDict(batch_size=state["batch_size"])
    for key, value in state["entries"].items():
        data.set(key, unpack_observation(value))
    return data


def _llm_classes() -> dict[str, type]:
    from torchrl.modules.llm.policies import common

    names = ("ChatHistory", "Text", "Tokens", "Masks", "LogProbs")
    return {"History": History, **{name: getattr(common, name) for name in names}}
