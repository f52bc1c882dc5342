"""A mistake in a config ends the run at once, with one line that a person can act on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from torchrl_llm_async.recipes.config import PACKAGE_DIR, ConfigError, load_config

CONFIGS = sorted((PACKAGE_DIR / "recipes" / "configs").glob("arithmetic_*.yaml"))


@pytest.fixture
def cfg():
    return OmegaConf.load(CONFIGS[0])


def with_overrides(cfg, *overrides: str):
    return OmegaConf.merge(cfg, OmegaConf.from_dotlist(list(overrides)))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_checked_in_configs_pass(path):
    loaded = load_config(OmegaConf.load(path))
    assert (Path(loaded.model_dir) / "config.json").is_file()
    assert loaded.engine.model == loaded.model_dir  # interpolations follow the folder found


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("grup_size=8", r"config key 'grup_size': .*Did you mean: 'group_size'"),
        ("group_size=many", r"config key 'group_size': Value 'many'"),
        ("total_steps=1.5", r"config key 'total_steps': Value '1.5'"),
        ("loss=ppo", r"config key 'loss'"),
        ("dtype=fp8", r"dtype is 'fp8'; it must be 'fp32' or 'bf16'"),
        ("model_dir=no/where", r"model_dir is 'no/where', but there is no .*no/where/config.json"),
        (
            "checkpointer.checkpoint_files=[w.safetensors]",
            r"checkpoint_files names 'w.safetensors'",
        ),
        ("loss._component_=torchrl_llm_async.objectives.PPO", r"loss._component_ is .*PPO', which"),
        ("loss.clip_epsilonn=0.2", r"loss.clip_epsilonn is 0.2, .*did you mean 'clip_epsilon'\?"),
        ("loss.prox=recomputed", r"loss.prox is 'recomputed'; .* one of 'recompute', 'loglinear'"),
        ("optimizer.lr=fast", r"optimizer.lr is 'fast'"),
        ("sampling.temprature=1", r"sampling.temprature is 1, .*did you mean 'temperature'\?"),
        ("collector.host=ray", r"collector.host is 'ray'; .* one of 'process', 'thread'"),
        ("engine.max_num_seqs=many", r"engine.max_num_seqs is 'many'; VLLMEngine wants int"),
        ("group_size=1", r"group_size is 1, .*at least 2"),
        ("group_size=0", r"group_size is 0; it must be at least 1"),
        ("max_staleness=-1", r"max_staleness is -1; it must be 0"),
        ("minibatches_per_step=3", r"groups_per_step is 64, which minibatches_per_step \(3\)"),
        ("micro_batch_tokens=64", r"micro_batch_tokens is 64, too few"),
        ("engine.max_model_len=100000", r"engine.max_model_len is 100000, .*context is \d+ tokens"),
        ("sampling.max_new_tokens=128", r"sampling.max_new_tokens is 128; .*no room"),
        ("sampling.max_new_tokens=127", r"env gives a prompt of \d+ tokens; .*does not fit"),
        ("env.split=test", r"env.split is 'test'; .*'train', 'heldout'"),
        ("model.num_layers=7", r"model.num_layers is 7, but num_hidden_layers in .* is \d+"),
    ],
)
def test_mistakes_are_named(cfg, override, message):
    with pytest.raises(ConfigError, match=message) as error:
        load_config(with_overrides(cfg, override))
    assert "\n" not in str(error.value)


def test_a_missing_key_is_named(cfg):
    del cfg.loss
    with pytest.raises(ConfigError, match="config key 'loss' is missing"):
        load_config(cfg)


def test_an_unknown_data_set_is_named(cfg):
    cfg.env = {"_component_": "torchrl_llm_async.envs.ReasoningGymEnv", "dataset": "chain_sums"}
    with pytest.raises(ConfigError, match=r"env: .*'chain_sums'.*did you mean 'chain_sum'"):
        load_config(cfg)


def test_a_tokenizer_of_another_model_is_refused(cfg, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(load_config(cfg).model_dir, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["one more"] = len(vocabulary)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match=r"tokenizer: its vocabulary has \d+ tokens"):
        load_config(with_overrides(cfg, f"model_dir={folder}"))
