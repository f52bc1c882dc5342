"""Memory and time of a loss's forward and backward pass beside TorchRL's GRPOLoss.

::

    OMP_NUM_THREADS=1 python benchmarks/losses.py

Both losses see one batch of 16 sequences of 512 tokens and one torchtune decoder (2 layers, width
512, vocabulary 32,000, float32). ``DecoupledPPOLoss`` scores it through ``TorchtuneActor``, by
chunks; ``GRPOLoss`` through the least actor it takes: whole logits, shifted by one position as
TorchRL's own wrappers do, without temperature. The options are such that both compute the same
loss, which is checked by its gradient. Peak memory is that of a fresh process for each loss, above
what it held before; for the time the two take turns in one process. On a CPU that is processor
time, so that what else the machine does counts little.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torch.nn import functional as F
from torchrl.modules.distributions.discrete import LLMMaskedCategorical
from torchrl.modules.llm import LLMWrapperBase
from torchrl.objectives.llm import GRPOLoss
from torchtune.models.qwen2 import qwen2

from torchrl_llm_async.modules import TorchtuneActor
from torchrl_llm_async.objectives import DecoupledPPOLoss

VOCABULARY, SEQUENCES, TOKENS = 32_000, 16, 512
CLIP, ENTROPY_COEFF = (0.2, 0.28), 0.01
LOSSES = ("ours", "torchrl")


class Case(NamedTuple):
    """What is asked of the two losses.

    Attributes:
        name (str): as the table has it.
        sampled (float): share of each sequence, at its end, that the policy sampled.
        entropy (bool): whether there is an entropy bonus, as by default in ``GRPOLoss``.
    """

    name: str
    sampled: float
    entropy: bool


CASES = {
    case.name: case
    for case in (
        Case("all", sampled=1.0, entropy=False),
        Case("half", sampled=0.5, entropy=False),
        Case("entropy", sampled=1.0, entropy=True),
    )
}


class WholeLogits(LLMWrapperBase):
    """The least actor ``GRPOLoss`` takes, over a torchtune decoder."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.in_keys, self.out_keys = [("tokens", "full")], []

    def _get_rlhf_dist(self, rows: TensorDictBase) -> LLMMaskedCategorical:
        logits = self.model(rows["tokens", "full"])[:, :-1]
        return LLMMaskedCategorical(
            logits=F.pad(logits, (0, 0, 1, 0)), mask=rows["masks", "all_assistant_mask"]
        )


def make_decoder(device: str) -> nn.Module:
    torch.manual_seed(0)
    model = qwen2(
        vocab_size=VOCABULARY,
        num_layers=2,
        num_heads=8,
        num_kv_heads=2,
        embed_dim=512,
        intermediate_dim=1536,
        max_seq_len=TOKENS,
    )
    return model.to(device)


def make_batch(case: Case, model: nn.Module, sequences: int, tokens: int) -> TensorDictBase:
    """Rows sampled by a policy near the model, so that a few tokens are clipped."""
    torch.manual_seed(1)
    token_ids = torch.randint(VOCABULARY, (sequences, tokens))
    place = torch.arange(tokens).expand(sequences, tokens)
    # A first token has nothing before it, so nobody sampled it.
    sampled = place >= max(1, round(tokens * (1 - case.sampled)))
    advantage = torch.randn(sequences, 1)
    rows = TensorDict(
        {
            "tokens": {"full": token_ids},
            "masks": {
                "all_attention_mask": torch.ones_like(sampled),
                "all_assistant_mask": sampled,
            },
            "advantage": advantage,
            # GRPOLoss wants a feature dimension after that of the tokens.
            "their_advantage": advantage.unsqueeze(-1),
        },
        batch_size=[sequences],
    )
    noise = torch.where(sampled, 0.1 * torch.randn(sequences, tokens), 0.0)
    rows = rows.to(model.tok_embeddings.weight.device)
    with torch.no_grad():
        # One sequence after the other, to take little memory.
        theta = [
            TorchtuneActor(model).score(row[None], mask=row["masks", "all_assistant_mask"][None])
            for row in rows.unbind(0)
        ]
    mu = torch.cat([scores.log_probs for scores in theta]) + noise.to(rows.device)
    return rows.set(("log_probs", "full"), mu)


