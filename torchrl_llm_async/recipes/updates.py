"""One optimizer update: the gradient's norm, clipping, the step, the schedule.

Owns what becomes of a gradient that is not finite: the update is skipped and counted, and too many
in a row end the run. Computes no gradient.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LRScheduler
from torchrl._utils import logger as torchrl_logger


class Updates:
    """Makes the optimizer's updates. Every rank has one, and calls it alike.

    Args:
        model: plain, or sharded by FSDP2; its parameters hold the gradient of the whole update.
        optimizer: of the model's parameters.
        lr_scheduler: stepped once per update, skipped ones included, so that it ends with the run.
        clip_grad_norm: largest norm; None for no clipping.
        max_skipped: updates in a row that may be skipped since their gradient is not finite.

    Attributes:
        skipped (int): updates skipped so far.

    Examples:
        >>> model = nn.Linear(2, 1, bias=False)
        >>> updates = Updates(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> _ = nn.init.ones_(model.weight)
        >>> model(torch.tensor([3.0, 4.0])).sum().backward()
        >>> updates.step()
        5.0
        >>> model.weight
        Parameter containing:
        tensor([[0.7000, 0.6000]], requires_grad=True)
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        lr_scheduler: LRScheduler | None = None,
        *,
        clip_grad_norm: float | None = None,
        max_skipped: int = 3,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._lr_scheduler = lr_scheduler
        self._max_norm = float("inf") if clip_grad_norm is None else clip_grad_norm
        self._max_skipped = max_skipped
        self._skipped_in_a_row = 0
        self.skipped = 0

    def step(self) -> float | None:
        """Takes the gradients there are, and clears them.

        Returns:
            The norm of the gradient before clipping; None if it is not finite, and nothing done.

        Raises:
            RuntimeError: it is so for more than ``max_skipped`` updates in a row.
        """
        parameters = self._model.parameters()
        norm: Any = torch.nn.utils.clip_grad_norm_(parameters, max_norm=self._max_norm)
        norm = (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()
        is_finite = math.isfinite(norm)
        if is_finite:
            self._optimizer.step()
            self._skipped_in_a_row = 0
        else:
            self._skip(norm)
        self._optimizer.zero_grad(set_to_none=True)
        self.pass_over()
        return norm if is_finite else None

    def pass_over(self) -> None:
        """Counts an update that has nothing to learn from: only the schedule goes on."""
        if self._lr_scheduler is not None:
            self._lr_scheduler.step()

    def _skip(self, norm: float) -> None:
        self.skipped += 1
        self._skipped_in_a_row += 1
        if self._skipped_in_a_row > self._max_skipped:
            raise RuntimeError(
                f"The gradient's norm is {norm} in {self._skipped_in_a_row} updates in a row "
                f"(max_skipped_updates is {self._max_skipped}). Lower optimizer.lr, set "
                "clip_grad_norm, or look at the samples (dump_samples: true)."
            )
        torchrl_logger.warning(
            f"The gradient's norm is {norm}: the update is skipped, {self.skipped} so far."
        )
