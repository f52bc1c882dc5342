"""From the replay buffer on rank 0 to micro-batches on every rank.

Owns the division of a step's groups into minibatches and micro-batches, their scattering, and the
denominators, which are counted once over all ranks. Owns neither the choice of groups (the
buffer's) nor of rows within a group (the loss's).
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from tensordict import TensorDictBase

from torchrl_llm_async.data import StalenessReplayBuffer
from torchrl_llm_async.packing import Form, blank_rows, pack_rows, pad_rows, plan_micro_batches

_ROWS_PER_UNIT = {"sequence": 1, "pair": 2}


@dataclass
class Minibatch:
    """One rank's share of one optimizer update.

    Args:
        micro_batches: as many on every rank, each ``[N, T]``, left-padded or packed.
        denominator: what the loss is divided by, summed over all ranks. 0: nothing to learn from.
    """

    micro_batches: list[TensorDictBase]
    denominator: float


@dataclass
class StepBatch:
    """One rank's share of one training step, with rank 0's figures about the whole of it."""

    minibatches: list[Minibatch]
    figures: dict[str, float]

    def to(self, device: torch.device) -> StepBatch:
        """Moves the micro-batches to ``device``."""
        for minibatch in self.minibatches:
            minibatch.micro_batches = [micro.to(device) for micro in minibatch.micro_batches]
        return self


class BatchFeed:
    """Gives every rank its share of each step. All ranks call :meth:`next` together.

    Args:
        buffer: the replay buffer on rank 0, None elsewhere.
        loss: the loss module: its ``select``, ``denominator`` and ``packing_unit`` are used.
        minibatches: optimizer updates per step.
        micro_batch_tokens: most tokens, padding included, of one micro-batch.
        form: of the micro-batches, ``"padded"`` or ``"packed"``.
        group_size: rows per group.
        pad_id: token id to pad with.
        group: a process group whose backend carries CPU objects.

    Attributes:
        group_ids: on rank 0, the groups of the step last given out.
    """

    def __init__(
        self,
        buffer: StalenessReplayBuffer | None,
        loss: torch.nn.Module,
        *,
        minibatches: int,
        micro_batch_tokens: int,
        form: Form,
        group_size: int,
        pad_id: int,
        group: dist.ProcessGroup,
    ):
        self._buffer = buffer
        self._loss = loss
        self._minibatches = minibatches
        self._micro_batch_tokens = micro_batch_tokens
        self._form = form
        self._rows_per_unit = {**_ROWS_PER_UNIT, "group": group_size}[loss.packing_unit]
        self._pad_id = pad_id
        self._group = group
        self._world_size = dist.get_world_size(group)
        self._group_size = group_size
        self.group_ids: list[int] = []

    def next(self) -> StepBatch:
        """Waits for a step's groups and returns this rank's share.

        Raises:
            Exception: on rank 0, whatever ended the collector.
        """
        shares = self._divide() if self._buffer is not None else None
        received: list[StepBatch | None] = [None]
        dist.scatter_object_list(received, shares, src=0, group=self._group)
        return received[0]

    def _divide(self) -> list[StepBatch]:
        start = time.perf_counter()
        rows, info = self._buffer.sample(return_info=True)
        self.group_ids = info["group_ids"]
        waited = time.perf_counter() - start
        # Those that are reused come behind, and have been reported.
        fresh = rows[: len(self.group_ids) * self._group_size]
        figures = _figures(fresh) | {
            "trainer_waited_s": waited,
            "trained_tokens": 0,
            "padding": 0.0,
            "groups_tied": 0,
        }
        dense_tokens = 0
        shares = [StepBatch([], figures) for _ in range(self._world_size)]
        groups = torch.arange(len(rows)).reshape(-1, self._group_size)
        for first in range(self._minibatches):
            # They are in the order of age, fresh ones before reused ones: each update gets some of
            # all. One after the other, the last updates would be off-policy and the first not.
            part = rows[groups[first :: self._minibatches].flatten()]
            chosen = self._loss.select(part, target_version=self._buffer.consumer_version)
            figures["groups_tied"] += self._loss.groups_tied
            if len(chosen) == 0:
                for share in shares:
                    share.minibatches.append(Minibatch([], 0.0))
                continue
            lengths = [len(row["tokens", "full"]) for row in chosen.unbind(0)]
            plan = plan_micro_batches(
                lengths,
                world_size=self._world_size,
                token_budget=self._micro_batch_tokens,
                unit=self._rows_per_unit,
                form=self._form,
            )
            figures["trained_tokens"] += sum(lengths)
            denominator = float(self._loss.denominator(chosen))
            for share, micro_rows in zip(shares, plan, strict=True):
                micro_batches = [
                    self._dense(chosen[indices], max(lengths))
                    if indices
                    else blank_rows(chosen, self._pad_id)
                    for indices in micro_rows
                ]
                dense_tokens += sum(micro["tokens", "full"].numel() for micro in micro_batches)
                share.minibatches.append(Minibatch(micro_batches, denominator))
        if dense_tokens:
            figures["padding"] = 1 - figures["trained_tokens"] / dense_tokens
        return shares

    def _dense(self, rows: TensorDictBase, longest: int) -> TensorDictBase:
        if self._form == "padded":
            return pad_rows(rows, self._pad_id)
        return pack_rows(rows, self._pad_id, row_tokens=longest)


def _figures(rows: TensorDictBase) -> dict[str, float]:
    """Means over trajectories, rewards as the environment gave them, and counts of tokens."""
    # Beside a raw reward, the other one is shaped (see objectives.GroupAdvantage).
    raw = ("next", "raw_reward")
    key = raw if raw in rows.keys(include_nested=True) else ("next", "reward")
    rewards = torch.stack([row[key] for row in rows.unbind(0)])
    truncated = torch.stack([row["next", "truncated"] for row in rows.unbind(0)])
    sampled = sum(int(row["masks", "all_assistant_mask"].sum()) for row in rows.unbind(0))
    return {
        "reward": float(rewards.mean()),
        "accuracy": float((rewards >= 1).float().mean()),
        "truncated": float(truncated.float().mean()),
        "answer_tokens": sampled / len(rows),
        "sampled_tokens": sampled,
    }
