"""Collectors that are cut and go on from the files, for tests of what is in a cut."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import torch
from scripted import ScriptedEngine, make_buffer

from torchrl_llm_async.checkpoint import load_tree, save_tree
from torchrl_llm_async.collectors import Cut


class HeldEngine(ScriptedEngine):
    """Can be held in the middle of its answers, so that a cut finds them half done."""

    def __init__(self):
        super().__init__(length=12)
        self._is_held = lambda request_id: False
        self._half_done = threading.Event()

    async def start(self):
        self._loop, self._let_go = asyncio.get_running_loop(), asyncio.Event()
        await super().start()

    async def _before_token(self, request_id, answer):
        await super()._before_token(request_id, answer)
        if answer.token_ids and self._is_held(request_id):
            self._half_done.set()
            await self._let_go.wait()

    def hold(self, turn=""):
        """From now on no answer (to the turn) gets a second token."""
        self._is_held = lambda request_id: request_id.endswith(f"-{turn}") or turn == ""

    def wait_until_half_done(self):
        assert self._half_done.wait(20)

    def let_go(self):
        self._is_held = lambda request_id: False
        self._loop.call_soon_threadsafe(self._let_go.set)


def saved(cut: Cut, folder: Path) -> None:
    save_tree(folder / "collector", cut.collector)
    cut.buffer.save(folder)


def restored(make_collector, folder: Path, *, buffer_options=None, **options):
    """A new collector and a new buffer, that go on from the files."""
    buffer = make_buffer(max_staleness=options.get("max_staleness", 1), **(buffer_options or {}))
    buffer.loads(folder)
    collector = make_collector(replay_buffer=buffer, **options)
    state = load_tree(folder / "collector")
    collector.load_state_dict(state)
    return collector, buffer


def train(collector, buffer, steps, *, in_order=True, hold=None) -> dict[int, list[int]]:
    """Trains on nothing; the groups of each step.

    An engine may be held before the last weights are served, with which others are begun.
    """
    trained = {}
    for step in steps:
        batch, info = buffer.sample(timeout=60, return_info=True)
        assert info["step"] == step
        trained[step] = info["group_ids"]
        for row in batch.unbind(0):
            versions = row["policy_version", "full"]
            versions = versions[versions >= 0]
            assert (step - versions).max() <= buffer.sampler.max_staleness
            assert torch.equal(versions, versions.sort().values)
            # Groups and problems are numbered alike: the order is that of one run without an end.
            number = row["text", "prompt"].removesuffix("?")
            assert not in_order or int(number) == row["group", "id"]
        if hold is not None and step == steps[-1]:
            hold.hold()
        collector.serve_weights("unread", version=step + 1)
    return trained
