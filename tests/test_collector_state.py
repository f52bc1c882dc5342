"""What a checkpoint keeps of observations and episodes, through its files and back."""

from __future__ import annotations

import pytest
import torch
from scripted import ScriptedEnv
from tensordict import (
    NonTensorData,
    NonTensorStack,
    TensorDict,
    TensorDictBase,
    is_non_tensor,
    is_tensor_collection,
)
from torchrl.envs import StepCounter, TransformedEnv
from torchrl.envs.llm import ChatEnv

from torchrl_llm_async.checkpoint import load_tree, save_tree
from torchrl_llm_async.collectors.state import Progress, pack_observation, unpack_observation
from torchrl_llm_async.engines import Generation
from torchrl_llm_async.envs import WrittenSumsEnv


def chat() -> TensorDictBase:
    env = ChatEnv(batch_size=(1,), input_mode="history", system_prompt="Be brief.")
    return env.reset(TensorDict(query=NonTensorStack("hello"), batch_size=(1,)))


OBSERVATIONS = {
    "text": lambda: WrittenSumsEnv().reset(),
    "transformed": lambda: TransformedEnv(WrittenSumsEnv(), StepCounter()).reset(),
    "messages": chat,
    "plain values": lambda: TensorDict(
        {
            "list": NonTensorData([1, 2]),
            "dictionary": NonTensorData({"numbers": [3, 4], "target": None}),
            "deep": {"text": "x", "flag": torch.tensor([True])},
            "scale": torch.tensor(0.1, dtype=torch.float64),
        }
    ),
    "a batch of one": lambda: TensorDict(
        {
            "dictionary": NonTensorData({"numbers": [3, 4]}, batch_size=(1,)),
            "texts": NonTensorStack("x"),
            "lists": NonTensorStack(NonTensorData([5, 6])),
        },
        batch_size=(1,),
    ),
}


def assert_same(found, wanted) -> None:
    if is_non_tensor(wanted):
        assert is_non_tensor(found) and found.batch_size == wanted.batch_size
        assert found.tolist() == wanted.tolist()
    elif isinstance(wanted, torch.Tensor):
        assert found.dtype == wanted.dtype and torch.equal(found, wanted)
    elif not is_tensor_collection(wanted):  # what a field of messages is made of
        assert found == wanted
    else:
        assert type(found) is type(wanted) and found.batch_size == wanted.batch_size
        assert set(found.keys()) == set(wanted.keys())
        for key in wanted.keys():  # noqa: SIM118
            assert_same(found.get(key), wanted.get(key))


@pytest.mark.parametrize("name", OBSERVATIONS)
def test_an_observation_comes_back_as_it_was(name, tmp_path):
    observation = OBSERVATIONS[name]()
    save_tree(tmp_path / "observation", pack_observation(observation))
    assert_same(unpack_observation(load_tree(tmp_path / "observation")), observation)


def test_what_can_not_be_kept_is_named(tmp_path):
    class Tool:
        pass

    observation = TensorDict({"deep": {"tool": NonTensorData(Tool())}})
    with pytest.raises(TypeError, match=r"entries.deep.entries.tool.value is a .*Tool"):
        save_tree(tmp_path / "observation", pack_observation(observation))


def answer(*tokens: int, version: int = 0, reason: str = "stop") -> Generation:
    count = len(tokens)
    return Generation(list(tokens), [-0.1] * count, [version] * count, reason)


class NoEngine:
    def partial_answer(self, request_id):
        return {"running": answer(7, 8, version=2, reason="abort")}.get(request_id)


def test_an_episode_goes_through_its_turns_once_more(tmp_path):
    progress = Progress()
    assert progress.recall([1, 2]) is None
    progress.request_id = "first"
    progress.record(answer(3, 4, version=1))
    assert progress.recall([1, 2, 3, 4, 5]) is None
    progress.request_id = "running"
    save_tree(tmp_path / "state", progress.state(NoEngine()))
    again = Progress.restored(load_tree(tmp_path / "state"))
    assert again.recall([1, 2]) == answer(3, 4, version=1)
    again.record(answer(3, 4, version=1))
    assert again.recall([1, 2, 3, 4, 5]) == answer(7, 8, version=2, reason="abort")
    assert again.discarded == 0
    # Cut again before the engine was asked, it still has all.
    assert [turn["token_ids"].tolist() for turn in again.state(NoEngine())] == [[3, 4], [7, 8]]


def test_answers_to_another_context_do_not_count():
    turns = [answer(3, 4), answer(5), answer(6, 7, reason="abort")]
    progress = Progress()
    for context, turn in zip(([1], [1, 2], [1, 2, 3]), turns, strict=True):
        progress.recall(context)
        progress.record(turn)
    again = Progress.restored(_tensors(progress.state(NoEngine())))
    assert again.recall([1]) == turns[0]
    again.record(turns[0])
    assert again.recall([9]) is None
    assert again.discarded == 3
    again.record(answer(8))
    assert again.recall([1, 2, 3]) is None
    assert [turn["token_ids"].tolist() for turn in again.state(NoEngine())] == [[3, 4], [8]]
    assert again.discarded == 3


def _tensors(turns: list[dict]) -> list[dict]:
    """As they come from a file."""
    arrays = ("token_ids", "log_probs", "versions")
    return [{k: torch.as_tensor(v) if k in arrays else v for k, v in t.items()} for t in turns]


def test_an_environment_that_steps_a_copy_of_what_came_back(tmp_path):
    env = ScriptedEnv()
    env.set_seed(3)
    observation = env.reset()
    save_tree(tmp_path / "observation", pack_observation(observation))
    back = unpack_observation(load_tree(tmp_path / "observation"))
    after = env.step(back.set(("text", "response"), "x"))["next"]
    assert after["reward"] == 1 and after["text", "prompt"] == "0?x more?"
