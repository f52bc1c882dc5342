"""Ends of a vLLM engine: of its core, of its client, and what a replacement takes over."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from conftest import TINY_QWEN2, EngineHost, heed_interrupts
from policies import Weights, assert_true, changed, initial_weights, load_policy, overwrite_weights

from torchrl_llm_async.engines import EngineDeadError, Generation, SamplingConfig, VLLMEngine
from torchrl_llm_async.weight_update import WeightStore

pytestmark = pytest.mark.engine

PROMPT = [5, 6, 7, 8, 9]
SHORT = SamplingConfig(max_new_tokens=24)
LONG = SamplingConfig(max_new_tokens=240)
GREEDY = SamplingConfig(max_new_tokens=48, temperature=0.0)
HEARTBEAT_S = 2.0


def _a_model(folder: Path, *, tied: bool) -> Path:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    shape = {**TINY_QWEN2, "tie_word_embeddings": tied}
    config = Qwen2Config(**shape, initializer_range=0.2, bos_token_id=None, eos_token_id=None)
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


@dataclass
class Loss:
    """How an engine's core was lost under running requests."""

    heard: list[EngineDeadError]  # by the requests
    heard_besides: list[EngineDeadError]
    seconds: float
    core: int  # process descriptor

    def assert_all_heard_in_time(self, seconds: float, reason: str) -> None:
        for error in self.heard + self.heard_besides:
            assert type(error) is EngineDeadError, error
            assert reason in str(error)
        assert self.seconds < seconds
        assert select.select([self.core], [], [], 30)[0], "the engine core lives on"

    def partials(self) -> list[Generation]:
        partials = [error.partial for error in self.heard]
        for partial in partials:
            assert 0 < len(partial.token_ids) < LONG.max_new_tokens
            assert partial.finish_reason == "abort"
        assert all(error.partial is None for error in self.heard_besides)
        return partials


async def _lose_the_core(
    engine: VLLMEngine, *signals: signal.Signals, besides: Sequence[Coroutine] = ()
) -> Loss:
    """Sends the signals; ``besides`` run from after the first one on."""
    (process,) = engine._engine.engine_core.resources.engine_manager.processes
    core = os.pidfd_open(process.pid)
    running = [
        asyncio.ensure_future(engine.generate(PROMPT, LONG, request_id=str(i), seed=i))
        for i in range(4)
    ]
    await engine.generate(PROMPT, SHORT, request_id="first")
    os.kill(process.pid, signals[0])
    began = time.monotonic()
    pending = asyncio.gather(*running, *besides, return_exceptions=True)
    await asyncio.sleep(0)
    for further in signals[1:]:
        os.kill(process.pid, further)
    heard = await pending
    seconds = time.monotonic() - began
    return Loss(heard[: len(running)], heard[len(running) :], seconds, core)


class TestKilled:
    """An untied model in float32, whose core is killed with a weight switch under way."""

    @dataclass
    class Life:
        folder: Path
        weights: Weights  # version 1
        served_beside_start: int
        greedy: Generation
        loss: Loss

    @pytest.fixture(scope="class")
    @staticmethod
    def life(engine_host: EngineHost, tmp_path_factory: pytest.TempPathFactory) -> Life:
        folder = _a_model(tmp_path_factory.mktemp("untied"), tied=False)
        weights = changed(initial_weights(folder), seed=1)
        path = WeightStore(tmp_path_factory.mktemp("weights")).write(1, weights.items())
        engine, other = VLLMEngine(folder, log_file=folder / "vllm.log"), engine_host.engine

        async def live() -> TestKilled.Life:
            start, served = asyncio.ensure_future(engine.start()), 0
            while not start.done():
                await other.generate(PROMPT, SHORT, request_id="beside the start")
                served += 1
            await start
            await engine.update_weights(1, path)
            greedy = await engine.generate(PROMPT, GREEDY, request_id="greedy")
            # Stopped first, so that the switch is certain to find it silent.
            loss = await _lose_the_core(
                engine,
                signal.SIGSTOP,
                signal.SIGKILL,
                besides=[engine.update_weights(2, path), engine.pause()],
            )
            await engine.shutdown()
            return TestKilled.Life(folder, weights, served, greedy, loss)

        return engine_host.run(live(), timeout=300)

    def test_another_engine_answers_while_it_starts(self, life: Life) -> None:
        assert life.served_beside_start > 10

    def test_an_updated_untied_model_is_greedy_as_transformers(self, life: Life) -> None:
        policy = load_policy(life.folder, life.weights)
        ids = torch.tensor([PROMPT])
        wanted = policy.generate(ids, do_sample=False, max_new_tokens=48, pad_token_id=0)
        assert life.greedy.token_ids == wanted[0, len(PROMPT) :].tolist()
        assert_true(life.greedy, life.folder, {1: life.weights}, PROMPT)

    @pytest.mark.inv5
    def test_everybody_hears_of_it(self, life: Life) -> None:
        life.loss.assert_all_heard_in_time(10, "its engine core died")

    @pytest.mark.inv2
    def test_what_was_sampled_is_kept_and_true(self, life: Life) -> None:
        for partial in life.loss.partials():
            assert_true(partial, life.folder, {1: life.weights}, PROMPT)


