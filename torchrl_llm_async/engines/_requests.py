"""What every engine over vLLM asks of a request, and of its end.

Owns the checks that vLLM 0.32 leaves out, the naming of random streams and of the ways an answer
ends. Sending requests, and what comes of them, is each engine's own affair.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Literal

from torchrl_llm_async.engines.base import SamplingConfig


def check_request(
    prompt_ids: Sequence[int],
    begun_ids: Sequence[int],
    sampling: SamplingConfig,
    *,
    max_model_len: int,
    vocabulary: int,
    allow_truncated_support: bool,
    served: str,
) -> None:
    """Refuses a request that can never be answered.

    Args:
        prompt_ids: token ids of the context.
        begun_ids: token ids of the answer that are there already.
        sampling: how the rest will be drawn.
        max_model_len: context in tokens, prompt and answer together.
        vocabulary: number of token ids.
        allow_truncated_support: whether ``top_p`` and ``top_k`` may be used.
        served: model and place, for the messages.

    Raises:
        ValueError: if the prompt is empty, leaves no room for a token or holds unknown ids, or if
            the sampling truncates the support without leave.
    """
    if not 0 < len(prompt_ids) < max_model_len:
        raise ValueError(
            f"prompt of {len(prompt_ids)} tokens: give 1 to {max_model_len - 1}, or a larger "
            f"max_model_len than {max_model_len} to the engine"
        )
    # vLLM 0.32 checks ids only against a tokenizer; an unknown one would kill its core.
    ids = [*prompt_ids, *begun_ids]
    if not 0 <= min(ids) <= max(ids) < vocabulary:
        raise ValueError(
            f"prompt ids run from {min(ids)} to {max(ids)}, the vocabulary of {served} from 0 to "
            f"{vocabulary - 1}: tokenizer and model do not match"
        )
    if sampling.truncates_support and not allow_truncated_support:
        raise ValueError(
            f"top_p={sampling.top_p}, top_k={sampling.top_k} truncate the support, which biases "
            "importance ratios: sample with temperature alone, or build the engine with "
            "allow_truncated_support=True"
        )


def finish_reason(vllms: str) -> Literal["stop", "length", "abort"]:
    """What vLLM's reason means; it has ``"error"`` and ``"repetition"`` too, in 0.32.

    Examples:
        >>> finish_reason("stop"), finish_reason("error")
        ('stop', 'abort')
    """
    return vllms if vllms in ("stop", "length") else "abort"


def stream_seed(seed: int, stream: int | str, begun: int) -> int:
    """Seed of one answer's random stream, from 62 bits.

    Hashed, since neighbouring seeds give correlated streams to the answers of a group; and an
    answer that is taken up again must not repeat the draws of its beginning.

    Args:
        seed: the engine's.
        stream: names the stream.
        begun: tokens of the answer that are there already.

    Examples:
        >>> stream_seed(0, "a", 0) != stream_seed(0, "a", 5)
        True
    """
    digest = hashlib.blake2b(
        f"{seed}/{stream}".encode(), digest_size=8, salt=begun.to_bytes(8, "little")
    ).digest()
    return int.from_bytes(digest, "little") >> 2
