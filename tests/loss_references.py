"""The losses once more, from their equations: plain Python, one token at a time, in float64.

Slow on purpose, and nothing here is taken from the package. Gradients come from a complex step
(Squire and Trapp, 1998): for f analytic, f(x + ih) = f(x) + ih f'(x) + O(h^2), so h = 1e-30 gives
f' to rounding, without a derivative written by hand. A stopped gradient is then a real part.
"""

from __future__ import annotations

import cmath
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from loss_batches import TARGET_VERSION, Trajectory

STEP = 1e-30


def gradient(function: Callable[[list[complex]], complex], point: Sequence[float]) -> list[float]:
    """Partial derivatives of a function that is analytic (piecewise, by real parts)."""
    slopes = []
    for i in range(len(point)):
        moved = [complex(x, STEP if i == j else 0.0) for j, x in enumerate(point)]
        slopes.append(complex(function(moved)).imag / STEP)
    return slopes


def exp(value: complex) -> complex:
    """exp of an argument bounded by +-20; flat beyond."""
    value = complex(value)
    return cmath.exp(value) if abs(value.real) <= 20 else cmath.exp(math.copysign(20, value.real))


def larger(a: complex, b: complex) -> complex:
    return a if complex(a).real >= complex(b).real else b


def smaller(a: complex, b: complex) -> complex:
    return a if complex(a).real <= complex(b).real else b


# --- Decoupled PPO ----------------------------------------------------------------------------


@dataclass
class PPOToken:
    """What the loss says of one sampled token; ``loss`` and ``kl`` may have an imaginary part."""

    loss: complex
    kl: complex
    weight: float
    ratio: float
    prox: float
    out_of_range: bool
    below: bool
    above: bool


def anchor(row: Trajectory, theta: list[complex], prox: str) -> list[float]:
    """log prox of every token, a constant."""
    if prox == "recompute":
        return row.prox
    if prox == "behavior":
        return row.mu
    out = []
    for mu, now, version in zip(row.mu, theta, row.version, strict=True):
        age = TARGET_VERSION - version
        share = (age - 1) / age if age > 1 else 0.0
        out.append(mu + share * (now.real - mu))
    return out


def behavior_weights(row: Trajectory, prox: list[float], options: dict) -> dict[int, tuple]:
    """By sampled token: the corrected weight w', and whether w was out of its range."""
    answer = row.answer()
    log_w = {t: prox[t] - row.mu[t] for t in answer}
    cap = options.get("correction_cap", 5.0)
    floor = options.get("correction_floor")
    floor = 1 / cap if floor is None else floor
    out = {}
    for t in answer:
        exponent = {
            "token": log_w[t],
            "sequence": sum(log_w.values()),
            "geometric": sum(log_w.values()) / len(answer),
        }[options.get("correction_level", "token")]
        w = exp(exponent).real
        match options.get("correction", "truncate"):
            case "off":
                out[t] = 1.0, False
            case "truncate":
                out[t] = (cap, True) if w > cap else (w, False)
            case "mask":
                out[t] = (0.0, True) if w > cap else (w, False)
            case "both":
                out[t] = (0.0, True) if w > cap or w < floor else (w, False)
    return out


def ppo_tokens(
    row: Trajectory, options: dict, theta: list[complex] | None = None
) -> list[PPOToken]:
    """The sampled tokens of one sequence under decoupled PPO."""
    theta = row.theta if theta is None else theta
    answer = row.answer()
    prox = anchor(row, theta, options.get("prox", "recompute"))
    weights = behavior_weights(row, prox, options)
    low, high = options.get("clip_epsilon", (0.2, 0.2))
    dual = options.get("dual_clip")
    tokens = []
    for t in answer:
        log_ratio = theta[t] - prox[t]
        if options.get("ratio_level", "token") == "sequence":  # GSPO
            log_ratio = sum(theta[s] - prox[s] for s in answer) / len(answer)
        r, a = exp(log_ratio), row.advantage[t]
        clipped = smaller(larger(r, 1 - low), 1 + high)
        loss = larger(-a * r, -a * clipped)
        if dual is not None and a < 0:
            loss = smaller(loss, -a * dual)
        w, out_of_range = weights[t]
        gap = row.ref[t] - theta[t]
        if options.get("kl_estimator", "k2") == "k2":
            kl = gap * gap / 2
        else:
            kl = exp(gap) - 1 - smaller(gap, 20.0)
        tokens.append(
            PPOToken(
                loss=w * loss,
                kl=kl,
                weight=w,
                ratio=r.real,
                prox=prox[t],
                out_of_range=out_of_range,
                below=a < 0 and r.real < 1 - low,
                above=(a > 0 and r.real > 1 + high) or bool(dual and a < 0 and r.real > dual),
            )
        )
    return tokens


