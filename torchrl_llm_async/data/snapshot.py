"""The replay buffer at one instant, and the files it becomes.

Owns the layout of ragged rows as columns: per key all rows' values one after the other, and their
shapes. What is stored beside the rows is the buffer's affair (:mod:`.replay_buffer`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase, is_leaf_nontensor

from torchrl_llm_async.checkpoint.tree import Tree, load_tree, save_tree

_NAME = "replay_buffer"


@dataclass(frozen=True)
class BufferSnapshot:
    """What :meth:`.StalenessReplayBuffer.snapshot` gives: references, so that it costs little.

    Args:
        rows: of the stored groups, in the order of ``groups``.
        state: the rest, as a tree of plain values.
    """

    rows: list[TensorDictBase]
    state: Tree

    def save(self, folder: str | Path) -> None:
        """Writes ``replay_buffer.json`` and ``.safetensors`` into a folder.

        Raises:
            TypeError: a row has an entry that is neither a tensor nor made of plain values; the
                message names its key.
        """
        tree = {"state": self.state, "rows": rows_to_columns(self.rows)}
        save_tree(Path(folder) / _NAME, tree)

    @classmethod
    def load(cls, folder: str | Path) -> BufferSnapshot:
        """Reads what :meth:`save` wrote."""
        tree = load_tree(Path(folder) / _NAME)
        return cls(columns_to_rows(tree["rows"]), tree["state"])


def rows_to_columns(rows: Sequence[TensorDictBase]) -> Tree:
    """Rows of batch size (), each with the keys and shapes that it has, as few large tensors.

    Examples:
        >>> rows = [TensorDict({"tokens": {"full": torch.arange(n)}}) for n in (2, 3)]
        >>> rows_to_columns(rows)["columns"][0]["values"]
        tensor([0, 1, 0, 1, 2])
    """
    columns: dict[tuple, dict[str, Any]] = {}
    for position, row in enumerate(rows):
        for key, value in row.items(include_nested=True, leaves_only=True, is_leaf=_is_leaf):
            path = key if isinstance(key, tuple) else (key,)
            is_tensor = isinstance(value, torch.Tensor)
            kind = (value.dtype, value.ndim) if is_tensor else None
            column = columns.setdefault((path, kind), {"rows": [], "values": [], "shapes": []})
            column["rows"].append(position)
            column["values"].append(value if is_tensor else _plain(value, path))
            if is_tensor:
                column["shapes"].append(tuple(value.shape))
    return {
        "count": len(rows),
        "columns": [
            {"key": list(path), "rows": torch.tensor(column["rows"]), **_values(kind, column)}
            for (path, kind), column in columns.items()
        ],
    }


def _is_leaf(cls: type) -> bool:
    # Texts are leaves too, and so are classes like History, which would come back as tensordicts.
    return is_leaf_nontensor(cls) or not issubclass(cls, TensorDictBase)


def _plain(entry: Any, path: tuple[str, ...]) -> Any:
    value = entry.tolist() if is_leaf_nontensor(type(entry)) else entry
    if not _is_plain(value):
        raise TypeError(
            f"a row's entry {path} is {value!r:.80}, of type {type(value).__qualname__}; a "
            "checkpoint takes tensors and, as NonTensorData, None, bool, int, float, str, and "
            "lists and dictionaries of these"
        )
    return value


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):  # a tuple comes back as a list
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(type(key) is str and _is_plain(each) for key, each in value.items())
    return value is None or type(value) in (bool, int, float, str)


def _values(kind: tuple | None, column: dict[str, Any]) -> dict[str, Any]:
    if kind is None:
        return {"values": column["values"], "shapes": None}
    return {
        "values": torch.cat([value.reshape(-1) for value in column["values"]]),
        "shapes": torch.tensor(column["shapes"], dtype=torch.int64).reshape(
            len(column["shapes"]), kind[1]
        ),
    }


def columns_to_rows(tree: Tree) -> list[TensorDictBase]:
    """The rows that :func:`rows_to_columns` was given; their tensors own their memory."""
    rows: list[TensorDictBase] = [TensorDict() for _ in range(tree["count"])]
    for column in tree["columns"]:
        values = column["values"]
        if column["shapes"] is not None:
            sizes = column["shapes"].prod(-1).tolist()
            shapes = column["shapes"].tolist()
            parts = zip(values.split(sizes), shapes, strict=True)
            values = [part.reshape(shape).clone() for part, shape in parts]
        else:  # or a list would become a tensor, and a dictionary a tensordict
            values = [NonTensorData(value) for value in values]
        for position, value in zip(column["rows"].tolist(), values, strict=True):
            rows[position][tuple(column["key"])] = value
    return rows
