"""One request to ``AsyncLLM`` of vLLM 0.32: how it is put, and what its output says.

Owns the translation between this package's request and answer types and vLLM's. When a request may
be sent, and what becomes of an answer that was broken off, is
:mod:`torchrl_llm_async.engines.vllm_engine`'s affair.
"""

from __future__ import annotations

from torchrl_llm_async.engines._requests import finish_reason
from torchrl_llm_async.engines.base import Generation, SamplingConfig


def sampling_params(sampling: SamplingConfig, *, begun: int, seed: int):
    """What vLLM calls ``SamplingParams``.

    Args:
        sampling: how to draw.
        begun: tokens of the answer that are there already.
        seed: of the random stream.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=sampling.max_new_tokens - begun,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        stop_token_ids=list(sampling.stop_token_ids),
        seed=seed,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        # With flat log-probabilities 30 us of this process per token; a message per token takes
        # 44, for chunks that carry no versions.
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


async def sample(engine, ids: list[int], params, request_id: str, cache_salt: str | None):
    """Sends a request and waits for its end.

    Args:
        engine: the ``AsyncLLM``.
        ids: token ids of the context.
        params: what :func:`sampling_params` gave.
        request_id: unique among the running requests.
        cache_salt: requests share prefixes only if theirs are the same.

    Returns:
        The :class:`~torchrl_llm_async.engines.Generation`; if the engine core dies, all that came
        before, with ``finish_reason="abort"``.

    Raises:
        ValueError: if vLLM refuses the request.
    """
    from vllm.exceptions import VLLMClientError
    from vllm.v1.engine.exceptions import EngineDeadError as CoreDeadError

    prompt = {"type": "token", "prompt_token_ids": ids}
    if cache_salt is not None:
        prompt["cache_salt"] = cache_salt
    try:
        async for output in engine.generate(prompt, params, request_id):
            answer = output.outputs[0]
    except CoreDeadError:
        return so_far(engine, request_id)  # vLLM 0.32 keeps the state of its requests
    except VLLMClientError as error:
        raise ValueError(f"vLLM refuses request {request_id}: {error}") from error
    return _translate(answer)


def so_far(engine, request_id: str) -> Generation:
    """What has come of an answer, with ``finish_reason="abort"``.

    Tokens come in one message each step with their log-probabilities and version, so none of them
    is unproven.
    """
    from vllm.v1.engine import FinishReason

    processor = engine.output_processor
    internal_ids = processor.external_req_ids.get(request_id)
    if not internal_ids:  # it was never submitted, or is over
        return Generation([], [], [], "abort")
    state = processor.request_states[internal_ids[-1]]
    return _translate(state.make_request_output([], None, FinishReason.ABORT, None).outputs[0])


def _translate(answer) -> Generation:
    return Generation(
        token_ids=list(answer.token_ids),
        log_probs=list(answer.logprobs.logprobs),
        versions=[
            int(span.version)
            for span in answer.weight_versions
            for _ in range(span.end - span.start)
        ],
        finish_reason=finish_reason(answer.finish_reason),
    )
