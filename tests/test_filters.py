"""Group filters, alone and in a collector; and rewards that are shaped as a group enters."""

from __future__ import annotations

import itertools
import pickle

import numpy as np
import pytest
import torch
from groups import make_buffer as make_plain_buffer
from groups import make_group
from omegaconf import OmegaConf
from scripted import ScriptedEnv, assert_the_books_add_up, make_buffer, run_all_steps
from torchrl.envs.transforms import Compose, Transform
from torchtune import config

from torchrl_llm_async.data import (
    FirstReason,
    RejectEqualRewards,
    RejectRepeatedPrompts,
    Trajectory,
)
from torchrl_llm_async.objectives import GroupAdvantage


def group(prompt: str, *rewards: float) -> list[Trajectory]:
    return [
        Trajectory(
            token_ids=np.array([2, 1]),
            sampled=np.array([False, True]),
            log_probs=np.array([0.0, -0.5], dtype=np.float32),
            versions=np.array([-1, 0]),
            prompt_length=1,
            reward=reward,
            terminated=True,
            truncated=False,
            ended_by="environment",
            group_id=0,
            index=index,
            start_version=0,
            prompt=prompt,
            response="",
        )
        for index, reward in enumerate(rewards)
    ]


@pytest.mark.parametrize(
    ("tolerance", "rewards", "reason"),
    [
        (0.0, (1.0, 1.0, 1.0), "equal rewards"),
        (0.0, (1.0, 1.0, 1.1), None),
        (0.25, (1.0, 1.25), "equal rewards"),
        (0.25, (1.0, 1.2, 1.4), None),
    ],
)
def test_equal_rewards(tolerance, rewards, reason):
    assert RejectEqualRewards(tolerance)(group("a", *rewards)) == reason


def test_a_prompt_may_come_again_once_enough_others_passed():
    reject = RejectRepeatedPrompts(window=2)
    passed = [prompt for prompt in "aabacadaab" if reject(group(prompt, 0.0, 1.0)) is None]
    # That "a" came again while it was remembered does not make it remembered for longer.
    assert passed == list("abcadb")


def test_a_filter_behind_the_first_reason_is_not_asked():
    repeated = RejectRepeatedPrompts(window=8)
    reject = FirstReason(RejectEqualRewards(), repeated)
    seen = [reject(group("a", *rewards)) for rewards in ((0, 0), (0, 1), (0, 1), (1, 1))]
    assert seen == ["equal rewards", None, "repeated prompt", "equal rewards"]
    # The other way round the prompt is remembered of a group that is then rejected.
    reject = FirstReason(RejectRepeatedPrompts(window=8), RejectEqualRewards())
    assert reject(group("a", 0, 0)) == "equal rewards"
    assert reject(group("a", 0, 1)) == "repeated prompt"
    assert FirstReason()(group("a", 0, 0)) is None


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="tolerance is -1; it must be 0 or more"):
        RejectEqualRewards(-1)
    with pytest.raises(ValueError, match="window is 0; it must be at least 1"):
        RejectRepeatedPrompts(window=0)
    with pytest.raises(TypeError, match=r"is no filter.*pass filters one by one"):
        FirstReason([RejectEqualRewards()])


def test_filters_travel_to_the_collectors_process():
    reject = FirstReason(RejectEqualRewards(0.5), RejectRepeatedPrompts(window=3))
    there = pickle.loads(pickle.dumps(reject))
    assert there(group("a", 0.0, 1.0)) is None
    assert there(group("a", 0.0, 1.0)) == "repeated prompt"
    assert there(group("a", 0.0, 0.5)) == "equal rewards"


