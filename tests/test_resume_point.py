"""Where a run resumes, and what is refused before anything slow starts."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from groups import make_group
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file
from scripted import GROUP_SIZE, GROUPS_PER_STEP
from scripted import make_buffer as make_collector_buffer
from torchrl.envs.transforms import RewardScaling

from torchrl_llm_async.checkpoint import (
    CheckpointStore,
    TrainingSnapshot,
    TrainingState,
    load_tree,
    save_tree,
)
from torchrl_llm_async.data import StalenessReplayBuffer
from torchrl_llm_async.envs import WrittenSumsEnv
from torchrl_llm_async.recipes.config import PACKAGE_DIR, ConfigError, load_config
from torchrl_llm_async.recipes.resume import (
    Records,
    RunCheckpoints,
    RunFolderError,
    begin_in,
    start_weights,
)
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


def write(cfg, version: int, transform=None) -> Path:
    """A checkpoint without a model, behind ``version`` steps, with groups in flight."""
    store = CheckpointStore(Path(cfg.output_dir) / "resume")
    part = store.begin(version)
    controller = StalenessController(**BOUNDS)
    buffer = StalenessReplayBuffer(**BOUNDS, group_size=2, transform=transform)
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
    checked = load_config(cfg)
    run = {
        "version": version,
        "config": OmegaConf.to_container(checked, resolve=True),
        "start_weights": start_weights(checked),
    }
    (part / "run.json").write_text(json.dumps(run))
    return store.commit(version)


def test_auto_takes_the_newest_or_starts_anew(cfg, caplog):
    assert load(cfg, "resume=auto").resume is None
    (Path(cfg.output_dir) / "logs").mkdir(parents=True)  # killed before its first checkpoint
    assert load(cfg, "resume=auto").resume is None
    first, second = write(cfg, 2), write(cfg, 3)
    assert load(cfg, "resume=auto").resume == str(second)
    (second / "replay_buffer.json").write_text("{")
    assert load(cfg, "resume=auto").resume == str(first)


@pytest.mark.inv7
def test_auto_begins_nothing_anew_where_checkpoints_are_lost(cfg):
    """It would wipe the records of the run that was there."""
    folder = write(cfg, 3)
    ledger = Path(cfg.output_dir) / "ledger.jsonl"
    ledger.write_text("".join(f'{{"version": {step}}}\n' for step in range(1, 20)))
    (folder / "manifest.json").unlink()
    with pytest.raises(ConfigError, match=r"of step_00003 none is whole .*ledger.jsonl has 19"):
        load(cfg, "resume=auto")
    shutil.rmtree(folder.parent)
    assert load(cfg, "resume=auto").resume is None  # killed while its first one was written
    with pytest.raises(ConfigError, match=r"there is no checkpoint in .*output_dir"):
        load(cfg, "resume=auto", "checkpoint_every=9")


@pytest.mark.inv7
def test_a_run_has_its_folder_for_itself(cfg):
    lock = begin_in(cfg)
    with pytest.raises(RunFolderError, match=rf"another run is at work \(process {os.getpid()} on"):
        begin_in(cfg)
    lock.close()
    begin_in(cfg).close()


def test_a_killed_run_lets_go_of_its_folder(cfg):
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()

    def hold() -> None:
        lock = begin_in(cfg)
        theirs.send(lock.name)
        signal.pause()

    holder = context.Process(target=hold)
    holder.start()
    ours.recv()
    with pytest.raises(RunFolderError, match=f"process {holder.pid} on"):
        begin_in(cfg)
    holder.kill()
    holder.join()
    begin_in(cfg).close()


def test_a_folder_that_can_not_be_written_is_a_config_error(cfg, tmp_path):
    (tmp_path / "file").write_text("")
    for folder in ("file", "file/below"):
        cfg.output_dir = str(tmp_path / folder)
        with pytest.raises(RunFolderError, match=r"which can't be written into: .*file"):
            begin_in(cfg)


@pytest.mark.inv4
def test_a_run_resumed_further_back_comes_back_there(cfg, tmp_path):
    """Killed before its next checkpoint, which would make the later ones obsolete."""
    first, second = write(cfg, 2), write(cfg, 3)
    fork = load(cfg, f"resume={first}", f"output_dir={tmp_path}/fork")
    begin_in(fork).close()
    assert load(cfg, "resume=auto").resume == str(second)
    begin_in(load(cfg, f"resume={first}")).close()
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
    with pytest.raises(ConfigError, match=r"resume is 'no/where', which is no .*step_00002, "):
        load(cfg, "resume=no/where")
    with pytest.raises(ConfigError, match="which is no checkpoint of a run; give 'auto'"):
        load(cfg, "resume=no/where", f"output_dir={tmp_path}/fork")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["seed=3"], r"seed is 3, but .* was written with 0; resume with the same seed"),
        (["group_size=4"], r"group_size is 4, but .* was written with 2"),
        (["env.max_terms=3"], r"env is .*max_terms': 3.*, but .* was written with"),
        (["total_steps=2"], r"total_steps is 2, and .* has 3 behind it; raise total_steps"),
        (["eval_problems=20"], r"eval_problems is 20, but .* was written with 500"),
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
        ["total_steps=3"],  # Nothing is left but to say how it went.
    ):
        assert load(cfg, "resume=auto", *overrides).resume is not None


def test_a_transform_with_a_state_hinders_nobody(cfg):
    """Its state is the run's affair, which has the transform."""
    scaling = RewardScaling(loc=0.0, scale=1.0, in_keys=[("next", "reward")])
    newest = write(cfg, 3, transform=scaling)
    assert json.loads((newest / "replay_buffer.json").read_text())["state"]["transform"]
    assert load(cfg, "resume=auto").resume == str(newest)


