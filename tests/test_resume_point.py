"""Where a run resumes, and what is refused before anything slow starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from groups import make_group
from omegaconf import OmegaConf

from torchrl_llm_async.checkpoint import (
    CheckpointStore,
    TrainingSnapshot,
    TrainingState,
    save_tree,
)
from torchrl_llm_async.data import StalenessReplayBuffer
from torchrl_llm_async.recipes.config import PACKAGE_DIR, ConfigError, load_config
from torchrl_llm_async.recipes.resume import Records, RunCheckpoints
from torchrl_llm_async.staleness import StalenessController

CONFIG = PACKAGE_DIR / "recipes" / "configs" / "arithmetic_ppo.yaml"
BOUNDS = dict(groups_per_step=4, max_staleness=2)


@pytest.fixture
def cfg(tmp_path):
    cfg = OmegaConf.load(CONFIG)
    cfg.output_dir = str(tmp_path / "run")
    return OmegaConf.merge(cfg, {**BOUNDS, "group_size": 2})


def load(cfg, *overrides: str):
    overridden = OmegaConf.merge(cfg, OmegaConf.from_dotlist(list(overrides)))
    return load_config(overridden, training=True)


def write(cfg, version: int) -> Path:
    """A checkpoint without a model, behind ``version`` steps, with groups in flight."""
    store = CheckpointStore(Path(cfg.output_dir) / "resume")
    part = store.begin(version)
    controller = StalenessController(**BOUNDS)
    buffer = StalenessReplayBuffer(**BOUNDS, group_size=2)
    for group_id in range((version + 3) * 4):
        if not controller.capacity():
            controller.serve(controller.served_version + 1)
        start = controller.admit(group_id)
        buffer.announce(group_id, start)
        if group_id % 4 < 3 or group_id < version * 4:
            controller.finish(group_id)
            buffer.extend(make_group(group_id, start))
        if group_id % 4 == 3 and buffer.consumer_version < version:
            buffer.sample(timeout=0)
    buffer.dumps(part)
    save_tree(part / "collector", {"controller": controller.state_dict()})
    config = OmegaConf.to_container(load_config(cfg), resolve=True)
    (part / "run.json").write_text(json.dumps({"version": version, "config": config}))
    return store.commit(version)


def test_auto_takes_the_newest_or_starts_anew(cfg, caplog):
    assert load(cfg, "resume=auto").resume is None
    (Path(cfg.output_dir) / "logs").mkdir(parents=True)  # killed before its first checkpoint
    assert load(cfg, "resume=auto").resume is None
    first, second = write(cfg, 2), write(cfg, 3)
    assert load(cfg, "resume=auto").resume == str(second)
    (second / "replay_buffer.json").write_text("{")
    assert load(cfg, "resume=auto").resume == str(first)


def test_without_resume_an_earlier_run_is_left_alone(cfg):
    (Path(cfg.output_dir) / "checkpoints").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"holds an earlier run; go on with it \(resume=auto\)"):
        load(cfg)


def test_a_checkpoint_may_be_named(cfg, tmp_path):
    first, second = write(cfg, 2), write(cfg, 3)
    (Path(cfg.output_dir) / "logs").mkdir()
    assert load(cfg, f"resume={first}").resume == str(first)
    # Another run may begin there, if it has a folder of its own.
    assert load(cfg, f"resume={first}", f"output_dir={tmp_path}/fork").resume == str(first)
    (second / "manifest.json").unlink()
    with pytest.raises(ConfigError, match=r"resume is .*is no checkpoint: it has no readable"):
        load(cfg, f"resume={second}")
    with pytest.raises(ConfigError, match="no/where is no checkpoint"):
        load(cfg, "resume=no/where", f"output_dir={tmp_path}/fork")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["seed=3"], r"seed is 3, but .* was written with 0; resume with the same seed"),
        (["group_size=4"], r"group_size is 4, but .* was written with 2"),
        (["env.max_terms=3"], r"env is .*max_terms': 3.*, but .* was written with"),
        (["total_steps=3"], r"total_steps is 3, and .* has them behind it"),
        (["max_staleness=1"], r"not all of them can be trained on in time"),
        (["groups_per_step=2", "minibatches_per_step=1"], r"max_staleness of at least \d"),
    ],
)
def test_what_can_not_go_on_is_refused(cfg, overrides, message):
    write(cfg, 3)
    with pytest.raises(ConfigError, match=message):
        load(cfg, "resume=auto", *overrides)


def test_what_may_change_may_change(cfg):
    write(cfg, 3)
    for overrides in (
        ["max_staleness=5"],
        ["groups_per_step=8"],
        ["groups_per_step=2", "max_staleness=5", "minibatches_per_step=2"],
        ["optimizer.lr=1e-5", "total_steps=99", "max_reuse=2"],
    ):
        assert load(cfg, "resume=auto", *overrides).resume is not None


def test_records_go_on_behind_the_checkpoint(tmp_path):
    path = tmp_path / "ledger.jsonl"
    records = Records(path, up_to=None)
    for version in (1, 2, 3):
        records.append(version, groups=[version])
    records.close()
    with open(path, "a") as file:
        file.write('{"version": 4, "gr')  # torn
    records = Records(path, up_to=2)
    assert records.kept == [{"version": 1, "groups": [1]}, {"version": 2, "groups": [2]}]
    records.append(3, groups=[30])
    records.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["groups"] for line in lines] == [[1], [2], [30]]
    Records(path, up_to=None).close()
    assert path.read_text() == ""


def save_with_a_full_disk(rank: int, folder: Path) -> None:
    """A checkpoint of two ranks, and another for which rank 1 has no room."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    model = torch.nn.Linear(2, 2)
    state = TrainingState(model, torch.optim.AdamW(model.parameters()))
    cfg = OmegaConf.create({"keep_checkpoints": 1})
    checkpoints = RunCheckpoints(folder / "resume", state, cfg, dist.group.WORLD)
    checkpoints.begin(1, cut=None)
    checkpoints.finish()

    def save(snapshot, folder):
        raise OSError(28, "No space left on device")

    if rank == 1:
        TrainingSnapshot.save = save
    checkpoints.begin(2, cut=None)
    with pytest.raises(OSError, match="another rank" if rank == 0 else "No space left"):
        while True:
            checkpoints.advance()
    dist.destroy_process_group()


@pytest.mark.inv5
def test_a_rank_that_can_not_write_leaves_the_checkpoint_before(tmp_path):
    mp.spawn(save_with_a_full_disk, (tmp_path,), nprocs=2)
    newest = CheckpointStore(tmp_path / "resume").newest()
    assert newest.name == "step_00001"
    assert len(list((newest / "training").iterdir())) == 2
