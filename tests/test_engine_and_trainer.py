"""Engine and trainer give a token the same log-probability, weights passed on in between."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import EngineHost
from decoders import tiny_decoder
from policies import changed, initial_weights
from scripted import ScriptedEngine, make_buffer
from tensordict import TensorDict, lazy_stack
from torchtune.models.qwen2._convert_weights import _FROM_HF

from torchrl_llm_async.engines import SamplingConfig
from torchrl_llm_async.modules import TorchtuneActor
from torchrl_llm_async.packing import pad_rows
from torchrl_llm_async.weight_update import VLLMSharedWeightSyncScheme, WeightPublisher, WeightStore

PROMPT = [5, 6, 7, 8, 9]


@pytest.mark.engine
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_agree_at_equal_weights(
    engine_host: EngineHost, tiny_model: Path, tmp_path: Path, temperature: float
) -> None:
    model = tiny_decoder(changed(initial_weights(tiny_model), seed=3))
    version = engine_host.engine.version + 1
    path = WeightPublisher(model, WeightStore(tmp_path), _FROM_HF).publish(version)
    engine_host.run(engine_host.engine.update_weights(version, path))
    sampling = SamplingConfig(max_new_tokens=48, temperature=temperature)
    answer = engine_host.run(
        engine_host.engine.generate(PROMPT, sampling, request_id=f"trainer-{temperature}")
    )
    tokens = torch.tensor(PROMPT + answer.token_ids)
    sampled = torch.arange(len(tokens)) >= len(PROMPT)
    row = TensorDict(
        {
            "tokens": {"full": tokens},
            "masks": {
                "all_attention_mask": torch.ones_like(sampled),
                "all_assistant_mask": sampled,
            },
        }
    )
    actor = TorchtuneActor(model, temperature=temperature)
    with torch.no_grad():
        log_probs = actor.score(pad_rows(lazy_stack([row]), pad_id=0)).log_probs
    torch.testing.assert_close(
        log_probs[0][sampled], torch.tensor(answer.log_probs), atol=1e-4, rtol=0
    )


class Recording(ScriptedEngine):
    """Keeps what it was told to serve."""

    async def update_weights(self, version: int, path: Path) -> None:
        self.told = (version, path.name, path.exists())
        await super().update_weights(version, path)


def test_torchrls_update_reaches_the_engine(make_collector, tiny_model: Path) -> None:
    model = tiny_decoder(initial_weights(tiny_model))
    scheme = VLLMSharedWeightSyncScheme(_FROM_HF)
    engine, buffer = Recording(), make_buffer()
    collector = make_collector(
        engine=engine, replay_buffer=buffer, total_steps=3, weight_sync_schemes={"policy": scheme}
    )
    scheme.init_on_sender(model_id="policy", context=collector, model=model)
    collector.start()
    for _ in range(3):  # The third batch is there only once version 1 is served.
        buffer.sample(timeout=30)
        if scheme.version == 0:
            collector.update_policy_weights_()
    folder = scheme.store.root
    collector.shutdown()
    assert engine.told == (1, "version-00000001.safetensors", True)
    assert not folder.exists()
