"""A mistake in a config ends the run at once, with one line that a person can act on."""

from __future__ import annotations

import inspect
import json
import shutil
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from tensordict import NonTensorData

from torchrl_llm_async.collectors import AsyncLLMCollector
from torchrl_llm_async.envs import WrittenSumsEnv
from torchrl_llm_async.recipes.collection import COLLECTOR_KEYS, filter_nodes
from torchrl_llm_async.recipes.config import PACKAGE_DIR, ConfigError, RecipeConfig, load_config

CONFIGS = sorted((PACKAGE_DIR / "recipes" / "configs").glob("arithmetic_*.yaml"))


@pytest.fixture
def cfg():
    return OmegaConf.load(PACKAGE_DIR / "recipes" / "configs" / "arithmetic_ppo.yaml")


def with_overrides(cfg, *overrides: str):
    return OmegaConf.merge(cfg, OmegaConf.from_dotlist(list(overrides)))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_checked_in_configs_pass(path):
    loaded = load_config(OmegaConf.load(path))
    assert (Path(loaded.model_dir) / "config.json").is_file()
    assert loaded.engine.model == loaded.model_dir  # interpolations follow the folder found


def test_what_a_loss_does_not_need_may_be_left_out(cfg):
    objectives = "torchrl_llm_async.objectives"
    alone = ["group_size=1", "advantage._component_=null"]  # What tune makes of advantage=null.
    loaded = load_config(
        with_overrides(cfg, f"loss._component_={objectives}.CriticPPOLoss", *alone)
    )
    assert loaded.advantage is None and loaded.group_size == 1
    load_config(
        with_overrides(cfg, f"loss._component_={objectives}.OnlineDPOLoss", "advantage=null")
    )
    with pytest.raises(ConfigError, match=r"group_size is 1, but .*OnlineDPOLoss compares"):
        load_config(with_overrides(cfg, f"loss._component_={objectives}.OnlineDPOLoss", *alone))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("grup_size=8", r"config key 'grup_size': .*Did you mean.*'group_size'"),
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
        ("group_size=1", r"advantage: group_size=1: .* at least 2 trajectories"),
        ("advantage=null", r"advantage is null, but .*DecoupledPPOLoss reads advantages"),
        ("group_size=0", r"group_size is 0; it must be at least 1"),
        ("micro_batches=ragged", r"micro_batches is 'ragged'; it must be 'padded' or 'packed'"),
        ("max_skipped_updates=-1", r"max_skipped_updates is -1; it must be 0 or more"),
        ("max_staleness=-1", r"max_staleness is -1; it must be 0"),
        ("minibatches_per_step=3", r"groups_per_step is 64, which minibatches_per_step \(3\)"),
        ("micro_batch_tokens=64", r"micro_batch_tokens is 64, too few for one sequence"),
        ("engine.max_model_len=512", r"engine.max_model_len is 512, but the model's context is"),
        ("model.max_seq_len=64", r"max_model_len is 128, but model.max_seq_len is 64 tokens"),
        ("engine.on_update=[keep]", r"engine.on_update is \['keep'\]; .* one of 'keep'"),
        ("eval_problems=1", r"eval_problems is 1; it must be at least 2"),
        ("clip_grad_norm=0", r"clip_grad_norm is 0.0; it must be above 0, or null"),
        ("on_stale=never", r"on_stale is 'never'; it must be 'wait' or 'drop'"),
        ("num_engines=0", r"num_engines is 0; it must be at least 1"),
        ("keep_checkpoints=0", r"keep_checkpoints is 0; it must be at least 1"),
        ("checkpoint_every=0", r"checkpoint_every is 0; it must be at least 1, or null"),
        ("max_reuse=0", r"max_reuse is 0; it must be at least 1"),
        ("reuse=random", r"reuse is 'random'; it must be 'recency', 'reward' or 'uniform'"),
        ("reuse_groups=4", r"reuse_groups is 4 and max_reuse 1; groups are reused if"),
        ("reuse=reward", r"reuse is 'reward' and max_reuse 1, so nothing is reused"),
        ("max_reuse=4", r"max_reuse is 4, but .* max_staleness is 2; set max_reuse to 3 or"),
        ("group_filter._component_=builtins.nothing", r"group_filter._component_ is .*nothing'"),
        ("device=gpu", r"device is 'gpu'; it must be 'cpu' or 'cuda'"),
        ("weights_dir=no/where", r"weights_dir is 'no/where', which is no folder"),
        ("collector.seed=1", r"collector.seed is 1, .* use the top-level key seed instead"),
        ("collector.log_path=x", r"collector.log_path is .* top-level key output_dir instead"),
        ("model.rope_base=1e6", r"model.rope_base is 1000000.0, but rope_theta in .* is 10000"),
        ("tokenizer.path=no/where", r"tokenizer: path='no/where': no tokenizer.json there"),
        ("loss._component_=torch.nn.MSELoss", r"loss._component_ is .* packing_unit is None"),
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


