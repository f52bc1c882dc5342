"""What runs inside vLLM's worker, without a core around it: reading and checking publications."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from policies import changed, initial_weights

from torchrl_llm_async.weight_update import WeightStore

pytestmark = pytest.mark.engine


@pytest.fixture
def worker(tiny_model: Path):
    """The extension on as much of a worker as staging needs."""
    from torchrl_llm_async.engines.vllm_worker import WeightUpdateExtension

    worker = WeightUpdateExtension()
    worker.model_config = SimpleNamespace(
        model=str(tiny_model),
        dtype=torch.float16,
        hf_config=SimpleNamespace(tie_word_embeddings=True),
    )
    return worker


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    return WeightStore(tmp_path / "weights")


@pytest.mark.inv3
@pytest.mark.parametrize(("value", "verdict"), [(7e4, "not finite in torch.float16"), (6e4, "")])
def test_what_overflows_when_it_is_cast_is_refused(
    worker, store: WeightStore, tiny_model: Path, value: float, verdict: str
) -> None:
    weights = changed(initial_weights(tiny_model), seed=1)
    weights["model.norm.weight"][3] = value
    worker.begin_staging(1, str(store.write(1, weights.items())))
    worker._staging.result(timeout=30)
    assert worker.staging_verdict().endswith(verdict)
    assert bool(worker.staging_verdict()) == bool(verdict)


@pytest.mark.inv5
def test_a_file_system_that_never_answers_blocks_only_its_own_publication(
    worker, store: WeightStore, tiny_model: Path, tmp_path: Path
) -> None:
    os.mkfifo(dead := tmp_path / "dead.safetensors")  # opening it waits for a writer
    worker.begin_staging(1, str(dead))
    (hangs,) = (thread for thread in threading.enumerate() if "stages" in thread.name)
    assert worker.staging_verdict() is None
    weights = changed(initial_weights(tiny_model), seed=1)
    worker.begin_staging(2, str(store.write(2, weights.items())))
    assert worker._staging.result(timeout=30).version == 2
    assert worker.staging_verdict() == ""
    assert hangs.is_alive()
    assert hangs.daemon
    writer = os.open(dead, os.O_RDWR)
    hangs.join(30)
    os.close(writer)
    assert not hangs.is_alive()
    assert worker.staging_verdict() == ""  # its late word is heard by nobody


@pytest.mark.inv3
def test_what_can_not_be_checked_is_refused(worker, store: WeightStore, tiny_model: Path) -> None:
    """Also if the error has no text, which must not pass for the absence of one."""

    def fail(tensors) -> str:
        raise AssertionError

    worker._misfit = fail
    worker.begin_staging(1, str(store.write(1, initial_weights(tiny_model).items())))
    worker._staging.result(timeout=30)
    assert "can't be checked (AssertionError())" in worker.staging_verdict()
