"""Measures generation: the collector's overhead, what a weight update costs, and the ways to do it.

Usage::

    OMP_NUM_THREADS=1 python benchmarks/generation.py --json generation.json

Prints Markdown tables. Whatever is compared runs by turns in one go, and ratios are medians over
the turns, since machines are shared and noisy. Two cores and no GPU suffice; it takes about five
minutes. Random models will do: speed does not depend on what they say.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import math
import multiprocessing
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

# Before torch: child processes inherit them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # lets bare_load() be sent to the core

import torch
from safetensors.torch import load_file

import torchrl_llm_async
from torchrl_llm_async.collectors import AsyncLLMCollector
from torchrl_llm_async.engines import SamplingConfig, VLLMEngine
from torchrl_llm_async.envs import WrittenSumsEnv

if TYPE_CHECKING:
    from torchrl_llm_async.weight_update import WeightStore

ASSET = Path(torchrl_llm_async.__file__).parent / "assets/written-sums-qwen2"
IN_FLIGHT = 64
# Width, MLP's width, layers, heads, key-value heads, vocabulary.
TINY, LARGE = (192, 512, 5, 6, 2, 2048), (768, 2048, 12, 12, 4, 32_000)


def random_model(sizes: tuple[int, ...], folder: Path) -> Path:
    """A random Qwen2 without an end token, in Hugging Face format."""
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.manual_seed(0)
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    config = Qwen2Config(
        **dict(zip((*names, "num_key_value_heads", "vocab_size"), sizes, strict=True)),
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


def new_store() -> WeightStore:
    """A store in shared memory; to be called after the engine's start.

    Importing torchtune starts threads, and a core is forked, which is fastest, only before.
    """
    from torchrl_llm_async.weight_update import WeightStore

    return WeightStore.temporary()


def table(columns: Sequence[str], rows: Iterable[Iterable[object]]) -> None:
    """Prints a Markdown table."""
    for row in (columns, ["---"] * len(columns), *rows):
        print("| " + " | ".join(str(cell) for cell in row) + " |", flush=True)
    print(flush=True)


def spread(ratios: Sequence[float]) -> str:
    """The median, and from where to where."""
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


# ---------------------------------------------------------------------- 1. the collector's overhead
GROUP_SIZE = 8


def collector_overhead(repeats: int, scratch: Path) -> dict[str, float]:
    """Tokens per second through the collector, over those of bare vLLM on the same requests."""
    # With the number of groups that take some seconds.
    random_folder = random_model(TINY, scratch / "tiny")
    models = {"written_sums": (ASSET, 64), "random": (random_folder, 32)}
    print(
        f"## Collector\n\nGroups of {GROUP_SIZE} answers in a one-turn environment, {IN_FLIGHT} "
        "decoded at once, fp32; the model of the demo (0.3M parameters), whose answers are short, "
        "and a random one (2.4M), which answers with 64 tokens. Tokens/s, medians of "
        f"{repeats}; ratios with their range.\n"
    )
    rows, ratios = [], {}
    for name, (folder, groups) in models.items():
        length, speeds = _collector_and_bare(folder, groups, repeats, scratch)
        shares = [collected / bare for collected, bare, _ in speeds]
        ratios[name] = statistics.median(shares)
        medians = (f"{statistics.median(column):,.0f}" for column in zip(*speeds, strict=True))
        rows.append([name, f"{length:.0f}", *medians, spread(shares)])
    columns = ["model", "tokens/answer", "collector", "bare vLLM", "bare, without log-probs"]
    table([*columns, "collector / bare"], rows)
    return {
        "collector/throughput_ratio": min(ratios.values()),
        **{f"collector/throughput_ratio_{name}": ratio for name, ratio in ratios.items()},
    }


def _collector_and_bare(
    folder: Path, groups_per_turn: int, repeats: int, scratch: Path
) -> tuple[float, list[tuple[float, ...]]]:
    """Mean tokens of an answer; tokens/s of collector, bare vLLM, and that without log-probs."""
    engine = VLLMEngine(
        folder, max_model_len=128, max_num_seqs=IN_FLIGHT, log_file=scratch / "vllm.log"
    )
    collector = AsyncLLMCollector(
        WrittenSumsEnv,
        engine,
        tokenizer=str(ASSET),
        sampling=SamplingConfig(max_new_tokens=64),
        group_size=GROUP_SIZE,
        groups_per_step=groups_per_turn,
        max_staleness=0,  # It rests after each batch until it is given the next version.
        total_steps=repeats + 1,
        # Some more than are decoded at once: what waits for the last of a group leaves no gap.
        max_concurrent_groups=IN_FLIGHT // GROUP_SIZE + 4,
        log_path=scratch / "collector.log",
    )
    context = multiprocessing.get_context("spawn")
    connection, theirs = context.Pipe()
    bare = context.Process(target=_serve_bare, args=(theirs, engine))
    collector.start()
    bare.start()
    theirs.close()  # So that the pipe ends when the process does.
    weights = load_file(folder / "model.safetensors")
    store = new_store()
    speeds = []
    try:
        groups = iter(collector)
        connection.recv()  # It is ready.
        for turn in range(repeats + 1):
            if turn > 0:
                _serve_next_version(collector, store.write(turn, weights.items()), turn)
            begun = time.perf_counter()
            if turn > 0:
                collector.resume()
            batch = list(itertools.islice(groups, groups_per_turn))
            seconds = [time.perf_counter() - begun]
            requests = [
                (row["tokens", "prompt"].tolist(), int(row["masks", "all_assistant_mask"].sum()))
                for group in batch
                for row in group.unbind(0)
            ]
            for log_probs in (True, False):
                connection.send((requests, log_probs))
                seconds.append(connection.recv())
            tokens = sum(length for _, length in requests)
            if turn > 0:  # The first warms up.
                speeds.append(tuple(tokens / took for took in seconds))
    finally:
        collector.shutdown()
        store.close()
        connection.close()  # Which ends the other process.
        bare.join()
    return tokens / len(requests), speeds


def _serve_next_version(collector: AsyncLLMCollector, path: Path, version: int) -> None:
    """Has the engine switch before the clock runs; the collector is left paused."""
    collector.pause()
    if not collector.serve_weights(path, version=version).result(60):
        raise RuntimeError(f"version {version} was refused")


def _serve_bare(connection: Connection, engine: VLLMEngine) -> None:
    """Answers batches of requests with vLLM alone, in a process of its own as the collector's."""
    with asyncio.Runner() as runner, contextlib.suppress(EOFError):
        runner.run(engine.start())
        connection.send("ready")
        for batch in itertools.count():
            requests, log_probs = connection.recv()
            connection.send(runner.run(_answer_bare(engine, batch, requests, log_probs)))


