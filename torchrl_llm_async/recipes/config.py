"""What a recipe's YAML may hold, and every check that needs no model.

Owns the schema and the fail-fast checks: a mistake ends the run before anything slow starts, with
one line that names the key, the value and what would be right. Owns no defaults that a reader of
the YAML would want to see: those stand in the YAML.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torchrl.envs import EnvBase
from torchtune import config as tune_config
from torchtune.config._utils import _get_component_from_path
from torchtune.models.qwen2._convert_weights import _FROM_HF as _QWEN2_FROM_HF

from torchrl_llm_async.checkpoint import save_tree
from torchrl_llm_async.collectors.conversation import Conversation
from torchrl_llm_async.collectors.problems import env_state
from torchrl_llm_async.collectors.state import pack_problem
from torchrl_llm_async.recipes.batches import _ROWS_PER_UNIT
from torchrl_llm_async.recipes.collection import filter_nodes
from torchrl_llm_async.recipes.components import ConfigError, check_arguments, check_component
from torchrl_llm_async.recipes.resume import find_checkpoint, is_own_checkpoint, resume_folder

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
    "rope_base": "rope_theta",
    "tie_word_embeddings": "tie_word_embeddings",
}

_CHOICES = {
    "on_stale": ("wait", "drop"),
    "dtype": ("fp32", "bf16"),
    "micro_batches": ("padded", "packed"),
    "reuse": ("recency", "reward", "uniform"),
}

# Families whose conversion to Hugging Face is renaming alone, by torchtune's model_type.
HF_KEY_MAPS = {"QWEN2": _QWEN2_FROM_HF}


@dataclass
class RecipeConfig:
    """The keys of ``async_rl_full_finetune_distributed``; nested mappings are components.

    ``env``, ``eval_env``, ``engine``, ``model``, ``tokenizer``, ``checkpointer``, ``loss``,
    ``advantage``, ``optimizer``, ``lr_scheduler``, ``metric_logger`` and ``group_filter`` have a
    ``_component_`` and that component's arguments, and ``group_filter`` may be a list of such,
    asked in order; ``sampling`` and ``collector`` are arguments of
    :class:`~torchrl_llm_async.engines.SamplingConfig` and
    :class:`~torchrl_llm_async.collectors.AsyncLLMCollector`. ``advantage`` is null for a loss that
    reads none.
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
    loss: dict[str, Any]
    optimizer: dict[str, Any]
    metric_logger: dict[str, Any]
    advantage: dict[str, Any] | None = None
    lr_scheduler: dict[str, Any] | None = None
    weights_dir: str | None = None
    num_engines: int = 1
    group_filter: Any = None
    on_stale: str = "wait"
    max_reuse: int = 1
    reuse: str = "recency"
    reuse_groups: int | None = None
    compile: bool = False
    enable_activation_checkpointing: bool = False
    micro_batches: str = "padded"
    max_skipped_updates: int = 3
    checkpoint_every: int | None = 10
    keep_checkpoints: int = 2
    resume: str | None = None


def load_config(cfg: DictConfig, *, training: bool = False) -> DictConfig:
    """Checks a parsed recipe config; returns it with defaults filled in and ``model_dir`` found.

    A ``model_dir`` that the current folder does not have is looked for in the package's own folder,
    so that the checked-in configs run from anywhere. The current folder is made importable, so that
    a ``_component_`` can be a module of the user's.

    Args:
        cfg: the parsed YAML, overrides merged.
        training: also refuse what only a training run must not have: an ``output_dir`` with an
            earlier run in it, and sampling that importance ratios can't account for; and find the
            checkpoint to resume from, whose folder ``resume`` is then, or None.

    Raises:
        ConfigError: naming the key, the value and what would be right.

    Examples:
        >>> cfg = load_config(OmegaConf.load("recipes/configs/arithmetic_ppo.yaml"))
        >>> cfg.engine.max_model_len
        128
    """
    if os.getcwd() not in sys.path:  # A script's sys.path has the script's folder instead.
        sys.path.insert(0, os.getcwd())
    cfg = _check_schema(cfg)
    for key, node in cfg.items():
        if OmegaConf.is_dict(node) and "_component_" in node:
            check_component(key, node)
    for index, node in enumerate(filter_nodes(cfg)):
        if not OmegaConf.is_dict(node) or "_component_" not in node:
            raise ConfigError(
                f"group_filter is {cfg.group_filter!r}; it must be null, a mapping with "
                "_component_ or a list of these"
            )
        check_component(f"group_filter[{index}]", node)
    for key, path in (
        ("sampling", "torchrl_llm_async.engines.SamplingConfig"),
        ("collector", "torchrl_llm_async.collectors.AsyncLLMCollector"),
    ):
        check_arguments(key, _get_component_from_path(path), cfg[key])
    _check_values(cfg)
    _check_loss(cfg)
    if training:
        _check_resume(cfg)
        _check_training(cfg)
    context = _check_context(cfg, _check_model(cfg))
    _check_prompts(cfg, context)
    if training:
        cfg.resume = _find_checkpoint(cfg)
    return cfg


