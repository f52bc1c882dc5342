"""What the losses share: how they read a micro-batch, and what they return.

Owns :class:`AsyncLLMLoss`, the interface between a loss and the loop that trains
with it, and :class:`LossOutput`. Holds no loss arithmetic (see :mod:`.functional`),
does no packing, and never talks to another rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from tensordict import NestedKey, TensorClass, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from torchrl.objectives.common import LossModule


class LossOutput(TensorClass["nocast"]):
    """Base of what a loss returns: ``loss_*`` entries and detached diagnostics.

    A ``loss_*`` entry is a scalar, already divided by the step's normalizer. Every
    other entry is a diagnostic of shape ``(2,)``, a sum and how many values it is over,
    so that diagnostics add over micro-batches and ranks; their mean is
    ``entry[0] / entry[1]``. Entries that are switched off are None.
    """

    def total(self) -> Tensor:
        """Sum of the ``loss_*`` entries, the scalar to call ``backward`` on."""
        return sum(
            value for name, value in self.items() if name.startswith("loss_") and value is not None
        )

    def diagnostics(self) -> dict[str, Tensor]:
        """The ``(sum, count)`` entries by name, each of shape ``(2,)``, detached."""
        return {
            name: value
            for name, value in self.items()
            if not name.startswith("loss_") and value is not None
        }


def sum_and_count(values: Tensor, mask: Tensor) -> Tensor:
    """``(sum, count)`` of the values where ``mask`` holds: shape ``(2,)``, detached."""
    kept = torch.where(mask, values.detach().to(torch.float32), 0.0)
    return torch.stack([kept.sum(), mask.sum().to(torch.float32)])


class AsyncLLMLoss(LossModule):
    """A loss as the asynchronous training loop uses it.

    In each training step the loop calls, in this order,

    1. :meth:`select` on the sampled batch: the rows to train on;
    2. :meth:`denominator` on the rows each optimizer update will see, summed over ranks;
    3. :meth:`anchor` on each micro-batch, before the step's first optimizer update; it
       may be left out where the step makes one update only;
    4. the loss itself on each micro-batch. Its ``loss_*`` entries are sums divided by
       the normalizer, so the gradients of a step's micro-batches and ranks add up to
       that of one large batch, whatever the packing. FSDP averages gradients over
       ranks: multiply by their number before ``backward``.

    Args:
        actor_network (TensorDictModuleBase): the policy being trained. It offers
            ``log_probs(micro, *, mask, entropy) -> (log_probs, entropy or None)``, as
            :class:`~torchrl_llm_async.modules.TorchtuneActor` does.
        reference_network (TensorDictModuleBase, optional): a frozen policy of the same
            interface. Its log-probs are computed, without gradient, where the
            micro-batch does not bring them.

    Attributes:
        packing_unit: what packing must not split: a ``"sequence"``, a ``"pair"`` of
            adjacent rows, or a ``"group"`` of adjacent rows.
        groups_tied (int): groups that the last call of :meth:`select` skipped, since their
            rewards tell nothing.
    """

    packing_unit: Literal["sequence", "pair", "group"] = "sequence"
    groups_tied: int = 0

    @dataclass
    class _AcceptedKeys:
        """Keys every loss reads; see ``set_keys``.

        Attributes:
            assistant_mask (NestedKey): True where the policy sampled the token.
                Defaults to ``("masks", "all_assistant_mask")``.
            ref_log_prob (NestedKey): log-probs of the reference.
                Defaults to ``("log_probs", "ref")``.
        """

        assistant_mask: NestedKey = ("masks", "all_assistant_mask")
        ref_log_prob: NestedKey = ("log_probs", "ref")

    default_keys = _AcceptedKeys
    tensor_keys: _AcceptedKeys

    def __init__(
        self,
        actor_network: TensorDictModuleBase,
        *,
        reference_network: TensorDictModuleBase | None = None,
    ) -> None:
        super().__init__()
        self.actor_network = actor_network
        self.reference_network = reference_network

    def _forward_value_estimator_keys(self, **kwargs) -> None:
        """No value estimator; ``in_keys`` follow ``tensor_keys`` by themselves."""

    @property
    def in_keys(self) -> list[NestedKey]:
        """What the actor reads, then every key of ``tensor_keys`` without repeats."""
        own = vars(self.tensor_keys).values()
        return list(dict.fromkeys([*self.actor_network.in_keys, *own]))

    @property
    def needs_reference(self) -> bool:
        """Whether the loss reads the reference's log-probs."""
        return False

    def select(self, batch: TensorDictBase, *, target_version: int | None = None) -> TensorDictBase:
        """The rows to train on, with whatever else ``forward`` needs of the whole batch.

        Args:
            batch (TensorDictBase): ``(B * K,)``, the rows of a group adjacent.
            target_version (int, optional): the version this step trains towards, one
                more than that of the weights it starts from.

        Returns:
            TensorDictBase: rows that share their tensors with ``batch``; may be empty.
        """
        return batch

    def anchor(self, micro: TensorDictBase) -> TensorDictBase:
        """The micro-batch with what must be computed before the step's first update."""
        return micro

    def denominator(self, rows: TensorDictBase) -> Tensor:
        """What these rows contribute to the normalizer of ``forward``, scalar int64."""
        raise NotImplementedError

    def forward(self, micro: TensorDictBase, *, normalizer: Tensor | float) -> LossOutput:
        """The loss of one micro-batch.

        Args:
            micro (TensorDictBase): ``(N,)`` rows, dense and padded on the left, or ragged.
            normalizer (Tensor or float): :meth:`denominator` of everything the current
                optimizer update sees, summed over micro-batches and ranks.

        Returns:
            LossOutput: connected to the actor's graph even if no token counts.
        """
        raise NotImplementedError

    def _find(
        self, rows: TensorDictBase, name: str, fill: float | int | bool | None = None
    ) -> Tensor | None:
        """The entry at the accepted key ``name``, None if there is none.

        With ``fill`` it has one value per token and is padded on the left with that.
        """
        key = getattr(self.tensor_keys, name)
        if fill is None:
            return rows.get(key, None)
        return rows.get(key, None, as_padded_tensor=True, padding_side="left", padding_value=fill)

    def _read(
        self, rows: TensorDictBase, name: str, fill: float | int | bool | None = None
    ) -> Tensor:
        """Like :meth:`_find`, for an entry that must be there."""
        value = self._find(rows, name, fill)
        if value is None:
            raise KeyError(
                f"{type(self).__name__} found no {name} at {getattr(self.tensor_keys, name)!r} "
                f"among {sorted(map(str, rows.keys(True, True)))}. Write it there, or point the "
                f"loss to it with set_keys({name}=...)."
            )
        return value

    def _reference_log_prob(self, micro: TensorDictBase, mask: Tensor) -> Tensor:
        """[N, T], read from the micro-batch or computed by the reference network."""
        if self.reference_network is None:
            return self._read(micro, "ref_log_prob", 0.0)
        recorded = self._find(micro, "ref_log_prob", 0.0)
        if recorded is not None:
            return recorded
        with torch.no_grad():
            return self.reference_network.log_probs(micro, mask=mask)[0]


def row_ids(mask: Tensor) -> Tensor:
    """Segment ids of a padded micro-batch: the row of each token of ``mask`` [N, T], flat."""
    rows, length = mask.shape
    return torch.arange(rows, device=mask.device).repeat_interleave(length)


def require(condition: bool, message: str) -> None:
    """Raises ``ValueError(message)`` unless the condition of an option holds."""
    if not condition:
        raise ValueError(message)
