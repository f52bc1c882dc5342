"""How weights get from a torchtune decoder to the engine, in TorchRL's words.

:class:`VLLMSharedWeightSyncScheme` owns the order of things on the trainer's side: which version
comes next, publish on all ranks, then tell the collector on rank 0. Gathering is
:mod:`.publisher`'s, files are :mod:`.store`'s, and the switch itself the engine's. There is no
receiver's side to own: engines read a publication by its path.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import nn
from torchrl.weight_update import TransportBackend, WeightSyncScheme

from torchrl_llm_async.weight_update.publisher import WeightPublisher, is_writing_rank
from torchrl_llm_async.weight_update.store import WeightStore

__all__ = ["VLLMSharedWeightSyncScheme"]


class WeightReceiver(Protocol):
    """What the scheme asks of its context, which is a collector."""

    def serve_weights(self, path: Path, *, version: int) -> None:
        """Has the engines switch to a publication; may return before they have."""


class VLLMSharedWeightSyncScheme(WeightSyncScheme):
    """Publishes a torchtune decoder, sharded or not, and has the collector's engine switch to it.

    :meth:`send` is a collective when the model is sharded: every rank has a scheme and calls it;
    rank 0 alone writes, and alone knows the collector. It returns once the collector has been told;
    the engine switches at a token boundary of its own, and the trainer goes on meanwhile.

    The object can be pickled; what comes out is not initialised. Neither a ``strategy`` nor
    transports take part: weights are streamed in the dtype of the forward pass, one FSDP unit at a
    time, and never extracted into a tensordict.

    Args:
        hf_key_map: Hugging Face name -> torchtune name, as for :class:`.WeightPublisher`.
        root: folder in which the publications' own folder is made, which :meth:`shutdown` removes;
            by default shared memory. For engines on other machines, a shared file system.
        keep: newest versions that stay. Engines may lag behind by ``max_staleness + 1``, and one
            that is replaced loads what the others serve: give ``max_staleness + 2``.

    Examples:
        One process, and the version counts itself::

            scheme = VLLMSharedWeightSyncScheme(_FROM_HF)
            collector = AsyncLLMCollector(..., weight_sync_schemes={"policy": scheme})
            scheme.init_on_sender(model_id="policy", context=collector, model=decoder)
            ...
            collector.update_policy_weights_()

        Several, on every one of them::

            scheme.init_on_sender(
                model_id="policy", context=collector if rank == 0 else None, model=decoder
            )
            ...
            scheme.send(version=step + 1)
    """

    _store: WeightStore | None = None
    _version = 0

    def __init__(
        self,
        hf_key_map: Mapping[str, str | None],
        *,
        root: str | Path | None = None,
        keep: int = 2,
    ) -> None:
        super().__init__()
        self.hf_key_map = dict(hf_key_map)
        self.root = None if root is None else Path(root)
        self.keep = keep

    @property
    def store(self) -> WeightStore | None:
        """Where the publications lie; None on ranks other than 0, and before init_on_sender."""
        return self._store

    @property
    def version(self) -> int:
        """The version last published; 0, the engine's checkpoint, before the first."""
        return self._version

    # ------------------------------------------------------------------ the trainer's side
    def _init_on_sender_impl(
        self, *, model: nn.Module, model_id: str = "policy", context: WeightReceiver | None = None
    ) -> None:
        """What ``init_on_sender`` does.

        Args:
            model: torchtune ``TransformerDecoder``, plain or under FSDP2; only referred to weakly,
                as the context is.
            model_id: the scheme's key in the collector's ``weight_sync_schemes``.
            context: the collector on rank 0; None on the others.

        Raises:
            ValueError: if rank 0 has no context, or another rank has one.
        """
        writes = is_writing_rank()
        if writes != (context is not None):
            raise ValueError(
                f"context={context}: give init_on_sender the collector on rank 0, which tells it "
                "of new weights, and None on the other ranks"
            )
        self.model_id, self.model, self.context = model_id, model, context
        if writes:
            self._store = WeightStore.temporary(self.root, keep=self.keep)

    def _setup_connection_and_weights_on_sender_impl(
        self, *, worker_idx: int | None = None, weights: Any = None
    ) -> None:
        """Nothing: the engine starts from the checkpoint that the model was loaded from."""
        if weights is not None:
            raise ValueError("connect() takes no weights here: send() them as a version of theirs")

    def send(
        self,
        weights: nn.Module | None = None,
        worker_ids: None = None,
        *,
        version: int | None = None,
    ) -> None:
        """Publishes a version and tells the collector; on every rank, if there are several.

        Args:
            weights: another decoder of the same shape (an average of the weights, say); None takes
                the one given to ``init_on_sender``.
            worker_ids: None; a collector's engines are switched together.
            version: number of training steps behind the weights; None counts one up.

        Raises:
            RuntimeError: if not initialised on the sender, or the collector is gone.
            ValueError: if ``version`` does not exceed the last one, or workers are picked.
            TypeError: if ``weights`` is no module.
            OSError: on rank 0, if the publication can't be written.
        """
        if not self.initialized_on_sender:
            raise RuntimeError("call init_on_sender(model=..., context=collector) before send()")
        if worker_ids is not None:
            raise ValueError(
                f"worker_ids={worker_ids}: give None; versions count for the whole collector"
            )
        model = self.model if weights is None else weights
        if not isinstance(model, nn.Module):
            raise TypeError(
                "the model given to init_on_sender is no more; keep a reference to it"
                if weights is None
                else f"weights is a {type(weights).__name__}; give a torchtune decoder, or None "
                "for the one given to init_on_sender. Weights published already go to "
                "collector.serve_weights(path, version=...)"
            )
        version = self._version + 1 if version is None else version
        if version <= self._version:
            raise ValueError(f"version={version}: {self._version} is published, give a later one")
        path = WeightPublisher(model, self._store, self.hf_key_map).publish(version)
        self._version = version
        if path is not None:
            if self.context is None:  # After the collective, in which other ranks would wait.
                raise RuntimeError(f"no one to tell of version {version}: the collector is gone")
            self.context.serve_weights(path, version=version)

    def shutdown(self) -> None:
        """Removes the publications and forgets the model; idempotent."""
        super().shutdown()
        self._initialized_on_sender = self.synchronized_on_sender = False
        if self._store is not None:
            self._store.close()
            self._store = None

    def __getstate__(self) -> dict[str, Any]:
        """The configuration: the publications stay this object's to remove."""
        return {**super().__getstate__(), "_store": None, "_version": 0}

    # ------------------------------------------------------------------ what makes no sense here
    def init_on_receiver(self, **kwargs: Any) -> None:
        """Raises a RuntimeError: nothing is received by this object."""
        raise RuntimeError(
            "this scheme has no receiver: the collector hands the path of a publication to the "
            "engine, which loads it in its own process (GenerationEngine.update_weights)"
        )

    def create_transport(self, **kwargs: Any) -> TransportBackend:
        """Raises a RuntimeError: a publication is a file."""
        raise RuntimeError("this scheme has no transports: publications are files in scheme.store")
