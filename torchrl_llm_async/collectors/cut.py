"""Collector and replay buffer at one instant: what a checkpoint has of them, and that they agree.

Owns what has to be looked at on both sides at once. The collector's own state is :mod:`.rollouts`'
affair, the buffer's :mod:`torchrl_llm_async.data.snapshot`'s; that the two are of one instant is
the collector's, which takes the buffer's when the other arrives.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torchrl_llm_async.checkpoint.tree import Tree
from torchrl_llm_async.collectors.settings import RolloutStats
from torchrl_llm_async.data.replay_buffer import StalenessReplayBuffer
from torchrl_llm_async.data.snapshot import BufferSnapshot


@dataclass(frozen=True)
class Cut:
    """The collector and its replay buffer at one instant.

    Args:
        collector: for :meth:`AsyncLLMCollector.load_state_dict`; a tree of plain values, arrays and
            tensors, for :func:`~torchrl_llm_async.checkpoint.save_tree`.
        buffer: the replay buffer's snapshot, if there is one.
    """

    collector: Tree
    buffer: BufferSnapshot | None


def complete_cut(
    state: Tree,
    replay_buffer: StalenessReplayBuffer | None,
    not_heard: Mapping[int, str],
    served_version: int,
) -> Cut:
    """Adds to the state that a collector's host has sent what the trainer's side knows now.

    Args:
        state: the host's.
        replay_buffer: into which everything went that was sent before.
        not_heard: reasons by id of the drops that the host was told of, and has not told to have
            carried out. Others may be added meanwhile.
        served_version: what the engines serve.
    """
    if replay_buffer is None:
        return Cut({**state, "step": served_version, "pending_drops": _pairs(not_heard)}, None)
    buffer = replay_buffer.snapshot()
    groups = buffer.state["groups"]
    pending = {**dict(map(tuple, groups["untold"])), **not_heard}
    for group_id, *_ in groups["running"]:  # dropped after the snapshot
        pending.pop(group_id, None)
    collector = {**state, "step": groups["consumer_version"], "pending_drops": _pairs(pending)}
    return Cut(collector, buffer)


def _pairs(drops: Mapping[int, str]) -> list[list[int | str]]:
    return [list(drop) for drop in sorted(drops.items())]


def check_ledgers(theirs: RolloutStats, ours: dict[str, int]) -> None:
    """Holds the collector's accounts against the buffer's, after the same messages.

    Raises:
        RuntimeError: they differ.
    """
    # Drops travel the other way: where there are any, only the sum is the same at every instant.
    names = ("submitted", "running", "accepted", "rejected")
    names = names[:1] if theirs.dropped or ours["dropped"] else names
    found = {name: getattr(theirs, name) for name in names}
    if found != {name: ours[name] for name in names}:
        raise RuntimeError(f"the collector counts {found} groups, the replay buffer {ours}")
