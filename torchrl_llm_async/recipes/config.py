"""What a recipe's YAML may hold, and every check that needs no model.

Owns the schema and the fail-fast checks: a mistake ends the run before anything slow starts, with
one line that names the key, the value and what would be right. Owns no defaults that a reader of
the YAML would want to see: those stand in the YAML.
"""

from __future__ import annotations

import difflib
import inspect
import json
import typing
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Literal

import torch
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torchtune import config as tune_config
from torchtune.config._errors import InstantiationError
from torchtune.config._utils import _get_component_from_path
from torchtune.models.qwen2._convert_weights import _FROM_HF as _QWEN2_FROM_HF

from torchrl_llm_async.collectors.conversation import Conversation

PACKAGE_DIR = Path(__file__).resolve().parents[1]

# torchtune's builders read nothing from config.json, so what they are given is held against it.
_HF_NAMES = {
    "vocab_size": "vocab_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "embed_dim": "hidden_size",
    "intermediate_dim": "intermediate_size",
    "norm_eps": "rms_norm_eps",
    "tie_word_embeddings": "tie_word_embeddings",
}


# Families whose conversion to Hugging Face is renaming alone, by torchtune's model_type.
HF_KEY_MAPS = {"QWEN2": _QWEN2_FROM_HF}


class ConfigError(ValueError):
    """A configuration that can't run; the message is one line for a person."""


@dataclass
class RecipeConfig:
    """The keys of ``async_rl_full_finetune_distributed``; nested mappings are components.

    ``env``, ``eval_env``, ``engine``, ``model``, ``tokenizer``, ``checkpointer``, ``loss``,
    ``advantage``, ``optimizer``, ``lr_scheduler`` and ``metric_logger`` have a ``_component_`` and
    that component's arguments; ``sampling`` and ``collector`` are arguments of
    :class:`~torchrl_llm_async.engines.SamplingConfig` and
    :class:`~torchrl_llm_async.collectors.AsyncLLMCollector`.
    """

    output_dir: str
    model_dir: str
    seed: int
    device: str
    dtype: str
    total_steps: int
    groups_per_step: int
    group_size: int
    max_staleness: int
    minibatches_per_step: int
    micro_batch_tokens: int
    clip_grad_norm: float | None
    evaluate_every: int
    eval_problems: int
    dump_samples: bool
    env: dict[str, Any]
    eval_env: dict[str, Any]
    sampling: dict[str, Any]
    engine: dict[str, Any]
    collector: dict[str, Any]
    model: dict[str, Any]
    tokenizer: dict[str, Any]
    checkpointer: dict[str, Any]
    advantage: dict[str, Any]
    loss: dict[str, Any]
    optimizer: dict[str, Any]
    metric_logger: dict[str, Any]
    lr_scheduler: dict[str, Any] | None = None
    weights_dir: str | None = None


def load_config(cfg: DictConfig) -> DictConfig:
    """Checks a parsed recipe config; returns it with defaults filled in and ``model_dir`` found.

    A ``model_dir`` that the current folder does not have is looked for in the package's own folder,
    so that the checked-in configs run from anywhere.

    Raises:
        ConfigError: naming the key, the value and what would be right.
    """
    cfg = _check_schema(cfg)
    for key, node in cfg.items():
        if OmegaConf.is_dict(node) and "_component_" in node:
            _check_component(key, node)
    for key, path in (
        ("sampling", "torchrl_llm_async.engines.SamplingConfig"),
        ("collector", "torchrl_llm_async.collectors.AsyncLLMCollector"),
    ):
        _check_arguments(key, _get_component_from_path(path), cfg[key])
    _check_counts(cfg)
    context = _check_context(cfg, _check_model(cfg))
    _check_prompts(cfg, context)
    return cfg


def _check_schema(cfg: DictConfig) -> DictConfig:
    try:
        merged = OmegaConf.merge(OmegaConf.structured(RecipeConfig), cfg)
        missing = OmegaConf.missing_keys(merged)
        if "model_dir" not in missing:
            merged.model_dir = str(_find_model_dir(merged.model_dir))
        OmegaConf.resolve(merged)
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None)
        raise ConfigError(f"config key '{key}': {str(error).splitlines()[0]}") from None
    if missing:
        raise ConfigError(f"config key '{min(missing)}' is missing; it has no default")
    if merged.dtype not in ("fp32", "bf16"):
        raise ConfigError(f"dtype is {merged.dtype!r}; it must be 'fp32' or 'bf16'")
    return merged


def _find_model_dir(model_dir: str) -> Path:
    for candidate in (Path(model_dir), PACKAGE_DIR / model_dir):
        if (candidate / "config.json").is_file():
            return candidate.resolve()
    raise ConfigError(
        f"model_dir is {model_dir!r}, but there is no {Path(model_dir).resolve()}/config.json; "
        "give the folder of a Hugging Face checkpoint (config.json, *.safetensors, tokenizer.json)"
    )


def _check_component(key: str, node: DictConfig) -> None:
    path = node["_component_"]
    try:
        component = _get_component_from_path(path)
    except (InstantiationError, ValueError, ImportError, AttributeError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"{key}._component_ is {path!r}, which can't be imported ({reason}); give the dotted "
            "path of a class or function"
        ) from None
    _check_arguments(key, component, node)


