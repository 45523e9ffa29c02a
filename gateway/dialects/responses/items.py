"""The input items of /v1/responses, and the form in which items are kept and listed.

An item that is kept is a plain JSON object of OpenAI's API with an id. This server makes the ids so that each names the
response to which the item belongs: an `item_reference` can be looked up without an index. Knows items; does not know
chat messages, requests or the store.
"""

import re
from base64 import b64decode, b64encode
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, field_validator

from gateway.protocol.bodies.messages import MAX_PIECES, RefusalPart, Text, count_pieces, part_tag
from gateway.protocol.bodies.validation import choose, text_or_list
from gateway.protocol.json_body import Body

Item = dict[str, Any]

FIRST_INPUT = 0x8000  # number of a response's first input item; output items are numbered from 0
RESPONSE_PREFIX = "resp_"
_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "compaction": "cmp",
}
_SEAL = "tidegate:"  # begins an `encrypted_content` of this server
_OWN_ID = re.compile(r"[a-z]+_([0-9a-f]{32})[0-9a-f]{4}")


def item_id(response_id: str, kind: str, number: int) -> str:
    """Return the id of an item of the type `kind`. `number` is less than 65,536 and unique in the response."""
    return f"{_PREFIXES[kind]}_{response_id.removeprefix(RESPONSE_PREFIX)}{number:04x}"


def response_of_item(item: str) -> str | None:
    """Return the id of the response in which this server made the item id `item`; None if it is not such an id."""
    match = _OWN_ID.fullmatch(item)
    return RESPONSE_PREFIX + match[1] if match else None


def sealed(text: str) -> str:
    """Return `text` as an `encrypted_content`, which clients keep and send back. It is encoded, not encrypted: they
    have seen the text."""
    return _SEAL + b64encode(text.encode()).decode()


def unsealed(content: str) -> str:
    """Return the text of an `encrypted_content`; an empty text if this server has not made it."""
    try:
        return b64decode(content.removeprefix(_SEAL), validate=True).decode() if content.startswith(_SEAL) else ""
    except ValueError:
        return ""


class TextPart(Body):
    type: Literal["input_text", "output_text", "text", "summary_text", "reasoning_text"]
    text: Text


class ImagePart(Body):
    type: Literal["input_image"]
    image_url: Annotated[Text, Field(min_length=1)]
    detail: Literal["auto", "low", "high", "original"] = "auto"


def _only_served(value: Any) -> Any:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind in ("input_file", "input_audio", "image_url"):
        raise ValueError(
            f"parts of type {kind} are not served here, only input_image and text parts such as input_text"
        )
    if kind == "input_image" and value.get("file_id") is not None:
        raise ValueError("a file_id is not served here: send the image itself as image_url")
    return value


def _part_tag(value: Any) -> str:
    return "<image>" if isinstance(value, dict) and value.get("type") == "input_image" else part_tag(value)


Part = Annotated[
    Annotated[TextPart, Tag("<text>")] | Annotated[RefusalPart, Tag("<refusal>")],
    Discriminator(part_tag),
    BeforeValidator(_only_served),
]
Parts = Annotated[list[Part], Field(fail_fast=True, max_length=MAX_PIECES)]
PartOrImage = Annotated[
    Annotated[TextPart, Tag("<text>")]
    | Annotated[RefusalPart, Tag("<refusal>")]
    | Annotated[ImagePart, Tag("<image>")],
    Discriminator(_part_tag),
    BeforeValidator(_only_served),
]
PartsOrImages = Annotated[list[PartOrImage], Field(fail_fast=True, max_length=MAX_PIECES)]


TextOrParts = Annotated[
    Annotated[Text, Tag("<text>")] | Annotated[PartsOrImages, Tag("<list>")],
    choose(text_or_list, "a string or an array"),
]
Status = Literal["in_progress", "completed", "incomplete"] | None


class MessageItem(Body):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: TextOrParts
    phase: Text | None = None  # of an assistant's message: `commentary` or `final_answer`
    id: Text | None = None
    status: Status = None

    def kept(self, own_id: str) -> Item:
        parts = [TextPart(type="text", text=self.content)] if isinstance(self.content, str) else self.content
        content = [_kept_part(part, self.role == "assistant") for part in parts]
        status = self.status or "completed"
        phase = {} if self.phase is None else {"phase": self.phase}
        named = {"id": self.id or own_id, "type": self.type, "role": self.role, **phase}
        return {**named, "content": content, "status": status}


class CallItem(Body):
    """A call of a tool: its name, and the namespace if the tool is in one."""

    call_id: Annotated[Text, Field(min_length=1)]
    name: Annotated[Text, Field(min_length=1)]
    namespace: Text | None = None
    id: Text | None = None
    status: Status = None

    def kept(self, own_id: str) -> Item:
        fields = self.model_dump(exclude={"id", "status"}, exclude_none=True)
        return {"id": self.id or own_id, **fields, "status": self.status or "completed"}


class FunctionCallItem(CallItem):
    type: Literal["function_call"]
    arguments: Text


class CustomToolCallItem(CallItem):
    type: Literal["custom_tool_call"]
    input: Text