async def _answer_bare(
    engine: VLLMEngine, batch: int, requests: list[tuple[list[int], int]], log_probs: bool
) -> float:
    """Seconds that vLLM's AsyncLLM takes, at its fastest setting for what is asked of it."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    vllm = engine._engine  # The AsyncLLM, at the settings measured to be its fastest.

    async def answer(index: int, prompt: list[int], length: int) -> None:
        params = SamplingParams(
            max_tokens=length,
            ignore_eos=True,  # Exactly as many tokens as the collector's answer had.
            seed=batch * len(requests) + index,
            logprobs=0 if log_probs else None,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        request = {"type": "token", "prompt_token_ids": prompt}
        async for output in vllm.generate(request, params, f"bare-{batch}-{index}"):
            assert len(output.outputs[0].token_ids) == length

    begun = time.perf_counter()
    await asyncio.gather(
        *(answer(index, prompt, length) for index, (prompt, length) in enumerate(requests))
    )
    return time.perf_counter() - begun


# ---------------------------------------------------------------------- 2. what an update costs
PARTS = ("stage", "pause", "load", "repack", "resume")
COMPARED = ("still", "bare load", "3 copies", "client's gap", "usual gap")
STALL_IN_FLIGHT, TICKS = 16, 6


def update_stall(repeats: int, scratch: Path) -> dict[str, float]:
    """How long generation stands still at a weight update, against a bare load and three copies."""
    folder = random_model(LARGE, scratch / "large")
    found = asyncio.run(_measure_stalls(folder, repeats, scratch))
    size = (folder / "model.safetensors").stat().st_size
    print(
        f"## Stall\n\nWeight update of {size / 1e6:.0f} MB (100M parameters, fp32), "
        f"{STALL_IN_FLIGHT} requests running, ms, medians of {repeats}. `stage` (reading and "
        "checking) goes on beside generation, `pause` waits for the step under way; from then on "
        "generation stands still. The limit is a bare load and three copies of the same bytes. "
        "A client's gap is its longest wait for a token around the switch.\n"
    )
    rows, ratios = [], {}
    for way, runs in found.items():
        shares = [run["still"] / (run["bare load"] + run["3 copies"]) for run in runs]
        ratios[way] = statistics.median(shares)
        medians = (statistics.median(run[name] for run in runs) for name in (*PARTS, *COMPARED))
        rows.append([way, *(f"{1e3 * median:.0f}" for median in medians), spread(shares)])
    table(["on_update", *PARTS, *COMPARED, "still / limit"], rows)
    return {
        "weights/stall_over_limit": max(ratios.values()),
        **{f"weights/stall_over_limit_{way}": ratio for way, ratio in ratios.items()},
    }


async def _measure_stalls(
    folder: Path, repeats: int, scratch: Path
) -> dict[str, list[dict[str, float]]]:
    engine = VLLMEngine(
        folder, max_model_len=1024, max_num_seqs=STALL_IN_FLIGHT, log_file=scratch / "vllm.log"
    )
    await engine.start()
    weights = load_file(folder / "model.safetensors")
    store = new_store()
    found: dict[str, list[dict[str, float]]] = {"keep": [], "recompute": []}
    try:
        for turn in range(repeats + 1):
            for way, runs in found.items():
                engine.on_update = way
                path = store.write(engine.version + 1, weights.items())
                run = await _measure_stall(engine, path)
                if turn > 0:  # The first touches memory.
                    runs.append(run)
    finally:
        store.close()
        await engine.shutdown()
    return found


async def _measure_stall(engine: VLLMEngine, path: Path) -> dict[str, float]:
    """One weight update in seconds, part by part, as its clients see it, and what it may take."""
    version = engine.version + 1
    arrivals: asyncio.Queue[float] = asyncio.Queue()
    clients = [_client(engine, f"{version}-{index}") for index in range(1, STALL_IN_FLIGHT)]
    async with asyncio.TaskGroup() as tasks:
        running = [
            tasks.create_task(c) for c in (*clients, _tick(engine, f"{version}-0", arrivals))
        ]
        seen = [await arrivals.get() for _ in range(TICKS)]
        await engine.update_weights(version, path)
        seen += [await arrivals.get() for _ in range(arrivals.qsize() + TICKS)]
        ((bare, copies),) = await engine._engine.collective_rpc(bare_load, args=(str(path),))
        for task in running:
            task.cancel()
    gaps = [after - before for before, after in itertools.pairwise(seen)]
    return engine.last_update | {
        "still": engine.last_update["stall"] - engine.last_update["pause"],
        "bare load": bare,
        "3 copies": copies,
        "client's gap": max(gaps),
        "usual gap": statistics.median(gaps),
    }


def bare_load(worker: Any, path: str) -> tuple[float, float]:
    """In the engine core: seconds to reload weights from memory, and to copy them thrice."""
    weights = {name: tensor.clone() for name, tensor in load_file(path).items()}
    copies = {name: tensor.clone() for name, tensor in weights.items()}  # touches the memory
    begun = time.perf_counter()
    worker.reload_weights(weights_iterator=iter(weights.items()))
    loaded = time.perf_counter()
    for _ in range(3):
        for name, tensor in weights.items():
            copies[name].copy_(tensor)
    return loaded - begun, time.perf_counter() - loaded


async def _client(engine: VLLMEngine, request_id: str) -> None:
    await engine.generate([1] * 32, SamplingConfig(max_new_tokens=900), request_id=request_id)


async def _tick(engine: VLLMEngine, request_id: str, arrivals: asyncio.Queue[float]) -> None:
    """Says when each token of a request arrives; the engine itself gives whole answers only."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(
        max_tokens=900, seed=0, detokenize=False, output_kind=RequestOutputKind.DELTA
    )
    request = {"type": "token", "prompt_token_ids": [1] * 32}
    async for _ in engine._engine.generate(request, params, request_id):
        arrivals.put_nowait(time.perf_counter())