def _check_schema(cfg: DictConfig) -> DictConfig:
    try:
        merged = OmegaConf.merge(OmegaConf.structured(RecipeConfig), cfg)
        for key in ("advantage", "lr_scheduler"):
            # Where the YAML has a component, torchtune 0.6.1 takes key=null for its _component_'s.
            if merged[key] is not None and merged[key].get("_component_", "") is None:
                merged[key] = None
        missing = OmegaConf.missing_keys(merged)
        if "model_dir" not in missing:
            merged.model_dir = str(_find_model_dir(merged.model_dir))
        OmegaConf.resolve(merged)
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None)
        raise ConfigError(f"config key '{key}': {str(error).splitlines()[0]}") from None
    if missing:
        raise ConfigError(f"config key '{min(missing)}' is missing; it has no default")
    for key, choices in _CHOICES.items():
        if merged[key] not in choices:
            right = f"{', '.join(map(repr, choices[:-1]))} or {choices[-1]!r}"
            raise ConfigError(f"{key} is {merged[key]!r}; it must be {right}")
    return merged


def _find_model_dir(model_dir: str) -> Path:
    for candidate in (Path(model_dir), PACKAGE_DIR / model_dir):
        if (candidate / "config.json").is_file():
            return candidate.resolve()
    raise ConfigError(
        f"model_dir is {model_dir!r}, but there is no {Path(model_dir).resolve()}/config.json; "
        "give the folder of a Hugging Face checkpoint (config.json, *.safetensors, tokenizer.json)"
    )


def _check_values(cfg: DictConfig) -> None:
    for key in (
        "total_steps",
        "groups_per_step",
        "group_size",
        "minibatches_per_step",
        "micro_batch_tokens",
        "evaluate_every",
        "num_engines",
        "max_reuse",
        "keep_checkpoints",
    ):
        if cfg[key] < 1:
            raise ConfigError(f"{key} is {cfg[key]}; it must be at least 1")
    if cfg.checkpoint_every is not None and cfg.checkpoint_every < 1:
        raise ConfigError(
            f"checkpoint_every is {cfg.checkpoint_every}; it must be at least 1, or null for none"
        )
    if cfg.max_skipped_updates < 0:
        raise ConfigError(
            f"max_skipped_updates is {cfg.max_skipped_updates}; it must be 0 or more: how many "
            "updates in a row may have a gradient that is not finite"
        )
    if cfg.max_staleness < 0:
        raise ConfigError(f"max_staleness is {cfg.max_staleness}; it must be 0 (on-policy) or more")
    if cfg.max_reuse > cfg.max_staleness + 1:
        raise ConfigError(
            f"max_reuse is {cfg.max_reuse}, but a group lags by one more at each step and "
            f"max_staleness is {cfg.max_staleness}; set max_reuse to {cfg.max_staleness + 1} or "
            "max_staleness higher"
        )
    if cfg.reuse_groups is not None and (cfg.reuse_groups < 1 or cfg.max_reuse == 1):
        raise ConfigError(
            f"reuse_groups is {cfg.reuse_groups} and max_reuse {cfg.max_reuse}; groups are reused "
            "if reuse_groups is at least 1, or null, and max_reuse at least 2"
        )
    if cfg.reuse != RecipeConfig.reuse and cfg.max_reuse == 1:
        raise ConfigError(
            f"reuse is {cfg.reuse!r} and max_reuse 1, so nothing is reused; set max_reuse to 2 or "
            "more"
        )
    if cfg.groups_per_step % cfg.minibatches_per_step:
        raise ConfigError(
            f"groups_per_step is {cfg.groups_per_step}, which minibatches_per_step "
            f"({cfg.minibatches_per_step}) does not divide; choose a divisor"
        )
    if cfg.eval_problems < 2:
        raise ConfigError(
            f"eval_problems is {cfg.eval_problems}; it must be at least 2, or the held-out "
            "accuracy has no standard error"
        )
    if cfg.clip_grad_norm is not None and cfg.clip_grad_norm <= 0:
        raise ConfigError(
            f"clip_grad_norm is {cfg.clip_grad_norm}; it must be above 0, or null for no clipping"
        )
    if cfg.num_engines > 1 and "url" in cfg.engine:
        raise ConfigError(
            f"num_engines is {cfg.num_engines}, but engine.url names one server, which one engine "
            "object speaks for; set it to 1, or build an EnginePool in Python"
        )
    if cfg.device.split(":")[0] not in ("cpu", "cuda"):
        raise ConfigError(f"device is {cfg.device!r}; it must be 'cpu' or 'cuda'")
    if cfg.weights_dir is not None and not Path(cfg.weights_dir).is_dir():
        raise ConfigError(
            f"weights_dir is {cfg.weights_dir!r}, which is no folder; make it first, or give null "
            "for this machine's shared memory"
        )


