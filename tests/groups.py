"""Groups of ragged rows, and a buffer for them, as the replay buffer's tests use them."""

from __future__ import annotations

import torch
from tensordict import NonTensorData, TensorDict, lazy_stack

from torchrl_llm_async.data import StalenessReplayBuffer

PATIENCE = 20.0  # seconds after which a test that should have been woken fails


def make_group(group_id, start=0, size=2, versions=None):
    """A group; row i has a prompt token and i + 1 sampled ones, or those of ``versions[i]``."""
    rows = []
    for index in range(size):
        sampled = [start] * (index + 1) if versions is None else versions[index]
        rows.append(
            TensorDict(
                {
                    "group": {
                        "id": torch.tensor(group_id),
                        "index": torch.tensor(index),
                        "start_version": torch.tensor(start),
                    },
                    "policy_version": {"full": torch.tensor([-1, *sampled])},
                    "next": {"reward": torch.tensor([float(group_id + index)])},
                    "text": {"response": NonTensorData(f"{group_id}/{index}")},
                }
            )
        )
    return lazy_stack(rows)


def make_buffer(groups_per_step=2, max_staleness=1, group_size=2, **kwargs):
    return StalenessReplayBuffer(
        groups_per_step=groups_per_step,
        max_staleness=max_staleness,
        group_size=group_size,
        **kwargs,
    )


def assert_rows_lie_in_their_slots(buffer):
    """No slot belongs to two groups, and each holds the row that its group put there."""
    sampler = buffer.sampler
    groups = {**sampler.finished, **sampler.reusable}
    slots = [slot for group in groups.values() for slot in group.index.tolist()]
    assert len(set(slots)) == len(slots) == len(buffer) <= buffer.storage.max_size
    for group_id, group in groups.items():
        rows = [buffer.storage.get(slot)["group"] for slot in group.index.tolist()]
        found = [(int(row["id"]), int(row["index"])) for row in rows]
        assert found == [(group_id, index) for index in range(buffer.group_size)]


def names(batch):
    return list(batch["text", "response"])
