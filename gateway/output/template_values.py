"""The values that the chat template gets from a request beside the messages.

Knows bodies and the template's text; does not render it.
"""

import inspect
import re
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedTokenizerFast

from gateway.protocol.bodies.schemas import ChatCompletionRequest
from gateway.protocol.errors import invalid_request, invalid_value

# What the template gets from the server itself, so that a request cannot set it in `chat_template_kwargs`.
RESERVED = frozenset(inspect.signature(PreTrainedTokenizerFast.apply_chat_template).parameters) | {"messages"}
TRUST_SETTING = "--trust-request-chat-template"


def template_values(request: ChatCompletionRequest, chat_template: str, trusts_templates: bool) -> Mapping[str, Any]:
    """Return the arguments of `apply_chat_template` for `request`; no values for an ordinary chat.

    `chat_template` is the model's own. Raises `ApiError` 400 if the request sets a value that the server sets itself,
    or one that the template would not use.
    """
    if request.chat_template is not None:
        _check_template(trusts_templates)
    values = dict(request.chat_template_kwargs or {})
    if reserved := sorted(RESERVED & values.keys()):
        raise invalid_value("chat_template_kwargs", f"A request cannot set '{reserved[0]}' in 'chat_template_kwargs'.")
    if request.documents:
        _check_documents(request.chat_template or chat_template)
        values["documents"] = request.documents
    if request.chat_template is not None:
        values["chat_template"] = request.chat_template
    continues = bool(request.continue_final_message)
    begins = not continues if request.add_generation_prompt is None else request.add_generation_prompt
    if begins and not continues:
        return values
    return values | {"add_generation_prompt": begins, "continue_final_message": continues}


def _check_documents(chat_template: str) -> None:
    if not re.search(r"\bdocuments\b", chat_template):
        message = "This model's chat template takes no 'documents'. Put them into a message."
        raise invalid_request(message, "documents", "unsupported_parameter")


def _check_template(trusts_templates: bool) -> None:
    """Refuse a template from an untrusted client: it is a program, and may run for as long as it likes."""
    if not trusts_templates:
        message = f"A request may bring its own 'chat_template' only if the server was started with {TRUST_SETTING}."
        raise invalid_request(message, "chat_template", "unsupported_parameter")