def ppo(trajectories: Sequence[Trajectory], options: dict) -> tuple[float, list, list]:
    """The step's loss, and its gradients by log-probs and by entropies, per trajectory."""
    answers = [row.answer() for row in trajectories]
    sequences = sum(bool(answer) for answer in answers)
    aggregation = options.get("aggregation", "token")
    count = {
        "token": sum(len(answer) for answer in answers),
        "sequence": sequences,
        "fixed": sequences * (options.get("fixed_length") or 0),
    }[aggregation]

    def of_row(row: Trajectory, theta: list[complex], entropy: list[complex]) -> complex:
        answer, total = row.answer(), 0j
        for t, token in zip(answer, ppo_tokens(row, options, theta), strict=True):
            total += token.loss
            importance = min(options.get("correction_cap", 5.0), token.weight * token.ratio)
            total += options.get("kl_to_ref_coeff", 0.0) * importance * token.kl
            total -= options.get("entropy_coeff", 0.0) * entropy[t]
        return total / ((len(answer) or 1) if aggregation == "sequence" else 1) / (count or 1)

    loss = sum(of_row(row, row.theta, row.entropy).real for row in trajectories)
    by_theta = [gradient(lambda x, r=r: of_row(r, x, r.entropy), r.theta) for r in trajectories]
    by_entropy = [gradient(lambda x, r=r: of_row(r, r.theta, x), r.entropy) for r in trajectories]
    return loss, by_theta, by_entropy


def ppo_diagnostics(trajectories: Sequence[Trajectory], options: dict) -> dict[str, tuple]:
    """(sum, count) over sampled tokens of everything the loss reports."""
    sums: dict[str, list[float]] = {}

    def add(name: str, value: float, counted: bool = True) -> None:
        entry = sums.setdefault(name, [0.0, 0])
        if counted:
            entry[0] += value
            entry[1] += 1

    def k3(log_q: float, log_p: float) -> float:
        return math.exp(log_p - log_q) - 1 - (log_p - log_q)

    for row in trajectories:
        for t, token in zip(row.answer(), ppo_tokens(row, options), strict=True):
            theta, mu = row.theta[t], row.mu[t]
            add("ratio", token.ratio)
            add("clip_fraction_low", token.below)
            add("clip_fraction_high", token.above)
            add("correction_fraction", token.out_of_range)
            add("behavior_weight", token.weight)
            add("importance", token.weight * token.ratio)
            add("importance_squared", (token.weight * token.ratio) ** 2)
            add("kl_behavior_to_policy", mu - theta)
            add("kl_to_prox", token.weight * token.ratio * k3(theta, token.prox))
            add("kl_prox_to_behavior", token.weight * k3(token.prox, mu))
            add("kl_to_ref", token.kl.real)
            add("entropy", row.entropy[t])
    anchored = options.get("prox", "recompute") == "recompute"
    return sums | lag_diagnostics(trajectories, anchored=anchored)


