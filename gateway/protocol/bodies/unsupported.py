"""Refuse parameters of OpenAI's API and of vLLM's extensions that this server does not implement.

Each of these parameters would change the answer. A request that sets one of them is refused with an error that names
the parameter, unless the value asks for the default behaviour. Parameters that do not change the answers of this server
(`store`, `user`) are not listed.
"""

from collections.abc import Callable
from typing import Any

from gateway.protocol.errors import misplaced_parameter, unsupported_parameter

Harmless = Callable[[Any], bool]


def _one_of(*values: Any) -> Harmless:
    """Return a function that accepts the values equal to one of `values`.

    A bool is never equal to a number: `logprobs: 0` asks for log probabilities, `logprobs: false` does not.
    """
    return lambda value: any(value == v and isinstance(value, bool) == isinstance(v, bool) for v in values)


def _empty(value: Any) -> bool:
    return value in ([], {}, "")


def _never(value: Any) -> bool:
    return False


# For each parameter, a function that returns whether a value asks for the default behaviour.
HARMLESS: dict[str, Harmless] = {
    # parameters of OpenAI's API
    "suffix": _empty,
    "audio": _never,
    "modalities": _one_of(["text"]),
    "prediction": _never,
    "web_search_options": _never,
    "moderation": _never,
    # parameters of vLLM's extensions
    "length_penalty": _one_of(1),
    "use_beam_search": _one_of(False),
    "structural_tag": _never,
    "logits_processors": _empty,
    "logprob_token_ids": _empty,
    "thinking_token_budget": _one_of(-1),
    "vllm_xargs": _empty,
    "prompt_embeds": _never,
    "repetition_detection": _never,
    "kv_transfer_params": _empty,
    "ec_transfer_params": _empty,
    "return_prompt_text": _one_of(False),
}


# Parameters that change the answer to a chat, and mean nothing in /v1/completions; and the reverse.
ONLY_IN_CHATS = (
    *("tools", "functions", "top_logprobs", "max_completion_tokens", "documents"),
    *("chat_template", "chat_template_kwargs", "continue_final_message"),
)
ONLY_IN_COMPLETIONS = ("echo",)


def refuse_misplaced(body: dict[str, Any], is_chat: bool) -> None:
    """Refuse a body with a parameter of the other endpoint. Raises `ApiError` 400 `unsupported_parameter`."""
    for name in ONLY_IN_COMPLETIONS if is_chat else ONLY_IN_CHATS:
        if body.get(name):
            raise misplaced_parameter(name, "/v1/completions" if is_chat else "/v1/chat/completions")


def refuse_unsupported(body: dict[str, Any]) -> None:
    """Refuse a body with an unsupported parameter that would change the answer.

    Raises `ApiError` 400 `unsupported_parameter` for the first such parameter.
    """
    for name, harmless in HARMLESS.items():
        value = body.get(name)
        if value is not None and not harmless(value):
            raise unsupported_parameter(name)