# ---------------------------------------------------------------------- 3. the ways to update
WAYS = ("no updates", "keep", "recompute", "abort", "drain first")
MEDIAN_LENGTH, LONGEST = 32, 256
WARM_UP_S, WINDOW_S = 2.0, 5.0


def ways_to_update(repeats: int, scratch: Path) -> dict[str, float]:
    """Useful tokens per second at one weight update a second, for each way to update."""
    folder = random_model(TINY, scratch / "tiny")
    found = asyncio.run(_measure_ways(folder, repeats, scratch))
    print(
        "## Updates\n\nA new version one second after the last was served; 2.4M parameters, fp32, "
        f"{IN_FLIGHT} requests in flight, lengths lognormal with median {MEDIAN_LENGTH}, sigma 1, "
        f"at most {LONGEST}. Useful tokens are those of answers that were finished; medians of "
        f"{repeats}. Draining counts towards the time till served.\n"
    )
    rows, shares = [], {}
    for way, runs in found.items():
        useful, rate, took = (statistics.median(column) for column in zip(*runs, strict=True))
        ratios = [run[0] / base[0] for run, base in zip(runs, found["no updates"], strict=True)]
        shares[way] = statistics.median(ratios)
        switches = ("", "") if way == "no updates" else (f"{rate:.2f}", f"{1e3 * took:.0f}")
        rows.append([way, f"{useful:,.0f}", spread(ratios), *switches])
    columns = ["way", "useful tokens/s", "of those without updates", "updates/s", "ms till served"]
    table(columns, rows)
    return {f"updates/{way.replace(' ', '_')}_share": share for way, share in shares.items()}