def lag_diagnostics(trajectories: Sequence[Trajectory], *, anchored: bool) -> dict[str, tuple]:
    """(sum, count) over sampled tokens of known version, by lag."""
    sums: dict[str, list[float]] = {}

    def add(name: str, value: float, counted: bool) -> None:
        entry = sums.setdefault(name, [0.0, 0])
        entry[0] += value * counted
        entry[1] += counted

    for row in trajectories:
        for t in row.answer():
            theta, mu = row.theta[t], row.mu[t]
            known = row.version[t] >= 0
            lag = TARGET_VERSION - 1 - row.version[t]
            for first, last in ((0, 0), (1, 1), (2, 2), (3, 4), (5, 8), (9, 10**9)):
                bucket = f"{first}-{last}" if first < last < 10**9 else f"{first}"
                bucket += "+" if last == 10**9 else ""
                inside = known and first <= lag <= last
                add(f"ratio_by_lag/{bucket}", math.exp(theta - mu), inside)
                add(f"log_ratio_size_by_lag/{bucket}", abs(theta - mu), inside)
            start = row.prox[t] if anchored else theta
            add("mismatch_lag_0", abs(start - mu), lag == 0)
    return sums


# --- Online DPO -------------------------------------------------------------------------------


def best_against_worst(trajectories: Sequence[Trajectory]) -> tuple[list[tuple[int, int]], int]:
    """(chosen, rejected) rows of every group, the first of several equals; and tied groups."""
    pairs, ties = [], 0
    for group in dict.fromkeys(row.group for row in trajectories):
        members = [i for i, row in enumerate(trajectories) if row.group == group]
        best = worst = members[0]
        for i in members:
            best = i if trajectories[i].reward > trajectories[best].reward else best
            worst = i if trajectories[i].reward < trajectories[worst].reward else worst
        if trajectories[best].reward > trajectories[worst].reward:
            pairs.append((best, worst))
        else:
            ties += 1
    return pairs, ties


def preference(h: complex, options: dict) -> complex:
    """The loss of a pair by its margin h, without label smoothing."""
    beta = options.get("beta", 0.1)
    match options.get("loss_type", "sigmoid"):
        case "sigmoid":
            return -cmath.log(1 / (1 + cmath.exp(-beta * h)))
        case "hinge":
            return larger(0.0, 1 - beta * h)
        case "ipo":
            return (h - 1 / (2 * beta)) ** 2


def pair_weight(members: Sequence[Trajectory], options: dict) -> float:
    """How much a stale pair counts: the geometric mean of its tokens' ratios, at most the cap."""
    cap = options.get("importance_cap")
    if cap is None:
        return 1.0
    log_ratios = [row.theta[t] - row.mu[t] for row in members for t in row.answer()]
    return min(cap, exp(sum(log_ratios) / len(log_ratios)).real)


def dpo(
    trajectories: Sequence[Trajectory], pairs: Sequence[tuple[int, int]], options: dict
) -> tuple[float, list, int]:
    """The loss over the given pairs, its gradient by log-probs, and how many pairs counted."""
    smoothing = options.get("label_smoothing", 0.0)
    pairs = [pair for pair in pairs if any(trajectories[i].answer() for i in pair)]

    def implicit_reward(row: Trajectory, theta: Sequence[complex]) -> complex:
        return sum((theta[t] - row.ref[t] for t in row.answer()), 0j)

    def of_pair(pair: tuple[int, int], theta: dict[int, Sequence[complex]]) -> complex:
        chosen, rejected = (implicit_reward(trajectories[i], theta[i]) for i in pair)
        h = chosen - rejected
        loss = (1 - smoothing) * preference(h, options) + smoothing * preference(-h, options)
        return pair_weight([trajectories[i] for i in pair], options) * loss / len(pairs)

    now = {i: row.theta for i, row in enumerate(trajectories)}
    loss = sum(of_pair(pair, now).real for pair in pairs)
    by_theta = [[0.0] * len(row.theta) for row in trajectories]
    for pair in pairs:
        for i in pair:
            slopes = gradient(lambda x, i=i, pair=pair: of_pair(pair, now | {i: x}), now[i])
            by_theta[i] = [a + b for a, b in zip(by_theta[i], slopes, strict=True)]
    return loss, by_theta, len(pairs)
