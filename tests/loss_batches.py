"""Random trajectories in plain numbers, and the same as the batches a loss reads.

The references (``loss_references``) read :class:`Trajectory`; the losses read tensordicts made of
it, in each of the forms a micro-batch may have. :class:`TablePolicy` stands for the model, so that
a loss's gradient is by log-probs, token by token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from tensordict.nn import TensorDictModuleBase

from torchrl_llm_async.modules.scores import TokenScores
from torchrl_llm_async.packing import blank_rows, pack_rows, pad_rows

TARGET_VERSION = 14
VOCABULARY = 23


@dataclass
class Trajectory:
    """One row: lists of one entry per token, and what is said of the whole of it."""

    sampled: list[bool]
    theta: list[float]
    mu: list[float]
    prox: list[float]
    ref: list[float]
    entropy: list[float]
    value: list[float]
    version: list[int]
    advantage: list[float]
    reward: float
    group: int
    index: int

    def answer(self) -> list[int]:
        """Positions of the sampled tokens."""
        return [t for t, sampled in enumerate(self.sampled) if sampled]


def random_trajectories(
    seed: int,
    *,
    rows: int = 6,
    group_size: int = 2,
    longest: int = 7,
    empty: float = 0.1,
    outliers: float = 0.0,
    oldest: int = 1,
    per_token_advantage: bool = False,
) -> list[Trajectory]:
    """Ragged trajectories of 2 to ``longest`` tokens, with gaps between the sampled ones.

    Versions lie between ``oldest`` and the newest before :data:`TARGET_VERSION`; -1 is unknown.
    Every row but a share ``empty`` of them has a sampled token. A share ``outliers`` of the tokens
    is where two policies are apart by more than any ratio may be. Rewards are 0, 1 or 2, so ties
    happen.
    """
    rng = np.random.default_rng(seed)
    trajectories = []
    for row in range(rows):
        length = int(rng.integers(2, longest + 1))
        sampled = rng.random(length) < 0.7
        sampled[0], sampled[-1] = False, True
        if rng.random() < empty:
            sampled[:] = False
        mu = rng.normal(-1.5, 1.0, length)
        theta, prox, ref = (mu + rng.normal(0, spread, length) for spread in (0.5, 0.8, 0.8))
        for policy in (theta, prox, ref):
            policy += rng.choice([-30, 0, 30], length, p=[outliers / 2, 1 - outliers, outliers / 2])
        advantage = rng.normal(0, 1, length if per_token_advantage else 1)
        trajectories.append(
            Trajectory(
                sampled=sampled.tolist(),
                theta=theta.tolist(),
                mu=mu.tolist(),
                prox=prox.tolist(),
                ref=ref.tolist(),
                entropy=rng.random(length).tolist(),
                value=rng.normal(0, 1, length).tolist(),
                version=np.where(
                    sampled, rng.integers(oldest, TARGET_VERSION, length), -1
                ).tolist(),
                advantage=np.broadcast_to(advantage, length).tolist(),
                reward=float(rng.integers(0, 3)),
                group=row // group_size,
                index=row % group_size,
            )
        )
    return trajectories


class TablePolicy(TensorDictModuleBase):
    """A policy that is its own table of scores: entry ``("table", "place")`` says which."""

    def __init__(self, trajectories: Sequence[Trajectory]) -> None:
        super().__init__()
        self.in_keys = [("table", "place")]
        self.out_keys = []
        self.lengths = [len(row.theta) for row in trajectories]
        self.log_probs, self.entropy, self.values = (
            torch.nn.Parameter(
                torch.tensor(
                    [number for row in trajectories for number in getattr(row, name)],
                    dtype=torch.float64,
                )
            )
            for name in ("theta", "entropy", "value")
        )

    def score(self, micro, *, mask=None, entropy="off", values=False) -> TokenScores:
        place = micro.get(
            ("table", "place"), as_padded_tensor=True, padding_side="left", padding_value=-1
        )
        mask = place >= 0 if mask is None else mask

        def look_up(table: torch.Tensor) -> torch.Tensor:
            return torch.where(mask, table[place.clamp_min(0)], 0.0)

        value = self.entropy.detach() if entropy == "detached" else self.entropy
        return TokenScores(
            look_up(self.log_probs),
            None if entropy == "off" else look_up(value),
            look_up(self.values) if values else None,
        )

    def gradients(self, name: str = "log_probs") -> list[list[float]]:
        """Those of one table, per trajectory; 0 where there is none."""
        table = getattr(self, name)
        gradient = torch.zeros_like(table) if table.grad is None else table.grad
        return [part.tolist() for part in gradient.split(self.lengths)]


def to_batch(
    trajectories: Sequence[Trajectory], *, per_token_advantage: bool = False
) -> TensorDictBase:
    """The ragged rows a loss's ``select`` gets: as the replay buffer gives them, in float64."""
    place, rows = 0, []
    for row in trajectories:
        length = len(row.theta)
        sampled = torch.tensor(row.sampled)
        numbers = {
            name: torch.tensor(getattr(row, name), dtype=torch.float64)
            for name in ("mu", "prox", "ref", "advantage")
        }
        rows.append(
            TensorDict(
                {
                    "tokens": {"full": torch.arange(place, place + length) * 7 % VOCABULARY},
                    "masks": {
                        "all_attention_mask": torch.ones(length, dtype=torch.bool),
                        "all_assistant_mask": sampled,
                    },
                    "log_probs": {
                        # What a collector writes for a token that nobody sampled.
                        "full": torch.where(sampled, numbers["mu"], 0.0),
                        "prox": numbers["prox"],
                        "ref": numbers["ref"],
                    },
                    "policy_version": {"full": torch.tensor(row.version)},
                    "advantage": numbers["advantage"][: None if per_token_advantage else 1],
                    "next": {"reward": torch.tensor([row.reward], dtype=torch.float64)},
                    "group": {"id": torch.tensor(row.group), "index": torch.tensor(row.index)},
                    "table": {"place": torch.arange(place, place + length)},
                }
            )
        )
        place += length
    return lazy_stack(rows)


