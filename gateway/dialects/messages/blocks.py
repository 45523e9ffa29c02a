"""The content blocks of Anthropic's Messages API, and the texts in them.

Knows blocks; does not know requests or chat messages. Blocks that this server cannot show to a model, such as images,
are refused by name.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from gateway.protocol.bodies.messages import Text
from gateway.protocol.bodies.validation import choose, text_or_list
from gateway.protocol.json_body import Body

KINDS = ("text", "thinking", "redacted_thinking", "tool_use", "tool_result")
Id = Annotated[Text, Field(min_length=1, max_length=256)]


def _only(kinds: Sequence[str]) -> BeforeValidator:
    """Return what refuses blocks of other types than `kinds` by name."""

    def check(value: Any) -> Any:
        kind = value.get("type") if isinstance(value, dict) else None
        if isinstance(kind, str) and kind not in kinds:
            raise ValueError(f"blocks of the type '{kind[:64]}' are not served here, only {', '.join(kinds)}")
        return value

    return BeforeValidator(check)


class TextBlock(Body):
    type: Literal["text"]
    text: Text


TextBlocks = Annotated[list[Annotated[TextBlock, _only(("text",))]], Field(fail_fast=True)]
TextOrBlocks = Annotated[
    Annotated[Text, Tag("<text>")] | Annotated[TextBlocks, Tag("<list>")],
    choose(text_or_list, "a string or an array of text blocks"),
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
    content: TextOrBlocks = ""


def _tag(value: Any) -> str | None:
    return f"<{value['type']}>" if isinstance(value, dict) and value.get("type") in KINDS else None


Block = Annotated[
    Annotated[TextBlock, Tag("<text>")]
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