def _check_loss(cfg: DictConfig) -> None:
    """Whether group and advantage are what the loss needs; asked of its class."""
    path = cfg.loss["_component_"]
    loss_class = _get_component_from_path(path)
    least = getattr(loss_class, "least_group_size", 1)
    if cfg.group_size < least:
        raise ConfigError(
            f"group_size is {cfg.group_size}, but {path} compares the answers of a group; it must "
            f"be at least {least}"
        )
    if cfg.advantage is not None:
        _build("advantage", cfg)
    elif getattr(loss_class, "needs_advantages", False):
        raise ConfigError(
            f"advantage is null, but {path} reads advantages; give it a _component_, e.g. "
            "torchrl_llm_async.objectives.GroupAdvantage"
        )


def _check_training(cfg: DictConfig) -> None:
    folder = Path(cfg.output_dir)
    continues = cfg.resume == "auto" or is_own_checkpoint(cfg, cfg.resume)
    names = ("config.yaml", "logs", "checkpoints")
    if not continues and any((folder / name).exists() for name in names):
        raise ConfigError(
            f"output_dir is {cfg.output_dir!r}, which holds an earlier run; go on with it "
            "(resume=auto), choose another or remove it"
        )
    if cfg.sampling.get("temperature", 1.0) <= 0:
        raise ConfigError(
            f"sampling.temperature is {cfg.sampling.temperature}; a group's greedy answers are all "
            "alike, so training needs one above 0, e.g. 1.0"
        )
    for argument, off in (("top_p", 1.0), ("top_k", 0)):
        value = cfg.sampling.get(argument, off)
        if value != off and not cfg.engine.get("allow_truncated_support", False):
            raise ConfigError(
                f"sampling.{argument} is {value}, which biases importance ratios; use {off} (off), "
                "or accept the bias with engine.allow_truncated_support: true"
            )


def _check_resume(cfg: DictConfig) -> None:
    if cfg.resume in (None, "auto") or (Path(cfg.resume) / "run.json").is_file():
        return
    own = sorted(path.parent for path in resume_folder(cfg).glob("step_*/run.json"))
    there = f"; there are {', '.join(map(str, own))}" if own else ""
    raise ConfigError(
        f"resume is {cfg.resume!r}, which is no checkpoint of a run; give 'auto' for the newest, "
        f"null for a new run, or a folder {resume_folder(cfg)}/step_<number>{there}"
    )


def _find_checkpoint(cfg: DictConfig) -> str | None:
    try:
        folder = find_checkpoint(cfg)
    except ValueError as error:
        raise ConfigError(f"resume is {cfg.resume!r}: {_one_line(error)}") from error
    return None if folder is None else str(folder)


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
    flat = {**(hf_config.get("rope_parameters") or {}), **hf_config}  # rope_theta is in either
    for argument, hf_name in _HF_NAMES.items():
        given, right = _model_argument(cfg, argument), flat.get(hf_name)
        if given is not None and right is not None and given != right:
            default = "" if argument in cfg.model else " by default"
            raise ConfigError(
                f"model.{argument} is {given}{default}, but {hf_name} in {folder}/config.json is "
                f"{right}; write model.{argument}: {right}"
            )
    size = _build("tokenizer", cfg).vocab_size
    if size > hf_config["vocab_size"]:
        raise ConfigError(
            f"tokenizer: its vocabulary has {size} tokens, but the model in {folder} has "
            f"{hf_config['vocab_size']}; use the tokenizer the model was trained with"
        )
    return hf_config


