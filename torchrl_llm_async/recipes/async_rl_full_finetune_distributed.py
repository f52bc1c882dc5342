"""Asynchronous RL of a language model: full finetuning, FSDP2, one recipe.

Launch (two ranks, no GPU needed)::

    tune run --nproc_per_node 2 recipes/async_rl_full_finetune_distributed.py \\
        --config recipes/configs/arithmetic_ppo.yaml

Read it from :meth:`AsyncRLFullFinetuneRecipe.train` outwards. Rank 0 owns the replay buffer and
the collector, which generates in a process of its own, with vLLM in another; all ranks train.
"""

from __future__ import annotations

import contextlib
import functools
import signal
import sys
import time
from concurrent.futures import Future
from pathlib import Path

import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf
from tensordict.nn import TensorDictModuleBase
from torch import nn
from torchtune import config, training, utils
from torchtune.config._utils import _get_component_from_path
from torchtune.recipe_interfaces import FTRecipeInterface

from torchrl_llm_async.checkpoint import TrainingState, load_tree
from torchrl_llm_async.collectors import AsyncLLMCollector, Evaluation
from torchrl_llm_async.data import StalenessReplayBuffer
from torchrl_llm_async.modules import TorchtuneActor
from torchrl_llm_async.objectives import LossOutput
from torchrl_llm_async.recipes.batches import BatchFeed, Minibatch, StepBatch
from torchrl_llm_async.recipes.collection import make_collector
from torchrl_llm_async.recipes.config import HF_KEY_MAPS, ConfigError
from torchrl_llm_async.recipes.report import CheckpointKeeper, Report, finished
from torchrl_llm_async.recipes.resume import (
    Records,
    RunCheckpoints,
    resume_folder,
    version_of,
)
from torchrl_llm_async.recipes.running import run
from torchrl_llm_async.recipes.sharding import build_sharded_model
from torchrl_llm_async.recipes.updates import Updates
from torchrl_llm_async.weight_update import VLLMSharedWeightSyncScheme


