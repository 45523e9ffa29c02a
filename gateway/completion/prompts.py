"""From a validated body to prompts of token ids that fit the model, and the room left for the output.

Knows bodies, the tokenizer and the model's limits; knows neither tiers nor queues. A request that can never
fit is refused here, with the reason.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from gateway.completion.tokenizer import ChatTemplateError, TextTooLong, Tokenizer
from gateway.protocol.errors import context_length_exceeded, invalid_request, invalid_value
from gateway.protocol.schemas import ChatCompletionRequest, CompletionRequest
from scheduler.registry.worker_status import WorkerStatus

DEFAULT_CONTEXT = 4096  # where neither a worker nor the model's config says
DEFAULT_COMPLETION_TOKENS = 16  # of /v1/completions, as OpenAI has it


@dataclass(frozen=True, slots=True)
class ModelLimits:
    max_model_len: int  # tokens, prompt and output together
    vocab_size: int


def model_limits(workers: Iterable[WorkerStatus], tokenizer: Tokenizer) -> ModelLimits:
    """What every live worker can take: a request may be claimed by any of them."""
    alive = list(workers)
    return ModelLimits(
        min((w.max_model_len for w in alive), default=tokenizer.max_model_len or DEFAULT_CONTEXT),
        min((w.vocab_size for w in alive), default=tokenizer.vocab_size),
    )


@dataclass(frozen=True, slots=True)
class Prompt:
    token_ids: tuple[int, ...]
    max_tokens: int  # of output


async def encode_prompts(
    request: ChatCompletionRequest | CompletionRequest, tokenizer: Tokenizer, limits: ModelLimits
) -> list[Prompt]:
    """One entry a prompt, in order. Raises `ApiError` 400 for what does not fit or is no token."""
    if isinstance(request, ChatCompletionRequest):
        ids = await _encode_chat(request, tokenizer, limits)
        return [_fit(ids, request.output_limit, None, limits, "messages")]
    prompts = await _encode_texts(request, tokenizer, limits)
    return [_fit(ids, request.max_tokens, DEFAULT_COMPLETION_TOKENS, limits, "prompt") for ids in prompts]


async def _encode_chat(request: ChatCompletionRequest, tokenizer: Tokenizer, limits: ModelLimits) -> list[int]:
    if len(request.messages) > limits.max_model_len:  # each costs a token at least: not worth rendering
        raise context_length_exceeded(limits.max_model_len, "messages", None, None)
    messages = [message.for_template() for message in request.messages]
    try:
        return await tokenizer.encode_chat(messages, limits.max_model_len)
    except ChatTemplateError as error:
        raise invalid_request(str(error), "messages", "invalid_value") from error
    except TextTooLong:
        raise context_length_exceeded(limits.max_model_len, "messages", None, None) from None


async def _encode_texts(request: CompletionRequest, tokenizer: Tokenizer, limits: ModelLimits) -> list[list[int]]:
    """The prompts are all texts, or all token ids already."""
    id_lists = [prompt for prompt in request.prompts if isinstance(prompt, list)]
    if any(max(ids) >= limits.vocab_size for ids in id_lists):
        message = f"Invalid value for 'prompt': token ids must be less than {limits.vocab_size}."
        raise invalid_value("prompt", message)
    texts = [prompt for prompt in request.prompts if isinstance(prompt, str)]
    try:
        return id_lists or await tokenizer.encode(texts, limits.max_model_len)
    except TextTooLong:
        raise context_length_exceeded(limits.max_model_len, "prompt", None, None) from None


def _fit(ids: list[int], asked: int | None, default: int | None, limits: ModelLimits, param: str) -> Prompt:
    """`asked`: the output the user wants, all of it; `default`: what is given where there is room for it."""
    room = limits.max_model_len - len(ids)
    if not ids:
        raise invalid_value(param, f"Invalid value for '{param}': it must not be empty.")
    if room < (asked or 1):
        raise context_length_exceeded(limits.max_model_len, param, len(ids), asked)
    if asked is not None:
        return Prompt(tuple(ids), asked)
    return Prompt(tuple(ids), room if default is None else min(default, room))
