"""Chats with images: what they may ask for, and what is passed on of them.

Only a server behind the worker can read images. It gets the messages as the client sent them and applies its own chat
template. So the number of tokens is not known here: each image counts as many as the operator says. Images are never
decoded or fetched: an address is passed on as it is.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from gateway.protocol.bodies.messages import ImagePart
from gateway.protocol.bodies.schemas import AnyRequest, ChatCompletionRequest
from gateway.protocol.errors import invalid_value

# Values of the chat template that the chat endpoints of servers take by these names. All others are its arguments.
_OWN_FIELDS = ("tools", "documents", "chat_template", "add_generation_prompt", "continue_final_message")
_NEEDS_PROMPT = ("truncate_prompt_tokens", "add_special_tokens", "return_token_ids")  # options for known tokens
STANDS_FOR_IMAGE = 0  # the token id by which an image is counted in a prompt


def image_places(request: AnyRequest) -> list[str]:
    """Return the paths of the images, such as `messages[0].content[1]`."""
    messages = request.messages if isinstance(request, ChatCompletionRequest) else ()
    return [
        f"messages[{i}].content[{j}]"
        for i, message in enumerate(messages)
        if isinstance(message.content, list)
        for j, part in enumerate(message.content)
        if isinstance(part, ImagePart)
    ]


def check_images(request: AnyRequest, image_tokens: int) -> int:
    """Return how many tokens the images of a request count. Raises `ApiError` 400 if it may not have any, or if it has
    an option that does not go with images."""
    places = image_places(request)
    if places and not image_tokens:
        raise invalid_value(places[0], f"Invalid value for '{places[0]}': this model takes no images here, only text.")
    for name in _NEEDS_PROMPT if places else ():
        if getattr(request, name) not in (None, False):
            reason = "in a chat with images, only the server that generates the tokens knows those of the prompt"
            raise invalid_value(name, f"Invalid value for '{name}': {reason}. Leave it out.")
    return image_tokens * len(places)


def passed_on(request: ChatCompletionRequest, values: Mapping[str, Any], max_tokens: int) -> str:
    """Return what a server gets of a chat with images, as a JSON object.

    `values` are those of the chat template. The limit of output tokens is passed on if the client has set `max_tokens`.
    """
    chat: dict[str, Any] = {"messages": [message.as_sent() for message in request.messages]}
    chat |= {name: values[name] for name in _OWN_FIELDS if name in values}
    if "tools" in values:
        chat["tool_choice"] = "none"  # calls are found in the text here; the model sees the tools nevertheless
    if arguments := {name: value for name, value in values.items() if name not in _OWN_FIELDS}:
        chat["chat_template_kwargs"] = arguments
    if request.output_limit == max_tokens:
        chat["max_tokens"] = max_tokens
    return msgspec.json.encode(chat).decode()
