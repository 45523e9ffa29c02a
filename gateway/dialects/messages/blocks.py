"""The content blocks of Anthropic's Messages API, and the texts in them.

Knows blocks; does not know requests or chat messages. Blocks that this server cannot show to a model, such as
documents, are refused by name.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from gateway.protocol.bodies.messages import Text
from gateway.protocol.bodies.validation import choose, text_or_list
from gateway.protocol.json_body import Body

KINDS = ("text", "image", "thinking", "redacted_thinking", "tool_use", "tool_result")
Id = Annotated[Text, Field(min_length=1, max_length=256)]


def _only(kinds: Sequence[str]) -> BeforeValidator:
    """Return what refuses blocks of other types than `kinds` by name."""

    def check(value: Any) -> Any:
        kind = value.get("type") if isinstance(value, dict) else None
        if isinstance(kind, str) and kind not in kinds:
            raise ValueError(f"blocks of the type '{kind[:64]}' are not served here, only {', '.join(kinds)}")
        return value

    return BeforeValidator(check)


def _tag(value: Any) -> str | None:
    return f"<{value['type']}>" if isinstance(value, dict) and value.get("type") in KINDS else None


class TextBlock(Body):
    type: Literal["text"]
    text: Text


class ImageData(Body):
    type: Literal["base64"]
    media_type: Annotated[str, Field(pattern=r"^image/[a-z0-9.+-]{1,64}$")]
    data: Annotated[Text, Field(min_length=1)]

    @property
    def as_url(self) -> str:
        return f"data:{self.media_type};base64,{self.data}"


class ImageAddress(Body):
    type: Literal["url"]
    url: Annotated[Text, Field(min_length=1)]

    @property
    def as_url(self) -> str:
        return self.url


class ImageBlock(Body):
    type: Literal["image"]
    source: Annotated[ImageData | ImageAddress, Discriminator("type")]


TextBlocks = Annotated[list[Annotated[TextBlock, _only(("text",))]], Field(fail_fast=True)]
TextOrBlocks = Annotated[
    Annotated[Text, Tag("<text>")] | Annotated[TextBlocks, Tag("<list>")],
    choose(text_or_list, "a string or an array of text blocks"),
]


_ResultBlock = Annotated[
    Annotated[TextBlock, Tag("<text>")] | Annotated[ImageBlock, Tag("<image>")],
    Discriminator(_tag),
    _only(("text", "image")),
]
ResultContent = Annotated[
    Annotated[Text, Tag("<text>")] | Annotated[list[_ResultBlock], Field(fail_fast=True), Tag("<list>")],
    choose(text_or_list, "a string or an array of text and image blocks"),
]


class ThinkingBlock(Body):
    type: Literal["thinking"]
    thinking: Text


class RedactedThinkingBlock(Body):
    """Reasoning that only Anthropic's servers can read. It has no effect."""

    type: Literal["redacted_thinking"]


class ToolUseBlock(Body):
    type: Literal["tool_use"]
    id: Id
    name: Id
    input: dict[str, Any] = {}


class ToolResultBlock(Body):
    type: Literal["tool_result"]
    tool_use_id: Id
    content: ResultContent = ""


Block = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ImageBlock, Tag("<image>")]
    | Annotated[ThinkingBlock, Tag("<thinking>")]
    | Annotated[RedactedThinkingBlock, Tag("<redacted_thinking>")]
    | Annotated[ToolUseBlock, Tag("<tool_use>")]
    | Annotated[ToolResultBlock, Tag("<tool_result>")],
    Discriminator(_tag, custom_error_type="block", custom_error_message=f"Must be a block of the types {KINDS}"),
    _only(KINDS),
]
Content = Annotated[
    Annotated[Text, Tag("<text>")] | Annotated[list[Block], Field(fail_fast=True), Tag("<list>")],
    choose(text_or_list, "a string or an array of content blocks"),
]


def blocks_of(content: str | Sequence[Any]) -> Sequence[Any]:
    """Return the content of a message as blocks: a string stands for one text block."""
    return [TextBlock(type="text", text=content)] if isinstance(content, str) else content


def text_of(content: str | Sequence[Any]) -> str:
    """Return the text of all text blocks of a content. The texts of several blocks become lines."""
    return "\n".join(block.text for block in blocks_of(content) if isinstance(block, TextBlock) and block.text)


def content_of(content: str | Sequence[Any]) -> str | list[dict[str, Any]]:
    """Return the texts and images of a content as that of a chat message: its text, or parts if there are images."""
    blocks = [block for block in blocks_of(content) if isinstance(block, TextBlock | ImageBlock)]
    if not any(isinstance(block, ImageBlock) for block in blocks):
        return text_of(content)
    return [_chat_part(block) for block in blocks]


def _chat_part(block: TextBlock | ImageBlock) -> dict[str, Any]:
    if isinstance(block, TextBlock):
        return {"type": "text", "text": block.text}
    return {"type": "image_url", "image_url": {"url": block.source.as_url}}