class TestHung:
    """A tied model in bfloat16 whose core hangs; the engine is started again."""

    @dataclass
    class Life:
        updated: list[Generation]  # version 1
        hung: Loss
        replaced: list[Generation]  # a fresh engine with the weights of version 1
        resubmitted: list[Generation]
        told_to_end: Loss

    @pytest.fixture(scope="class")
    @staticmethod
    def life(engine_host: EngineHost, tmp_path_factory: pytest.TempPathFactory) -> Life:
        folder = _a_model(tmp_path_factory.mktemp("tied"), tied=True)
        weights = {
            name: tensor.bfloat16()
            for name, tensor in changed(initial_weights(folder), seed=1).items()
        }
        path = WeightStore(tmp_path_factory.mktemp("weights")).write(1, weights.items())
        engine = VLLMEngine(
            folder, dtype="bfloat16", heartbeat_s=HEARTBEAT_S, log_file=folder / "vllm.log"
        )

        async def greedy() -> list[Generation]:
            return [  # one after the other: bfloat16 depends on the batch
                await engine.generate([5 + i, *PROMPT], GREEDY, request_id=str(i)) for i in range(4)
            ]

        async def live() -> TestHung.Life:
            await engine.start()
            await engine.update_weights(1, path)
            updated = await greedy()
            hung = await _lose_the_core(engine, signal.SIGSTOP)
            overwrite_weights(folder, weights)
            await engine.shutdown()
            await engine.start()
            replaced = await greedy()
            resubmitted = [
                await engine.generate(PROMPT, LONG, request_id=str(i), partial=error.partial)
                for i, error in enumerate(hung.heard)
            ]
            told_to_end = await _lose_the_core(engine, signal.SIGTERM)
            await engine.shutdown()
            return TestHung.Life(updated, hung, replaced, resubmitted, told_to_end)

        return engine_host.run(live(), timeout=300)

    def test_an_updated_bf16_engine_equals_a_fresh_one(self, life: Life) -> None:
        for updated, fresh in zip(life.updated, life.replaced, strict=True):
            assert updated.token_ids == fresh.token_ids
            assert updated.log_probs == fresh.log_probs
            assert (set(updated.versions), set(fresh.versions)) == ({1}, {0})

    @pytest.mark.inv5
    def test_the_heartbeat_ends_a_hung_core(self, life: Life) -> None:
        life.hung.assert_all_heard_in_time(HEARTBEAT_S + 10, "answered nothing for 2 s")

    @pytest.mark.inv2
    def test_its_replacement_goes_on(self, life: Life) -> None:
        for begun, whole in zip(life.hung.partials(), life.resubmitted, strict=True):
            kept = len(begun.token_ids)
            assert whole.token_ids[:kept] == begun.token_ids
            assert whole.log_probs[:kept] == begun.log_probs
            assert whole.versions == [1] * kept + [0] * (LONG.max_new_tokens - kept)
            assert whole.finish_reason == "length"

    @pytest.mark.inv5
    def test_a_core_told_to_end_is_dead_to_its_requests(self, life: Life) -> None:
        life.told_to_end.assert_all_heard_in_time(30, "does not run")
        assert len(life.told_to_end.partials()) == 4


