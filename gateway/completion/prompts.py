"""Encode a validated body into prompts that fit the model. Each prompt has a limit of output tokens.

Knows bodies, the tokenizer and the model's limits; does not know tiers or queues. A request that can never fit is
refused here.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from gateway.completion.tokenizer import ChatTemplateError, TextTooLong, Tokenizer
from gateway.protocol.errors import context_length_exceeded, invalid_request, invalid_value
from gateway.protocol.schemas import ChatCompletionRequest, CompletionRequest
from scheduler.registry.worker_status import WorkerStatus

DEFAULT_CONTEXT = 4096  # tokens; used if no worker is alive and the model's config has no context length
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
    max_tokens: int  # limit of output tokens


async def encode_prompts(
    request: ChatCompletionRequest | CompletionRequest, tokenizer: Tokenizer, limits: ModelLimits
) -> list[Prompt]:
    """Return the encoded prompts of `request`, in order.

    Raises `ApiError` 400 if a prompt is empty, does not fit into the context, or has unknown token ids.
    """
    if isinstance(request, ChatCompletionRequest):
        ids = await _encode_chat(request, tokenizer, limits)
        return [_fit(ids, request.output_limit, None, limits, "messages")]
    prompts = await _encode_texts(request, tokenizer, limits)
    return [_fit(ids, request.max_tokens, DEFAULT_COMPLETION_TOKENS, limits, "prompt") for ids in prompts]


async def encode_only(
    request: ChatCompletionRequest | CompletionRequest, tokenizer: Tokenizer, limits: ModelLimits
) -> list[int]:
    """Return the token ids of the one prompt of `request`, which need not leave room for an output.

    Raises `ApiError` 400 if the prompt certainly has more tokens than the context.
    """
    if isinstance(request, ChatCompletionRequest):
        return await _encode_chat(request, tokenizer, limits)
    return (await _encode_texts(request, tokenizer, limits))[0]


async def _encode_chat(request: ChatCompletionRequest, tokenizer: Tokenizer, limits: ModelLimits) -> list[int]:
    if len(request.messages) > limits.max_model_len:  # each message takes at least one token
        raise context_length_exceeded(limits.max_model_len, "messages", None, None)
    messages = [message.for_template() for message in request.messages]
    try:
        return await tokenizer.encode_chat(messages, limits.max_model_len)
    except ChatTemplateError as error:
        raise invalid_request(str(error), "messages", "invalid_value") from error
    except TextTooLong:
        raise context_length_exceeded(limits.max_model_len, "messages", None, None) from None


async def _encode_texts(request: CompletionRequest, tokenizer: Tokenizer, limits: ModelLimits) -> list[list[int]]:
    """Return the token ids of each prompt of a body. The prompts are either all texts or all lists of token ids."""
    id_lists = [prompt for prompt in request.prompts if isinstance(prompt, list)]
    if any(max(ids) >= limits.vocab_size for ids in id_lists):
        message = f"Invalid value for 'prompt': token ids must be less than {limits.vocab_size}."
        raise invalid_value("prompt", message)
    texts = [prompt for prompt in request.prompts if isinstance(prompt, str)]
    try:
        return id_lists or await tokenizer.encode(texts, limits.max_model_len)
    except TextTooLong:
        raise context_length_exceeded(limits.max_model_len, "prompt", None, None) from None


def _fit(ids: list[int], requested: int | None, default: int | None, limits: ModelLimits, param: str) -> Prompt:
    """Return the prompt with its limit of output tokens.

    The limit is `requested` if it is given. Otherwise it is `default`, or all tokens that the context has left if
    `default` is None or does not fit. Raises `ApiError` 400 if the prompt is empty, or does not fit into the context
    together with `requested` output tokens.
    """
    room = limits.max_model_len - len(ids)
    if not ids:
        raise invalid_value(param, f"Invalid value for '{param}': it must not be empty.")
    if room < (requested or 1):
        raise context_length_exceeded(limits.max_model_len, param, len(ids), requested)
    if requested is not None:
        return Prompt(tuple(ids), requested)
    return Prompt(tuple(ids), room if default is None else min(default, room))
