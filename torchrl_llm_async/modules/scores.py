"""What a policy says of given tokens, and how any actor is asked for it.

Owns :class:`TokenScores` and the choice of the way to get them. Holds no model.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

EntropyMode = Literal["off", "detached", "differentiable"]


class TokenScores(NamedTuple):
    """Scores of tokens, each of shape [N, T]; 0 at positions not asked for.

    Attributes:
        log_probs (Tensor): log-prob of token i given those before it, float32 at least.
        entropy (Tensor, optional): of the distribution token i was drawn from, in nats.
        values (Tensor, optional): the critic's value of the state before token i.
    """

    log_probs: Tensor
    entropy: Tensor | None = None
    values: Tensor | None = None


def score_tokens(
    actor: TensorDictModuleBase,
    micro: TensorDictBase,
    *,
    mask: Tensor,
    entropy: EntropyMode = "off",
    values: bool = False,
) -> TokenScores:
    """Scores of the tokens of a micro-batch where ``mask`` [N, T] holds."""
    return actor.score(micro, mask=mask, entropy=entropy, values=values)
