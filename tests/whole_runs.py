"""Whole runs as users start them, for the tests that need some."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from conftest import heed_interrupts

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
RECIPE = "recipes/async_rl_full_finetune_distributed.py"
CONFIG = "recipes/configs/arithmetic_ppo.yaml"
LORA_RECIPE = "recipes/async_rl_lora_finetune_distributed.py"
LORA_CONFIG = "recipes/configs/arithmetic_lora_ppo.yaml"


def launch(*command: str | Path, cwd: Path = ROOT) -> subprocess.Popen:
    """Starts a program of the environment the tests run in."""
    return subprocess.Popen(
        [BIN / command[0], *command[1:]],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=heed_interrupts,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def on_ranks(ranks: int) -> tuple[str, ...]:
    """The launcher's options: so many ranks, that meet at a free port."""
    return "--standalone", "--nproc_per_node", str(ranks)


def tune_run(
    output_dir: Path, *overrides: str, ranks: int = 2, recipe: str = RECIPE, config: str = CONFIG
) -> subprocess.Popen:
    """The recipe, as ``tune run`` starts it from the root."""
    return launch(
        *("tune", "run", *on_ranks(ranks), recipe, "--config", config),
        *(f"output_dir={output_dir}", *overrides),
    )


def finish(process: subprocess.Popen, timeout: float = 240.0) -> str:
    """Waits for a program's end; what it printed."""
    try:
        output, _ = process.communicate(timeout=timeout)
    finally:
        process.kill()
    return output


def succeed(process: subprocess.Popen, timeout: float = 240.0) -> str:
    """The same, of one that has to end well."""
    output = finish(process, timeout)
    assert process.returncode == 0, output
    return output


def metrics(output_dir: Path) -> dict[int, dict[str, float]]:
    """What torchtune's DiskLogger wrote, by step; a resumed run writes a file of its own."""
    steps: dict[int, dict[str, float]] = {}
    for log in sorted((output_dir / "logs").glob("*.txt")):
        for line in log.read_text().splitlines():
            if found := re.match(r"Step (\d+) \| (.*)", line):
                values = (pair.split(":") for pair in found[2].split())
                steps.setdefault(int(found[1]), {}).update({k: float(v) for k, v in values})
    return steps
