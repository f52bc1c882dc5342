"""Publications: names, values, atomicity; from one process and from two FSDP2 ranks."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from conftest import TINY_QWEN2
from decoders import tiny_decoder
from safetensors import safe_open
from safetensors.torch import load_file
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torchtune.models.qwen2._convert_weights import _FROM_HF, qwen2_tune_to_hf
from torchtune.training import set_activation_checkpointing

from torchrl_llm_async.weight_update import WeightPublisher, WeightStore


def _torchtunes_hf_names(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """torchtune's own converter, to whose names the publisher's are held."""
    state = {
        name.replace("_checkpoint_wrapped_module.", ""): value for name, value in state.items()
    }
    return qwen2_tune_to_hf(
        state,
        num_heads=TINY_QWEN2["num_attention_heads"],
        num_kv_heads=TINY_QWEN2["num_key_value_heads"],
        dim=TINY_QWEN2["hidden_size"],
        tie_word_embeddings=True,
    )


def _assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


class TestWeightStore:
    def test_file_is_whole_and_stamped(self, tmp_path: Path) -> None:
        store = WeightStore(tmp_path / "weights")
        wanted = {"a": torch.randn(3, 4), "b": torch.randn(4, 3).bfloat16().T}
        path = store.write(7, iter(wanted.items()))
        _assert_same(load_file(path), wanted)
        with safe_open(path, framework="pt") as tensors:
            assert tensors.metadata()["version"] == "7"
        assert store.path(7) == path

    def test_keeps_the_newest_two(self, tmp_path: Path) -> None:
        store = WeightStore(tmp_path / "weights")
        assert store.latest() is None
        for version in (1, 2, 5):
            store.write(version, [("a", torch.ones(1) * version)])
        assert store.latest() == 5
        assert sorted(tmp_path.rglob("*.safetensors")) == [store.path(2), store.path(5)]
        with pytest.raises(FileNotFoundError, match=r"version 1 .*\[2, 5\]"):
            store.path(1)

    def test_failed_write_publishes_nothing(self, tmp_path: Path) -> None:
        store = WeightStore(tmp_path / "weights")
        store.write(1, [("a", torch.ones(1))])

        def breaks_off():
            yield "a", torch.zeros(1)
            raise RuntimeError("the trainer died")

        with pytest.raises(RuntimeError, match="the trainer died"):
            store.write(2, breaks_off())
        assert store.latest() == 1
        assert len(list(store.root.iterdir())) == 1
        with pytest.raises(ValueError, match="no tensors"):
            store.write(2, [])

    def test_close_removes_its_own_files_only(self, tmp_path: Path) -> None:
        store = pickle.loads(pickle.dumps(WeightStore(tmp_path / "weights")))
        store.write(1, [("a", torch.ones(1))])
        (other := store.root / "other.safetensors").touch()
        store.close()
        assert list(store.root.iterdir()) == [other]
        other.unlink()
        store.close()
        assert not store.root.exists()
        store.close()


class TestOneProcess:
    def test_names_and_values_are_the_checkpoints(self, tiny_model: Path, tmp_path: Path) -> None:
        weights = load_file(tiny_model / "model.safetensors")
        publisher = WeightPublisher(tiny_decoder(weights), WeightStore(tmp_path), _FROM_HF)
        path = publisher.publish(1)
        _assert_same(load_file(path), weights)
        assert "lm_head.weight" not in weights

    def test_untied_head_is_published(self, tiny_model: Path, tmp_path: Path) -> None:
        weights = load_file(tiny_model / "model.safetensors")
        weights["lm_head.weight"] = torch.randn_like(weights["model.embed_tokens.weight"])
        model = tiny_decoder(weights, tied=False)
        path = WeightPublisher(model, WeightStore(tmp_path), _FROM_HF).publish(1)
        _assert_same(load_file(path), weights)

    def test_transformers_gives_the_same_logits(self, tiny_model: Path, tmp_path: Path) -> None:
        from transformers import Qwen2ForCausalLM

        model = tiny_decoder(load_file(tiny_model / "model.safetensors"))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
        path = WeightPublisher(model, WeightStore(tmp_path), _FROM_HF).publish(1)
        reference = Qwen2ForCausalLM.from_pretrained(tiny_model)
        missing, unexpected = reference.load_state_dict(load_file(path), strict=False)
        assert missing == ["lm_head.weight"] and not unexpected
        tokens = torch.randint(64, (2, 17))
        with torch.no_grad():
            torch.testing.assert_close(model(tokens), reference(tokens).logits, atol=1e-5, rtol=0)


def _train_and_publish(rank: int, folder: str, rendezvous: str, weights_file: str) -> None:
    """One rank of two: a step on an FSDP2 model, published with and without mixed precision."""
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    weights = load_file(weights_file)
    for case, policy in {
        "float32": MixedPrecisionPolicy(),
        "bfloat16": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
    }.items():
        model = tiny_decoder(weights)
        set_activation_checkpointing(model, {type(model.layers[0])})
        for layer in model.layers:
            fully_shard(layer, mp_policy=policy, reshard_after_forward=False)
        fully_shard(model, mp_policy=policy, reshard_after_forward=False)
        publisher = WeightPublisher(model, WeightStore(Path(folder) / case), _FROM_HF)
        first = publisher.publish(0)
        tokens = torch.arange(10)[None] + rank
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(tokens).float().square().mean().backward()
        with torch.no_grad():
            model(tokens)  # leaves every unit unsharded, with the weights of before the step
        optimizer.step()
        second = publisher.publish(1)
        assert (first is None, second is None) == (rank != 0, rank != 0)
        # The truth by another way: every parameter gathered by itself.
        truth = {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}
        if rank == 0:
            torch.save(truth, Path(folder) / f"{case}.pt")
        model(tokens).float().square().mean().backward()  # publishing leaves the model usable
    dist.destroy_process_group()


def test_two_fsdp_ranks(tiny_model: Path, tmp_path: Path) -> None:
    weights_file = tiny_model / "model.safetensors"
    mp.spawn(
        _train_and_publish, (str(tmp_path), str(tmp_path / "rendezvous"), str(weights_file)), 2
    )
    weights = load_file(weights_file)
    for case, dtype in {"float32": torch.float32, "bfloat16": torch.bfloat16}.items():
        store = WeightStore(tmp_path / case)
        _assert_same(load_file(store.path(0)), {k: v.to(dtype) for k, v in weights.items()})
        published = load_file(store.path(1))
        truth = _torchtunes_hf_names(torch.load(tmp_path / f"{case}.pt"))
        _assert_same(published, {k: v.to(dtype) for k, v in truth.items()})
        assert not torch.equal(
            published["model.norm.weight"], weights["model.norm.weight"].to(dtype)
        )


def test_as_many_versions_stay_as_were_asked_for(tmp_path: Path) -> None:
    store = WeightStore(tmp_path, keep=3)
    for version in range(1, 6):
        store.write(version, [("weight", torch.ones(1))])
    assert [store.path(version).exists() for version in (3, 4, 5)] == [True] * 3
    with pytest.raises(FileNotFoundError, match="version 2 is not in"):
        store.path(2)
    with pytest.raises(ValueError, match="keep=0"):
        WeightStore(tmp_path, keep=0)


def test_folders_of_killed_processes_are_swept(tmp_path: Path) -> None:
    process = mp.get_context("spawn").Process(target=WeightStore.temporary, args=(tmp_path,))
    process.start()
    process.join()
    (left,) = tmp_path.iterdir()
    own, second = WeightStore.temporary(tmp_path), WeightStore.temporary(tmp_path)
    assert not left.exists()
    assert {own.root, second.root} == set(tmp_path.iterdir())
