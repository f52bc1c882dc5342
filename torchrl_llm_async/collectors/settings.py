"""What a collector is to do, and what it counts: plain data that both of its sides know."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from torchrl.envs import EnvBase

from torchrl_llm_async.data.filters import GroupFilter
from torchrl_llm_async.deadlines import check_bounds
from torchrl_llm_async.engines import SamplingConfig


@dataclass(frozen=True)
class RolloutConfig:
    """What a collector does; see :class:`.AsyncLLMCollector` for the meaning of each field."""

    make_env: Callable[[], EnvBase]
    tokenizer_path: str
    sampling: SamplingConfig
    group_size: int
    groups_per_step: int
    max_staleness: int
    total_steps: int | None
    max_concurrent_groups: int
    max_turns: int
    env_workers: int
    step_timeout: float
    step_retries: int
    max_failures: int
    max_rejections: int
    group_filter: GroupFilter | None
    longest_first: bool
    seed: int
    make_eval_env: Callable[[], EnvBase] | None
    eval_problems: int
    dump_path: Path | None
    log_path: Path | None

    def __post_init__(self) -> None:
        for name in (
            "group_size",
            "max_concurrent_groups",
            "max_turns",
            "env_workers",
            "max_failures",
            "max_rejections",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.step_timeout <= 0:
            raise ValueError(f"step_timeout is {self.step_timeout}; it must be a number of seconds")
        if self.step_retries < 0:
            raise ValueError(f"step_retries is {self.step_retries}; it must be 0 (none) or more")
        check_bounds(self.groups_per_step, self.max_staleness)


@dataclass
class RolloutStats:
    """Running totals since the start, in the units their names tell."""

    groups: int = 0
    samples: int = 0
    sampled_tokens: int = 0
    elapsed_s: float = 0.0
    # Time in which the staleness bound left no room for another group.
    waiting_for_trainer_s: float = 0.0
    weight_update_s: float = 0.0
    weight_updates_refused: int = 0
    # Tokens of finished trajectories whose group was rejected.
    rejected_tokens: int = 0
    env_retries: int = 0
    # Of answers whose engine died; see PoolStats.
    engine_restarts: int = 0
    resubmitted: int = 0
    given_up: int = 0
    kept_tokens: int = 0
    # Sampled in vain: by an engine that died, for groups dropped before they were complete, and
    # where a conversation taken up in a resumed run went another way.
    discarded_tokens: int = 0
    # The ledger: always submitted = running + accepted + rejected + dropped.
    submitted: int = 0
    running: int = 0
    accepted: int = 0
    rejected: int = 0
    dropped: int = 0
    # Rejected groups by reason.
    reasons: dict[str, int] = field(default_factory=dict)

    def flat(self) -> dict[str, int | float]:
        """All of them by name, those of ``reasons`` as ``"rejected/<reason>"``."""
        totals = dict(vars(self))
        reasons = totals.pop("reasons")
        return totals | {f"rejected/{reason}": count for reason, count in reasons.items()}
