"""Refuse parameters that this server does not implement, and names that are probably misspelt.

A parameter of OpenAI's API or of vLLM's extensions that would change the answer is refused by name, unless its value
asks for the default behaviour. Parameters that do not change the answers of this server (`store`, `user`) are not
listed.

A name near a known one is a mistake that would silently change the answer (`max_token`). Other unknown names are of
other servers' extensions, which clients send to everybody; they have no effect, and the answer names them in the header
`x-tidegate-ignored-parameters`.
"""

import re
from collections.abc import Callable, Collection, Mapping
from difflib import get_close_matches
from typing import Any

from gateway.protocol.errors import ApiError, invalid_request, misplaced_parameter, unsupported_parameter

IGNORED_HEADER = "x-tidegate-ignored-parameters"
# Least similarity (difflib's ratio, 0 … 1) of a name to the known one that it is likely to mean, without underscores
# and case. `max_new_tokens` is 0.86 like `max_tokens`; `top_a`, an option of other servers, is 0.75 like `top_p`.
NEAR = 0.85
MAX_NAMES = 32  # names compared and reported: a comparison with all known names takes 1 ms
MAX_LENGTH = 64  # characters of a name that are compared and reported

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


# Parameters that change the answer to a chat, and mean nothing in /v1/completions.
ONLY_IN_CHATS = (
    *("tools", "functions", "top_logprobs", "max_completion_tokens", "documents"),
    *("chat_template", "chat_template_kwargs", "continue_final_message"),
)


def refuse_parameters_of_chats(body: dict[str, Any]) -> None:
    """Refuse a body of /v1/completions with a parameter of chats. Raises `ApiError` 400 `unsupported_parameter`."""
    for name in ONLY_IN_CHATS:
        if body.get(name):
            raise misplaced_parameter(name, "/v1/chat/completions")


def refuse_unsupported(body: dict[str, Any]) -> None:
    """Refuse a body with an unsupported parameter that would change the answer.

    Raises `ApiError` 400 `unsupported_parameter` for the first such parameter.
    """
    for name, value in body.items():
        if value is not None and name in HARMLESS and not HARMLESS[name](value):
            raise unsupported_parameter(name)


def unknown_names(body: Mapping[str, Any], known: Collection[str]) -> tuple[str, ...]:
    """Return the names in `body` that are neither in `known` nor refused by name. At most `MAX_NAMES` are returned.

    Raises `ApiError` 400 for a name near a known one.
    """
    names = [name[:MAX_LENGTH] for name in body if name not in known and name not in HARMLESS][:MAX_NAMES]
    for name in names:
        if (meant := _nearest(name, known)) is not None:
            raise _misspelt(name, meant)
    return tuple(names)


def ignored_header(names: Collection[str]) -> dict[str, str]:
    """Return the header that tells which parameters are left out; empty if there are none."""
    return {IGNORED_HEADER: header_value(names)} if names else {}


def header_value(names: Collection[str]) -> str:
    """Return `names` as the value of a header: printable ASCII, separated by commas."""
    return ", ".join(re.sub(r"[^!-+\--~]", "?", name) for name in names)


def _nearest(name: str, known: Collection[str]) -> str | None:
    candidates = {_plain(candidate): candidate for candidate in (*HARMLESS, *known)}
    found = get_close_matches(_plain(name), candidates, n=1, cutoff=NEAR)
    return candidates[found[0]] if found else None


def _plain(name: str) -> str:
    return name.replace("_", "").lower()


def _misspelt(name: str, meant: str) -> ApiError:
    message = f"Unknown parameter: '{name}'. Did you mean '{meant}'?"
    return invalid_request(message, name, "unknown_parameter")
