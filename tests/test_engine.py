"""The vLLM engine against transformers: tokens, log-probabilities, versions, switches, failures."""

from __future__ import annotations

import asyncio
import os
import pickle
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import EngineHost, heed_interrupts
from safetensors.torch import load_file

from torchrl_llm_async.engines import (
    EngineDeadError,
    GenerationEngine,
    SamplingConfig,
    VLLMEngine,
    WeightUpdateError,
)
from torchrl_llm_async.weight_update import WeightStore

PROMPT = [5, 6, 7, 8, 9]
SHORT = SamplingConfig(max_new_tokens=24)
LONG = SamplingConfig(max_new_tokens=240)

needs_engine = pytest.mark.engine


class TestWithoutVLLM:
    def test_sampling_config_refuses_bad_values(self) -> None:
        for field, value in {
            "max_new_tokens": 0,
            "temperature": -0.1,
            "top_p": 0.0,
            "top_k": -1,
        }.items():
            with pytest.raises(ValueError, match=field):
                SamplingConfig(**{"max_new_tokens": 4, field: value})

    def test_constructor_is_cheap_and_picklable(self, tmp_path: Path) -> None:
        engine = VLLMEngine(tmp_path, on_update="keep", log_file=tmp_path / "log", seed=3)
        assert vars(pickle.loads(pickle.dumps(engine))) == vars(engine)
        assert isinstance(engine, GenerationEngine)
        with pytest.raises(ValueError, match="on_update='drop'"):
            VLLMEngine(tmp_path, on_update="drop")

    def test_use_before_start_raises(self, tmp_path: Path) -> None:
        with pytest.raises(EngineDeadError, match="never started"):
            VLLMEngine(tmp_path).check_health()


@pytest.fixture
def host(engine_host: EngineHost) -> EngineHost:
    """The shared engine, which a test may switch to a further version."""
    engine_host.engine.check_health()
    return engine_host


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    return WeightStore(tmp_path / "weights")


def _reference_log_probs(
    tiny_model: Path, weights: dict[str, torch.Tensor], tokens: list[int], temperature: float
) -> torch.Tensor:
    """log p(token i | tokens before i) of every token but the first, by transformers."""
    from transformers import Qwen2ForCausalLM

    model = Qwen2ForCausalLM.from_pretrained(tiny_model)
    model.load_state_dict(weights, strict=False)
    ids = torch.tensor([tokens])
    with torch.no_grad():
        log_probs = (model(ids).logits[0, :-1] / temperature).log_softmax(-1)
    return log_probs.gather(-1, ids[0, 1:, None])[:, 0]


def _changed(weights: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: tensor + 0.1 * torch.randn(tensor.shape, generator=generator)
        for name, tensor in weights.items()
    }


