"""The vLLM engine's requests against transformers: tokens, log-probabilities, ends, pauses."""

from __future__ import annotations

import asyncio
import pickle
import time
from pathlib import Path

import pytest
import torch
from conftest import EngineHost
from policies import assert_true, changed, initial_weights, load_policy

from torchrl_llm_async.engines import (
    EngineDeadError,
    Generation,
    GenerationEngine,
    SamplingConfig,
    VLLMEngine,
    vllm_engine,
)
from torchrl_llm_async.engines._heartbeat import until_silent
from torchrl_llm_async.engines._vllm_request import sampling_params
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
        with pytest.raises(ValueError, match="heartbeat_s=0"):
            VLLMEngine(tmp_path, heartbeat_s=0)

    def test_use_before_start_raises(self, tmp_path: Path) -> None:
        with pytest.raises(EngineDeadError, match="never started"):
            VLLMEngine(tmp_path).check_health()


class TestHeartbeat:
    def test_silence_ends_it_and_answers_do_not(self) -> None:
        answers = 0

        async def three_times() -> None:
            nonlocal answers
            if answers == 3:
                await asyncio.Event().wait()
            answers += 1

        asyncio.run(until_silent(three_times, seconds=0.02))
        assert answers == 3

    def test_a_loop_that_stood_still_is_no_silence(self) -> None:
        async def scenario() -> bool:
            watch = asyncio.ensure_future(until_silent(lambda: asyncio.to_thread(int), 0.1))
            await asyncio.sleep(0)
            time.sleep(0.3)  # the answer has come, and every timer is due
            for _ in range(10):
                await asyncio.sleep(0)
            return watch.cancel()

        assert asyncio.run(scenario())

    def test_what_the_question_raises_is_raised(self) -> None:
        async def broken() -> None:
            raise EngineDeadError("gone")

        with pytest.raises(EngineDeadError, match="gone"):
            asyncio.run(until_silent(broken, seconds=1.0))


@pytest.fixture
def host(engine_host: EngineHost, tiny_model: Path, tmp_path: Path) -> EngineHost:
    """The shared engine, at a version of the initial weights."""
    engine_host.engine.check_health()
    version = engine_host.engine.version + 1
    path = WeightStore(tmp_path / "weights").write(version, initial_weights(tiny_model).items())
    engine_host.run(engine_host.engine.update_weights(version, path))
    return engine_host


