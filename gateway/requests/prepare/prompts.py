"""Encode a validated body into prompts that fit the model. Each prompt has a limit of output tokens.

Knows bodies, the tokenizer and the model's limits; does not know tiers or queues. A request that can never fit is
refused here.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from gateway.protocol.bodies.messages import messages_for_template
from gateway.protocol.bodies.schemas import ChatCompletionRequest, CompletionRequest
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


def model_limits(workers: Iterable[WorkerStatus], tokenizer: Tokenizer) -> ModelLimits:
    """Return the smallest limits of all live workers, because any of them may claim the request."""
    alive = list(workers)
    return ModelLimits(
        min((w.max_model_len for w in alive), default=tokenizer.max_model_len or DEFAULT_CONTEXT),
        min((w.vocab_size for w in alive), default=tokenizer.vocab_size),
    )


@dataclass(frozen=True, slots=True)
class Prompt:
    token_ids: tuple[int, ...]
    max_tokens: int  # limit of output tokens; 0: the prompt is only scored
    text: str | None = None  # as the client sent it; None: a chat, token ids, or a part of a text


async def encode_prompts(
    request: ChatCompletionRequest | CompletionRequest,
    tokenizer: Tokenizer,
    limits: ModelLimits,
    template_values: Mapping[str, Any],
    run: RunInThread,
) -> list[Prompt]:
    """Return the encoded prompts of `request`, in order.

    `template_values` are for the chat template, beside the messages. Long texts are encoded by `run`. Raises `ApiError`
    400 if a prompt is empty, does not fit into the context, or has unknown token ids.
    """
    if isinstance(request, ChatCompletionRequest):
        return [_fit(await _encode_chat(request, tokenizer, limits, template_values, run), request, None, limits)]
    prompts = await _encode_texts(request, tokenizer, limits, run)
    fitting = [_fit(ids, request, DEFAULT_COMPLETION_TOKENS, limits) for ids in prompts]
    if request.truncate_prompt_tokens is not None:
        return fitting
    return [
        replace(prompt, text=text) if isinstance(text, str) else prompt
        for prompt, text in zip(fitting, request.prompts, strict=True)
    ]


async def encode_only(
    request: ChatCompletionRequest | CompletionRequest,
    tokenizer: Tokenizer,
    limits: ModelLimits,
    template_values: Mapping[str, Any],
    run: RunInThread,
) -> list[int]:
    """Return the token ids of the one prompt of `request`, which need not leave room for an output.

    A long text is encoded by `run`. Raises `ApiError` 400 if the prompt certainly has more tokens than the context.
    """
    if isinstance(request, ChatCompletionRequest):
        return await _encode_chat(request, tokenizer, limits, template_values, run)
    [ids] = await _encode_texts(request, tokenizer, limits, run)
    return ids


def check_prompt_logprobs(request: ChatCompletionRequest | CompletionRequest, prompts: list[Prompt]) -> None:
    """Refuse a request whose answer would have too many log probabilities of the prompt. Raises `ApiError` 400."""
    num_top = request.num_prompt_logprobs
    if num_top is None:
        return
    total = (1 + num_top) * request.num_sequences * sum(len(prompt.token_ids) for prompt in prompts)
    if total > MAX_PROMPT_LOGPROBS:
        param = "logprobs" if request.prompt_logprobs is None else "prompt_logprobs"
        message = f"the prompt would have {total} log probabilities, {MAX_PROMPT_LOGPROBS} at most"
        raise invalid_value(param, f"Invalid value for '{param}': {message}. Ask for fewer, or send shorter prompts.")


async def _encode_chat(
    request: ChatCompletionRequest,
    tokenizer: Tokenizer,
    limits: ModelLimits,
    template_values: Mapping[str, Any],
    run: RunInThread,
) -> list[int]:
    truncation = _truncation(request, limits)
    if truncation is None and len(request.messages) > limits.max_model_len:  # each message takes at least one token
        raise context_length_exceeded(limits.max_model_len, "messages", None, None)
    messages = messages_for_template(request.messages)
    try:
        return await tokenizer.encode_chat(
            messages,
            limits.max_model_len,
            values=template_values,
            add_special_tokens=bool(request.add_special_tokens),
            truncation=truncation,
            run=run,
        )
    except ChatTemplateError as error:
        raise invalid_request(str(error), "messages", "invalid_value") from error
    except TextTooLong:
        raise context_length_exceeded(limits.max_model_len, "messages", None, None) from None


async def _encode_texts(
    request: CompletionRequest, tokenizer: Tokenizer, limits: ModelLimits, run: RunInThread
) -> list[list[int]]:
    """Return the token ids of each prompt of a body. The prompts are either all texts or all lists of token ids."""
    id_lists = [prompt for prompt in request.prompts if isinstance(prompt, list)]
    if any(max(ids) >= limits.vocab_size for ids in id_lists):
        message = f"Invalid value for 'prompt': token ids must be less than {limits.vocab_size}."
        raise invalid_value("prompt", message)
    texts = [prompt for prompt in request.prompts if isinstance(prompt, str)]
    truncation = _truncation(request, limits)
    if id_lists:
        return id_lists if truncation is None else [truncation.kept(ids) for ids in id_lists]
    try:
        return await tokenizer.encode(
            texts,
            limits.max_model_len,
            add_special_tokens=request.add_special_tokens is not False,
            truncation=truncation,
            run=run,
        )
    except TextTooLong:
        raise context_length_exceeded(limits.max_model_len, "prompt", None, None) from None


def _truncation(request: ChatCompletionRequest | CompletionRequest, limits: ModelLimits) -> Truncation | None:
    """Return which tokens of a prompt the request asks to keep; None: all."""
    num_kept = request.truncate_prompt_tokens
    if num_kept is None:
        return None
    if num_kept < 0:
        num_kept = max(1, limits.max_model_len - (request.output_limit or 1))
    return Truncation(num_kept, keeps_first=request.truncation_side == "right")


def _fit(
    ids: list[int], request: ChatCompletionRequest | CompletionRequest, default: int | None, limits: ModelLimits
) -> Prompt:
    """Return the prompt with its limit of output tokens.

    The limit is the requested one if there is one. Otherwise it is `default`, or all tokens that the context has left
    if `default` is None or does not fit. Raises `ApiError` 400 if the prompt is empty, or does not fit into the context
    together with the requested output tokens.
    """
    param = "messages" if isinstance(request, ChatCompletionRequest) else "prompt"
    room, requested = limits.max_model_len - len(ids), request.output_limit
    if not ids:
        raise invalid_value(param, f"Invalid value for '{param}': it must not be empty.")
    if room < 1:
        raise context_length_exceeded(limits.max_model_len, param, len(ids), requested)
    if requested is not None and requested > room:
        raise context_length_exceeded(limits.max_model_len, request.output_limit_name, len(ids), requested)
    if requested is not None:
        return Prompt(tuple(ids), requested)
    return Prompt(tuple(ids), room if default is None else min(default, room))
