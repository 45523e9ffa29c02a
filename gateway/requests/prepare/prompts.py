"""Encode a validated body into prompts that fit the model. Each prompt has a limit of output tokens.

Knows bodies, the tokenizer and the model's limits; does not know tiers or queues. A request that can never fit is
refused here.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from engine.interface import ModelKind
from gateway.protocol.bodies.messages import messages_for_template
from gateway.protocol.bodies.schemas import AnyRequest, CompletionRequest
from gateway.protocol.errors import context_length_exceeded, invalid_request, invalid_value
from gateway.requests.tokens.tokenizer import ChatTemplateError, RunInThread, TextTooLong, Tokenizer, Truncation
from scheduler.registry.worker_status import WorkerStatus

DEFAULT_CONTEXT = 4096  # tokens; used if no worker is alive and the model's config has no context length
MAX_PROMPT_LOGPROBS = 2**17  # of one answer; those of a prompt come at once, and to read so many takes 40 ms
DEFAULT_COMPLETION_TOKENS = 16  # output tokens of /v1/completions without `max_tokens`, as in OpenAI's API


@dataclass(frozen=True, slots=True)
class ModelLimits:
    max_model_len: int  # tokens of prompt and output together
    vocab_size: int


def model_limits(workers: Iterable[WorkerStatus], tokenizer: Tokenizer, kind: ModelKind = "chat") -> ModelLimits:
    """Return the smallest limits of all live workers, because any of them may claim the request.

    Workers of a model that is no chat count the token that stands for the vector, which callers do not see.
    """
    alive, unseen = list(workers), int(kind != "chat")
    return ModelLimits(
        min((w.max_model_len - unseen for w in alive), default=tokenizer.max_model_len or DEFAULT_CONTEXT),
        min((w.vocab_size for w in alive), default=tokenizer.vocab_size),
    )


@dataclass(frozen=True, slots=True)
class Prompt:
    token_ids: tuple[int, ...]
    max_tokens: int  # limit of output tokens; 0: the prompt is only scored
    text: str | None = None  # as the client sent it; None: a chat, token ids, or a part of a text


async def encode(
    request: AnyRequest,
    tokenizer: Tokenizer,
    limits: ModelLimits,
    template_values: Mapping[str, Any],
    run: RunInThread,
) -> list[list[int]]:
    """Return the token ids of each prompt of `request`, in order. They need not leave room for an output.

    `template_values` are for the chat template, beside the messages. Long texts are encoded by `run`. Raises `ApiError`
    400 if a prompt certainly has more tokens than the context, or has unknown token ids.
    """
    param, truncation = "prompt", _truncation(request, limits)
    try:
        if isinstance(request, CompletionRequest):
            return await _encode_texts(request, tokenizer, limits, truncation, run)
        param = "messages"
        if truncation is None and len(request.messages) > limits.max_model_len:  # each takes at least one token
            raise TextTooLong
        chat = await tokenizer.encode_chat(
            messages_for_template(request.messages),
            limits.max_model_len,
            values=template_values,
            add_special_tokens=bool(request.add_special_tokens),
            truncation=truncation,
            run=run,
        )
        return [chat]
    except ChatTemplateError as error:
        raise invalid_request(str(error), param, "invalid_value") from error
    except TextTooLong:
        raise context_length_exceeded(limits.max_model_len, param, None, None) from None


def fitting(request: AnyRequest, encoded: list[list[int]], limits: ModelLimits) -> list[Prompt]:
    """Return the encoded prompts of `request` with their limits of output tokens.

    Raises `ApiError` 400 if a prompt is empty, or does not fit into the context with the requested output tokens.
    """
    texts: list[Any] = [None] * len(encoded)
    if isinstance(request, CompletionRequest) and request.truncate_prompt_tokens is None:
        texts = [text if isinstance(text, str) else None for text in request.prompts]
    return [
        Prompt(tuple(ids), _max_tokens(request, len(ids), limits), text)
        for ids, text in zip(encoded, texts, strict=True)
    ]


def check_prompt_logprobs(request: AnyRequest, prompts: list[Prompt]) -> None:
    """Refuse a request whose answer would have too many log probabilities of the prompt. Raises `ApiError` 400."""
    num_top = request.num_prompt_logprobs
    if num_top is None:
        return
    total = (1 + num_top) * request.num_sequences * sum(len(prompt.token_ids) for prompt in prompts)
    if total > MAX_PROMPT_LOGPROBS:
        param = "logprobs" if request.prompt_logprobs is None else "prompt_logprobs"
        message = f"the prompt would have {total} log probabilities, {MAX_PROMPT_LOGPROBS} at most"
        raise invalid_value(param, f"Invalid value for '{param}': {message}. Ask for fewer, or send shorter prompts.")


async def _encode_texts(
    request: CompletionRequest,
    tokenizer: Tokenizer,
    limits: ModelLimits,
    truncation: Truncation | None,
    run: RunInThread,
) -> list[list[int]]:
    """Return the token ids of each prompt of a body. The prompts are either all texts or all lists of token ids."""
    id_lists = [prompt for prompt in request.prompts if isinstance(prompt, list)]
    if any(max(ids) >= limits.vocab_size for ids in id_lists):
        message = f"Invalid value for 'prompt': token ids must be less than {limits.vocab_size}."
        raise invalid_value("prompt", message)
    if id_lists:
        return id_lists if truncation is None else [truncation.kept(ids) for ids in id_lists]
    texts = [prompt for prompt in request.prompts if isinstance(prompt, str)]
    add_special = request.add_special_tokens is not False
    return await tokenizer.encode(
        texts, limits.max_model_len, add_special_tokens=add_special, truncation=truncation, run=run
    )


def _truncation(request: AnyRequest, limits: ModelLimits) -> Truncation | None:
    """Return which tokens of a prompt the request asks to keep; None: all."""
    num_kept = request.truncate_prompt_tokens
    if num_kept is None:
        return None
    if num_kept < 0:
        num_kept = max(1, limits.max_model_len - (request.output_limit or 1))
    return Truncation(num_kept, keeps_first=request.truncation_side == "right")


def _max_tokens(request: AnyRequest, num_ids: int, limits: ModelLimits) -> int:
    """Return the limit of output tokens of a prompt with `num_ids` tokens.

    It is the requested limit if there is one. Otherwise it is the endpoint's default, or all tokens that the context
    has left if there is no default or it does not fit.
    """
    param, default = "messages", limits.max_model_len
    if isinstance(request, CompletionRequest):
        param, default = "prompt", DEFAULT_COMPLETION_TOKENS
    room, requested = limits.max_model_len - num_ids, request.output_limit
    if not num_ids:
        raise invalid_value(param, f"Invalid value for '{param}': it must not be empty.")
    if room < 1:
        raise context_length_exceeded(limits.max_model_len, param, num_ids, requested)
    if requested is not None and requested > room and not request.limit_shrinks:
        raise context_length_exceeded(limits.max_model_len, request.output_limit_name, num_ids, requested)
    return min(default if requested is None else requested, room)
