"""What packing gains: tokens per second of a training step in three kinds of micro-batches.

::

    OMP_NUM_THREADS=1 python benchmarks/packing.py

All three train on the same sequences, whose lengths are lognormal (sigma 1), with the same budget
of tokens per micro-batch, padding included: sequences in the order in which they came, so many per
micro-batch that the longest of all would fit that often, padded to the longest of theirs; planned
and padded; planned and packed. The gradients are compared. The three take turns in one process;
the ratio is that of the medians of processor time, so that what else the machine does counts
little.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torchtune.models.qwen2 import qwen2

from torchrl_llm_async.modules import TorchtuneActor
from torchrl_llm_async.objectives import DecoupledPPOLoss
from torchrl_llm_async.packing import pack_rows, pad_rows, plan_micro_batches

VOCABULARY = 8_000


def make_rows(number: int, median: int, longest: int) -> TensorDictBase:
    """Sequences of lognormal lengths; the first eighth of each is the prompt."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randn(number, generator=generator).exp().mul(median).long().clamp(8, longest)
    rows = []
    for length in lengths.tolist():
        sampled = torch.arange(length) >= max(length // 8, 1)
        rows.append(
            TensorDict(
                {
                    "tokens": {
                        "full": torch.randint(VOCABULARY, (length,), generator=generator),
                    },
                    "masks": {
                        "all_attention_mask": torch.ones_like(sampled),
                        "all_assistant_mask": sampled,
                    },
                    "log_probs": {"full": torch.where(sampled, -9.0, 0.0)},
                    "advantage": torch.randn(1, generator=generator),
                }
            )
        )
    return lazy_stack(rows)


def in_order(rows: TensorDictBase, lengths: list[int], budget: int) -> list[TensorDictBase]:
    """A fixed number of sequences, as they came."""
    count = budget // max(lengths)
    return [pad_rows(rows[i : i + count], 0) for i in range(0, len(rows), count)]


def planned(form: str) -> Callable[[TensorDictBase, list[int], int], list[TensorDictBase]]:
    """By the package's plan, for one rank."""

    def make(rows: TensorDictBase, lengths: list[int], budget: int) -> list[TensorDictBase]:
        (plan,) = plan_micro_batches(lengths, world_size=1, token_budget=budget, form=form)
        if form == "padded":
            return [pad_rows(rows[indices], 0) for indices in plan]
        return [pack_rows(rows[indices], 0, row_tokens=max(lengths)) for indices in plan]

    return make


KINDS = {
    "in order, fixed number, padded": in_order,
    "planned, padded": planned("padded"),
    "planned, packed": planned("packed"),
}


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sequences", type=int, default=192)
    parser.add_argument("--median", type=int, default=64, help="tokens of the median sequence")
    parser.add_argument("--longest", type=int, default=512, help="tokens; longer ones are cut")
    parser.add_argument("--budget", type=int, default=4096, help="tokens of a micro-batch")
    parser.add_argument("--width", type=int, default=512, help="of the model")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()

    rows = make_rows(args.sequences, args.median, args.longest)
    lengths = [len(row["tokens", "full"]) for row in rows.unbind(0)]
    model = qwen2(
        vocab_size=VOCABULARY,
        num_layers=2,
        num_heads=8,
        num_kv_heads=2,
        embed_dim=args.width,
        intermediate_dim=3 * args.width,
        max_seq_len=args.longest,
    )
    loss = DecoupledPPOLoss(TorchtuneActor(model))
    normalizer = loss.denominator(rows)

    def step(micros: list[TensorDictBase]) -> list[torch.Tensor]:
        model.zero_grad()
        for micro in micros:
            loss(micro, normalizer=normalizer).total().backward()
        return [parameter.grad for parameter in model.parameters()]

    micros = {kind: make(rows, lengths, args.budget) for kind, make in KINDS.items()}
    gradients = {kind: torch.cat([g.flatten() for g in step(m)]) for kind, m in micros.items()}
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(args.repeats):
        for kind in KINDS:
            start = time.process_time()
            step(micros[kind])
            seconds[kind].append(time.process_time() - start)

    first = next(iter(KINDS))
    median = {kind: statistics.median(values) for kind, values in seconds.items()}
    print(
        f"{len(lengths)} sequences of {min(lengths)} to {max(lengths)} tokens, mean "
        f"{statistics.mean(lengths):.0f}; {args.budget} tokens per micro-batch; "
        f"width {args.width}; median of {args.repeats}, {torch.get_num_threads()} thread"
    )
    print("| micro-batches | number | padding | tokens/s | ratio | gradient differs by |")
    print("|---|---|---|---|---|---|")
    for kind in KINDS:
        dense = sum(micro["tokens", "full"].numel() for micro in micros[kind])
        distance = (gradients[kind] - gradients[first]).norm() / gradients[first].norm()
        print(
            f"| {kind} | {len(micros[kind])} | {1 - sum(lengths) / dense:.1%} | "
            f"{sum(lengths) / median[kind]:,.0f} | {median[first] / median[kind]:.2f} | "
            f"{distance:.1e} |"
        )


if __name__ == "__main__":
    main()
