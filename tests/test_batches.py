"""How a step's groups become minibatches, and what is reported of them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from decoders import tiny_decoder
from groups import make_buffer
from safetensors.torch import load_file
from tensordict import TensorDict, lazy_stack

from torchrl_llm_async.modules import TorchtuneActor
from torchrl_llm_async.objectives import DecoupledPPOLoss, GroupAdvantage
from torchrl_llm_async.recipes.batches import BatchFeed


@pytest.fixture(scope="module")
def process_group(tmp_path_factory):
    meeting = tmp_path_factory.mktemp("dist") / "meet"
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def loss(tiny_model):
    return DecoupledPPOLoss(
        TorchtuneActor(tiny_decoder(load_file(tiny_model / "model.safetensors")))
    )


def make_feed(buffer, loss, process_group, minibatches=2, form="padded") -> BatchFeed:
    sizes = dict(minibatches=minibatches, micro_batch_tokens=64, group_size=2, pad_id=0)
    return BatchFeed(buffer, loss, group=process_group, form=form, **sizes)


def add_group(buffer, group_id: int, version: int, *, rewards=(1.0, 0.0), answer=2) -> None:
    """Two rows of a prompt token and ``answer`` sampled ones."""
    sampled = torch.tensor([False] + [True] * answer)
    buffer.announce(group_id, version)
    rows = [
        TensorDict(
            {
                "group": {
                    "id": torch.tensor(group_id),
                    "index": torch.tensor(index),
                    "start_version": torch.tensor(version),
                },
                "tokens": {"full": torch.arange(answer + 1)},
                "masks": {
                    "all_attention_mask": torch.ones_like(sampled),
                    "all_assistant_mask": sampled,
                },
                "log_probs": {"full": torch.where(sampled, -0.5, 0.0)},
                "policy_version": {"full": torch.where(sampled, version, -1)},
                "next": {
                    "reward": torch.tensor([reward]),
                    "truncated": torch.tensor([answer > 3]),
                },
            }
        )
        for index, reward in enumerate(rewards)
    ]
    buffer.extend(lazy_stack(rows))


def groups_of(minibatch) -> list[int]:
    ids = torch.cat([micro["group", "id"] for micro in minibatch.micro_batches])
    return sorted(set(ids.tolist()))


def test_every_minibatch_gets_old_and_new_and_reused_groups(loss, process_group):
    buffer = make_buffer(
        groups_per_step=4, max_reuse=2, reuse_groups=4, transform=GroupAdvantage(2)
    )
    feed = make_feed(buffer, loss, process_group)
    for group_id in range(6):
        add_group(buffer, group_id, version=0)
    first = feed.next()
    assert [groups_of(minibatch) for minibatch in first.minibatches] == [[0, 2], [1, 3]]
    for group_id in range(6, 8):
        add_group(buffer, group_id, version=1)
    second = feed.next()  # 4 to 7, of which 4 and 5 are older, and the first four once more
    assert feed.group_ids == [4, 5, 6, 7]
    ids = [groups_of(minibatch) for minibatch in second.minibatches]
    assert ids == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_figures_are_of_what_the_step_consumes(loss, process_group):
    buffer = make_buffer(
        groups_per_step=2, max_reuse=2, reuse_groups=2, transform=GroupAdvantage(2)
    )
    feed = make_feed(buffer, loss, process_group)
    for group_id in range(4):
        is_first = group_id < 2
        add_group(
            *(buffer, group_id, 0),
            rewards=(0.0, 0.5) if is_first else (1.0, 0.0),
            answer=4 if is_first else 2,
        )
    figures = feed.next().figures
    assert (figures["reward"], figures["accuracy"]) == (0.25, 0.0)
    assert (figures["sampled_tokens"], figures["truncated"]) == (16, 1.0)
    figures = feed.next().figures
    assert (figures["reward"], figures["accuracy"]) == (0.5, 0.5)
    assert (figures["sampled_tokens"], figures["truncated"]) == (8, 0.0)
    assert figures["answer_tokens"] == 2
    assert figures["trained_tokens"] == 4 * 3 + 4 * 5  # reused ones are trained on


def test_the_rewards_reported_are_the_environments(loss, process_group):
    transform = GroupAdvantage(2, reward_scale=10.0, reward_bias=-5.0)
    buffer = make_buffer(groups_per_step=1, transform=transform)
    add_group(buffer, 0, version=0)
    batch = make_feed(buffer, loss, process_group, minibatches=1).next()
    assert batch.minibatches[0].micro_batches[0]["next", "reward"].flatten().tolist() == [5, -5]
    assert (batch.figures["reward"], batch.figures["accuracy"]) == (0.5, 0.5)


def test_packed_micro_batches_train_the_same_on_less_padding(loss, process_group):
    gradients, padding = [], []
    for form in ("padded", "packed"):
        buffer = make_buffer(groups_per_step=4, transform=GroupAdvantage(2))
        for group_id, answer in enumerate((9, 2, 3, 4)):
            add_group(buffer, group_id, version=0, answer=answer)
        batch = make_feed(buffer, loss, process_group, minibatches=1, form=form).next()
        padding.append(batch.figures["padding"])
        (minibatch,) = batch.minibatches
        loss.zero_grad()
        for micro in minibatch.micro_batches:
            assert micro["tokens", "full"].numel() <= 64
            loss(micro, normalizer=minibatch.denominator).total().backward()
        gradients.append([p.grad for p in loss.parameters()])
    loss.zero_grad()
    # 2 x 10 + 2 x 3 + 2 x 4 + 2 x 5 = 44 tokens; padded, six rows of 10 and two of 3.
    assert padding == pytest.approx([1 - 44 / 66, 1 - 44 / 50])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=0)