async def _measure_ways(
    folder: Path, repeats: int, scratch: Path
) -> dict[str, list[tuple[float, float, float]]]:
    engine = VLLMEngine(
        folder,
        max_model_len=LONGEST + 64,
        max_num_seqs=IN_FLIGHT,
        log_file=scratch / "vllm.log",
    )
    await engine.start()
    weights = load_file(folder / "model.safetensors")
    store = new_store()
    found: dict[str, list[tuple[float, float, float]]] = {way: [] for way in WAYS}
    try:
        for turn in range(repeats):
            for way, runs in found.items():
                runs.append(await Window(engine, store, weights, way, seed=turn).measure())
    finally:
        store.close()
        await engine.shutdown()
    return found


class Window:
    """Requests that never cease, and updates in one way, for some seconds."""

    def __init__(
        self,
        engine: VLLMEngine,
        store: WeightStore,
        weights: dict[str, torch.Tensor],
        way: str,
        seed: int,
    ) -> None:
        self.engine, self.store, self.weights, self.way = engine, store, weights, way
        self.lengths = _lengths(random.Random(seed))
        self.finished_tokens = self.running = 0
        self.may_start, self.idle = asyncio.Event(), asyncio.Event()
        self.may_start.set()
        if way in ("keep", "recompute", "abort"):
            engine.on_update = way

    async def measure(self) -> tuple[float, float, float]:
        """Useful tokens per second, updates per second, mean seconds per update."""
        async with asyncio.TaskGroup() as tasks:
            clients = [tasks.create_task(self._ask_for_ever(index)) for index in range(IN_FLIGHT)]
            await self._updates(WARM_UP_S)
            # From the end of an update to that of another: whole cycles.
            begun, before = time.perf_counter(), self.finished_tokens
            took = await self._updates(WINDOW_S)
            seconds, tokens = time.perf_counter() - begun, self.finished_tokens - before
            for client in clients:
                client.cancel()
        return tokens / seconds, len(took) / seconds, statistics.mean(took)

    async def _updates(self, at_least: float) -> list[float]:
        """Updates once a second, for so many seconds or some more; says what each took."""
        begun, took = time.perf_counter(), []
        while time.perf_counter() - begun < at_least:
            await asyncio.sleep(1)
            due = time.perf_counter()
            if self.way != "no updates":
                await self._update()
            took.append(time.perf_counter() - due)
        return took

    async def _update(self) -> None:
        version = self.engine.version + 1
        path = await asyncio.to_thread(self.store.write, version, self.weights.items())
        if self.way == "drain first":
            self.may_start.clear()
            await self.idle.wait()
        await self.engine.update_weights(version, path)
        self.may_start.set()

    async def _ask_for_ever(self, index: int) -> None:
        for count in itertools.count():
            await self.may_start.wait()
            self.running += 1
            self.idle.clear()
            answer = await self.engine.generate(
                [1 + index] * 32,
                SamplingConfig(max_new_tokens=next(self.lengths)),
                request_id=f"{id(self)}-{index}-{count}",
            )
            self.finished_tokens += len(answer.token_ids)
            self.running -= 1
            if self.running == 0:
                self.idle.set()


def _lengths(generator: random.Random) -> Iterator[int]:
    while True:
        length = round(generator.lognormvariate(math.log(MEDIAN_LENGTH), 1))
        yield min(max(length, 1), LONGEST)


# ---------------------------------------------------------------------- the command
BENCHMARKS = {
    "collector": collector_overhead,
    "stall": update_stall,
    "updates": ways_to_update,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=BENCHMARKS, help="run one of the three")
    parser.add_argument("--repeats", type=int, default=3, help="turns that medians are taken of")
    parser.add_argument("--json", metavar="PATH", help="write the figures there; - for stdout")
    args = parser.parse_args()
    figures: dict[str, float] = {}
    for name, benchmark in BENCHMARKS.items():
        if args.only in (None, name):
            # A process each: an engine core is forked fastest where no threads are yet.
            with (
                tempfile.TemporaryDirectory() as scratch,
                ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool,
            ):
                figures |= pool.submit(benchmark, args.repeats, Path(scratch)).result()
    text = json.dumps({name: round(value, 4) for name, value in figures.items()})
    if args.json == "-":
        print(text)
    elif args.json:
        Path(args.json).write_text(text + "\n")


if __name__ == "__main__":
    main()