class TestEnded:
    """One whose heartbeat fails, started again, and shut down by one who gives up."""

    @dataclass
    class Life:
        ailing: Loss
        core_ended: bool  # after a second shutdown returned

    @pytest.fixture(scope="class")
    @staticmethod
    def life(engine_host: EngineHost, tmp_path_factory: pytest.TempPathFactory) -> Life:
        folder = _a_model(tmp_path_factory.mktemp("tied"), tied=True)
        engine = VLLMEngine(folder, heartbeat_s=HEARTBEAT_S, log_file=folder / "vllm.log")

        async def fail() -> None:
            raise RuntimeError("as told")

        async def ail() -> None:
            await engine.pause()  # so that no answer is whole before
            engine._engine.get_weight_version = fail

        async def live() -> TestEnded.Life:
            await engine.start()
            ailing = await _lose_the_core(engine, signal.SIGCONT, besides=[ail()])
            await engine.shutdown()
            await engine.start()
            (process,) = engine._engine.engine_core.resources.engine_manager.processes
            core = os.pidfd_open(process.pid)
            giving_up = asyncio.ensure_future(engine.shutdown())
            await asyncio.sleep(0)
            giving_up.cancel()
            await asyncio.wait([giving_up])
            await engine.shutdown()
            # While this loop stands still: nothing of the shutdown is left to do.
            return TestEnded.Life(ailing, bool(select.select([core], [], [], 10)[0]))

        return engine_host.run(live(), timeout=300)

    @pytest.mark.inv5
    def test_a_heartbeat_that_fails_ends_the_core(self, life: Life) -> None:
        for error in life.ailing.heard:
            assert "answered RuntimeError('as told') and was killed" in str(error)
        assert select.select([life.ailing.core], [], [], 30)[0], "the engine core lives on"

    @pytest.mark.inv5
    def test_a_shutdown_is_carried_through_though_its_caller_gave_up(self, life: Life) -> None:
        assert life.core_ended


_CLIENT = """
import asyncio, multiprocessing, sys
from pathlib import Path
from torchrl_llm_async.engines import SamplingConfig, VLLMEngine

async def main(model, log_file):
    engine = VLLMEngine(model, log_file=Path(log_file))
    await engine.start()
    (core,) = multiprocessing.active_children()
    print("ready", core.pid, flush=True)
    try:
        while True:
            await engine.generate(
                [5, 6], SamplingConfig(max_new_tokens=200), request_id="loop"
            )
    finally:
        await engine.shutdown()

if __name__ == "__main__":
    try:
        asyncio.run(main(*sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
"""


class TestClientsEnd:
    @staticmethod
    def _client(tiny_model: Path, tmp_path: Path) -> tuple[subprocess.Popen, int]:
        """A process with a running engine, and a process descriptor of its core."""
        (script := tmp_path / "client.py").write_text(_CLIENT)
        client = subprocess.Popen(
            [sys.executable, script, tiny_model, tmp_path / "vllm.log"],
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
        assert select.select([core], [], [], 30)[0], "the engine core outlived its client"
        os.close(core)

    def test_core_dies_with_a_killed_client(self, tiny_model: Path, tmp_path: Path) -> None:
        client, core = self._client(tiny_model, tmp_path)
        client.kill()
        self._assert_dies(core)
        client.communicate()

    def test_interrupt_ends_all_quietly(self, tiny_model: Path, tmp_path: Path) -> None:
        client, core = self._client(tiny_model, tmp_path)
        os.killpg(client.pid, signal.SIGINT)
        try:
            assert client.communicate(timeout=30) == ("", "")
        finally:
            client.kill()
        assert client.returncode == 130
        self._assert_dies(core)


def test_failed_start_says_what_and_where(tiny_model: Path, tmp_path: Path) -> None:
    log_file = tmp_path / "vllm.log"
    engine = VLLMEngine(tiny_model, max_model_len=100_000, log_file=log_file)
    environment = dict(os.environ)
    with pytest.raises(RuntimeError, match=f"(?s)max_model_len=100000: .*{log_file}"):
        asyncio.run(engine.start())
    assert dict(os.environ) == environment
    with pytest.raises(EngineDeadError, match="never started"):
        engine.check_health()
