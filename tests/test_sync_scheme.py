"""The weight-sync scheme: TorchRL's words lead from a decoder to whoever serves it."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from conftest import EngineHost
from decoders import tiny_decoder
from safetensors.torch import load_file
from torch.distributed.fsdp import fully_shard
from torchrl.collectors import BaseCollector
from torchtune.models.qwen2._convert_weights import _FROM_HF

from torchrl_llm_async.engines import SamplingConfig
from torchrl_llm_async.weight_update import VLLMSharedWeightSyncScheme


class Collector:
    """Stands for the collector of rank 0: notes what it is told to serve."""

    def __init__(self) -> None:
        self.told: list[tuple[int, Path]] = []

    def serve_weights(self, path: Path, *, version: int) -> None:
        assert path.exists()
        self.told.append((version, path))

    # TorchRL's own, which is to find the scheme under the model's name and send().
    update_policy_weights_ = BaseCollector.update_policy_weights_
    _legacy_weight_updater = False
    _weight_update_impl = BaseCollector._weight_update_impl
    _extract_weights_if_needed = BaseCollector._extract_weights_if_needed
    _send_weights_scheme = BaseCollector._send_weights_scheme


@pytest.fixture
def model(tiny_model: Path) -> torch.nn.Module:
    return tiny_decoder(load_file(tiny_model / "model.safetensors"))


@pytest.fixture
def collector() -> Collector:
    return Collector()


@pytest.fixture
def scheme(
    tmp_path: Path, model: torch.nn.Module, collector: Collector
) -> Iterator[VLLMSharedWeightSyncScheme]:
    scheme = VLLMSharedWeightSyncScheme(_FROM_HF, root=tmp_path)
    scheme.init_on_sender(model_id="policy", context=collector, model=model)
    collector._weight_sync_schemes = {"policy": scheme}
    yield scheme
    scheme.shutdown()


class TestSend:
    def test_torchrls_update_publishes_the_next_version_and_tells(
        self, scheme: VLLMSharedWeightSyncScheme, collector: Collector, model: torch.nn.Module
    ) -> None:
        before = model.norm.scale.detach().clone()
        collector.update_policy_weights_()
        with torch.no_grad():
            model.norm.scale.add_(1)
        collector.update_policy_weights_()
        assert [version for version, _ in collector.told] == [1, 2]
        first, second = (load_file(path)["model.norm.weight"] for _, path in collector.told)
        assert torch.equal(first, before) and torch.equal(second, before + 1)
        assert scheme.version == scheme.store.latest() == 2

    def test_versions_may_skip_but_not_return(
        self, scheme: VLLMSharedWeightSyncScheme, collector: Collector
    ) -> None:
        scheme.send(version=4)
        for version in (4, 3, 0):
            with pytest.raises(ValueError, match=f"version={version}: 4 is published"):
                scheme.send(version=version)
        scheme.send()
        assert [version for version, _ in collector.told] == [4, 5]

    def test_another_decoder_may_be_sent(
        self,
        scheme: VLLMSharedWeightSyncScheme,
        collector: Collector,
        tiny_model: Path,
    ) -> None:
        weights = load_file(tiny_model / "model.safetensors")
        weights["model.norm.weight"] += 1
        collector.update_policy_weights_(tiny_decoder(weights))
        published = load_file(scheme.store.path(1))
        assert torch.equal(published["model.norm.weight"], weights["model.norm.weight"])

    @pytest.mark.parametrize("weights", ["version-1.safetensors", {"w": torch.ones(1)}])
    def test_what_is_no_decoder_is_refused(
        self, scheme: VLLMSharedWeightSyncScheme, collector: Collector, weights: object
    ) -> None:
        with pytest.raises(TypeError, match="give a torchtune decoder, or None"):
            collector.update_policy_weights_(weights)
        with pytest.raises(ValueError, match="worker_ids=0"):
            collector.update_policy_weights_(worker_ids=0)
        assert scheme.store.latest() is None and not collector.told

    def test_a_folder_that_is_gone_tells_no_one(
        self, scheme: VLLMSharedWeightSyncScheme, collector: Collector
    ) -> None:
        scheme.send()
        for file in scheme.store.root.iterdir():
            file.unlink()
        scheme.store.root.rmdir()
        with pytest.raises(OSError, match="version 2 can't be written"):
            scheme.send()
        assert scheme.version == 1 and len(collector.told) == 1

    def test_a_collector_that_is_gone_is_named(self, model: torch.nn.Module) -> None:
        scheme = VLLMSharedWeightSyncScheme(_FROM_HF)
        scheme.init_on_sender(context=Collector(), model=model)
        with pytest.raises(RuntimeError, match="no one to tell of version 1"):
            scheme.send()
        scheme.shutdown()

    def test_a_model_that_is_gone_is_named(self, collector: Collector, tiny_model: Path) -> None:
        scheme = VLLMSharedWeightSyncScheme(_FROM_HF)
        weights = load_file(tiny_model / "model.safetensors")
        scheme.init_on_sender(context=collector, model=tiny_decoder(weights))
        with pytest.raises(TypeError, match="is no more; keep a reference"):
            scheme.send()
        scheme.shutdown()


class TestLife:
    def test_publications_are_in_shared_memory_and_go_with_the_scheme(
        self, model: torch.nn.Module, collector: Collector
    ) -> None:
        scheme = VLLMSharedWeightSyncScheme(_FROM_HF, keep=1)
        assert scheme.store is None and not scheme.initialized_on_sender
        scheme.init_on_sender(model_id="policy", context=collector, model=model)
        scheme.connect()  # TorchRL's collectors do; there is nothing to do
        assert scheme.initialized_on_sender and scheme.synchronized_on_sender
        scheme.send()
        scheme.send()
        (first, second) = (path for _, path in collector.told)
        assert second.parent.parent == Path("/dev/shm")
        assert second.exists() and not first.exists()
        scheme.shutdown()
        assert not second.parent.exists() and not scheme.initialized_on_sender
        scheme.shutdown()
        with pytest.raises(RuntimeError, match="call init_on_sender"):
            scheme.send()

    def test_a_pickled_scheme_is_its_configuration(
        self, scheme: VLLMSharedWeightSyncScheme, tmp_path: Path
    ) -> None:
        scheme.send()
        copy = pickle.loads(pickle.dumps(scheme))
        assert (copy.hf_key_map, copy.root, copy.keep) == (_FROM_HF, tmp_path, 2)
        assert not copy.initialized_on_sender and copy.store is None and copy.version == 0
        del copy  # and takes nothing with it
        assert scheme.store.path(1).exists()

    def test_rank_zero_needs_a_collector(self, model: torch.nn.Module) -> None:
        scheme = VLLMSharedWeightSyncScheme(_FROM_HF)
        with pytest.raises(ValueError, match="give init_on_sender the collector on rank 0"):
            scheme.init_on_sender(model_id="policy", model=model)
        assert not scheme.initialized_on_sender

    def test_there_is_no_receiver(self, scheme: VLLMSharedWeightSyncScheme) -> None:
        with pytest.raises(RuntimeError, match="has no receiver"):
            scheme.init_on_receiver(model_id="policy", context=object())
        with pytest.raises(RuntimeError, match="on receiver"):
            scheme.receive()
        with pytest.raises(RuntimeError, match="has no transports"):
            scheme.create_transport()
        with pytest.raises(ValueError, match="connect"):
            scheme.connect(weights={})
        scheme.send()  # asking has harmed nothing
        assert scheme.version == 1


def _send_on_two_ranks(rank: int, folder: str, weights_file: str) -> None:
    """One rank of two; rank 0 notes what its collector was told."""
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2
    )
    model = tiny_decoder(load_file(weights_file))
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    collector = Collector()
    scheme = VLLMSharedWeightSyncScheme(_FROM_HF, root=folder)
    with pytest.raises(ValueError, match="on rank 0"):
        scheme.init_on_sender(context=None if rank == 0 else collector, model=model)
    scheme.init_on_sender(context=collector if rank == 0 else None, model=model)
    scheme.send(version=3)
    with pytest.raises(ValueError, match="3 is published"):  # on both: neither waits
        scheme.send(version=3)
    if rank == 0:
        ((version, path),) = collector.told
        torch.save((version, load_file(path)), Path(folder) / "told.pt")
    else:
        assert not collector.told and scheme.store is None and scheme.version == 3
    scheme.shutdown()
    dist.destroy_process_group()


def test_two_ranks_send_together(tiny_model: Path, tmp_path: Path) -> None:
    weights_file = tiny_model / "model.safetensors"
    mp.spawn(_send_on_two_ranks, (str(tmp_path), str(weights_file)), 2)
    version, published = torch.load(tmp_path / "told.pt")
    assert version == 3
    wanted = load_file(weights_file)
    assert published.keys() == wanted.keys()
    assert all(torch.equal(published[name], wanted[name]) for name in wanted)


class EngineCollector(Collector):
    """Hands publications to a real engine, as the collector's host does."""

    def __init__(self, host: EngineHost) -> None:
        super().__init__()
        self.host = host

    def serve_weights(self, path: Path, *, version: int) -> None:
        self.host.run(self.host.engine.update_weights(version, path))


@pytest.mark.engine
def test_the_engine_samples_from_the_model_that_was_sent(
    engine_host: EngineHost, tiny_model: Path, tmp_path: Path
) -> None:
    weights = load_file(tiny_model / "model.safetensors")
    model = tiny_decoder({k: v + 0.05 * torch.randn_like(v) for k, v in weights.items()})
    collector = EngineCollector(engine_host)
    scheme = VLLMSharedWeightSyncScheme(_FROM_HF, root=tmp_path)
    scheme.init_on_sender(context=collector, model=model)
    version = engine_host.engine.version + 1
    scheme.send(version=version)
    prompt = [1, 2, 3, 4, 5]
    answer = engine_host.run(
        engine_host.engine.generate(
            prompt, SamplingConfig(max_new_tokens=16), request_id="after-send"
        )
    )
    assert set(answer.versions) == {version}
    with torch.no_grad():
        log_probs = model(torch.tensor([prompt + answer.token_ids])).log_softmax(-1)
    expected = log_probs[0, len(prompt) - 1 : -1].gather(1, torch.tensor([answer.token_ids]).T)
    torch.testing.assert_close(
        torch.tensor(answer.log_probs), expected.flatten(), atol=1e-3, rtol=0
    )
    scheme.shutdown()