def test_filters_are_named_in_yaml_as_a_list_of_components():
    """torchtune instantiates no list, and nothing within a component: it goes node by node."""
    cfg = OmegaConf.create(
        """
        group_filter:
          - {_component_: torchrl_llm_async.data.RejectEqualRewards, tolerance: 0.5}
          - {_component_: torchrl_llm_async.data.RejectRepeatedPrompts, window: 100}
        """
    )
    with pytest.raises(ValueError, match="only supports DictConfigs"):
        config.instantiate(cfg.group_filter)
    reject = FirstReason(*map(config.instantiate, cfg.group_filter))
    assert [type(each) for each in reject.filters] == [RejectEqualRewards, RejectRepeatedPrompts]
    assert (reject.filters[0].tolerance, reject.filters[1].window) == (0.5, 100)


class FourTimes(ScriptedEnv):
    """Asks each question four times, and gives answers to the odd ones of them unequal rewards."""

    rewards = itertools.count()

    def _reset(self, tensordict=None, **kwargs):
        out = super()._reset(tensordict, **kwargs)
        return out.set(("text", "prompt"), f"{int(out['number']) // 4}?")

    def _step(self, tensordict):
        out = super()._step(tensordict)
        if int(out["number"]) % 2:
            out["reward"] = torch.tensor([float(next(FourTimes.rewards))])
        return out


@pytest.mark.inv4
def test_a_collector_rejects_for_the_first_reason_and_counts_it(make_collector):
    """Of every four groups of a prompt one is trained on, in whatever order they are complete."""
    buffer = make_buffer()
    collector = make_collector(
        FourTimes,
        replay_buffer=buffer,
        group_filter=FirstReason(RejectEqualRewards(), RejectRepeatedPrompts(window=100)),
    )
    rows = run_all_steps(collector, buffer)
    groups = {int(row["group", "id"]): row["text", "prompt"] for row in rows}
    assert sorted(groups.values()) == ["0?", "1?", "2?", "3?"]
    assert all(group_id % 2 for group_id in groups)
    stats = collector.stats()
    # Of groups 0 to 13; the one of each prompt's odd pair that comes second is a repetition.
    assert (stats["rejected/equal rewards"], stats["rejected/repeated prompt"]) == (7, 3)
    assert_the_books_add_up(collector, rows, rejected=10)


@pytest.mark.inv5
def test_fewer_prompts_than_are_remembered_end_the_run_with_that_reason(make_collector):
    class TwoProblems(ScriptedEnv):
        def _reset(self, tensordict=None, **kwargs):
            out = super()._reset(tensordict, **kwargs)
            return out.set(("text", "prompt"), f"{int(out['number']) % 2}?")

    buffer = make_buffer()
    collector = make_collector(
        TwoProblems,
        replay_buffer=buffer,
        group_filter=RejectRepeatedPrompts(window=2),
        max_rejections=5,
    )
    collector.start()
    with pytest.raises(RuntimeError, match=r"5 groups in a row were rejected \(5 x repeated"):
        for _ in range(2):  # There are the groups of one step.
            buffer.sample(timeout=30)


class TokenCost(Transform):
    """Takes 2 off the reward for each sampled token, as a group enters the buffer."""

    def _inv_call(self, tensordict):
        for row in tensordict.unbind(0):
            row["next", "reward"] -= 2.0 * (row["policy_version", "full"] >= 0).sum()
        return tensordict


@pytest.mark.parametrize(
    ("transforms", "advantages"),
    [
        ((GroupAdvantage(2), TokenCost()), [0.5, -0.5]),  # of the rewards -2 and -3
        ((TokenCost(), GroupAdvantage(2)), [-0.5, 0.5]),  # of the rewards 0 and 1
    ],
    ids=["shaped first", "shaped afterwards"],
)
def test_the_last_transform_comes_first_on_the_way_in(transforms, advantages):
    buffer = make_plain_buffer(groups_per_step=1, transform=Compose(*transforms))
    buffer.announce(0, 0)
    buffer.extend(make_group(0))
    batch = buffer.sample(timeout=0)
    assert batch["advantage"].flatten().tolist() == advantages
    assert batch["next", "reward"].flatten().tolist() == [
        -2.0,
        -3.0,
    ]  # once, and not on the way out
