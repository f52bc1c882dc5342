"""From a launch to its end: process groups, the config's checks, the run's folder, signals.

Owns what is the same for every recipe that trains on several ranks, so that a recipe's file holds
what is its own. Knows nothing of models or data.
"""

from __future__ import annotations

import datetime
import signal
import sys
from typing import Protocol, TextIO

import torch.distributed as dist
from omegaconf import DictConfig
from torchtune import training

from torchrl_llm_async._lifetime import die_with_parent
from torchrl_llm_async.recipes.config import ConfigError, load_config
from torchrl_llm_async.recipes.resume import RunFolderError, begin_in


class Recipe(Protocol):
    """What is run: built on every rank from a checked config and a group of CPU objects."""

    def __init__(self, cfg: DictConfig, control: dist.ProcessGroup) -> None: ...

    @classmethod
    def check(cls, cfg: DictConfig) -> None:
        """Raises ConfigError for what this recipe can't do, if the config is right in itself."""

    def setup(self) -> None:
        """Builds everything."""

    def train(self) -> None:
        """Runs to the end."""

    def cleanup(self) -> None:
        """Ends everything, whether or not it was built."""


def run(recipe_class: type[Recipe], cfg: DictConfig) -> int:
    """Runs a recipe on this rank, under torchrun.

    Args:
        recipe_class: the recipe.
        cfg: the config as it was parsed, unchecked.

    Returns:
        The exit status: 0, 1 if the config can't run, which rank 0 has said, 130 if interrupted.
    """
    die_with_parent()  # torchrun's agent, which could be killed without a chance to end us
    dist.init_process_group(training.get_distributed_backend(cfg.get("device", "cpu")))
    # The other ranks wait here while rank 0 waits for long answers; gloo's default is half an hour.
    control = dist.new_group(backend="gloo", timeout=datetime.timedelta(days=7))
    if dist.get_rank() > 0:
        # Rank 0 has all there is to clean up; the others may be deep in a collective.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    else:
        # torchrun's, when another rank has died: clean up as after an error.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    cfg, lock = _checked(recipe_class, cfg, control)
    if cfg is None:
        return 1
    recipe = recipe_class(cfg, control)
    try:
        recipe.setup()
        recipe.train()
    except KeyboardInterrupt:
        print(
            f"\ninterrupted; what was written so far is in {cfg.output_dir}; resume=auto goes on "
            "from the newest checkpoint",
            file=sys.stderr,
        )
        return 130
    finally:
        recipe.cleanup()
        if lock is not None:
            lock.close()
    return 0


def _checked(
    recipe_class: type[Recipe], cfg: DictConfig, control: dist.ProcessGroup
) -> tuple[DictConfig | None, TextIO | None]:
    """The config as rank 0 has checked it, on all ranks; None if rank 0 has said it can't run.

    And what keeps other runs out of its folder for as long as rank 0 has it.
    """
    message: list[DictConfig | None] = [None]
    lock = None
    if dist.get_rank() == 0:
        try:
            checked = load_config(cfg, training=True)
            recipe_class.check(checked)
            lock = begin_in(checked)
            message = [checked]
        except (ConfigError, RunFolderError) as error:
            print(f"config error: {error}", file=sys.stderr, flush=True)
    dist.broadcast_object_list(message, src=0, group=control)
    return message[0], lock
