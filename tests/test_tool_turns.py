"""Several turns with a tool, on vLLM, while weights switch: every token, mask, version, log-prob.

A random model writes no tool calls, so the tool answers whatever is written; everything else is
TorchRL's own: a :class:`ChatEnv` in history mode with a data loader and transforms.
"""

from __future__ import annotations

import asyncio
import functools
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import EngineHost
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models
from torch.utils.data import DataLoader
from torchrl.data import Unbounded
from torchrl.envs import Transform
from torchrl.envs.llm.chat import DatasetChatEnv
from torchrl.envs.llm.transforms.tools import ToolTransformBase
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from torchrl_llm_async.collectors.conversation import Conversation
from torchrl_llm_async.collectors.env_pool import EnvPool, WorkerThreads
from torchrl_llm_async.collectors.episode import run_episode
from torchrl_llm_async.data.trajectory import Trajectory
from torchrl_llm_async.engines import SamplingConfig
from torchrl_llm_async.weight_update import WeightStore

pytestmark = [pytest.mark.engine, pytest.mark.inv2, pytest.mark.inv8]

TURNS = 3
# The first is the template's end of turn; after the others, ordinary ones, the template writes it.
# The tiny model samples it about as often as the others together.
STOPS = (2, 7, 29, 47)
SAMPLING = SamplingConfig(max_new_tokens=60, stop_token_ids=STOPS)
PROBLEMS = ["1+1", "what?", "x"]


@functools.cache
def tokenizer() -> PreTrainedTokenizerFast:
    """64 tokens for the tiny model's vocabulary, and a template that trims what it is given."""
    specials = ["<pad>", "<start>", "<end>"]
    characters = list("abcdefghijklmnopqrstuvwxyz0123456789 \n.,:;?!+-*/=()[]{}")
    merges = [("1", "2"), ("a", "b"), ("i", "n"), ("e", "r"), (" ", " "), ("\n", "\n")]
    tokens = [*specials, *characters, *map("".join, merges)]
    core = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    core.decoder = decoders.Fuse()
    core.add_special_tokens(specials)
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        eos_token="<end>",
        chat_template="{% for m in messages %}<start>{{ m['role'] }}\n{{ m['content'] | trim }}"
        "<end>\n{% endfor %}{% if add_generation_prompt %}<start>assistant\n{% endif %}",
    )


class Counter(ToolTransformBase):
    """Answers everything, with as many messages as it has been called since its reset."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def _process_batch_item(self, content: str, index: int) -> list[str]:
        self.calls += 1
        return results(self.calls, content)

    def _reset(self, tensordict, tensordict_reset):
        self.calls = 0
        return tensordict_reset


def results(call: int, content: str) -> list[str]:
    return [f"{call}.{part}: {len(content)}" for part in range(call)]


class RewardForLength(Transform):
    """The number of characters of the turn's answer."""

    def _step(self, tensordict, next_tensordict):
        (answer,) = tensordict["text", "response"]
        return next_tensordict.set("reward", torch.tensor([[float(len(answer))]]))

    def transform_reward_spec(self, reward_spec):
        reward_spec["reward"] = Unbounded((1, 1))
        return reward_spec


def make_env() -> DatasetChatEnv:
    problems = DataLoader([{"query": problem} for problem in PROBLEMS], collate_fn=_collate)
    env = DatasetChatEnv.from_dataloader(problems, tokenizer=tokenizer(), batch_size=(1,))
    return env.append_transform(Counter()).append_transform(RewardForLength())


def _collate(batch: list[dict[str, str]]) -> dict[str, list[str]]:
    return {"query": [entry["query"] for entry in batch]}


