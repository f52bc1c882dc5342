"""An engine and an environment that do as told, for tests of what is around them.

What the collector does when rewards crash, environments hang or engines die takes a dozen starts;
with vLLM each would take ten seconds. ``test_recipe.py`` runs the same collector on vLLM.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from dataclasses import replace
from pathlib import Path

import torch
from tensordict import TensorDict
from tokenizers import Tokenizer, decoders, models
from torchrl.data import Composite, NonTensor, Unbounded
from torchrl.envs import EnvBase
from transformers import PreTrainedTokenizerFast

from torchrl_llm_async.data import StalenessReplayBuffer
from torchrl_llm_async.engines import EngineDeadError, Generation, WeightUpdateError

EOS = 1
GROUP_SIZE, GROUPS_PER_STEP = 3, 2
ALL = range(10**9)  # problems


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
        ticks: turns of the event loop a token takes.
        die_after: answers after which it is dead, for good.
        die_once_at: answers after which it dies in the middle of the next; started again it lives.
        refuse: versions whose weights it refuses.
    """

    max_model_len = 128

    def __init__(
        self,
        *,
        length: int = 2,
        ticks: int = 1,
        die_after: int | None = None,
        die_once_at: int | None = None,
        refuse: tuple[int, ...] = (),
    ):
        self.length, self.ticks, self.refuse = length, ticks, refuse
        self.die_after, self.die_once_at = die_after, die_once_at
        self.sampled = 0  # tokens, in all
        self.answers: dict[str, Generation] = {}  # running ones, as far as they are
        self._answers = 0
        self._alive = False

    async def start(self) -> None:
        self._version = 0
        self._alive = True
        self._running = asyncio.Event()
        self._running.set()

    async def generate(
        self, prompt_ids, sampling, *, request_id, seed=None, partial=None
    ) -> Generation:
        self.check_health()
        tokens = ([20] * self.length + [EOS])[: sampling.max_new_tokens]
        answer = self.answers[request_id] = partial or Generation([], [], [], "abort")
        for token in tokens[len(answer.token_ids) :]:
            await self._before_token(request_id, answer)
            due = self.die_once_at is not None and self._answers >= self.die_once_at
            if due and answer.token_ids:
                self._alive, self.die_once_at = False, None
            if not self._alive:
                raise EngineDeadError("the engine died, as told", answer)
            self.sampled += 1
            answer = answer.followed_by(Generation([token], [-0.5], [self._version], "abort"))
            self.answers[request_id] = answer
        del self.answers[request_id]
        self._answers += 1
        if self.die_after is not None and self._answers > self.die_after:
            self._alive = False
            raise EngineDeadError("the engine died, as told")
        return replace(answer, finish_reason="stop" if tokens[-1] == EOS else "length")

    async def _before_token(self, request_id: str, answer: Generation) -> None:
        for _ in range(self.ticks):
            await asyncio.sleep(0)
            await self._running.wait()

    def partial_answer(self, request_id: str) -> Generation | None:
        answer = self.answers.get(request_id)
        return answer if answer is not None and answer.token_ids else None

    async def update_weights(self, version: int, path: Path) -> None:
        self.check_health()
        if version in self.refuse:
            raise WeightUpdateError(f"version {version} refused, as told")
        self._version = version

    async def pause(self) -> None:
        self._running.clear()

    async def resume(self) -> None:
        self._running.set()

    @property
    def version(self) -> int:
        return self._version

    def check_health(self) -> None:
        if not self._alive:
            raise EngineDeadError("the engine died, as told")

    async def shutdown(self) -> None:
        self._alive = False


class ScriptedEnv(EnvBase):
    """Counts its resets in the prompt; ``turns`` questions, reward 1 for each answer.

    Args:
        turns: answers until it terminates.
        problems: number of resets after which it raises StopIteration.
        crash_at, hang_at: numbers of the problems whose reward raises, or never comes.
        crash_turn: the turn in which it raises, counted from 1.
        kill_at: number of the problem whose reward kills the process.

    The reward is 0 if the environment that scores has another seed than the one that asked.
    """

    def __init__(self, turns=1, problems=None, crash_at=(), crash_turn=1, hang_at=(), kill_at=None):
        super().__init__(batch_size=())
        self.problems, self.seed = problems, 0
        self.turns, self.crash_at, self.crash_turn = turns, crash_at, crash_turn
        self.hang_at, self.kill_at = hang_at, kill_at
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
        if self.problems is not None and number >= self.problems:
            raise StopIteration
        out = TensorDict({"number": number, "turn": 0, "seed": self.seed})
        return out.set(("text", "prompt"), f"{number}?")

    def _step(self, tensordict):
        number, turn = int(tensordict["number"]), int(tensordict["turn"]) + 1
        if number in self.crash_at and turn == self.crash_turn:
            raise ZeroDivisionError("the reward crashed, as told")
        if number in self.hang_at:
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


def make_buffer(max_staleness=1, **options):
    bounds = dict(groups_per_step=GROUPS_PER_STEP, max_staleness=max_staleness)
    return StalenessReplayBuffer(**bounds, group_size=GROUP_SIZE, **options)


def run_all_steps(collector, buffer, steps=2):
    """Trains on nothing, ``steps`` times; returns all rows."""
    collector.start()
    batches = []
    for step in range(steps):
        batches.append(buffer.sample(timeout=60))
        collector.serve_weights("unread", version=step + 1)
    return [row for batch in batches for row in batch]


def assert_the_books_add_up(collector, rows, *, rejected):
    """The collector's ledger, the groups that came, and the buffer's own count agree."""
    stats, buffer = collector.stats(), collector.replay_buffer.stats()
    accepted = {int(row["group", "id"]) for row in rows}
    assert len(rows) == GROUP_SIZE * len(accepted)
    states = [stats[state] for state in ("running", "accepted", "rejected", "dropped")]
    assert states == [0, len(accepted), rejected, 0]
    assert stats["submitted"] == len(accepted) + rejected
    assert buffer["groups_rejected"] == rejected
    assert (buffer["groups_consumed"], buffer["groups_running"]) == (len(accepted), 0)
