"""An engine and an environment that do as told, for tests of what is around them.

What the collector does when rewards crash, environments hang or engines die takes a dozen starts;
with vLLM each would take ten seconds. ``test_recipe.py`` runs the same collector on vLLM.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from pathlib import Path

import torch
from tensordict import TensorDict
from tokenizers import Tokenizer, decoders, models
from torchrl.data import Composite, NonTensor, Unbounded
from torchrl.envs import EnvBase
from transformers import PreTrainedTokenizerFast

from torchrl_llm_async.engines import EngineDeadError, Generation, WeightUpdateError

EOS = 1


def save_tokenizer(folder: Path) -> Path:
    """A tokenizer of printable ASCII characters in Hugging Face format."""
    core = Tokenizer(
        models.BPE({c: i for i, c in enumerate(["<pad>", "<eos>", *map(chr, range(32, 127))])}, [])
    )
    core.decoder = decoders.Fuse()
    core.add_special_tokens(["<pad>", "<eos>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>")
    fast.save_pretrained(folder)
    return folder


class ScriptedEngine:
    """Answers every prompt with ``length`` times the token 20 and the end token.

    Args:
        length: sampled tokens of an answer before the end token.
        ticks: turns of the event loop an answer takes.
        die_after: answers after which it is dead.
        refuse: versions whose weights it refuses.
    """

    max_model_len = 128

    def __init__(
        self,
        *,
        length: int = 2,
        ticks: int = 1,
        die_after: int | None = None,
        refuse: tuple[int, ...] = (),
    ):
        self.length, self.ticks, self.die_after, self.refuse = length, ticks, die_after, refuse
        self._version = 0
        self._answers = 0

    async def start(self) -> None:
        pass

    async def generate(self, prompt_ids, sampling, *, request_id, seed=None) -> Generation:
        versions = []
        for _ in range(self.length + 1):
            for _ in range(self.ticks):
                await asyncio.sleep(0)
            versions.append(self._version)
        self._answers += 1
        if self.die_after is not None and self._answers > self.die_after:
            raise EngineDeadError("the engine died, as told")
        tokens = ([20] * self.length + [EOS])[: sampling.max_new_tokens]
        reason = "stop" if tokens[-1] == EOS else "length"
        size = len(tokens)
        return Generation(tokens, [-0.5] * size, versions[:size], reason)

    async def update_weights(self, version: int, path: Path) -> None:
        if version in self.refuse:
            raise WeightUpdateError(f"version {version} refused, as told")
        self._version = version

    @property
    def version(self) -> int:
        return self._version

    def check_health(self) -> None:
        pass

    async def shutdown(self) -> None:
        pass


class ScriptedEnv(EnvBase):
    """Counts its resets in the prompt; ``turns`` questions, reward 1 for each answer.

    Args:
        turns: answers until it terminates.
        problems: number of resets after which it raises StopIteration.
        crash_at, hang_at, kill_at: number of the problem whose reward raises, never comes, or
            kills the process.

    The reward is 0 if the environment that scores has another seed than the one that asked.
    """

    def __init__(self, turns=1, problems=None, crash_at=None, hang_at=None, kill_at=None):
        super().__init__(batch_size=())
        self.problems, self.seed = problems, 0
        self.turns, self.crash_at, self.hang_at, self.kill_at = turns, crash_at, hang_at, kill_at
        self._next = 0
        self.observation_spec = Composite(
            {
                ("text", "prompt"): NonTensor(shape=(), example_data="text"),
                "number": Unbounded(shape=(), dtype=torch.int64),
                "turn": Unbounded(shape=(), dtype=torch.int64),
                "seed": Unbounded(shape=(), dtype=torch.int64),
            }
        )
        self.full_action_spec = Composite(
            {("text", "response"): NonTensor(shape=(), example_data="text")}
        )
        self.reward_spec = Unbounded(shape=(1,))

    def _reset(self, tensordict=None, **kwargs):
        number, self._next = self._next, self._next + 1
        if number == self.problems:
            raise StopIteration
        out = TensorDict({"number": number, "turn": 0, "seed": self.seed})
        return out.set(("text", "prompt"), f"{number}?")

    def _step(self, tensordict):
        number, turn = int(tensordict["number"]), int(tensordict["turn"]) + 1
        if number == self.crash_at:
            raise ZeroDivisionError("the reward crashed, as told")
        if number == self.hang_at:
            threading.Event().wait()
        if number == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        done = turn == self.turns
        text = tensordict["text", "prompt"] + tensordict["text", "response"]
        return TensorDict(
            {
                "number": number,
                "turn": turn,
                "seed": tensordict["seed"],
                "reward": (tensordict["seed"] == self.seed).float().reshape(1),
                "success": torch.tensor([True]),
                "terminated": torch.tensor([done]),
                "done": torch.tensor([done]),
            }
        ).set(("text", "prompt"), f"{text} more?")

    def _set_seed(self, seed):
        self.seed = seed
