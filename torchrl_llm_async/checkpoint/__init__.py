"""Checkpoints of a whole run, in open formats.

:func:`save_tree` and :func:`load_tree` are the format of plain state, :class:`TrainingState` is the
trainer's, and :class:`CheckpointStore` makes files a checkpoint that is whole or not there at all.
"""

from torchrl_llm_async.checkpoint.store import CheckpointStore
from torchrl_llm_async.checkpoint.training import TrainingSnapshot, TrainingState
from torchrl_llm_async.checkpoint.tree import Tree, load_tree, save_tree

__all__ = [
    "CheckpointStore",
    "TrainingSnapshot",
    "TrainingState",
    "Tree",
    "load_tree",
    "save_tree",
]
