"""What the tests share: a tiny model, and one running vLLM engine for the whole session."""

from __future__ import annotations

import asyncio
import gc
import io
import os
import signal
import sys
import threading
import traceback
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: child processes inherit it

# First of the big imports: pytest rewrites hypothesis, and CPython 3.11's parser now and then fails
# on it ("AST constructor recursion depth mismatch") deep inside another import.
import hypothesis  # noqa: F401
import pytest
import torch
from scripted import GROUP_SIZE, GROUPS_PER_STEP, ScriptedEngine, ScriptedEnv, save_tokenizer

from torchrl_llm_async.collectors import AsyncLLMCollector
from torchrl_llm_async.engines import SamplingConfig, VLLMEngine

TINY_QWEN2 = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,  # head size 32, the smallest vLLM's CPU attention knows
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}


def heed_interrupts() -> None:
    """For ``preexec_fn``: a suite run in the background hands on that SIGINT is ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Iterator[Any]:
    """Where a test waited in vain, the report shows what every thread and task was at."""
    report = yield
    if call.excinfo is not None and call.excinfo.errisinstance(TimeoutError):
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        told = io.StringIO()
        for ident, frame in sys._current_frames().items():
            print(f"\n{names.get(ident, ident)}", file=told)
            traceback.print_stack(frame, file=told)
        for task in [task for task in gc.get_objects() if isinstance(task, asyncio.Task)]:
            if not task.done():
                task.print_stack(file=told)
        report.sections.append(("threads and tasks", told.getvalue()))
    return report


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random tied Qwen2 of 0.1M parameters in Hugging Face format, without an end token."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    # A wide initialisation, for a distribution far from uniform.
    config = Qwen2Config(**TINY_QWEN2, initializer_range=0.2, bos_token_id=None, eos_token_id=None)
    folder = tmp_path_factory.mktemp("tiny_qwen2")
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


class EngineHost:
    """An engine on an event loop of its own thread, for tests that are no coroutines."""

    def __init__(self, engine: VLLMEngine) -> None:
        self.engine = engine
        self.loop = asyncio.new_event_loop()
        # Here and not in the loop's thread: the core lives as long as the thread that starts it,
        # and may be forked while there is no other.
        self.loop.run_until_complete(engine.start())
        threading.Thread(target=self.loop.run_forever, name="engine-loop", daemon=True).start()

    def submit(self, coroutine: Coroutine) -> Any:
        """Runs a coroutine in the engine's loop; gives a ``concurrent.futures.Future``."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def run(self, coroutine: Coroutine, timeout: float = 60.0) -> Any:
        """Runs a coroutine in the engine's loop and waits for its result."""
        return self.submit(coroutine).result(timeout)


@pytest.fixture(scope="session")
def engine_host(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineHost]:
    """The session's running engine over :func:`tiny_model`, at whatever version tests left."""
    log_file = tmp_path_factory.mktemp("vllm") / "vllm.log"
    host = EngineHost(VLLMEngine(tiny_model, log_file=log_file))
    yield host
    host.run(host.engine.shutdown())
    host.loop.call_soon_threadsafe(host.loop.stop)


@pytest.fixture(scope="session")
def tokenizer_path(tmp_path_factory):
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def make_collector(tokenizer_path):
    collectors = []

    def make(env=ScriptedEnv, engine=None, **options):
        defaults = dict(
            tokenizer=tokenizer_path,
            sampling=SamplingConfig(max_new_tokens=8),
            group_size=GROUP_SIZE,
            groups_per_step=GROUPS_PER_STEP,
            max_staleness=1,
            total_steps=2,
            host="thread",
        )
        collector = AsyncLLMCollector(env, engine or ScriptedEngine(), **(defaults | options))
        collectors.append(collector)
        return collector

    yield make
    for collector in collectors:
        collector.shutdown(timeout=20.0)
