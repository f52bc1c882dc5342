"""The replay buffer's state through its files: rows, groups and accounts, to the bit."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from groups import make_buffer, make_group
from tensordict import NonTensorData, TensorDict, lazy_stack
from torchrl.data.llm import History
from torchrl.envs.transforms import Transform

from torchrl_llm_async.checkpoint import load_tree
from torchrl_llm_async.data.snapshot import BufferSnapshot, columns_to_rows, rows_to_columns
from torchrl_llm_async.data.trajectory import Trajectory, stack_group
from torchrl_llm_async.objectives import GroupAdvantage


def make_rows(group_id: int, start: int, size: int) -> TensorDict:
    """A group as the collector hands it on."""
    rng = np.random.default_rng(group_id)
    rows = []
    for index in range(size):
        prompt, answer = 3 + group_id % 4, 1 + int(rng.integers(6))
        total = prompt + answer
        sampled = np.arange(total) >= prompt
        rows.append(
            Trajectory(
                token_ids=rng.integers(0, 100, total),
                sampled=sampled,
                log_probs=np.where(sampled, -rng.random(total), 0).astype(np.float32),
                versions=np.where(sampled, start, -1),
                prompt_length=prompt,
                reward=float(rng.random()),
                terminated=True,
                truncated=False,
                ended_by="environment",
                group_id=group_id,
                index=index,
                start_version=start,
                prompt=f"prompt {group_id} ü",
                response=f"answer {index}",
                extras={"success": np.array([True])},
            )
        )
    return stack_group(rows)


def assert_same_rows(left, right) -> None:
    assert len(left) == len(right)
    for one, other in zip(left.unbind(0), right.unbind(0), strict=True):
        keys = list(one.keys(True, True))
        assert keys and keys == list(other.keys(True, True))
        for key in keys:
            assert one[key].dtype == other[key].dtype and torch.equal(one[key], other[key]), key
        for key in ("prompt", "response"):
            assert one["text", key] == other["text", key] != ""


@pytest.mark.inv4
def test_a_restored_buffer_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    def fresh():
        transform = GroupAdvantage(group_size=3)
        return make_buffer(groups_per_step=2, max_staleness=2, group_size=3, transform=transform)

    buffer = fresh()
    for group_id in range(4):
        buffer.announce(group_id, 0)
    for group_id in (3, 0, 1):
        buffer.extend(make_rows(group_id, 0, 3))
    buffer.sample(timeout=0)
    buffer.announce(4, 1)
    buffer.retract(2, "crash")
    buffer.announce(5, 1)
    buffer.dumps(tmp_path)
    again = fresh()
    again.loads(tmp_path)
    assert again.consumer_version == 1 and again.ledger() == buffer.ledger()
    assert again.sampler.ledger.by_version() == buffer.sampler.ledger.by_version()
    for one in (buffer, again):
        for group_id in (4, 5):
            one.extend(make_rows(group_id, 1, 3))
        with pytest.raises(ValueError, match="order of admission"):
            one.announce(5, 1)
    left, right = buffer.sample(timeout=0), again.sample(timeout=0)
    assert_same_rows(left, right)
    assert right["advantage"][0].abs().sum() > 0
    assert again.ledger() == buffer.ledger()
    vary = ("_s", "_mean", "_max", "write_count")  # with the clock, and TorchRL's own
    stats = {k: v for k, v in buffer.stats().items() if not k.endswith(vary)}
    assert stats.items() <= again.stats().items()


def test_the_snapshot_is_of_its_instant(tmp_path: Path) -> None:
    buffer = make_buffer(groups_per_step=1, max_staleness=3)
    for group_id in range(2):
        buffer.announce(group_id, 0)
        buffer.extend(make_group(group_id))
    snapshot = buffer.snapshot()
    buffer.sample(timeout=0), buffer.sample(timeout=0)
    for group_id in (2, 3):  # overwrites the slots
        buffer.announce(group_id, 1)
        buffer.extend(make_group(group_id, 1))
    snapshot.save(tmp_path)
    restored = make_buffer(groups_per_step=1, max_staleness=3)
    restored.loads(tmp_path)
    assert [list(restored.sample(timeout=0)["text", "response"]) for _ in range(2)] == [
        ["0/0", "0/1"],
        ["1/0", "1/1"],
    ]


class TenTimes(Transform):
    """Multiplies rewards as rows leave."""

    def forward(self, tensordict):
        for row in tensordict.unbind(0):
            row["next", "reward"] = 10 * row["next", "reward"]
        return tensordict


def test_what_is_written_into_a_batch_is_in_no_snapshot(tmp_path: Path) -> None:
    """Neither by a transform nor by the trainer, although both hold the same tensors."""
    buffer = make_buffer(groups_per_step=1, max_staleness=2, transform=TenTimes())
    for group_id in range(3):
        buffer.announce(group_id, 0)
    for group_id in range(2):
        buffer.extend(make_group(group_id))
    first = buffer.snapshot()
    for _ in range(2):
        batch = buffer.sample(timeout=0)
        for row in batch.unbind(0):
            row["loss"] = torch.tensor(1.0)
            del row["text"]
    assert batch["next", "reward"].flatten().tolist() == [10.0, 20.0]
    buffer.extend(make_group(2))
    first.save(tmp_path)
    rows = BufferSnapshot.load(tmp_path).rows
    assert [row["text", "response"] for row in rows] == ["0/0", "0/1", "1/0", "1/1"]
    assert [float(row["next", "reward"]) for row in rows] == [0.0, 1.0, 1.0, 2.0]
    assert not any("loss" in row for row in rows)


def test_rows_may_differ_in_keys_and_shapes() -> None:
    rows = [
        TensorDict({"a": torch.arange(3), "t": NonTensorData("x"), "n": {"b": torch.ones(2, 2)}}),
        TensorDict({"a": torch.tensor(1.5), "n": {"c": torch.empty(0, 3)}}),
        TensorDict({"a": torch.arange(0), "t": NonTensorData(["y", 1, None])}),
    ]
    back = columns_to_rows(rows_to_columns(rows))
    assert [sorted(map(str, row.keys(True))) for row in back] == [
        sorted(map(str, row.keys(True))) for row in rows
    ]
    assert back[0]["n", "b"].shape == (2, 2) and back[1]["n", "c"].shape == (0, 3)
    assert back[1]["a"] == 1.5 and back[2]["a"].shape == (0,)
    assert back[0]["t"] == "x" and back[2]["t"] == ["y", 1, None]
    assert columns_to_rows(rows_to_columns([])) == []


@pytest.mark.parametrize("value", [{"a": 1}, [1, 2], [], 3, 0.5, True, None, "", {"b": [None]}])
def test_plain_values_come_back_as_what_they_were(value, tmp_path: Path) -> None:
    """And not a list of numbers as a tensor, or a dictionary as a tensordict."""
    BufferSnapshot([TensorDict({"n": {"v": NonTensorData(value)}})], None).save(tmp_path)
    (row,) = BufferSnapshot.load(tmp_path).rows
    assert type(row["n", "v"]) is type(value) and row["n", "v"] == value


@pytest.mark.parametrize(
    "value",
    [
        NonTensorData({1, 2}),
        NonTensorData([np.arange(2)]),
        NonTensorData({3: "a"}),
        History(role="user", content="hi"),  # would come back as a tensordict
    ],
    ids=["set", "array", "number as key", "class"],
)
def test_what_is_no_plain_value_is_refused_by_its_key(value, tmp_path: Path) -> None:
    buffer = make_buffer(groups_per_step=1, max_staleness=0, group_size=1)
    buffer.announce(0, 0)
    (row,) = make_group(0, size=1).unbind(0)
    row["text", "tool"] = value
    buffer.extend(lazy_stack([row]))
    with pytest.raises(TypeError, match=r"(?s)entry \('text', 'tool'\) is .*a checkpoint takes"):
        buffer.dumps(tmp_path)


def test_another_group_size_and_a_used_buffer_are_refused(tmp_path: Path) -> None:
    make_buffer(group_size=2).dumps(tmp_path)
    with pytest.raises(ValueError, match=r"group_size is 3, but .* holds groups of 2"):
        make_buffer(group_size=3).loads(tmp_path)
    used = make_buffer()
    used.announce(0, 0)
    with pytest.raises(RuntimeError, match="used already"):
        used.loads(tmp_path)


def test_the_files_are_json_and_safetensors(tmp_path: Path) -> None:
    buffer = make_buffer()
    buffer.announce(0, 0)
    buffer.extend(make_group(0))
    buffer.dumps(tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "replay_buffer.json",
        "replay_buffer.safetensors",
    ]
    assert json.loads((tmp_path / "replay_buffer.json").read_text())["state"]["group_size"] == 2
    assert load_tree(tmp_path / "replay_buffer")["rows"]["count"] == 2