class EnvWithASet(WrittenSumsEnv):
    """Its reset gives something that is neither a tensor nor a plain value."""

    def _reset(self, tensordict=None, **kwargs):
        return super()._reset(tensordict, **kwargs).set("seen", NonTensorData({1, 2}))


def test_an_observation_that_no_checkpoint_can_hold_is_named(cfg, monkeypatch):
    cfg.env = {"_component_": f"{__name__}.EnvWithASet"}
    with pytest.raises(ConfigError, match=r"env: .*observation.*is a set .*checkpoint_every: null"):
        load_config(cfg)
    load_config(with_overrides(cfg, "checkpoint_every=null"))


class EnvWithASetForAState(WrittenSumsEnv):
    """Its position is not made of plain values."""

    def get_extra_state(self):
        return {"seen": {1, 2}}

    def set_extra_state(self, state):
        pass


class EnvWithoutItsState(EnvWithASetForAState):
    """It can't tell its position."""

    def get_extra_state(self):
        raise RuntimeError("not in the middle")


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (EnvWithASetForAState, r"env\.seen is a set"),
        (EnvWithoutItsState, "RuntimeError: not in the middle"),
    ],
)
def test_a_state_that_no_checkpoint_can_hold_is_named(cfg, env, message):
    cfg.env = {"_component_": f"{__name__}.{env.__name__}"}
    with pytest.raises(ConfigError, match=rf"env: its get_extra_state .*{message}"):
        load_config(cfg)
    load_config(with_overrides(cfg, "checkpoint_every=null"))


def test_group_filters_may_be_one_or_several(cfg):
    name = "torchrl_llm_async.data."
    one = {"_component_": f"{name}RejectEqualRewards"}
    two = {"_component_": f"{name}RejectRepeatedPrompts", "window": 100}
    for given, count in ((None, 0), (one, 1), ([one, two], 2)):
        cfg.group_filter = given
        assert len(filter_nodes(load_config(cfg))) == count
    for given, message in (
        ([one, {**two, "windows": 3}], r"group_filter\[1\].windows is 3, .*did you mean 'window'"),
        ([one, "equal"], r"group_filter is .*; it must be null, a mapping with _component_ or"),
        ("equal", r"group_filter is 'equal'; it must be null"),
    ):
        cfg.group_filter = given
        with pytest.raises(ConfigError, match=message):
            load_config(cfg)


def test_reuse_needs_staleness(cfg):
    with pytest.raises(ConfigError, match=r"max_reuse is 2, .* set max_reuse to 1"):
        load_config(with_overrides(cfg, "max_reuse=2", "max_staleness=0"))
    load_config(with_overrides(cfg, "max_reuse=2", "reuse_groups=16", "reuse=reward"))


def test_a_missing_key_is_named(cfg):
    del cfg.loss
    with pytest.raises(ConfigError, match="config key 'loss' is missing"):
        load_config(cfg)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("sampling.max_new_tokens", r"sampling: SamplingConfig .*'max_new_tokens'"),
        ("tokenizer.path", r"tokenizer: HFTokenizer .*'path'"),
        ("engine.model", r"engine: VLLMEngine .*'model'"),
        ("model.vocab_size", r"model: qwen2 .*'vocab_size'"),
        # Left out, torchtune's own default holds, which is not this model's.
        ("model.norm_eps", r"model.norm_eps is 1e-05 by default, but rms_norm_eps in .* is 1e-06"),
        ("model.rope_base", r"model.rope_base is 1000000.0 by default, but rope_theta in"),
    ],
)
def test_a_missing_argument_is_named(cfg, argument, message):
    key, name = argument.split(".")
    del cfg[key][name]
    with pytest.raises(ConfigError, match=message):
        load_config(cfg)