class AsyncRLFullFinetuneRecipe(FTRecipeInterface):
    """Trains a policy on groups that a collector samples meanwhile, at a bounded staleness.

    Args:
        cfg: a config that :func:`~torchrl_llm_async.recipes.config.load_config` has checked.
        control: a process group that carries CPU objects, whatever the device.
    """

    def __init__(self, cfg: DictConfig, control: dist.ProcessGroup):
        self._cfg = cfg
        self._control = control
        self._device = utils.get_device(device=cfg.device)
        self._dtype = training.get_dtype(cfg.dtype, device=self._device)
        self.world_size, self.rank = utils.get_world_size_and_rank()
        self._is_rank_zero = self.rank == 0
        self._output_dir = Path(cfg.output_dir).resolve()
        self._resumed = None if cfg.resume is None else Path(cfg.resume)
        training.set_seed(seed=cfg.seed)
        self._collector: AsyncLLMCollector | None = None
        self._buffer: StalenessReplayBuffer | None = None
        self._weights: VLLMSharedWeightSyncScheme | None = None
        self._report: Report | None = None
        self._records: dict[str, Records] = {}
        self._metric_logger = None
        self._evaluations: list[Future[Evaluation]] = []

    # ------------------------------------------------------------------ setup
    def setup(self) -> None:
        """Builds everything; the engine starts while the model loads."""
        cfg = self._cfg
        if self._is_rank_zero:
            if self._resumed is None:  # It may hold a run without a checkpoint yet.
                (self._output_dir / "samples.jsonl").unlink(missing_ok=True)
            again = cfg if self._resumed is None else OmegaConf.merge(cfg, {"resume": "auto"})
            OmegaConf.save(again, self._output_dir / "config.yaml")
            self._setup_collection()
            self._models = CheckpointKeeper(self._output_dir / "checkpoints")
            self._metric_logger = config.instantiate(cfg.metric_logger)
            self._metric_logger.log_config(cfg)
        checkpointer = config.instantiate(cfg.checkpointer)
        weights = checkpointer.load_checkpoint()[training.MODEL_KEY]
        # Asked of the class: the head must be there before the decoder is sharded, and the loss
        # takes the decoder.
        loss_class = _get_component_from_path(cfg.loss._component_)
        needs_value_head = getattr(loss_class, "needs_value_head", False)
        self._model = self._setup_model(weights, value_head=needs_value_head)
        trained = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        self._optimizer = config.instantiate(cfg.optimizer, trained)
        self._lr_scheduler = None
        if cfg.lr_scheduler is not None:
            updates = cfg.total_steps * cfg.minibatches_per_step
            self._lr_scheduler = config.instantiate(
                cfg.lr_scheduler, self._optimizer, num_training_steps=updates
            )
        self._updates = Updates(
            self._model,
            self._optimizer,
            self._lr_scheduler,
            clip_grad_norm=cfg.clip_grad_norm,
            max_skipped=cfg.max_skipped_updates,
        )
        self._loss = config.instantiate(cfg.loss, self._actor(self._model))
        if self._loss.needs_reference:
            self._loss.reference_network = self._setup_reference(weights)
        self._weights = VLLMSharedWeightSyncScheme(
            HF_KEY_MAPS[cfg.checkpointer.model_type],
            root=cfg.weights_dir,
            # While an evaluation holds the engines at one version, so many more are published; and
            # an engine that dies then has to find the one that is served.
            keep=cfg.max_staleness + 2,
        )
        self._weights.init_on_sender(model_id="policy", context=self._collector, model=self._model)
        state = TrainingState(self._model, self._optimizer, self._lr_scheduler)
        self._first_version = 0
        if self._resumed is not None:
            state.load(self._resumed)
            self._first_version = version_of(self._resumed)
        self._checkpoints = RunCheckpoints(resume_folder(cfg), state, cfg, self._control)
        self._feed = BatchFeed(
            self._buffer,
            self._loss,
            minibatches=cfg.minibatches_per_step,
            micro_batch_tokens=cfg.micro_batch_tokens,
            form=cfg.micro_batches,
            group_size=cfg.group_size,
            pad_id=config.instantiate(cfg.tokenizer).pad_id,
            group=self._control,
        )
        if self._is_rank_zero:
            self._collector.wait_until_ready()
            self._collected = self._collector.stats()

    @classmethod
    def check(cls, cfg: DictConfig) -> None:
        """Raises ConfigError for what this recipe can't do, if the config is right in itself."""
        if "lora_rank" in cfg.model:
            raise ConfigError(
                f"model._component_ is {cfg.model['_component_']!r}, which has LoRA adapters; "
                "train them with the recipe async_rl_lora_finetune_distributed, or give a model "
                "without"
            )

    def _setup_collection(self) -> None:
        """The replay buffer, and the collector that fills it."""
        cfg = self._cfg
        self._buffer = StalenessReplayBuffer(
            groups_per_step=cfg.groups_per_step,
            max_staleness=cfg.max_staleness,
            group_size=cfg.group_size,
            on_stale=cfg.on_stale,
            on_drop=self._drop if cfg.on_stale == "drop" else None,
            max_reuse=cfg.max_reuse,
            reuse=cfg.reuse,
            reuse_groups=cfg.reuse_groups,
            transform=None if cfg.advantage is None else config.instantiate(cfg.advantage),
        )
        self._collector = make_collector(
            cfg,
            output_dir=self._output_dir,
            total_steps=cfg.total_steps,
            replay_buffer=self._buffer,
        )
        if self._resumed is not None:
            self._buffer.loads(self._resumed)
            self._collector.load_state_dict(load_tree(self._resumed / "collector"))
        self._collector.start()

    def _drop(self, group_id: int, reason: str) -> None:
        self._collector.drop(group_id, reason)

    def _setup_model(
        self, weights: dict[str, torch.Tensor], *, value_head: bool = False
    ) -> nn.Module:
        """A decoder sharded over all ranks: fp32 master weights, ``dtype`` compute."""
        return build_sharded_model(
            functools.partial(config.instantiate, self._cfg.model),
            weights,
            device=self._device,
            dtype=self._dtype,
            value_head=value_head,
            compile_layers=self._cfg.compile,
            activation_checkpointing=self._cfg.enable_activation_checkpointing,
            seed=self._cfg.seed,
        )

    def _setup_reference(self, weights: dict[str, torch.Tensor]) -> TensorDictModuleBase:
        """The policy the run starts from, for a loss that compares with it: a frozen copy."""
        return self._actor(self._setup_model(weights))

    def _actor(self, model: nn.Module) -> TorchtuneActor:
        return TorchtuneActor(model, temperature=self._cfg.sampling.get("temperature", 1.0))

    # ------------------------------------------------------------------ the loop
    def train(self) -> None:
        """Steps until ``total_steps``; weights go to the engine after each."""
        self._begin()
        for step in range(self._first_version, self._cfg.total_steps):
            batch = self._feed.next().to(self._device)
            self._checkpoints.advance()  # It was written while that was waited for.
            start = time.perf_counter()
            metrics = self._train_step(batch)
            trained = time.perf_counter()
            self._checkpoint(version=step + 1)
            saved = time.perf_counter()
            self._weights.send(version=step + 1)
            if self._is_rank_zero:
                metrics["train_s"] = trained - start
                metrics["checkpoint_s"] = saved - trained
                metrics["publish_s"] = time.perf_counter() - saved
                self._log(step, metrics, batch)
            if self._is_every(self._cfg.evaluate_every, step + 1):
                self._evaluate(version=step + 1)
        self._checkpoints.finish()
        if self._is_rank_zero:
            self._finish()

    def _begin(self) -> None:
        """What the first version needs: its weights and, if it is resumed at, the records.

        An evaluation that was under way when the run ended is begun again.
        """
        first, evaluated = self._first_version, set()
        if self._is_rank_zero:
            self._report = Report(self._cfg.total_steps, first)
            earlier = self._models.go_on(first)
            up_to = None if self._resumed is None else first
            for name in ("ledger", "evaluations"):
                self._records[name] = Records(self._output_dir / f"{name}.jsonl", up_to)
            for record in self._records["evaluations"].kept:
                self._judge(Evaluation(**record))
                evaluated.add(record["version"])
            if 0 not in evaluated:  # The engines still serve what they started with.
                self._evaluate(version=0)
            for version in earlier:
                if version not in evaluated:
                    weights = self._models.path(version) / "model.safetensors"
                    self._collector.serve_weights(weights, version=version)
                    self._evaluations.append(self._collector.evaluate())
        if first > 0:
            self._weights.send(version=first)
            if self._is_every(self._cfg.evaluate_every, first) and first not in evaluated:
                self._evaluate(version=first)

    def _is_every(self, every: int | None, version: int) -> bool:
        """Whether it is a version for what happens every so many steps, and behind the last."""
        is_last = version == self._cfg.total_steps
        return every is not None and (version % every == 0 or is_last)

    def _checkpoint(self, version: int) -> None:
        """Saves the whole run, every so many steps, before the weights of the step go out.

        At staleness 0 nothing is in flight then, so that a resumed run repeats to the bit.
        """
        self._checkpoints.advance()
        if self._is_every(self._cfg.checkpoint_every, version):
            cut = self._collector.cut() if self._is_rank_zero else None
            self._checkpoints.begin(version, cut)

    def _train_step(self, batch: StepBatch) -> dict[str, float]:
        """One optimizer update per minibatch; returns the step's metrics over all ranks."""
        if len(batch.minibatches) > 1:  # With one, the current policy is the proximal one.
            for minibatch in batch.minibatches:
                minibatch.micro_batches = [self._loss.anchor(m) for m in minibatch.micro_batches]
        outputs, norms = [], []
        for minibatch in batch.minibatches:
            if minibatch.denominator == 0:
                self._updates.pass_over()
                continue
            trained = self._backward(minibatch)
            if norms:  # Engine and trainer are of one version before the first update only.
                for output in trained:
                    output.mismatch_lag_0 = None
            outputs += trained
            norms.append(self._updates.step())
        return self._reduce(outputs, norms)

    def _backward(self, minibatch: Minibatch) -> list[LossOutput]:
        """Accumulates the minibatch's gradient, all-reduced once, with its last micro-batch."""
        outputs = []
        for index, micro in enumerate(minibatch.micro_batches):
            last = index + 1 == len(minibatch.micro_batches)
            self._model.set_requires_gradient_sync(last)
            # FSDP averages over ranks; the denominator already counts all of them.
            output = self._loss(micro, normalizer=minibatch.denominator / self.world_size)
            output.total().backward()
            outputs.append(output.detach())
        return outputs

    # ------------------------------------------------------------------ what a person sees
    def _reduce(self, outputs: list[LossOutput], norms: list[float | None]) -> dict[str, float]:
        """Losses summed, diagnostics averaged over micro-batches, minibatches and ranks."""
        if not outputs:
            return {}
        sums: dict[str, torch.Tensor] = {}
        for output in outputs:
            losses = {
                name: torch.stack([value.detach(), value.new_zeros(())])
                for name, value in output.items()
                if name.startswith("loss_") and value is not None
            }
            for name, value in (losses | output.diagnostics()).items():
                sums[name] = sums.get(name, 0) + value.double()
        stacked = torch.stack(list(sums.values()))
        dist.all_reduce(stacked)
        totals = dict(zip(sums, stacked.tolist(), strict=True))
        updates = len(norms) * self.world_size
        metrics = {name: totals.pop(name)[0] / updates for name in losses}
        metrics |= type(outputs[0]).figures(totals)
        finite = [norm for norm in norms if norm is not None]
        if finite:
            metrics["gradient_norm"] = sum(finite) / len(finite)
        return metrics | {"updates_skipped": len(norms) - len(finite)}

    def _log(self, step: int, metrics: dict[str, float], batch: StepBatch) -> None:
        """Adds the collector's and the buffer's figures, then logs and shows them all."""
        metrics |= batch.figures
        logged = ("lag_", "groups_", "flight_", "queue_", "rejected/", "dropped/", "discarded_")
        metrics |= {k: v for k, v in self._buffer.stats().items() if k.startswith(logged)}
        before, self._collected = self._collected, self._collector.stats()
        # The buffer's are of groups that came after they were dropped; most don't come.
        metrics["discarded_tokens"] += self._collected["discarded_tokens"]
        gained = {key: value - before.get(key, 0) for key, value in self._collected.items()}
        metrics |= {
            "generation_tokens_per_s": gained["sampled_tokens"] / max(gained["elapsed_s"], 1e-9),
            "generation_waited_s": gained["waiting_for_trainer_s"],
            "weight_update_s": gained["weight_update_s"],
            "engine_restarts": gained["engine_restarts"],
            "training_tokens_per_s": batch.figures["trained_tokens"] / metrics["train_s"],
            "learning_rate": self._optimizer.param_groups[0]["lr"],
        }
        self._metric_logger.log_dict(metrics, step=step + 1)
        self._records["ledger"].append(
            step + 1, group_ids=self._feed.group_ids, **self._buffer.ledger()
        )
        self._report.step(metrics)
        for evaluation in finished(self._evaluations):
            self._evaluated(evaluation)

    def _evaluate(self, version: int) -> None:
        """Asks for a held-out evaluation of the weights just published; training goes on."""
        if not self._is_rank_zero:
            return
        if version > 0:
            weights = self._weights.store.path(version)
            self._models.save(version, weights, Path(self._cfg.model_dir))
        self._evaluations.append(self._collector.evaluate())

    def _judge(self, evaluation: Evaluation) -> None:
        self._report.evaluated(evaluation)
        self._models.judge(evaluation, last_version=self._cfg.total_steps)

    def _evaluated(self, evaluation: Evaluation) -> None:
        # Before it is judged: a model that lost is deleted, and could not be evaluated again.
        self._records["evaluations"].append(**vars(evaluation))
        self._judge(evaluation)
        self._metric_logger.log_dict(
            {
                "held_out_accuracy": evaluation.accuracy,
                "held_out_reward": evaluation.mean_reward,
                "held_out_answer_tokens": evaluation.answer_tokens,
                "held_out_truncated": evaluation.truncated,
            },
            step=evaluation.version,
        )

    def _finish(self) -> None:
        """Waits for the last evaluations and prints the closing table."""
        for future in self._evaluations:
            self._evaluated(future.result())
        self._report.close()
        print(
            self._report.table(
                tokens=self._collector.stats()["sampled_tokens"],
                checkpoint=self._models.path(self._cfg.total_steps),
                best=self._models.best,
                log=self._output_dir / "logs",
            ),
            flush=True,
        )

    def cleanup(self) -> None:
        """Ends the collector, the engine and the process group; each, whatever the others do."""
        if self._is_rank_zero:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        with contextlib.ExitStack() as stack:
            stack.callback(dist.destroy_process_group)
            if self._weights is not None:
                stack.callback(self._weights.shutdown)
            for part in (self._metric_logger, self._report, *self._records.values()):
                if part is not None:
                    stack.callback(part.close)
            if self._collector is not None:
                stack.callback(self._collector.shutdown)


@config.parse
def recipe_main(cfg: DictConfig) -> int:
    """Entry point: checks the config, then builds, trains and cleans up."""
    return run(AsyncRLFullFinetuneRecipe, cfg)


if __name__ == "__main__":
    sys.exit(recipe_main())
