"""The engine over HTTP against one real vLLM server: answers, versions, switches, losses."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import torch
from policies import Weights, assert_true, changed, initial_weights

from torchrl_llm_async._lifetime import die_with_parent
from torchrl_llm_async.engines import (
    EngineDeadError,
    Generation,
    GenerationEngine,
    SamplingConfig,
    VLLMServerEngine,
    WeightUpdateError,
)
from torchrl_llm_async.weight_update import WeightStore

PROMPT = [5, 6, 7, 8, 9]
SHORT = SamplingConfig(max_new_tokens=24)
LONG = SamplingConfig(max_new_tokens=1000)
CONTEXT = 2048
EXTENSION = "torchrl_llm_async.engines.vllm_worker.WeightUpdateExtension"


class Server(NamedTuple):
    """A running ``vllm serve`` of a tiny model."""

    url: str
    process: subprocess.Popen
    model: Path

    def run(self, test: Callable[[VLLMServerEngine], Awaitable[Any]], **arguments: Any) -> Any:
        """Runs a test with an engine that takes over the server at the version it serves."""

        async def main() -> Any:
            engine = VLLMServerEngine(self.url, max_model_len=CONTEXT - 1, **arguments)
            await engine.start()
            try:
                return await asyncio.wait_for(test(engine), 60)
            finally:
                await engine.shutdown()

        return asyncio.run(main())

    def core(self) -> int:
        """Process id of the server's engine core."""
        (core,) = (
            child
            for child in psutil.Process(self.process.pid).children(recursive=True)
            if "EngineCore" in " ".join(child.cmdline())
        )
        return core.pid


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The launch command of docs/engines.md for a CPU, on the tiny model with more context."""
    folder = tmp_path_factory.mktemp("server")
    model = shutil.copytree(tiny_model, folder / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT}))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with (folder / "server.log").open("w") as log:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "vllm.entrypoints.launchers.api_server.entry"),
                *("--model", model, "--host", "127.0.0.1", "--port", str(port)),
                *("--tokens-only", "--logprobs-mode", "processed_logprobs"),
                "--disable-uvicorn-access-log",
                *("--worker-extension-cls", EXTENSION, "--block-size", "32"),
                *("--dtype", "float32", "--enforce-eager", "--no-enable-chunked-prefill"),
                *("--kv-cache-memory-bytes", str(256 << 20)),
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
            preexec_fn=die_with_parent,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(sys.path),
                "VLLM_SERVER_DEV_MODE": "1",
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                "VLLM_NO_USAGE_STATS": "1",
                "TORCHDYNAMO_DISABLE": "1",
                "OMP_NUM_THREADS": "1",
            },
        )
    yield Server(f"http://127.0.0.1:{port}", process, model)
    process.kill()  # not terminate(): vLLM 0.32 would wait for what a dead core never answers
    process.wait()


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    return WeightStore(tmp_path / "weights")


def _weights(server: Server, seed: int) -> Weights:
    return changed(initial_weights(server.model), seed)


async def _under_way(engine: VLLMServerEngine, count: int, tag: str) -> list[asyncio.Task]:
    """Long answers of which some tokens have been sampled."""
    tasks = [
        asyncio.ensure_future(engine.generate(PROMPT, LONG, request_id=f"{tag}{i}", seed=i))
        for i in range(count)
    ]
    await engine.generate(PROMPT, SHORT, request_id=f"{tag}-first")
    assert not any(task.done() for task in tasks)
    return tasks


class TestWithoutServer:
    def test_constructor_is_cheap_and_picklable(self) -> None:
        engine = VLLMServerEngine("http://host:1/", on_update="keep", seed=3)
        assert vars(pickle.loads(pickle.dumps(engine))) == vars(engine)
        assert isinstance(engine, GenerationEngine)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"url": "host:8000"}, "url='host:8000'"),
            ({"url": "http://host", "on_update": "drop"}, "on_update='drop'"),
            ({"url": "http://host", "heartbeat_s": 0}, "heartbeat_s=0"),
        ],
    )
    def test_bad_arguments(self, arguments: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            VLLMServerEngine(**arguments)

    def test_use_before_start_raises_and_keeps_the_partial_answer(self) -> None:
        engine = VLLMServerEngine("http://host")
        with pytest.raises(EngineDeadError, match="never begun"):
            engine.check_health()
        begun = Generation([1], [-0.5], [3], "abort")
        with pytest.raises(EngineDeadError) as raised:
            asyncio.run(engine.generate(PROMPT, SHORT, request_id="0", partial=begun))
        assert raised.value.partial == begun

    def test_no_server_there(self) -> None:
        engine = VLLMServerEngine("http://127.0.0.1:9", start_timeout=0.3)
        with pytest.raises(RuntimeError, match=r"127.0.0.1:9 within 0.3 s \(.*docs/engines.md"):
            asyncio.run(engine.start())
        with pytest.raises(EngineDeadError):
            engine.check_health()


@pytest.mark.engine
class TestGenerate:
    def test_log_probs_are_the_sampling_distributions(
        self, server: Server, store: WeightStore
    ) -> None:
        weights = _weights(server, seed=5)

        async def answer(engine: VLLMServerEngine) -> tuple[int, Generation]:
            version = engine.version + 1
            await engine.update_weights(version, store.write(version, weights.items()))
            sampling = SamplingConfig(max_new_tokens=40, temperature=0.7)
            return version, await engine.generate(PROMPT, sampling, request_id="temperature")

        version, found = server.run(answer)
        assert found.finish_reason == "length"
        assert found.versions == [version] * 40
        assert_true(found, server.model, {version: weights}, PROMPT, atol=2e-5, temperature=0.7)

    def test_stop_token_ends_the_answer_and_belongs_to_it(self, server: Server) -> None:
        async def both(engine: VLLMServerEngine) -> tuple[Generation, Generation]:
            free = await engine.generate(PROMPT, SHORT, request_id="free", seed=1)
            sampling = SamplingConfig(max_new_tokens=24, stop_token_ids=(free.token_ids[5],))
            return free, await engine.generate(PROMPT, sampling, request_id="s", seed=1)

        free, stopped = server.run(both)
        assert stopped.finish_reason == "stop"
        assert stopped.token_ids == free.token_ids[: free.token_ids.index(free.token_ids[5]) + 1]

    def test_seed_names_the_answer_whatever_the_batch(self, server: Server) -> None:
        async def answers(engine: VLLMServerEngine) -> list[list[int]]:
            many = await asyncio.gather(
                *(engine.generate(PROMPT, SHORT, request_id=f"{i}", seed=i) for i in range(40))
            )
            alone = await engine.generate(PROMPT, SHORT, request_id="alone", seed=7)
            return [answer.token_ids for answer in (*many, alone)]

        *many, alone = server.run(answers)
        assert alone == many[7]
        assert len({tuple(tokens) for tokens in many}) > 35

    def test_answer_ends_with_the_context(self, server: Server) -> None:
        async def fill(engine: VLLMServerEngine) -> Generation:
            prompt = [3] * (engine.max_model_len - 4)
            return await engine.generate(prompt, SHORT, request_id="context")

        answer = server.run(fill)
        assert len(answer.token_ids) == 4
        assert answer.finish_reason == "length"

    @pytest.mark.parametrize(
        ("prompt", "sampling", "message"),
        [
            ([], SHORT, "prompt of 0 tokens"),
            ([1] * (CONTEXT - 1), SHORT, f"larger max_model_len than {CONTEXT - 1}"),
            ([1000], SHORT, "tokenizer and model do not match"),
            (PROMPT, SamplingConfig(max_new_tokens=4, top_p=0.9), "allow_truncated_support"),
            (PROMPT, SamplingConfig(max_new_tokens=4, stop_token_ids=(99,)), "refuses this.*99"),
        ],
    )
    def test_bad_requests_leave_the_server_unharmed(
        self, server: Server, prompt: list[int], sampling: SamplingConfig, message: str
    ) -> None:
        async def bad_then_good(engine: VLLMServerEngine) -> None:
            with pytest.raises(ValueError, match=message):
                await engine.generate(prompt, sampling, request_id="bad")
            await engine.generate(PROMPT, SHORT, request_id="good")

        server.run(bad_then_good)

    def test_cancelling_aborts_the_request(self, server: Server) -> None:
        async def cancel(engine: VLLMServerEngine) -> None:
            (task,) = await _under_way(engine, 1, "cancel")
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            began = time.monotonic()
            while await asyncio.to_thread(_running_requests, server):
                assert time.monotonic() - began < 10
            # Sampled to its end it would have been counted so.
            assert await asyncio.to_thread(_running_requests, server, "finished") == finished

        finished = _running_requests(server, "finished") + 1  # one comes before the cancelled one
        server.run(cancel)

    def test_an_answer_aborted_by_somebody_else_says_so(self, server: Server) -> None:
        async def abort(engine: VLLMServerEngine) -> tuple[int, Generation]:
            (task,) = await _under_way(engine, 1, "aborted")
            request = urllib.request.Request(f"{server.url}/abort_requests", data=b"{}")
            (await asyncio.to_thread(urllib.request.urlopen, request)).close()
            return engine.version, await task

        version, answer = server.run(abort)
        assert answer.finish_reason == "abort"
        assert set(answer.versions) == {version}
        assert 0 < len(answer.versions) < 1000


def _running_requests(server: Server, kind: str = "running") -> int:
    metric = {
        "running": r"vllm:num_requests_running\{.*\} (\S+)",
        "finished": r'vllm:request_success_total\{.*finished_reason="length".*\} (\S+)',
    }[kind]
    with urllib.request.urlopen(f"{server.url}/metrics") as answer:
        return int(float(re.search(metric, answer.read().decode())[1]))


@pytest.mark.engine
class TestUpdateWeights:
    @pytest.mark.inv2
    @pytest.mark.parametrize("on_update", ["keep", "recompute"])
    def test_versions_and_log_probs_are_exact_across_a_switch(
        self, server: Server, store: WeightStore, on_update: str
    ) -> None:
        old, new = _weights(server, seed=1), _weights(server, seed=2)
        prompt = [5 + i % 50 for i in range(100)]  # three whole blocks

        async def switch(engine: VLLMServerEngine) -> tuple[int, list[Generation]]:
            before = engine.version + 1
            await engine.update_weights(before, store.write(before, old.items()))
            await engine.generate(prompt, SHORT, request_id="fills the cache")
            tasks = await _under_way(engine, 4, "switch")
            after = before + 3  # versions may skip
            await engine.update_weights(after, store.write(after, new.items()))
            assert engine.version == after
            tasks.append(
                asyncio.ensure_future(engine.generate(prompt, SHORT, request_id="reuses nothing"))
            )
            return before, await asyncio.gather(*tasks)

        before, (*across, fresh) = server.run(switch, on_update=on_update)
        after = before + 3
        weights_of = {before: old, after: new}
        for answer in across:
            cut = answer.versions.index(after)
            assert answer.versions == [before] * cut + [after] * (1000 - cut)
            assert 0 < cut < 1000
            assert_true(answer, server.model, weights_of, PROMPT, keep_cache=on_update == "keep")
        assert_true(fresh, server.model, weights_of, prompt)

    @pytest.mark.inv3
    def test_bad_publication_is_refused_whole(self, server: Server, store: WeightStore) -> None:
        async def refused(engine: VLLMServerEngine) -> None:
            greedy = SamplingConfig(max_new_tokens=24, temperature=0.0)
            before = await engine.generate(PROMPT, greedy, request_id="before")
            version = engine.version + 1
            weights = _weights(server, seed=3)
            weights["model.norm.weight"][3] = torch.nan
            path = store.write(version, weights.items())
            with pytest.raises(WeightUpdateError, match=f"{version - 1} keeps serving: .*finite"):
                await engine.update_weights(version, path)
            path.unlink()
            with pytest.raises(WeightUpdateError, match="can't be read"):
                await engine.update_weights(version, path)
            assert await engine.generate(PROMPT, greedy, request_id="after") == before
            assert engine.version == version - 1

        server.run(refused)

    def test_a_switch_while_paused_keeps_it_paused(
        self, server: Server, store: WeightStore
    ) -> None:
        weights = _weights(server, seed=4)

        async def pause(engine: VLLMServerEngine) -> None:
            (running,) = await _under_way(engine, 1, "paused")
            await engine.pause()
            queued = asyncio.ensure_future(engine.generate(PROMPT, SHORT, request_id="queued"))
            version = engine.version + 1
            await engine.update_weights(version, store.write(version, weights.items()))
            paused = await asyncio.to_thread(urllib.request.urlopen, f"{server.url}/is_paused")
            assert json.loads(paused.read()) == {"is_paused": True}
            assert not running.done() and not queued.done()
            await engine.resume()
            assert set((await queued).versions) == {version}
            assert set((await running).versions) == {version - 1, version}

        server.run(pause)


@pytest.mark.engine
class TestLoss:
    """Last, since the last of them kills the server."""

    @pytest.mark.inv2
    def test_partial_answer_holds_proven_tokens_and_is_taken_up_again(
        self, server: Server, store: WeightStore
    ) -> None:
        old, new = _weights(server, seed=6), _weights(server, seed=7)

        async def lose(engine: VLLMServerEngine) -> list[Generation]:
            version = engine.version + 1
            await engine.update_weights(version, store.write(version, old.items()))
            across = await _under_way(engine, 1, "across")
            path = store.write(version + 1, new.items())
            await engine.update_weights(version + 1, path)
            within = await _under_way(engine, 1, "within")
            looks = [engine.partial_answer(name) for name in ("across0", "within0")]
            await engine.shutdown()
            errors = await asyncio.gather(*across, *within, return_exceptions=True)
            assert all(isinstance(error, EngineDeadError) for error in errors)
            partials = [error.partial for error in errors]
            assert looks[0] == partials[0]  # what comes behind a switch is not proven
            size = len(looks[1].token_ids)
            for name in ("token_ids", "log_probs", "versions"):
                assert getattr(looks[1], name) == getattr(partials[1], name)[:size]
            assert looks[1].finish_reason == "abort" and size
            assert engine.partial_answer("across0") is None
            assert errors[0].discarded > 0  # some came after the switch, of either version
            assert errors[1].discarded == 0
            await engine.start()
            assert engine.version == version + 1
            assert [set(partial.versions) for partial in partials] == [{version}, {version + 1}]
            wholes = [
                await engine.generate(PROMPT, LONG, request_id="again", partial=partial)
                for partial in partials
            ]
            for partial, whole in zip(partials, wholes, strict=True):
                kept = len(partial.token_ids)
                assert whole.token_ids[:kept] == partial.token_ids
                assert whole.log_probs[:kept] == partial.log_probs
                assert whole.versions == partial.versions + [version + 1] * (1000 - kept)
            enough = SamplingConfig(max_new_tokens=len(partials[0].token_ids))
            full = await engine.generate(PROMPT, enough, request_id="full", partial=partials[0])
            assert (full.token_ids, full.finish_reason) == (partials[0].token_ids, "length")
            return wholes

        across, within = server.run(lose)
        weights_of = dict(zip(sorted(set(across.versions)), (old, new), strict=True))
        assert_true(across, server.model, weights_of, PROMPT)
        assert_true(within, server.model, weights_of, PROMPT)

    @pytest.mark.inv5
    def test_a_server_that_hangs_is_noticed(self, server: Server) -> None:
        core = server.core()

        async def hang(engine: VLLMServerEngine) -> None:
            tasks = await _under_way(engine, 2, "hangs")
            began = time.monotonic()
            os.kill(core, signal.SIGSTOP)
            errors = await asyncio.gather(*tasks, return_exceptions=True)
            assert time.monotonic() - began < 8
            for error in errors:
                assert isinstance(error, EngineDeadError)
                assert "no sign of life for 4 s" in str(error)
                assert error.partial.versions == [engine.version] * len(error.partial.token_ids)
            with pytest.raises(EngineDeadError, match="no sign of life"):
                engine.check_health()
            await engine.shutdown()
            os.kill(core, signal.SIGCONT)
            await engine.start()  # a server that has come back is taken over
            await engine.generate(PROMPT, SHORT, request_id="back")

        try:
            server.run(hang, heartbeat_s=4)
        finally:
            os.kill(core, signal.SIGCONT)

    @pytest.mark.inv5
    def test_a_killed_server_is_noticed(self, server: Server, tmp_path: Path) -> None:
        core = os.pidfd_open(server.core())

        async def kill(engine: VLLMServerEngine) -> None:
            tasks = await _under_way(engine, 4, "killed")
            began = time.monotonic()
            server.process.kill()
            errors = await asyncio.gather(*tasks, return_exceptions=True)
            assert time.monotonic() - began < 5
            assert [type(error) for error in errors] == [EngineDeadError] * 4
            assert all(error.partial.token_ids for error in errors)
            for action in (engine.pause(), engine.update_weights(99, tmp_path)):
                with pytest.raises(EngineDeadError, match="is lost"):
                    await action

        server.run(kill)
        assert select.select([core], [], [], 10)[0], "the engine core outlived its server"
        os.close(core)
