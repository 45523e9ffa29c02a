"""The messages of a chat, and the texts in them.

Every list has a maximum length, which is checked before its items: see gateway/protocol/bodies/schemas.py.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, Discriminator, Field, Tag, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from gateway.protocol.bodies.tools import CalledFunction, ToolCall
from gateway.protocol.bodies.validation import choose
from gateway.protocol.json_body import Body

T = TypeVar("T")

MAX_PIECES = 2**12  # messages, content parts and tool calls of a chat, counted together


def _well_formed(text: str) -> str:
    """Refuse text with lone surrogates: escapes in JSON can produce them, but no tokenizer accepts them."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("must be well-formed Unicode text") from None
    return text


def tag_of(value: Any) -> str | None:
    """Return the tag of a text or of a list, by the type of its first item; None if `value` is neither."""
    if value is None or isinstance(value, str):
        return "<text>"
    if isinstance(value, list):
        inner = value[0] if value else None
        return "<ids>" if isinstance(inner, int) else "<id-lists>" if isinstance(inner, list) else "<list>"
    return None


Text = Annotated[str, AfterValidator(_well_formed)]
StopText = Annotated[Text, Field(min_length=1, max_length=1024)]
StopTexts = Annotated[list[StopText], Field(max_length=16, fail_fast=True)]  # OpenAI's API allows four
TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1, fail_fast=True)]


class TextPart(Body):
    type: Literal["text"]
    text: Text


class RefusalPart(Body):
    type: Literal["refusal"]
    refusal: Text


class ImageUrl(Body):
    url: Annotated[Text, Field(min_length=1)]  # `data:` with the image itself, or an address that is never fetched here
    detail: Literal["auto", "low", "high", "original"] | None = None


class ImagePart(Body):
    type: Literal["image_url"]
    image_url: ImageUrl


_PART_TAGS = {"refusal": "<refusal>", "image_url": "<image>"}


def part_tag(value: Any) -> str:
    """Return the tag of a part, which may also be one that was validated already."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return _PART_TAGS.get(kind, "<text>") if isinstance(kind, str) else "<text>"


Part = Annotated[
    Annotated[TextPart, Tag("<text>")]
    | Annotated[RefusalPart, Tag("<refusal>")]
    | Annotated[ImagePart, Tag("<image>")],
    Discriminator(part_tag),
]
Parts = Annotated[list[Part], Field(min_length=1, fail_fast=True)]


def _content_tag(value: Any) -> str | None:
    return "<list>" if isinstance(value, list) else tag_of(value)


Content = Annotated[
    Annotated[Text | None, Tag("<text>")] | Annotated[Parts, Tag("<list>")],
    choose(_content_tag, "a string or an array of content parts"),
]


_ROLES_THAT_NEED = {"content": ("system", "developer", "user", "tool"), "tool_call_id": ("tool",)}


class Message(Body):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Annotated[Content, Field(validate_default=True)] = None
    name: Text | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=128, fail_fast=True)] | None = None
    function_call: CalledFunction | None = None  # the older form of one tool call
    tool_call_id: Annotated[Text | None, Field(validate_default=True)] = None
    reasoning_content: Text | None = None
    reasoning: Text | None = None  # another name of `reasoning_content`

    @field_validator(*_ROLES_THAT_NEED)
    @classmethod
    def _needed(cls, value: T, info: ValidationInfo) -> T:
        if value is None and info.data.get("role") in _ROLES_THAT_NEED[info.field_name or ""]:
            raise PydanticCustomError("missing", "needed in this role")
        return value

    def as_sent(self) -> dict[str, Any]:
        """Return the message as the client has sent it, as plain data."""
        return self.model_dump(mode="json", exclude_unset=True)

    def for_template(self) -> dict[str, Any]:
        """Return the message as chat templates expect it, with its content as one string, without images.

        The older form of a tool call, and the role of its result, are returned in the form of today.
        """
        content = self.content or ""
        if isinstance(content, list):
            content = "\n".join(_text_of(part) for part in content if not isinstance(part, ImagePart))
        calls = [call.for_template() for call in self.tool_calls or ()]
        if self.function_call is not None:
            calls.append({"type": "function", "function": self.function_call.for_template()})
        extras = {
            "name": self.name,
            "tool_calls": calls or None,
            "tool_call_id": self.tool_call_id,
            "reasoning_content": self.reasoning_content or self.reasoning,
        }
        role = "tool" if self.role == "function" else self.role
        return {"role": role, "content": content, **{k: v for k, v in extras.items() if v is not None}}


def _text_of(part: TextPart | RefusalPart) -> str:
    return part.text if isinstance(part, TextPart) else part.refusal


def messages_for_template(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the messages as chat templates expect them. Results of tool calls get the names of their tools."""
    names: dict[str, str] = {}
    rendered = []
    for message in messages:
        names.update({call.id: call.function.name for call in message.tool_calls or () if call.id is not None})
        form = message.for_template()
        if message.role == "tool" and message.tool_call_id in names:
            form.setdefault("name", names[message.tool_call_id])
        rendered.append(form)
    return rendered


def count_pieces(items: list[Any], names: Sequence[str] = ("content", "tool_calls")) -> int:
    """Return the number of items, and of the parts in their fields of these names."""
    fields = [item.get(name) for item in items if isinstance(item, dict) for name in names]
    return len(items) + sum(len(field) for field in fields if isinstance(field, list))