def _model_argument(cfg: DictConfig, argument: str) -> Any:
    """What the model's builder gets, its own default included; None if it has no such argument."""
    builder = inspect.signature(_get_component_from_path(cfg.model["_component_"]))
    if argument in cfg.model or argument not in builder.parameters:
        return cfg.model.get(argument)
    default = builder.parameters[argument].default
    return None if default is inspect.Parameter.empty else default


def _build(key: str, cfg: DictConfig) -> Any:
    """Instantiates a component that is cheap to make; whatever it objects to is a ConfigError."""
    try:
        return tune_config.instantiate(cfg[key])
    except Exception as error:  # A user's component may raise anything.
        raise ConfigError(f"{key}: {_one_line(error)}") from error


def _one_line(error: Exception) -> str:
    lines = str(error).splitlines()
    text = lines[0] if lines else ""
    return text if isinstance(error, ValueError | TypeError) else f"{type(error).__name__}: {text}"


def _check_context(cfg: DictConfig, hf_config: dict[str, Any]) -> int:
    context = _build("engine", cfg).max_model_len
    for name, limit in (
        ("the model's context", hf_config["max_position_embeddings"]),
        ("model.max_seq_len", _model_argument(cfg, "max_seq_len")),
    ):
        if limit is not None and context > limit:
            raise ConfigError(
                f"engine.max_model_len is {context}, but {name} is {limit} tokens; it must not be "
                "more than that"
            )
    rows = _rows_per_unit(cfg)
    if cfg.micro_batch_tokens < rows * context:
        unit = "one sequence" if rows == 1 else f"{rows} sequences the loss can't split, each"
        raise ConfigError(
            f"micro_batch_tokens is {cfg.micro_batch_tokens}, too few for {unit} of "
            f"engine.max_model_len = {context} tokens; it must be at least {rows * context}"
        )
    answer = cfg.sampling.max_new_tokens
    if answer >= context:
        raise ConfigError(
            f"sampling.max_new_tokens is {answer}; with a context of {context} tokens no room is "
            "left for a prompt"
        )
    return context


def _rows_per_unit(cfg: DictConfig) -> int:
    path = cfg.loss["_component_"]
    unit = getattr(_get_component_from_path(path), "packing_unit", None)
    units = {**_ROWS_PER_UNIT, "group": cfg.group_size}
    if unit not in units:
        raise ConfigError(
            f"loss._component_ is {path!r}, whose packing_unit is {unit!r}; it must be a class "
            f"with one of {', '.join(map(repr, units))}"
        )
    return units[unit]


def _check_prompts(cfg: DictConfig, context: int, samples: int = 32) -> None:
    """Draws prompts as a collector will, from environments of its own."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(cfg.model_dir)
    except Exception as error:  # Of many kinds, for a config.json or tokenizer.json that is wrong.
        raise ConfigError(
            f"model_dir is {cfg.model_dir!r}, whose tokenizer can't be loaded: {_one_line(error)}"
        ) from error
    for key in ("env", "eval_env"):
        env = _build(key, cfg)
        try:
            prompts = [Conversation(tokenizer, env.reset()) for _ in range(samples)]
        except Exception as error:  # A user's environment may raise anything.
            raise ConfigError(
                f"{key}: {cfg[key]['_component_']} can't give a prompt; its reset: "
                f"{_one_line(error)}"
            ) from error
        if key == "env" and cfg.checkpoint_every is not None:
            _check_can_be_saved(env, prompts[0])
        longest = max(prompt.prompt_length for prompt in prompts)
        if longest + cfg.sampling.max_new_tokens > context:
            raise ConfigError(
                f"{key} gives a prompt of {longest} tokens; with sampling.max_new_tokens = "
                f"{cfg.sampling.max_new_tokens} it does not fit the context of {context} tokens; "
                "shorten the answer, filter the prompts or raise engine.max_model_len"
            )


def _check_can_be_saved(env: EnvBase, problem: Conversation) -> None:
    """Checkpoints hold what the environment gave for groups in flight, and its own position."""
    for what, state in (
        ("its reset gives", lambda: pack_problem(problem)),
        ("its get_extra_state gives", lambda: env_state(env)),
    ):
        with tempfile.TemporaryDirectory() as folder:
            try:
                save_tree(Path(folder) / "env", state())
            except Exception as error:  # A user's environment may raise anything.
                raise ConfigError(
                    f"env: {what} what no checkpoint can hold: {_one_line(error)}; change it, or "
                    "set checkpoint_every: null"
                ) from error