def test_what_the_recipe_supplies_need_not_be_given(cfg):
    scheduler = "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup"
    cfg.lr_scheduler = {"_component_": scheduler, "num_warmup_steps": 1}
    load_config(cfg)
    cfg.lr_scheduler.num_training_steps = 9
    with pytest.raises(ConfigError, match="the recipe passes num_training_steps itself"):
        load_config(cfg)


def test_every_other_collector_argument_is_the_users():
    arguments = inspect.signature(AsyncLLMCollector).parameters
    assert set(COLLECTOR_KEYS) < set(arguments)
    assert set(COLLECTOR_KEYS.values()) <= {field.name for field in fields(RecipeConfig)}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("sampling.temperature=0", r"sampling.temperature is 0; .* above 0"),
        ("sampling.top_p=0.9", r"sampling.top_p is 0.9, .*engine.allow_truncated_support: true"),
        ("sampling.top_k=5", r"sampling.top_k is 5, which biases"),
    ],
)
def test_sampling_that_biases_training_is_refused(cfg, tmp_path, override, message):
    cfg = with_overrides(cfg, f"output_dir={tmp_path}", override)
    load_config(cfg)  # Evaluation may.
    with pytest.raises(ConfigError, match=message):
        load_config(cfg, training=True)
    if "top_" in override:
        load_config(with_overrides(cfg, "engine.allow_truncated_support=true"), training=True)


@pytest.mark.parametrize("left_over", ["config.yaml", "logs", "checkpoints"])
def test_training_never_mixes_two_runs(cfg, tmp_path, left_over):
    cfg.output_dir = str(tmp_path)
    load_config(cfg, training=True)
    (tmp_path / left_over).mkdir()
    load_config(cfg)
    with pytest.raises(ConfigError, match="which holds an earlier run"):
        load_config(cfg, training=True)


def test_a_pair_must_fit_a_micro_batch(cfg):
    cfg.micro_batch_tokens = 128
    load_config(cfg)
    cfg.loss["_component_"] = "torchrl_llm_async.objectives.OnlineDPOLoss"
    with pytest.raises(ConfigError, match=r"too few for 2 sequences .* at least 256"):
        load_config(cfg)


USER_MODULE = """
from __future__ import annotations
from typing import TYPE_CHECKING
from torchrl_llm_async.envs import WrittenSumsEnv
from torchrl_llm_async.objectives import DecoupledPPOLoss
if TYPE_CHECKING:
    from nowhere import Split

class Sums(WrittenSumsEnv):
    def __init__(self, split: Split = "train", *, seed: int = 0):
        super().__init__(split, seed=seed)

class Broken(Sums):
    def _reset(self, *args, **kwargs):
        raise RuntimeError("the server is away")

class OddLoss(DecoupledPPOLoss):
    packing_unit = "turn"
"""


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    """The name of a module in the current folder, which no entry of sys.path leads to."""
    (tmp_path / "users_own.py").write_text(USER_MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    yield "users_own"
    sys.modules.pop("users_own", None)


def test_components_of_the_current_folder_are_found(cfg, user_module):
    cfg.env["_component_"] = f"{user_module}.Sums"  # Its annotation can't be resolved either.
    load_config(cfg)


def test_an_environment_that_does_not_reset_is_named(cfg, user_module):
    cfg.eval_env["_component_"] = f"{user_module}.Broken"
    with pytest.raises(ConfigError, match=r"eval_env: users_own.Broken .*RuntimeError: the server"):
        load_config(cfg)


def test_an_unknown_packing_unit_is_refused(cfg, user_module):
    cfg.loss["_component_"] = f"{user_module}.OddLoss"
    with pytest.raises(ConfigError, match=r"packing_unit is 'turn'; .*'sequence', 'pair', 'group'"):
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


def test_one_server_is_one_engine(cfg):
    server = {
        "_component_": "torchrl_llm_async.engines.VLLMServerEngine",
        "url": "http://localhost:1",
        "max_model_len": 128,
    }
    cfg.engine = server
    load_config(cfg)
    cfg.num_engines = 2
    with pytest.raises(ConfigError, match=r"num_engines is 2, but engine.url names one server"):
        load_config(cfg)


def test_a_config_json_that_transformers_refuses_is_a_config_error(cfg, tmp_path):
    folder = shutil.copytree(PACKAGE_DIR / "assets" / "written-sums-qwen2", tmp_path / "model")
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"layer_types": ["full_attention"]}))
    with pytest.raises(ConfigError, match=r"model_dir is .*, whose tokenizer can't be loaded: "):
        load_config(with_overrides(cfg, f"model_dir={folder}"))
