"""Builds a recipe's collector from its config; what training and evaluation share."""

from __future__ import annotations

import functools
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from torchtune import config

from torchrl_llm_async.collectors import AsyncLLMCollector
from torchrl_llm_async.data import FirstReason, StalenessReplayBuffer
from torchrl_llm_async.engines import EnginePool, SamplingConfig

# The collector's arguments that make_collector passes, and the recipe key each is made from.
COLLECTOR_KEYS = {
    "create_env_fn": "env",
    "engine": "engine",
    "tokenizer": "model_dir",
    "sampling": "sampling",
    "group_size": "group_size",
    "groups_per_step": "groups_per_step",
    "max_staleness": "max_staleness",
    "total_steps": "total_steps",
    "replay_buffer": "advantage",
    "seed": "seed",
    "create_eval_env_fn": "eval_env",
    "eval_problems": "eval_problems",
    "group_filter": "group_filter",
    "dump_path": "dump_samples",
    "log_path": "output_dir",
}


def filter_nodes(cfg: DictConfig) -> list:
    """The group filters of a config, which has none, one or a list of them."""
    node = cfg.group_filter
    if OmegaConf.is_list(node):
        return list(node)
    return [] if node is None else [node]


def make_collector(
    cfg: DictConfig,
    *,
    output_dir: Path,
    total_steps: int,
    replay_buffer: StalenessReplayBuffer | None = None,
) -> AsyncLLMCollector:
    """A collector that has not started; it prints to ``collector.log`` in ``output_dir``."""
    engines = [config.instantiate(cfg.engine) for _ in range(cfg.num_engines)]
    filters = filter_nodes(cfg)
    stop_tokens = tuple(config.instantiate(cfg.tokenizer).stop_tokens)
    return AsyncLLMCollector(
        functools.partial(config.instantiate, cfg.env),
        engines[0] if len(engines) == 1 else EnginePool(engines),
        tokenizer=cfg.model_dir,
        sampling=SamplingConfig(**{"stop_token_ids": stop_tokens, **cfg.sampling}),
        group_size=cfg.group_size,
        groups_per_step=cfg.groups_per_step,
        max_staleness=cfg.max_staleness,
        total_steps=total_steps,
        replay_buffer=replay_buffer,
        seed=cfg.seed,
        create_eval_env_fn=functools.partial(config.instantiate, cfg.eval_env),
        eval_problems=cfg.eval_problems,
        group_filter=FirstReason(*map(config.instantiate, filters)) if filters else None,
        dump_path=output_dir / "samples.jsonl" if cfg.dump_samples else None,
        log_path=output_dir / "collector.log",
        **cfg.collector,
    )
