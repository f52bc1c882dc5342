"""What makes rows a whole group that may be trained on.

Owns the checks of rows that enter the replay buffer, and what is computed from them on the way.
Which groups are expected, and where rows go, is the buffer's affair (:mod:`.replay_buffer`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase, lazy_stack


class RowChecks:
    """Cuts rows into groups and refuses those that are not whole, or too old, or too new.

    Args:
        group_size: rows of a group, K.
        group_id_key, group_index_key, start_version_key, version_key: as for
            :class:`.StalenessReplayBuffer`.
        reward_key: what the groups' mean reward is read from; None: nothing asks for it.
    """

    def __init__(
        self,
        *,
        group_size: int,
        group_id_key: NestedKey,
        group_index_key: NestedKey,
        start_version_key: NestedKey,
        version_key: NestedKey,
        reward_key: NestedKey | None,
    ) -> None:
        self.group_size = group_size
        self._group_id_key = group_id_key
        self._group_index_key = group_index_key
        self._start_version_key = start_version_key
        self._version_key = version_key
        self._reward_key = reward_key

    def split(
        self, data: TensorDictBase, *, newest_version: int
    ) -> list[tuple[TensorDictBase, int, dict[str, Any]]]:
        """Cuts rows into groups: rows in order of their index, group id, summary.

        Raises:
            ValueError: as :meth:`.StalenessReplayBuffer.extend` says.
        """
        size = self.group_size
        if data.ndim != 1 or len(data) == 0 or len(data) % size:
            raise ValueError(
                f"got rows of batch size {tuple(data.shape)}; whole groups have (n * {size},), as "
                f"group_size={size}"
            )
        rows = data.unbind(0)
        groups = [
            self._check(rows[begin : begin + size], newest_version)
            for begin in range(0, len(rows), size)
        ]
        ids = [group_id for _, group_id, _ in groups]
        if len(set(ids)) < len(ids):
            raise ValueError(f"the same group comes twice in one call: group ids {ids}")
        return groups

    def _check(
        self, rows: Sequence[TensorDictBase], newest_version: int
    ) -> tuple[TensorDictBase, int, dict[str, Any]]:
        rows = sorted(rows, key=lambda row: int(row[self._group_index_key]))
        indices = [int(row[self._group_index_key]) for row in rows]
        group_ids = {int(row[self._group_id_key]) for row in rows}
        starts = {int(row[self._start_version_key]) for row in rows}
        if len(group_ids) > 1 or indices != list(range(self.group_size)):
            raise ValueError(
                f"rows with group ids {sorted(group_ids)} and indices {indices} are not a whole "
                f"group: its {self.group_size} rows must be adjacent and have the indices 0 to "
                f"{self.group_size - 1}, each once"
            )
        (group_id,) = group_ids
        if len(starts) > 1:
            raise ValueError(f"rows of group {group_id} have start versions {sorted(starts)}")
        (start,) = starts
        all_versions, oldest = [], []
        for index, row in enumerate(rows):
            versions = row[self._version_key]
            versions = versions[versions >= 0]
            if not len(versions):
                raise ValueError(
                    f"row {index} of group {group_id} has no sampled token (no entry of "
                    f"{self._version_key!r} is >= 0); reject such a group where it is produced"
                )
            low, high = (int(bound) for bound in versions.aminmax())
            if low < start or high > newest_version:
                raise ValueError(
                    f"row {index} of group {group_id} has tokens of versions {low} to {high}; they "
                    f"must lie between its start version {start} and the trainer's {newest_version}"
                )
            all_versions.append(versions)
            oldest.append(low)
        found, counts = torch.cat(all_versions).unique(return_counts=True)
        summary = {
            "start_version": start,
            "token_versions": dict(zip(found.tolist(), counts.tolist(), strict=True)),
            "oldest": tuple(oldest),
        }
        if self._reward_key is not None:
            rewards = [float(row[self._reward_key].float().mean()) for row in rows]
            summary["reward"] = sum(rewards) / len(rewards)
        return lazy_stack(rows), group_id, summary