@needs_engine
class TestGenerate:
    @pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 1.0), (1.0, 0.9)])
    def test_log_probs_are_the_sampling_distributions(
        self,
        host: EngineHost,
        tiny_model: Path,
        monkeypatch: pytest.MonkeyPatch,
        temperature: float,
        top_p: float,
    ) -> None:
        monkeypatch.setattr(host.engine, "allow_truncated_support", True)
        sampling = SamplingConfig(max_new_tokens=200, temperature=temperature, top_p=top_p)
        answer = host.run(host.engine.generate(PROMPT, sampling, request_id="sampled"))
        assert answer.finish_reason == "length"
        assert answer.versions == [host.engine.version] * 200
        weights_of = {host.engine.version: initial_weights(tiny_model)}
        how = {"temperature": temperature, "top_p": top_p}
        assert_true(answer, tiny_model, weights_of, PROMPT, **how)

    def test_a_group_computes_its_prompt_once(
        self, host: EngineHost, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        prompt = [7 + i % 40 for i in range(100)]  # three whole blocks of 32 tokens, and a rest
        reused = []
        generate = host.engine._engine.generate

        async def with_vllms_own_count(*args):
            async for output in generate(*args):
                reused.append(output.num_cached_tokens)
                yield output

        monkeypatch.setattr(host.engine._engine, "generate", with_vllms_own_count)

        async def group():
            return await asyncio.gather(
                *(host.engine.generate(prompt, SHORT, request_id=f"of-{i}") for i in range(8))
            )

        assert len({tuple(answer.token_ids) for answer in host.run(group())}) == 8
        assert sorted(reused) == [0] + [96] * 7

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

    def test_an_updated_tied_model_is_greedy_as_transformers(
        self, host: EngineHost, tiny_model: Path, tmp_path: Path
    ) -> None:
        weights, version = changed(initial_weights(tiny_model), seed=1), host.engine.version + 1
        path = WeightStore(tmp_path).write(version, weights.items())
        host.run(host.engine.update_weights(version, path))
        greedy = SamplingConfig(max_new_tokens=48, temperature=0.0)
        answer = host.run(host.engine.generate(PROMPT, greedy, request_id="greedy"))
        policy = load_policy(tiny_model, weights)
        wanted = policy.generate(
            torch.tensor([PROMPT]), do_sample=False, max_new_tokens=48, pad_token_id=0
        )
        assert answer.token_ids == wanted[0, len(PROMPT) :].tolist()
        assert_true(answer, tiny_model, {version: weights}, PROMPT)

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

    def test_aborted_by_somebody_else_ends_with_what_there_is(self, host: EngineHost) -> None:
        async def abort():
            task = asyncio.ensure_future(host.engine.generate(PROMPT, LONG, request_id="aborted"))
            await host.engine.generate(PROMPT, SHORT, request_id="meanwhile")
            await host.engine._engine.abort("aborted")
            return await task

        answer = host.run(abort())
        assert answer.finish_reason == "abort"
        assert 0 < len(answer.token_ids) < LONG.max_new_tokens

    def test_ended_by_anything_but_sampling_it_is_aborted(
        self, host: EngineHost, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """By vLLM's detection of repetitions, which knows such an end and is never asked for."""
        from vllm.sampling_params import RepetitionDetectionParams

        def detecting(*args, **kwargs):
            params = sampling_params(*args, **kwargs)
            params.repetition_detection = RepetitionDetectionParams(
                max_pattern_size=1, min_pattern_size=1, min_count=2
            )
            return params

        monkeypatch.setattr(vllm_engine, "sampling_params", detecting)
        answer = host.run(host.engine.generate(PROMPT, LONG, request_id="repeats"))
        assert answer.finish_reason == "abort"
        assert answer.token_ids[-2] == answer.token_ids[-1]


@needs_engine
class TestPartial:
    def test_greedy_goes_on_as_if_never_interrupted(self, host: EngineHost) -> None:
        greedy = SamplingConfig(max_new_tokens=24, temperature=0.0)

        async def both():
            whole = await host.engine.generate(PROMPT, greedy, request_id="whole")
            begun = Generation(whole.token_ids[:9], whole.log_probs[:9], [0] * 9, "abort")
            return whole, await host.engine.generate(
                PROMPT, greedy, request_id="whole", partial=begun
            )

        whole, again = host.run(both())
        assert again.token_ids == whole.token_ids
        assert again.log_probs == pytest.approx(whole.log_probs, abs=5e-5)
        assert again.versions == [0] * 9 + [host.engine.version] * 15
        assert again.finish_reason == "length"

    def test_draws_from_a_stream_of_its_own(self, host: EngineHost, tiny_model: Path) -> None:
        version = host.engine.version

        async def drawn(tag: str, begun: Generation | None):
            return await host.engine.generate(PROMPT, LONG, request_id=tag, seed=3, partial=begun)

        whole = host.run(drawn("whole", None))
        begun = Generation(whole.token_ids[:50], whole.log_probs[:50], [version] * 50, "abort")
        once, twice = host.run(drawn("once", begun)), host.run(drawn("twice", begun))
        assert once == twice != whole
        assert once.token_ids[:50] == whole.token_ids[:50]
        assert once.log_probs[:50] == whole.log_probs[:50]
        # Not the first draws over again either, which the same stream would give.
        assert once.token_ids[50:100] != whole.token_ids[:50]
        assert len(once.token_ids) == LONG.max_new_tokens
        assert_true(once, tiny_model, {version: initial_weights(tiny_model)}, PROMPT)
        nothing = Generation([], [], [], "abort")
        assert host.run(drawn("from nothing", nothing)) == whole

    @pytest.mark.inv6
    def test_a_repeatable_engine_gives_the_whole_answer_again(
        self, host: EngineHost, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        version = host.engine.version
        whole = host.run(host.engine.generate(PROMPT, LONG, request_id="0", seed=3))

        def taken_up(versions: list[int]) -> Generation:
            begun = Generation(whole.token_ids[:50], whole.log_probs[:50], versions, "abort")
            return host.run(
                host.engine.generate(PROMPT, LONG, request_id="1", seed=3, partial=begun)
            )

        monkeypatch.setattr(host.engine, "repeatable", True)
        assert taken_up([version] * 50) == whole
        # What other weights have sampled stays.
        other = [version + 1] * 25 + [version] * 25
        assert taken_up(other).versions[:50] == other
        assert taken_up(other).token_ids[:50] == whole.token_ids[:50]

    def test_a_whole_one_is_the_answer(self, host: EngineHost) -> None:
        def answer(prompt: list[int], tokens: int, reason: str):
            begun = Generation([4] * tokens, [-1.0] * tokens, [0] * tokens, reason)
            answer = host.run(host.engine.generate(prompt, SHORT, request_id="w", partial=begun))
            assert answer.token_ids[:tokens] == begun.token_ids
            return len(answer.token_ids), answer.finish_reason

        limit, context = SHORT.max_new_tokens, host.engine.max_model_len
        assert answer(PROMPT, limit, "abort") == (limit, "length")
        assert answer([3] * (context - 4), 4, "abort") == (4, "length")
        assert answer([3] * (context - 4), 3, "abort") == (4, "length")
        assert answer(PROMPT, 5, "stop") == (5, "stop")

    def test_unknown_ids_are_refused(self, host: EngineHost) -> None:
        begun = Generation([1000], [-1.0], [0], "abort")
        with pytest.raises(ValueError, match="from 5 to 1000, the vocabulary"):
            host.run(host.engine.generate(PROMPT, SHORT, request_id="unknown", partial=begun))


@needs_engine
class TestPause:
    @staticmethod
    def _sampled(host: EngineHost) -> int:
        states = host.engine._engine.output_processor.request_states.values()
        return sum(state.detokenizer.num_output_tokens() for state in states)

    @pytest.mark.parametrize("on_update", ["keep", "recompute", "abort"])
    def test_nothing_is_sampled_until_resumed_though_weights_switch(
        self,
        host: EngineHost,
        tiny_model: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        on_update: str,
    ) -> None:
        monkeypatch.setattr(host.engine, "on_update", on_update)
        engine, before = host.engine, host.engine.version
        path = WeightStore(tmp_path).write(before + 1, initial_weights(tiny_model).items())

        async def steps_of_the_core() -> None:
            for _ in range(20):  # each call is answered between two steps
                await engine._call(engine._engine.get_weight_version())

        async def scenario():
            running = asyncio.ensure_future(engine.generate(PROMPT, LONG, request_id="running"))
            await engine.generate(PROMPT, SHORT, request_id="first")
            await engine.pause()
            await steps_of_the_core()
            sampled = self._sampled(host)
            queued = asyncio.ensure_future(engine.generate(PROMPT, SHORT, request_id="queued"))
            await engine.update_weights(before + 1, path)
            await steps_of_the_core()
            assert self._sampled(host) == (0 if on_update == "abort" else sampled) < 240
            assert not running.done() and not queued.done()
            await engine.resume()
            return sampled, await running, await queued

        sampled, running, queued = host.run(scenario())
        assert running.versions == [before] * sampled + [before + 1] * (240 - sampled)
        assert set(queued.versions) == {before + 1}

    def test_resuming_during_a_switch_waits_for_it(
        self, host: EngineHost, tiny_model: Path, tmp_path: Path
    ) -> None:
        engine, before = host.engine, host.engine.version
        path = WeightStore(tmp_path).write(before + 1, initial_weights(tiny_model).items())

        async def scenario():
            await engine.pause()
            queued = asyncio.ensure_future(engine.generate(PROMPT, SHORT, request_id="queued"))
            switch = asyncio.ensure_future(engine.update_weights(before + 1, path))
            while not engine._pause_lock.locked():
                await asyncio.sleep(0)
            await engine.resume()
            assert engine.version == before + 1
            await switch
            return await queued

        assert set(host.run(scenario()).versions) == {before + 1}

    def test_giving_up_a_queued_request_leaves_nothing(self, host: EngineHost) -> None:
        async def scenario():
            await host.engine.pause()
            queued = asyncio.ensure_future(host.engine.generate(PROMPT, SHORT, request_id="q"))
            await asyncio.sleep(0)
            queued.cancel()
            with pytest.raises(asyncio.CancelledError):
                await queued
            await host.engine.resume()
            return host.engine._engine.get_num_unfinished_requests()

        assert host.run(scenario()) == 0
