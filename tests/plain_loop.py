"""Reinforcement learning as one writes it down first: sample, train, load, again.

Run as a program by ``test_resume.py``: no collector, no buffer, no controller, no shards and
no publisher, one thing after the other in one process. What it shares with a run of the recipe are
the parts that sample (the engine), score (the environment) and do arithmetic (advantage, loss,
packing), so that the two can be compared to the bit.

    python tests/plain_loop.py --config CONFIG --out FOLDER [key=value ...]

Writes ``weights.safetensors`` and ``losses.json``, the loss of each step, into ``--out``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path

import numpy as np
import torch
from omegaconf import OmegaConf
from safetensors.torch import save_file
from transformers import AutoTokenizer

from torchrl_llm_async.collectors.episode import request_seed
from torchrl_llm_async.data.trajectory import Trajectory, stack_group
from torchrl_llm_async.engines import SamplingConfig, VLLMEngine
from torchrl_llm_async.envs import WrittenSumsEnv
from torchrl_llm_async.objectives import DecoupledPPOLoss, GroupAdvantage
from torchrl_llm_async.packing import pad_rows, plan_micro_batches


async def answer_group(cfg, engine, tokenizer, env, problem, group_id, version):
    """All answers to one problem, scored."""
    prompt = problem["text", "prompt"]
    prompt_ids = tokenizer.encode(prompt, add_special_tokens=False)
    sampling = SamplingConfig(**cfg.sampling, stop_token_ids=(tokenizer.eos_token_id,))
    answers = await asyncio.gather(
        *(
            engine.generate(
                prompt_ids,
                sampling,
                request_id=f"{group_id}-{index}",
                seed=request_seed(cfg.seed, group_id, index, turn=0),
            )
            for index in range(cfg.group_size)
        )
    )
    rows = []
    for index, answer in enumerate(answers):
        ids = answer.token_ids
        stopped = answer.finish_reason == "stop"
        text = tokenizer.decode(ids[:-1] if stopped else ids)
        step = env.step(problem.clone().set(("text", "response"), text))["next"]
        given, taken = len(prompt_ids), len(ids)
        rows.append(
            Trajectory(
                token_ids=np.array(prompt_ids + ids),
                sampled=np.array([False] * given + [True] * taken),
                log_probs=np.array([0.0] * given + answer.log_probs, dtype=np.float32),
                versions=np.array([-1] * given + [version] * taken),
                prompt_length=given,
                reward=float(step["reward"]),
                terminated=True,
                truncated=not stopped,
                ended_by="environment",
                group_id=group_id,
                index=index,
                start_version=version,
                prompt=prompt,
                response=text,
            )
        )
    return stack_group(rows)


def hf_names(model):
    """The decoder's weights as an engine loads them."""
    from torchtune.models.convert_weights import get_mapped_key
    from torchtune.models.qwen2._convert_weights import _FROM_HF

    to_hf = {ours: theirs for theirs, ours in _FROM_HF.items() if ours is not None}
    return {get_mapped_key(name, to_hf): value for name, value in model.state_dict().items()}


def train_step(cfg, rows, model, loss, optimizer, pad_id):
    """One optimizer update per minibatch; the loss, averaged over them."""
    minibatches = []
    groups = torch.arange(len(rows)).reshape(-1, cfg.group_size)
    for first in range(cfg.minibatches_per_step):
        part = rows[groups[first :: cfg.minibatches_per_step].flatten()]
        chosen = loss.select(part, target_version=int(rows[0]["group", "start_version"]) + 1)
        lengths = [len(row["tokens", "full"]) for row in chosen.unbind(0)]
        (plan,) = plan_micro_batches(lengths, world_size=1, token_budget=cfg.micro_batch_tokens)
        micro_batches = [loss.anchor(pad_rows(chosen[indices], pad_id)) for indices in plan]
        minibatches.append((micro_batches, float(loss.denominator(chosen))))
    losses = []
    for micro_batches, denominator in minibatches:
        for micro in micro_batches:
            output = loss(micro, normalizer=denominator)
            output.total().backward()
            losses.append(output.loss_objective.detach().double())
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=cfg.clip_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return float(torch.stack(losses).sum() / len(minibatches))


async def run(cfg, out: Path) -> None:
    torch.manual_seed(cfg.seed)
    engine = VLLMEngine(
        cfg.model_dir,
        max_model_len=cfg.engine.max_model_len,
        max_num_seqs=cfg.engine.max_num_seqs,
        log_file=out / "vllm.log",
    )
    # Before torchtune is imported, which starts a thread: until then the core can be forked.
    await engine.start()
    from torchtune import config, training

    from torchrl_llm_async.modules import TorchtuneActor

    tokenizer = AutoTokenizer.from_pretrained(cfg.model_dir)
    model = config.instantiate(cfg.model)
    weights = config.instantiate(cfg.checkpointer).load_checkpoint()[training.MODEL_KEY]
    model.load_state_dict(weights)
    optimizer = config.instantiate(cfg.optimizer, model.parameters())
    loss = DecoupledPPOLoss(TorchtuneActor(model))
    advantage = GroupAdvantage(group_size=cfg.group_size)
    pad_id = config.instantiate(cfg.tokenizer).pad_id
    env = WrittenSumsEnv(seed=cfg.seed)
    losses, group_id = [], 0
    for step in range(cfg.total_steps):
        groups = []
        for _ in range(cfg.groups_per_step):
            problem = env.reset()
            group = await answer_group(cfg, engine, tokenizer, env, problem, group_id, step)
            groups.append(advantage.inv(group))
            group_id += 1
        losses.append(train_step(cfg, torch.cat(groups), model, loss, optimizer, pad_id))
        path = out / "weights.safetensors"
        save_file({name: value.contiguous() for name, value in hf_names(model).items()}, path)
        await engine.update_weights(step + 1, path)
    await engine.shutdown()
    (out / "losses.json").write_text(json.dumps(losses))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    cfg = OmegaConf.merge(
        OmegaConf.load(arguments.config), OmegaConf.from_dotlist(arguments.overrides)
    )
    arguments.out.mkdir(parents=True, exist_ok=True)
    asyncio.run(run(cfg, arguments.out))


if __name__ == "__main__":
    main()
