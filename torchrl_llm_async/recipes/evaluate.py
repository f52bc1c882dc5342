"""Held-out accuracy of a checkpoint, in a fresh vLLM engine; trains nothing.

Launch::

    tune-async run evaluate --config recipes/configs/arithmetic_ppo.yaml \\
        model_dir=runs/arithmetic_ppo_seed0/checkpoints/step_00040

Reads the training recipe's own configs. With ``compare_to=FOLDER`` it scores a second checkpoint on
the same problems and prints the paired difference.
"""

from __future__ import annotations

import sys
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from torchtune import config

from torchrl_llm_async.collectors import Evaluation
from torchrl_llm_async.recipes.collection import make_collector
from torchrl_llm_async.recipes.config import ConfigError, load_config
from torchrl_llm_async.recipes.report import PairedGain


def evaluate(cfg: DictConfig) -> Evaluation:
    """Starts an engine on ``cfg.model_dir``, answers the held-out problems, ends it."""
    collector = make_collector(cfg, output_dir=Path(cfg.output_dir), total_steps=0)
    try:
        collector.start()
        collector.wait_until_ready()
        return collector.evaluate().result()
    finally:
        collector.shutdown()


@config.parse
def recipe_main(cfg: DictConfig) -> int:
    """Prints the held-out accuracy of ``model_dir``, and of ``compare_to`` if given."""
    compare_to = cfg.pop("compare_to", None)
    try:
        configs = [load_config(cfg)]
        if compare_to is not None:
            configs.append(load_config(OmegaConf.merge(cfg, {"model_dir": compare_to})))
    except ConfigError as error:
        print(f"config error: {error}", file=sys.stderr)
        return 1
    evaluations = [evaluate(each) for each in configs]
    for each, evaluation in zip(configs, evaluations, strict=True):
        print(
            f"{each.model_dir}: held-out accuracy {evaluation.accuracy:.3f} "
            f"({len(evaluation.rewards)} problems, greedy, "
            f"{evaluation.answer_tokens:.1f} tokens an answer)"
        )
    if compare_to is not None:
        print(PairedGain.of(evaluations[1].rewards, evaluations[0].rewards))
    return 0


if __name__ == "__main__":
    sys.exit(recipe_main())