@needs_engine
class TestGenerate:
    def test_log_probs_are_the_sampling_distributions(
        self, host: EngineHost, tiny_model: Path, store: WeightStore
    ) -> None:
        weights = load_file(tiny_model / "model.safetensors")
        version = host.engine.version + 1
        host.run(host.engine.update_weights(version, store.write(version, weights.items())))
        sampling = SamplingConfig(max_new_tokens=24, temperature=0.7)
        answer = host.run(host.engine.generate(PROMPT, sampling, request_id="temperature"))
        assert answer.finish_reason == "length"
        assert len(answer.token_ids) == len(answer.log_probs) == len(answer.versions) == 24
        assert set(answer.versions) == {version}
        wanted = _reference_log_probs(tiny_model, weights, PROMPT + answer.token_ids, 0.7)
        found = torch.tensor(answer.log_probs)
        torch.testing.assert_close(found, wanted[len(PROMPT) - 1 :], atol=2e-5, rtol=0)

    def test_more_prompt_tokens_than_a_batch_holds(self, host: EngineHost) -> None:
        """As after a switch that recomputes every running request; also, order changes nothing."""
        prompts = [[5 + i % 50, *range(5, 55), *range(6, 56), *range(7, 57)] for i in range(64)]

        async def all_at_once(order, name):
            answers = await asyncio.gather(
                *(
                    host.engine.generate(prompts[i], SHORT, request_id=f"{name}-{i}", seed=i)
                    for i in order
                )
            )
            return dict(zip(order, (answer.token_ids for answer in answers), strict=True))

        forwards = host.run(all_at_once(range(64), "forwards"), timeout=120)
        backwards = host.run(all_at_once(range(63, -1, -1), "backwards"), timeout=120)
        assert forwards == backwards

    def test_stop_token_ends_the_answer_and_belongs_to_it(self, host: EngineHost) -> None:
        async def both():
            free = await host.engine.generate(PROMPT, SHORT, request_id="free", seed=1)
            stop = free.token_ids[5]
            sampling = SamplingConfig(max_new_tokens=24, stop_token_ids=(stop,))
            return free, await host.engine.generate(PROMPT, sampling, request_id="s", seed=1)

        free, stopped = host.run(both())
        assert stopped.finish_reason == "stop"
        end = free.token_ids.index(free.token_ids[5]) + 1
        assert stopped.token_ids == free.token_ids[:end]

    def test_seed_names_the_answer_whatever_the_batch(self, host: EngineHost) -> None:
        async def answers(count: int, tag: str):
            return await asyncio.gather(
                *(
                    host.engine.generate(PROMPT, SHORT, request_id=f"{tag}{i}", seed=i)
                    for i in range(count)
                )
            )

        many = host.run(answers(40, "many"))
        few = host.run(answers(3, "few"))
        assert [a.token_ids for a in few] == [a.token_ids for a in many[:3]]
        assert [a.log_probs for a in few] == [a.log_probs for a in many[:3]]
        assert len({tuple(a.token_ids) for a in many}) > 35

    def test_greedy_is_the_argmax(self, host: EngineHost) -> None:
        greedy = SamplingConfig(max_new_tokens=8, temperature=0.0)
        answers = [
            host.run(host.engine.generate(PROMPT, greedy, request_id=f"g{seed}", seed=seed))
            for seed in (1, 2)
        ]
        assert answers[0].token_ids == answers[1].token_ids

    def test_answer_ends_with_the_context(self, host: EngineHost) -> None:
        prompt = [3] * (host.engine.max_model_len - 4)
        answer = host.run(host.engine.generate(prompt, SHORT, request_id="context"))
        assert len(answer.token_ids) == 4
        assert answer.finish_reason == "length"

    @pytest.mark.parametrize(
        ("prompt", "sampling", "message"),
        [
            ([], SHORT, "prompt of 0 tokens"),
            ([1] * 256, SHORT, "larger max_model_len than 256"),
            ([1000], SHORT, "tokenizer and model do not match"),
            (PROMPT, SamplingConfig(max_new_tokens=4, top_p=0.9), "allow_truncated_support"),
            (PROMPT, SamplingConfig(max_new_tokens=4, top_k=5), "allow_truncated_support"),
        ],
    )
    def test_bad_requests_leave_the_engine_unharmed(
        self, host: EngineHost, prompt: list[int], sampling: SamplingConfig, message: str
    ) -> None:
        with pytest.raises(ValueError, match=message):
            host.run(host.engine.generate(prompt, sampling, request_id="bad"))
        host.run(host.engine.generate(PROMPT, SHORT, request_id="good"))

    def test_cancelling_aborts_the_request(self, host: EngineHost) -> None:
        async def cancel() -> int:
            task = asyncio.ensure_future(host.engine.generate(PROMPT, LONG, request_id="cancel"))
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            return host.engine._engine.get_num_unfinished_requests()

        assert host.run(cancel()) == 0


async def _answers_across_a_switch(
    engine: VLLMEngine, version: int, path: Path, count: int, tag: str
):
    """Long answers that are under way when the weights switch."""
    running = [
        asyncio.ensure_future(engine.generate(PROMPT, LONG, request_id=f"{tag}{i}", seed=i))
        for i in range(count)
    ]
    first = await engine.generate(PROMPT, SHORT, request_id=f"{tag}-first")
    assert first.finish_reason == "length"
    await engine.update_weights(version, path)
    return await asyncio.gather(*running)


@needs_engine
class TestUpdateWeights:
    @pytest.mark.inv2
    def test_versions_and_log_probs_are_exact_across_a_switch(
        self, host: EngineHost, tiny_model: Path, store: WeightStore
    ) -> None:
        old = _changed(load_file(tiny_model / "model.safetensors"), seed=1)
        new = _changed(old, seed=2)
        before = host.engine.version + 1
        host.run(host.engine.update_weights(before, store.write(before, old.items())))
        after = before + 3  # versions may skip
        path = store.write(after, new.items())
        answers = host.run(_answers_across_a_switch(host.engine, after, path, 4, "switch"))
        assert host.engine.version == after
        for answer in answers:
            cut = answer.versions.index(after)
            assert answer.versions == [before] * cut + [after] * (240 - cut)
            assert 0 < cut < 240
            tokens, found = PROMPT + answer.token_ids, torch.tensor(answer.log_probs)
            under_old = _reference_log_probs(tiny_model, old, tokens, 1.0)[len(PROMPT) - 1 :]
            under_new = _reference_log_probs(tiny_model, new, tokens, 1.0)[len(PROMPT) - 1 :]
            torch.testing.assert_close(found[:cut], under_old[:cut], atol=5e-5, rtol=0)
            torch.testing.assert_close(found[cut:], under_new[cut:], atol=5e-5, rtol=0)
            assert (found[cut:] - under_old[cut:]).abs().max() > 0.1

    @pytest.mark.parametrize("on_update", ["keep", "recompute"])
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
        weights = _changed(load_file(tiny_model / "model.safetensors"), seed=11)
        host.run(host.engine.generate(prompt, SHORT, request_id="fills the cache"))
        version = host.engine.version + 1
        path = store.write(version, weights.items())
        across = host.run(_answers_across_a_switch(host.engine, version, path, 2, on_update))
        assert all(answer.versions == sorted(answer.versions) for answer in across)
        assert all(set(answer.versions) == {version - 1, version} for answer in across)
        answer = host.run(host.engine.generate(prompt, SHORT, request_id="new"))
        wanted = _reference_log_probs(tiny_model, weights, prompt + answer.token_ids, 1.0)
        found = torch.tensor(answer.log_probs)
        torch.testing.assert_close(found, wanted[len(prompt) - 1 :], atol=5e-5, rtol=0)

    def test_giving_up_leaves_a_whole_switch(
        self, host: EngineHost, tiny_model: Path, store: WeightStore
    ) -> None:
        weights = _changed(load_file(tiny_model / "model.safetensors"), seed=13)
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
        weights = _changed(load_file(tiny_model / "model.safetensors"), seed=7)
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


