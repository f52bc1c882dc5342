"""Checks of what losses and transforms are constructed with.

Owns the words in which a wrong option is refused, before anything is trained. Knows no loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real
from typing import Any, get_args

from torchrl_llm_async.objectives import functional


def check_numbers(**options: Any) -> None:
    """Whether each is a number, or None; YAML takes 1e-3 for text."""
    for name, value in options.items():
        require(
            value is None or (isinstance(value, Real) and not isinstance(value, bool)),
            f"{name}={value!r} is no number, but {type(value).__name__}; in YAML write 1.0e-3, not "
            "1e-3, and no quotes.",
        )


def check_clip_epsilon(clip_epsilon: float | Sequence[float]) -> tuple[float, float]:
    """The option as (epsilon_l, epsilon_h)."""
    is_pair = isinstance(clip_epsilon, Sequence) and not isinstance(clip_epsilon, str)
    pair = tuple(clip_epsilon) if is_pair else (clip_epsilon, clip_epsilon)
    require(
        len(pair) == 2 and None not in pair,
        f"clip_epsilon={clip_epsilon!r} must be a number, or one below and one above, e.g. 0.2 "
        "or [0.2, 0.28].",
    )
    low, high = pair
    check_numbers(clip_epsilon=low)
    check_numbers(clip_epsilon=high)
    require(
        0 < low < 1 and high > 0,
        f"clip_epsilon={clip_epsilon} must lie in (0, 1) below and above 0 above, e.g. "
        "0.2 or [0.2, 0.28].",
    )
    return float(low), float(high)


def check_aggregation(aggregation: functional.Aggregation, fixed_length: int | None) -> None:
    """Whether both options are right, and go together."""
    accepted = get_args(functional.Aggregation)
    check_numbers(fixed_length=fixed_length)
    require(aggregation in accepted, f"aggregation={aggregation!r} is not one of {accepted}.")
    require(
        (aggregation == "fixed") == (fixed_length is not None),
        f"fixed_length={fixed_length} with aggregation={aggregation!r}: 'fixed' needs a "
        "number of tokens, the others take none.",
    )
    require(
        fixed_length is None or fixed_length >= 1,
        f"fixed_length={fixed_length} must be at least 1 token, e.g. the most that are sampled.",
    )


def require(condition: bool, message: str) -> None:
    """Raises ``ValueError(message)`` unless the condition of an option holds."""
    if not condition:
        raise ValueError(message)