def make_step(loss_name: str, case: Case, model: nn.Module) -> Callable[[TensorDictBase], None]:
    """A forward and backward pass of one of the two losses, with fresh gradients."""
    coefficient = ENTROPY_COEFF if case.entropy else 0.0
    if loss_name == "ours":
        ours = DecoupledPPOLoss(
            TorchtuneActor(model), clip_epsilon=CLIP, prox="behavior", entropy_coeff=coefficient
        )

        def total(rows: TensorDictBase) -> Tensor:
            return ours(rows, normalizer=ours.denominator(rows)).total()
    else:
        theirs = GRPOLoss(
            WholeLogits(model),
            clip_epsilon=CLIP,
            masking_strategy="rlhf",
            entropy_bonus=case.entropy,
            entropy_coeff=coefficient,
        )
        theirs.set_keys(advantage="their_advantage")

        def total(rows: TensorDictBase) -> Tensor:
            output = theirs(rows)
            return output.loss_objective + (output.loss_entropy if case.entropy else 0.0)

    def step(rows: TensorDictBase) -> None:
        model.zero_grad()
        total(rows).backward()

    return step


def peak_bytes(loss_name: str, case: Case, device: str) -> int:
    """Most memory a pass takes above what was there before; for a process that did nothing else."""
    model = make_decoder(device)
    step = make_step(loss_name, case, model)
    # What first calls set up, and the gradients, which both losses have alike.
    step(make_batch(case, model, sequences=1, tokens=8))
    rows = make_batch(case, model, SEQUENCES, TOKENS)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step(rows)
        return torch.cuda.max_memory_allocated() - before
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    before = pages * resource.getpagesize()
    step(rows)
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before


def peak_in_fresh_process(loss_name: str, case: Case, device: str) -> int:
    command = [sys.executable, __file__, "--device", device, "--cases", case.name]
    command += ["--peak-of", loss_name]
    return int(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


def compare(case: Case, device: str, repeats: int) -> tuple[dict[str, float], float]:
    """Median seconds of a pass of each loss, and how far apart their gradients are."""
    models = {name: make_decoder(device) for name in LOSSES}
    steps = {name: make_step(name, case, model) for name, model in models.items()}
    rows = make_batch(case, models["ours"], SEQUENCES, TOKENS)
    clock = time.process_time if device == "cpu" else time.perf_counter
    seconds: dict[str, list[float]] = {name: [] for name in LOSSES}
    for turn in range(repeats + 1):
        for name in sorted(LOSSES, reverse=turn % 2 == 0):
            begin = clock()
            steps[name](rows)
            if device == "cuda":
                torch.cuda.synchronize()
            if turn:  # the first one warms up
                seconds[name].append(clock() - begin)
    ours, theirs = (
        torch.cat([p.grad.flatten() for p in models[name].parameters()]) for name in LOSSES
    )
    difference = float((ours - theirs).norm() / theirs.norm())
    return {name: statistics.median(values) for name, values in seconds.items()}, difference


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--peak-of", choices=LOSSES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peak_of is not None:
        print(peak_bytes(arguments.peak_of, CASES[arguments.cases[0]], arguments.device))
        return
    print(f"{torch.get_num_threads()} thread(s), OMP_NUM_THREADS={os.getenv('OMP_NUM_THREADS')}")
    print("| case | peak memory, ours / TorchRL's (MB) | ratio | time (s) | ratio | gradients |")
    print("|---|---|---|---|---|---|")
    results = {}
    for case in (CASES[name] for name in arguments.cases):
        peak = {name: peak_in_fresh_process(name, case, arguments.device) for name in LOSSES}
        seconds, difference = compare(case, arguments.device, arguments.repeats)
        memory_ratio = peak["ours"] / peak["torchrl"]
        time_ratio = seconds["ours"] / seconds["torchrl"]
        suffix = "" if case.name == "all" else f"_{case.name}"
        results[f"losses/memory_ratio{suffix}"] = memory_ratio
        results[f"losses/time_ratio{suffix}"] = time_ratio
        print(
            f"| {case.name} | {peak['ours'] / 1e6:.0f} / {peak['torchrl'] / 1e6:.0f} | "
            f"{memory_ratio:.2f} | {seconds['ours']:.2f} / {seconds['torchrl']:.2f} | "
            f"{time_ratio:.2f} | {difference:.1e} apart |",
            flush=True,
        )
        if not difference < 1e-4:
            sys.exit(f"The two losses are not the same in case {case.name!r}: nothing is compared.")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results) + "\n")


if __name__ == "__main__":
    main()
