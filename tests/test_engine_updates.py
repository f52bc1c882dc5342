"""The vLLM engine's weight switches against transformers: exact, whole, or refused."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
import torch
from conftest import EngineHost
from policies import Weights, assert_true, changed, initial_weights

from torchrl_llm_async.engines import Generation, SamplingConfig, VLLMEngine, WeightUpdateError
from torchrl_llm_async.weight_update import WeightStore

pytestmark = pytest.mark.engine

PROMPT = [5, 6, 7, 8, 9]
SHORT = SamplingConfig(max_new_tokens=24)
LONG = SamplingConfig(max_new_tokens=240)
ON_UPDATE = ["keep", "recompute", "abort"]


@pytest.fixture
def host(engine_host: EngineHost) -> EngineHost:
    """The shared engine, which a test may switch to a further version."""
    engine_host.engine.check_health()
    return engine_host


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    return WeightStore(tmp_path / "weights", keep=8)


async def _answers_across_switches(
    engine: VLLMEngine, paths: dict[int, Path], count: int, tag: str
) -> list[Generation]:
    """Long answers that are under way at each of the switches; looked at before and behind each."""
    running = [
        asyncio.ensure_future(engine.generate(PROMPT, LONG, request_id=f"{tag}{i}", seed=i))
        for i in range(count)
    ]
    assert engine.partial_answer(f"{tag}0") is None  # not sent yet
    seen = []
    for version, path in paths.items():
        between = await engine.generate(PROMPT, SHORT, request_id=f"{tag}-before-{version}")
        assert between.finish_reason == "length"
        seen += [(i, engine.partial_answer(f"{tag}{i}")) for i in range(count)]
        await engine.update_weights(version, path)
        seen += [(i, engine.partial_answer(f"{tag}{i}")) for i in range(count)]
    answers = await asyncio.gather(*running)
    for i, begun in seen:
        size = len(begun.token_ids)
        assert size and begun.finish_reason == "abort"
        for name in ("token_ids", "log_probs", "versions"):
            assert getattr(begun, name) == getattr(answers[i], name)[:size]
    assert len({len(begun.token_ids) for _, begun in seen}) >= len(paths)
    assert engine.partial_answer(f"{tag}0") is None
    return answers


class TestSwitch:
    @pytest.mark.inv2
    @pytest.mark.parametrize("on_update", ON_UPDATE)
    def test_versions_and_log_probs_are_exact_across_switches(
        self,
        host: EngineHost,
        tiny_model: Path,
        store: WeightStore,
        monkeypatch: pytest.MonkeyPatch,
        on_update: str,
    ) -> None:
        monkeypatch.setattr(host.engine, "on_update", on_update)
        first = host.engine.version + 1
        versions = [first, first + 1, first + 4, first + 5]  # some may be skipped
        weights_of: dict[int, Weights] = {}
        weights = initial_weights(tiny_model)
        for version in versions:
            weights = weights_of[version] = changed(weights, seed=version)
        paths = {v: store.write(v, weights.items()) for v, weights in weights_of.items()}
        host.run(host.engine.update_weights(first, paths.pop(first)))
        answers = host.run(_answers_across_switches(host.engine, paths, 4, on_update))
        assert host.engine.version == versions[-1]
        for answer in answers:
            assert len(answer.token_ids) == 240
            assert answer.finish_reason == "length"
            assert answer.versions == sorted(answer.versions)
            assert set(answer.versions) == set(versions)
            # With the cache kept, older weights have read what their tokens attend to.
            keep = {"keep_cache": on_update == "keep"}
            assert_true(answer, tiny_model, weights_of, PROMPT, **keep)
            with pytest.raises(AssertionError):
                assert_true(
                    answer, tiny_model, weights_of, PROMPT, keep_cache=not keep["keep_cache"]
                )

    @pytest.mark.parametrize("on_update", ON_UPDATE)
    def test_new_request_reuses_no_prefix_of_older_weights(
        self,
        host: EngineHost,
        tiny_model: Path,
        store: WeightStore,
        monkeypatch: pytest.MonkeyPatch,
        on_update: str,
    ) -> None:
        monkeypatch.setattr(host.engine, "on_update", on_update)
        prompt = [5 + i % 50 for i in range(100)]  # three whole blocks
        weights = changed(initial_weights(tiny_model), seed=11)
        host.run(host.engine.generate(prompt, SHORT, request_id="fills the cache"))
        version = host.engine.version + 1
        paths = {version: store.write(version, weights.items())}
        across = host.run(_answers_across_switches(host.engine, paths, 2, on_update))
        assert all(set(answer.versions) == {version - 1, version} for answer in across)
        answer = host.run(host.engine.generate(prompt, SHORT, request_id="new"))
        assert_true(answer, tiny_model, {version: weights}, prompt)

    def test_says_what_it_cost(
        self, host: EngineHost, tiny_model: Path, store: WeightStore
    ) -> None:
        version = host.engine.version + 1
        path = store.write(version, initial_weights(tiny_model).items())
        host.run(host.engine.update_weights(version, path))
        parts = dict(host.engine.last_update)
        stall = parts.pop("stall")
        assert set(parts) == {"stage", "pause", "load", "repack", "resume"}
        assert all(seconds > 0 for seconds in parts.values())
        assert sum(parts.values()) - parts["stage"] < stall

    @pytest.mark.inv5
    def test_a_file_system_that_never_answers_is_a_refusal(
        self,
        host: EngineHost,
        tiny_model: Path,
        store: WeightStore,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(host.engine, "heartbeat_s", 0.05)  # the running watch keeps its own
        version = host.engine.version + 1
        os.mkfifo(dead := tmp_path / "dead.safetensors")  # opening it waits for a writer
        with pytest.raises(WeightUpdateError, match=r"dead.safetensors could not be read in 0.5 s"):
            host.run(host.engine.update_weights(version, dead))
        monkeypatch.undo()
        answer = host.run(host.engine.generate(PROMPT, SHORT, request_id="meanwhile"))
        assert set(answer.versions) == {version - 1}
        path = store.write(version, initial_weights(tiny_model).items())
        host.run(host.engine.update_weights(version, path))
        assert host.engine.version == version

    def test_giving_up_leaves_a_whole_switch(
        self, host: EngineHost, tiny_model: Path, store: WeightStore
    ) -> None:
        weights = changed(initial_weights(tiny_model), seed=13)
        version = host.engine.version + 1
        path = store.write(version, weights.items())

        async def give_up():
            switch = asyncio.ensure_future(host.engine.update_weights(version, path))
            await asyncio.sleep(0)
            switch.cancel()
            with pytest.raises(asyncio.CancelledError):
                await switch
            # Waits behind the switch, and is refused.
            with pytest.raises(WeightUpdateError, match=f"version {version} keeps serving"):
                await host.engine.update_weights(version + 1, path.with_name("none"))
            return await host.engine.generate(PROMPT, SHORT, request_id="after giving up")

        assert set(host.run(give_up()).versions) == {version} == {host.engine.version}

    @pytest.mark.inv3
    @pytest.mark.parametrize(
        ("damage", "message"),
        [
            ("missing file", "can't be read"),
            ("torn file", "can't be read"),
            ("missing tensor", "1 missing .*embed_tokens"),
            ("unknown tensor", "1 unknown .*lm_head"),
            ("shape", r"has shape \(3,\)"),
            ("nan", "not finite"),
            ("stamp", "stamped version 1"),
        ],
    )
    def test_bad_publication_is_refused_whole(
        self, host: EngineHost, tiny_model: Path, store: WeightStore, damage: str, message: str
    ) -> None:
        greedy = SamplingConfig(max_new_tokens=24, temperature=0.0)
        served = host.engine.version
        before = host.run(host.engine.generate(PROMPT, greedy, request_id="before"))
        weights = changed(initial_weights(tiny_model), seed=7)
        version = served + 1
        if damage == "missing tensor":
            del weights["model.embed_tokens.weight"]
        elif damage == "unknown tensor":
            weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
        elif damage == "shape":
            weights["model.norm.weight"] = torch.ones(3)
        elif damage == "nan":
            weights["model.layers.1.mlp.up_proj.weight"][3, 4] = torch.nan
        path = store.write(1 if damage == "stamp" else version, weights.items())
        if damage == "stamp":
            version += 10
        elif damage == "missing file":
            path.unlink()
        elif damage == "torn file":
            os.truncate(path, path.stat().st_size - 100)
        with pytest.raises(WeightUpdateError, match=f"version {served} keeps serving.*{message}"):
            host.run(host.engine.update_weights(version, path))
        after = host.run(host.engine.generate(PROMPT, greedy, request_id="after"))
        assert after == before
        assert set(after.versions) == {served} == {host.engine.version}