_CLIENT = '''
import asyncio, multiprocessing, os, signal, sys
from pathlib import Path
from torchrl_llm_async.engines import EngineDeadError, SamplingConfig, VLLMEngine

LONG = SamplingConfig(max_new_tokens=200)

def core_pid():
    (core,) = multiprocessing.active_children()
    return core.pid

async def lose_the_core(engine):
    """Kills the core under running requests and a switch; all of them must hear of it."""
    requests = [engine.generate([5, 6], LONG, request_id=str(i)) for i in range(8)]
    pending = asyncio.gather(*requests, return_exceptions=True)
    await engine.generate([5, 6], SamplingConfig(max_new_tokens=4), request_id="first")
    os.kill(core_pid(), signal.SIGSTOP)  # the switch is certain to find it silent
    switch = asyncio.ensure_future(engine.update_weights(1, Path("none")))
    await asyncio.sleep(0)
    os.kill(core_pid(), signal.SIGKILL)
    heard = await asyncio.wait_for(pending, 10)
    heard += await asyncio.wait_for(asyncio.gather(switch, return_exceptions=True), 10)
    assert [type(error) for error in heard] == [EngineDeadError] * 9, heard
    await engine.shutdown()

async def main(model, log_file, case):
    engine = VLLMEngine(model, log_file=Path(log_file))
    await engine.start()
    if case == "interrupt":
        await lose_the_core(engine)
        await engine.start()
    print("ready", core_pid(), flush=True)
    try:
        while True:
            await engine.generate([5, 6], LONG, request_id="loop")
    finally:
        await engine.shutdown()

if __name__ == "__main__":
    try:
        asyncio.run(main(*sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
'''


@needs_engine
class TestDeath:
    @staticmethod
    def _client(tiny_model: Path, tmp_path: Path, case: str) -> tuple[subprocess.Popen, int]:
        """A process with a running engine, and a process descriptor of its core."""
        (script := tmp_path / "client.py").write_text(_CLIENT)
        client = subprocess.Popen(
            [sys.executable, script, tiny_model, tmp_path / "vllm.log", case],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=heed_interrupts,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        ready = client.stdout.readline().split()
        assert ready[:1] == ["ready"], client.communicate()[1]
        return client, os.pidfd_open(int(ready[1]))

    @staticmethod
    def _assert_dies(core: int) -> None:
        assert select.select([core], [], [], 10)[0], "the engine core outlived its client"
        os.close(core)

    def test_core_dies_with_a_killed_client(self, tiny_model: Path, tmp_path: Path) -> None:
        client, core = self._client(tiny_model, tmp_path, "kill")
        client.kill()
        self._assert_dies(core)
        client.communicate()

    @pytest.mark.inv5
    def test_lost_core_is_heard_of_and_interrupt_ends_all_quietly(
        self, tiny_model: Path, tmp_path: Path
    ) -> None:
        client, core = self._client(tiny_model, tmp_path, "interrupt")
        os.killpg(client.pid, signal.SIGINT)
        try:
            assert client.communicate(timeout=30) == ("", "")
        finally:
            client.kill()
        assert client.returncode == 130
        self._assert_dies(core)


@needs_engine
def test_failed_start_says_what_and_where(tiny_model: Path, tmp_path: Path) -> None:
    log_file = tmp_path / "vllm.log"
    engine = VLLMEngine(tiny_model, max_model_len=100_000, log_file=log_file)
    environment = dict(os.environ)
    with pytest.raises(RuntimeError, match=f"(?s)max_model_len=100000: .*{log_file}"):
        asyncio.run(engine.start())
    assert dict(os.environ) == environment
    with pytest.raises(EngineDeadError, match="never started"):
        engine.check_health()