def test_the_model_may_move_but_not_change(cfg, tmp_path):
    newest = write(cfg, 3)
    moved = tmp_path / "moved"
    shutil.copytree(load_config(cfg).model_dir, moved)
    assert load(cfg, "resume=auto", f"model_dir={moved}").resume == str(newest)
    weights = load_file(moved / "model.safetensors")
    name = max(weights)
    weights[name] = weights[name] + 1e-3
    save_file(weights, moved / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"model_dir is .*moved, but .* began with other weights"):
        load(cfg, "resume=auto", f"model_dir={moved}")


def test_weights_are_told_apart_without_reading_them_all(tmp_path):
    """Wherever as much as a sixty-fourth of the file differs; whatever its size."""
    cfg = OmegaConf.create({"model_dir": str(tmp_path), "checkpointer": {"checkpoint_files": "w"}})
    cfg.checkpointer.checkpoint_files = ["w"]
    for size in (0, 1, 100, 4096, 300_001):
        content = torch.arange(size).to(torch.uint8)
        digests = set()
        for changed in range(-1, 64):
            other = content.clone()
            if changed >= 0:
                other[changed * size // 64 : (changed + 1) * size // 64] += 1
            (tmp_path / "w").write_bytes(other.numpy().tobytes())
            digests.add(start_weights(cfg, samples=80, sample_bytes=16))
        assert len(digests) == 1 + min(size, 64)


@pytest.mark.parametrize("value", [{1: 0.5, "b": 2}, float("nan")])
def test_whatever_a_config_holds_is_equal_to_itself(cfg, value):
    env = {"_component_": f"{__name__}.EnvWithAnOption"}
    cfg.env = {**env, "option": value}
    newest = write(cfg, 3)
    assert load(cfg, "resume=auto").resume == str(newest)
    cfg.env = {**env, "option": "another"}
    with pytest.raises(ConfigError, match=r"env is .*'another'.*, but .* was written with"):
        load(cfg, "resume=auto")


class EnvWithAnOption(WrittenSumsEnv):
    """Takes whatever YAML has."""

    def __init__(self, option):
        super().__init__()


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


def test_records_end_where_they_are_damaged(tmp_path, caplog):
    """As a machine that fails may leave them: with zeros, or parts of other files."""
    path = tmp_path / "ledger.jsonl"
    good = [json.dumps({"version": version}) for version in range(1, 6)]
    for bad in ("\0" * 20, "{", "7", '{"step": 3}', '{"version": "3"}', "\xff\xfe"):
        path.write_bytes("\n".join([*good[:2], bad, *good[3:], ""]).encode("latin-1"))
        caplog.clear()
        records = Records(path, up_to=5)
        assert records.kept == [{"version": 1}, {"version": 2}], bad
        assert "damaged at line 3" in caplog.text
        records.append(3)
        records.close()
        assert path.read_text().splitlines() == good[:3]


def leg(make_collector, folder: Path, steps: list[int], *, dump: bool) -> int:
    """Goes on with a run, if there is one, for some steps; lines in its samples.jsonl then."""
    is_first = not (folder / "collector.json").exists()
    buffer = make_collector_buffer(max_staleness=0)
    samples = folder / "samples.jsonl"
    collector = make_collector(
        replay_buffer=buffer,
        total_steps=6,
        max_staleness=0,
        dump_path=samples if dump else None,
    )
    if not is_first:
        buffer.loads(folder)
        collector.load_state_dict(load_tree(folder / "collector"))
    collector.start()
    collector.wait_until_ready()
    if not is_first:
        collector.serve_weights("unread", version=steps[0])
    for step in steps:
        buffer.sample(timeout=20)
        cut = collector.cut()
        collector.serve_weights("unread", version=step + 1).result(20)
    save_tree(folder / "collector", cut.collector)
    cut.buffer.save(folder)
    collector.shutdown()
    return len(samples.read_text().splitlines())


def test_samples_stay_where_a_run_goes_on_without_a_dump(make_collector, tmp_path):
    of_a_step = GROUPS_PER_STEP * GROUP_SIZE
    # What was sampled behind the cut goes, as the run resumed will come to it again.
    for steps, dump, least in (([0, 1], True, 2), ([2, 3], False, 2), ([4, 5], True, 4)):
        lines = leg(make_collector, tmp_path, steps, dump=dump)
        assert lines >= least * of_a_step
    groups = [json.loads(line)["group"] for line in (tmp_path / "samples.jsonl").open()]
    assert {*range(4), *range(8, 12)} <= set(groups)
    assert len(groups) == len(set(groups)) * GROUP_SIZE


def test_records_and_models_are_synced_before_a_checkpoint_counts(tmp_path, monkeypatch):
    synced = []

    def sync(descriptor, really=os.fsync):
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).relative_to(tmp_path))
        really(descriptor)

    monkeypatch.setattr("os.fsync", sync)
    beside = [Path("ledger.jsonl"), Path("checkpoints/step_00001/model.safetensors")]
    for path in beside:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        model = torch.nn.Linear(2, 2)
        state = TrainingState(model, torch.optim.AdamW(model.parameters()))
        checkpoints = RunCheckpoints(tmp_path / "resume", state, config(), dist.group.WORLD)
        checkpoints.begin(1, cut=None)
        synced.clear()  # of making the folder
        checkpoints.finish()
    finally:
        dist.destroy_process_group()
    assert synced[:2] == beside
    assert Path("resume/step_00001.part/manifest.json") in synced[2:]


def config():
    """A config whose model is found from anywhere, and that keeps one checkpoint."""
    model_dir = PACKAGE_DIR / "assets" / "written-sums-qwen2"
    return OmegaConf.merge(OmegaConf.load(CONFIG), {"keep_checkpoints": 1, "model_dir": model_dir})


def save_with_a_full_disk(rank: int, folder: Path) -> None:
    """A checkpoint of two ranks, and another for which rank 1 has no room."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    model = torch.nn.Linear(2, 2)
    state = TrainingState(model, torch.optim.AdamW(model.parameters()))
    checkpoints = RunCheckpoints(folder / "resume", state, config(), dist.group.WORLD)
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