def _check_arguments(key: str, component: Callable, node: DictConfig) -> None:
    signature = inspect.signature(component)
    names = [name for name in signature.parameters if name != "self"]
    open_ended = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    hints = typing.get_type_hints(component.__init__ if inspect.isclass(component) else component)
    name = getattr(component, "__name__", str(component))
    for argument, value in node.items():
        if argument == "_component_":
            continue
        if argument not in names and not open_ended:
            close = difflib.get_close_matches(argument, names, n=1)
            hint = f"did you mean '{close[0]}'?" if close else f"it takes {', '.join(names)}"
            raise ConfigError(
                f"{key}.{argument} is {value!r}, but {name} has no such argument; {hint}"
            )
        expected = hints.get(argument, Any)
        if not _fits(value, expected):
            raise ConfigError(
                f"{key}.{argument} is {value!r}; {name} wants {_describe(expected)} there"
            )


def _fits(value: Any, expected: Any) -> bool:
    """Whether a YAML value can be an argument of that type; True if the type does not tell."""
    origin = typing.get_origin(expected)
    if origin in (typing.Union, UnionType):
        return any(_fits(value, option) for option in typing.get_args(expected))
    if origin is Literal:
        return value in typing.get_args(expected)
    if expected is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if expected is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if expected in (bool, str, type(None), torch.Tensor):
        return isinstance(value, expected)
    return True


def _describe(expected: Any) -> str:
    if typing.get_origin(expected) is Literal:
        return "one of " + ", ".join(map(repr, typing.get_args(expected)))
    return getattr(expected, "__name__", str(expected))


def _check_counts(cfg: DictConfig) -> None:
    for key in (
        "total_steps",
        "groups_per_step",
        "group_size",
        "minibatches_per_step",
        "micro_batch_tokens",
        "evaluate_every",
    ):
        if cfg[key] < 1:
            raise ConfigError(f"{key} is {cfg[key]}; it must be at least 1")
    if cfg.max_staleness < 0:
        raise ConfigError(f"max_staleness is {cfg.max_staleness}; it must be 0 (on-policy) or more")
    if cfg.groups_per_step % cfg.minibatches_per_step:
        raise ConfigError(
            f"groups_per_step is {cfg.groups_per_step}, which minibatches_per_step "
            f"({cfg.minibatches_per_step}) does not divide; choose a divisor"
        )
    if cfg.group_size < 2:
        raise ConfigError(
            f"group_size is {cfg.group_size}, but the advantage and the loss compare answers "
            "within a group; it must be at least 2"
        )


def _check_model(cfg: DictConfig) -> dict[str, Any]:
    folder = Path(cfg.model_dir)
    model_type = cfg.checkpointer.get("model_type")
    if model_type not in HF_KEY_MAPS:
        raise ConfigError(
            f"checkpointer.model_type is {model_type!r}; weights can be published to the engine "
            f"for {', '.join(HF_KEY_MAPS)} (which serves Qwen2 and Qwen2.5)"
        )
    for name in cfg.checkpointer.get("checkpoint_files", []):
        if not (folder / name).is_file():
            raise ConfigError(
                f"checkpointer.checkpoint_files names {name!r}, which is not in {folder}"
            )
    hf_config = json.loads((folder / "config.json").read_text())
    for argument, hf_name in _HF_NAMES.items():
        given, right = cfg.model.get(argument), hf_config.get(hf_name)
        if given is not None and right is not None and given != right:
            raise ConfigError(
                f"model.{argument} is {given}, but {hf_name} in {folder}/config.json is {right}"
            )
    size = tune_config.instantiate(cfg.tokenizer).vocab_size
    if size > hf_config["vocab_size"]:
        raise ConfigError(
            f"tokenizer: its vocabulary has {size} tokens, but the model in {folder} has "
            f"{hf_config['vocab_size']}; use the tokenizer the model was trained with"
        )
    return hf_config


def _check_context(cfg: DictConfig, hf_config: dict[str, Any]) -> int:
    context = hf_config["max_position_embeddings"]
    if cfg.engine.get("max_model_len", context) > context:
        raise ConfigError(
            f"engine.max_model_len is {cfg.engine.max_model_len}, but the model's context is "
            f"{context} tokens"
        )
    context = cfg.engine.get("max_model_len", context)
    if cfg.micro_batch_tokens < context:
        raise ConfigError(
            f"micro_batch_tokens is {cfg.micro_batch_tokens}, too few for one sequence of "
            f"engine.max_model_len = {context} tokens"
        )
    answer = cfg.sampling.max_new_tokens
    if answer >= context:
        raise ConfigError(
            f"sampling.max_new_tokens is {answer}; with a context of {context} tokens no room is "
            "left for a prompt"
        )
    return context


def _check_prompts(cfg: DictConfig, context: int, samples: int = 32) -> None:
    """Draws prompts as a collector will, from environments of its own."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(cfg.model_dir)
    for key in ("env", "eval_env"):
        try:
            env = tune_config.instantiate(cfg[key])
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{key}: {error}") from None
        longest = max(Conversation(tokenizer, env.reset()).prompt_length for _ in range(samples))
        if longest + cfg.sampling.max_new_tokens > context:
            raise ConfigError(
                f"{key} gives a prompt of {longest} tokens; with sampling.max_new_tokens = "
                f"{cfg.sampling.max_new_tokens} it does not fit the context of {context} tokens; "
                "shorten the answer, filter the prompts or raise engine.max_model_len"
            )
