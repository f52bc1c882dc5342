"""The contract between rollouts and whatever generates tokens.

Owns the protocol :class:`GenerationEngine`, the request and answer types, how an interrupted answer
is taken up again, and the two errors an engine raises. It deliberately knows nothing of vLLM, of
tensordicts or of text: an engine takes token ids and gives token ids back, so that nothing is ever
re-tokenised between sampling and training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

__all__ = [
    "EngineDeadError",
    "Generation",
    "GenerationEngine",
    "SamplingConfig",
    "WeightUpdateError",
]


class WeightUpdateError(RuntimeError):
    """A publication was refused whole; the former weights and version keep serving."""


@dataclass(frozen=True)
class SamplingConfig:
    """How tokens are drawn.

    The sampled distribution is ``softmax(logits / temperature)``, and its log-probabilities are
    what :class:`Generation` carries; ``temperature=0`` is greedy decoding, for evaluation.
    ``top_p`` and ``top_k`` truncate the support: importance ratios against a policy that gives
    mass to the truncated tokens are then biased, so engines refuse them unless asked.

    Args:
        max_new_tokens: upper bound on the sampled tokens of one answer, >= 1.
        temperature: softmax temperature, >= 0.
        top_p: nucleus mass in (0, 1]; 1 keeps the whole support.
        top_k: number of candidates kept; 0 keeps all of them.
        stop_token_ids: ids that end an answer, besides the end-of-sequence ids the model's own
            ``generation_config.json`` (or ``config.json``) names. The stopping token is part of
            the answer: it was sampled, so it is trained on.

    Raises:
        ValueError: if a value is out of its range.

    Examples:
        >>> SamplingConfig(max_new_tokens=32, stop_token_ids=(2,)).temperature
        1.0
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={self.max_new_tokens}: give at least 1")
        if self.temperature < 0:
            raise ValueError(f"temperature={self.temperature}: give 0 (greedy) or more")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p}: give a mass in (0, 1]; 1 turns it off")
        if self.top_k < 0:
            raise ValueError(f"top_k={self.top_k}: give 0 (off) or more")

    @property
    def truncates_support(self) -> bool:
        """Whether some tokens of the softmax can't be sampled, although sampling is random."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0)


@dataclass(frozen=True)
class Generation:
    """One answer; the three lists have one entry per sampled token.

    Args:
        token_ids: sampled ids, the stopping token included.
        log_probs: log-probability of each token under the distribution it was drawn from.
        versions: version of the weights that drew each token.
        finish_reason: ``"stop"`` (a stop token), ``"length"`` (``max_new_tokens`` or the context
            is used up: the answer is truncated) or ``"abort"`` (it is not whole).
    """

    token_ids: list[int]
    log_probs: list[float]
    versions: list[int]
    finish_reason: Literal["stop", "length", "abort"]

    def __post_init__(self) -> None:
        if not len(self.token_ids) == len(self.log_probs) == len(self.versions):
            raise ValueError(
                f"{len(self.token_ids)} tokens with {len(self.log_probs)} log-probabilities and "
                f"{len(self.versions)} versions: an engine gives one of each per token"
            )

    def followed_by(self, rest: Generation) -> Generation:
        """This answer's tokens, then those of ``rest``, and its finish reason.

        Examples:
            >>> begun = Generation([5, 6], [-0.1, -0.2], [3, 3], "abort")
            >>> begun.followed_by(Generation([2], [-0.3], [4], "stop")).versions
            [3, 3, 4]
        """
        return Generation(
            self.token_ids + rest.token_ids,
            self.log_probs + rest.log_probs,
            self.versions + rest.versions,
            rest.finish_reason,
        )


class EngineDeadError(RuntimeError):
    """The engine is gone and answers nothing any more; start a new one.

    Args:
        message: what is known of its end.
        partial: of an answer that was under way, the tokens whose versions are proven, with finish
            reason ``"abort"``; None if there are none. Give it to another engine's
            :meth:`GenerationEngine.generate` to go on from there.
        discarded: further tokens of that answer, which had come and are lost, since their versions
            are not proven.
    """

    def __init__(self, message: str, partial: Generation | None = None, discarded: int = 0) -> None:
        super().__init__(message)
        self.partial = partial
        self.discarded = discarded


@runtime_checkable
class GenerationEngine(Protocol):
    """What a collector needs of an engine.

    One engine belongs to one asyncio loop: all coroutines are awaited in the loop that awaited
    :meth:`start`. Constructors are cheap and picklable, so an engine can be described in one
    process and started in another.
    """

    max_model_len: int

    async def start(self) -> None:
        """Loads the model; its weights are version 0."""

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingConfig,
        *,
        request_id: str,
        seed: int | None = None,
        partial: Generation | None = None,
    ) -> Generation:
        """Samples one answer; cancelling the coroutine aborts the request.

        Args:
            prompt_ids: token ids of the whole context, at least one.
            sampling: how to draw.
            request_id: unique among the running requests.
            seed: names the random stream; None names it after ``request_id``. The same name gives
                the same answer.
            partial: the beginning of this answer, from an engine that could not finish it. Sampling
                goes on after it, from a random stream of its own, and ``max_new_tokens`` counts it.

        Returns:
            The whole answer, ``partial`` included; its tokens keep their log-probabilities and
            versions. With ``finish_reason="abort"`` it is not whole, and never will be: somebody
            ended the request, or the engine gave it up.

        Raises:
            ValueError: the request can never be answered.
            EngineDeadError: the engine died first; its ``partial`` includes the one given.
        """

    def partial_answer(self, request_id: str) -> Generation | None:
        """What is known so far of a running answer, with ``finish_reason="abort"``.

        Only tokens whose version is proven; None if there are none, or no such request. Taking it
        does not disturb the request.
        """

    async def update_weights(self, version: int, path: Path) -> None:
        """Switches weights and version together, at a token boundary, or refuses both.

        Raises:
            WeightUpdateError: the publication was refused whole; the former weights serve on.
            EngineDeadError: the engine died meanwhile.
        """

    async def pause(self) -> None:
        """Stops sampling at the next token boundary; requests stay, and new ones queue."""

    async def resume(self) -> None:
        """Goes on after :meth:`pause`."""

    @property
    def version(self) -> int:
        """Version of the weights that sample the next token."""

    def check_health(self) -> None:
        """Raises :class:`EngineDeadError` if the engine is not running."""

    async def shutdown(self) -> None:
        """Ends the engine and its processes; pending answers raise :class:`EngineDeadError`."""