class Weights:
    """The weights of each version, told apart by noise."""

    def __init__(self, tiny_model: Path, store: WeightStore):
        self._store = store
        self._base = load_file(tiny_model / "model.safetensors")
        self._model = Qwen2ForCausalLM.from_pretrained(tiny_model)

    def of(self, version: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(version)
        return {
            name: tensor + 0.05 * torch.randn(tensor.shape, generator=generator)
            for name, tensor in self._base.items()
        }

    def publish(self, version: int) -> Path:
        return self._store.write(version, self.of(version).items())

    def log_probs(self, version: int, token_ids: np.ndarray) -> np.ndarray:
        """log p(token i | tokens before i) by transformers, of every token but the first."""
        self._model.load_state_dict(self.of(version), strict=False)  # lm_head is the embedding
        ids = torch.from_numpy(token_ids)[None]
        with torch.no_grad():
            log_probs = self._model(ids).logits[0, :-1].log_softmax(-1)
        return log_probs.gather(-1, ids[0, 1:, None])[:, 0].numpy()


@pytest.fixture(scope="module")
def weights(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Weights:
    return Weights(tiny_model, WeightStore(tmp_path_factory.mktemp("weights")))


@pytest.fixture(scope="module")
def trajectories(engine_host: EngineHost, weights: Weights) -> list[Trajectory]:
    """Two waves of six, the second in the first one's environments; weights switch all along."""
    engine = engine_host.engine

    async def switch_on_and_on() -> None:
        for version in range(engine.version + 1, engine.version + 1000):
            await engine.update_weights(version, weights.publish(version))
            # So many tokens of every running answer lie between two switches.
            await engine.generate([5], SamplingConfig(6), request_id=f"pace-{version}")

    async def episodes() -> list[Trajectory]:
        await engine.update_weights(first := engine.version + 1, weights.publish(first))
        threads = WorkerThreads(2)
        pool = EnvPool(make_env, threads, timeout=30, retries=0)
        env = await pool.make()
        switches = asyncio.ensure_future(switch_on_and_on())
        done = []
        for wave in range(2):
            problem = Conversation(tokenizer(), await pool.reset(env))
            done += await asyncio.gather(
                *(
                    run_episode(
                        engine,
                        pool,
                        problem,
                        sampling=SAMPLING,
                        max_turns=TURNS,
                        seed=0,
                        name="tools-",
                        group_id=wave,
                        index=index,
                        start_version=first,
                    )
                    for index in range(6)
                )
            )
        switches.cancel()
        await asyncio.wait({switches})
        await pool.close()
        threads.close()
        return done

    return engine_host.run(episodes(), timeout=120)


def answers(trajectory: Trajectory) -> list[slice]:
    """Where the policy's tokens are, turn by turn."""
    edges = np.flatnonzero(np.diff(trajectory.sampled, prepend=False, append=False)).tolist()
    return [slice(*edge) for edge in zip(edges[::2], edges[1::2], strict=True)]


def text_of(answer: np.ndarray) -> str:
    """What the tool and the reward see: all but a special token at the end."""
    is_special = not tokenizer().decode(answer[-1:], skip_special_tokens=True)
    return tokenizer().decode(answer[:-1] if is_special else answer)


def test_it_is_as_long_and_as_varied_as_it_has_to_be(trajectories: list[Trajectory]) -> None:
    assert sum(len(answers(t)) == TURNS for t in trajectories) >= 8
    last = [t.token_ids[a][-1] for t in trajectories for a in answers(t)[:-1]]
    assert STOPS[0] in last
    assert set(last) <= set(STOPS)
    assert set(last) != {STOPS[0]}
    turns = [t.versions[a] for t in trajectories for a in answers(t)]
    assert any(len(set(versions)) > 1 for versions in turns)
    assert any(
        t.versions[one][-1] < t.versions[other][0]
        for t in trajectories
        for one, other in zip(answers(t)[:-1], answers(t)[1:], strict=True)
    )


def test_every_token_that_was_not_sampled_is_the_environments(
    trajectories: list[Trajectory],
) -> None:
    encode = functools.partial(tokenizer().encode, add_special_tokens=False)
    for trajectory in trajectories:
        tokens, end = trajectory.token_ids.tolist(), 0
        added = f"<start>user\n{PROBLEMS[trajectory.group_id]}<end>\n<start>assistant\n"
        assert trajectory.prompt_length == len(encode(added))
        for call, place in enumerate(answers(trajectory), start=1):
            assert tokens[end : place.start] == encode(added)
            answer, end = trajectory.token_ids[place], place.stop
            ended = "" if answer[-1] == STOPS[0] else "<end>"
            tool = "".join(f"<start>tool\n{r}<end>\n" for r in results(call, text_of(answer)))
            added = f"{ended}\n{tool}<start>assistant\n"
        assert end == len(tokens)


def test_versions_and_log_probs_are_those_of_each_token(
    trajectories: list[Trajectory], weights: Weights
) -> None:
    for trajectory in trajectories:
        sampled, versions = trajectory.sampled, trajectory.versions
        assert (versions[~sampled] == -1).all()
        assert (trajectory.log_probs[~sampled] == 0).all()
        assert (np.diff(versions[sampled]) >= 0).all()
        assert versions[sampled].min() >= trajectory.start_version
        for version in set(versions[sampled].tolist()):
            wanted = weights.log_probs(version, trajectory.token_ids)
            (places,) = np.nonzero(versions == version)
            np.testing.assert_allclose(
                trajectory.log_probs[places], wanted[places - 1], atol=1e-4, rtol=0
            )


def test_rewards_of_all_turns_are_summed(trajectories: list[Trajectory]) -> None:
    for trajectory in trajectories:
        texts = [text_of(trajectory.token_ids[place]) for place in answers(trajectory)]
        assert trajectory.reward == sum(map(len, texts))
        assert trajectory.truncated  # by the number of turns, or an answer's length
        assert not trajectory.terminated