class CallOutputItem(Body):
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: Annotated[Text, Field(min_length=1)]
    output: TextOrParts
    id: Text | None = None
    status: Status = None

    def kept(self, own_id: str) -> Item:
        output = self.output if isinstance(self.output, str) else [_kept_part(part, False) for part in self.output]
        status = self.status or "completed"
        return {"id": self.id or own_id, "type": self.type, "call_id": self.call_id, "output": output, "status": status}


class ReasoningItem(Body):
    """The reasoning of an answer. Clients that keep no text of it send its `encrypted_content` back."""

    type: Literal["reasoning"]
    id: Text | None = None
    summary: Parts = []
    content: Parts | None = None
    encrypted_content: Text | None = None

    def kept(self, own_id: str) -> Item:
        summary = [{"type": "summary_text", "text": _text_of(part)} for part in self.summary]
        texts = [_text_of(part) for part in self.content or []] or [unsealed(self.encrypted_content or "")]
        content = [{"type": "reasoning_text", "text": text} for text in texts if text]
        return {"id": self.id or own_id, "type": self.type, "summary": summary, "content": content}


class CompactionItem(Body):
    """An item of /v1/responses/compact: a summary that stands for a part of the conversation."""

    type: Literal["compaction"]
    encrypted_content: Text
    id: Text | None = None

    @field_validator("encrypted_content")
    @classmethod
    def _own(cls, value: str) -> str:
        if not unsealed(value):
            raise ValueError("was not made by this server's /v1/responses/compact: send the conversation itself")
        return value

    def kept(self, own_id: str) -> Item:
        return {"id": self.id or own_id, "type": self.type, "encrypted_content": self.encrypted_content}


class ItemReference(Body):
    type: Literal["item_reference"] | None = None
    id: Text


KINDS = (*_PREFIXES, "item_reference")


def _item_tag(value: Any) -> str | None:
    """Return the tag of an item. A message needs no type if it has a role, and a reference needs only an id."""
    if not isinstance(value, dict):
        return None
    kind = value.get("type") or ("message" if "role" in value else "item_reference")
    return f"<{kind}>" if kind in KINDS else None


InputItem = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[FunctionCallItem, Tag("<function_call>")]
    | Annotated[CallOutputItem, Tag("<function_call_output>")]
    | Annotated[CustomToolCallItem, Tag("<custom_tool_call>")]
    | Annotated[CallOutputItem, Tag("<custom_tool_call_output>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")]
    | Annotated[CompactionItem, Tag("<compaction>")]
    | Annotated[ItemReference, Tag("<item_reference>")],
    Discriminator(
        _item_tag,
        custom_error_type="item",
        custom_error_message=f"this server takes items of the types {', '.join(KINDS)}",
    ),
]


# Items of tools that OpenAI's servers or its own models have, in the history of a client that has been there. They are
# left out: the model sees what was said around them.
HOSTED_KINDS = (
    *("web_search_call", "file_search_call", "image_generation_call", "code_interpreter_call"),
    *("computer_call", "computer_call_output", "tool_search_call", "tool_search_output"),
    *("mcp_call", "mcp_list_tools", "mcp_approval_request", "mcp_approval_response"),
    *("local_shell_call", "local_shell_call_output", "shell_call", "shell_call_output"),
    *("apply_patch_call", "apply_patch_call_output"),
)


class HostedItem(Body):
    type: Literal[HOSTED_KINDS]  # type: ignore[valid-type]


def _sent_tag(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else None
    return "<hosted>" if kind in HOSTED_KINDS else "<served>"


SentItem = Annotated[
    Annotated[InputItem, Tag("<served>")] | Annotated[HostedItem, Tag("<hosted>")], Discriminator(_sent_tag)
]


def served_items(items: Sequence[InputItem | HostedItem]) -> list[InputItem]:
    """Return the items that are not left out."""
    return [item for item in items if not isinstance(item, HostedItem)]


def items_left_out(items: Sequence[InputItem | HostedItem], param: str) -> tuple[str, ...]:
    """Return how the header `x-tidegate-ignored-parameters` names the items of `param` that are left out."""
    return tuple(dict.fromkeys(f"{param}.{item.type}" for item in items if isinstance(item, HostedItem)))


def few_pieces(value: Any) -> Any:
    """Refuse a list of items with too many items and parts. Anything else is returned as it is."""
    if isinstance(value, list) and count_pieces(value, ("content", "output", "summary")) > MAX_PIECES:
        raise ValueError(f"must have at most {MAX_PIECES} items and content parts in all")
    return value


def text_of(value: str | list[dict[str, Any]]) -> str:
    """Return the text of a kept item's content or output. The texts of several parts become lines."""
    if isinstance(value, str):
        return value
    return "\n".join(part.get("text") or part.get("refusal") or "" for part in value)


def _kept_part(part: TextPart | RefusalPart | ImagePart, by_assistant: bool) -> dict[str, Any]:
    if isinstance(part, ImagePart):
        return part.model_dump()
    if isinstance(part, RefusalPart) and by_assistant:
        return {"type": "refusal", "refusal": part.refusal}
    if by_assistant:
        return {"type": "output_text", "text": _text_of(part), "annotations": []}
    return {"type": "input_text", "text": _text_of(part)}


def _text_of(part: TextPart | RefusalPart) -> str:
    return part.refusal if isinstance(part, RefusalPart) else part.text