FORMS = ("ragged", "padded", "packed", "one row", "padded parts", "packed parts", "mixed parts")


def micro_batches(
    rows: TensorDictBase, form: str, seed: int = 0, *, unit: int = 1
) -> list[TensorDictBase]:
    """The rows as a loss may get them; ``unit`` adjacent rows stay together.

    As they are, padded, packed, packed into one row alone; or dealt at random to several
    micro-batches, with one among them that has nothing to train.
    """
    if form == "ragged":
        return [rows]
    if form == "one row":
        tokens = sum(len(row["tokens", "full"]) for row in rows.unbind(0))
        return [pack_rows(rows, pad_id=0, row_tokens=tokens + 1)]
    kind, _, parts = form.partition(" ")
    makers = {"padded": [pad_rows], "packed": [pack_rows], "mixed": [pad_rows, pack_rows]}[kind]
    if not parts:
        return [makers[0](rows, pad_id=0)]
    rng = np.random.default_rng(seed)
    units = rng.permutation(len(rows) // unit)
    cuts = np.unique([0, len(units), *rng.integers(0, len(units) + 1, 2)])
    micros = [blank_rows(rows, pad_id=0)]
    for start, stop in pairwise(cuts):
        indices = [unit * u + k for u in units[start:stop].tolist() for k in range(unit)]
        micros.append(makers[len(micros) % len(makers)](rows[indices], pad_id=0))
    return micros


def flat(lists: Sequence[Sequence[float]]) -> list[float]:
    """The numbers of all trajectories, one behind another."""
    return [number for numbers in lists for number in numbers]


def backward(loss, micros: Sequence[TensorDictBase], normalizer) -> float:
    """Accumulates the gradients of micro-batches; gives the summed loss."""
    total = 0.0
    for micro in micros:
        output = loss(micro, normalizer=normalizer)
        output.total().backward()
        total += output.total().item()
    return total
