"""The schema of the body of POST /v1/messages and POST /v1/messages/count_tokens.

Knows Anthropic's names; does not know how a request is answered. Unknown parameters have no effect and are named in a
header of the answer, because Anthropic's clients send many that belong to its own servers.
"""

from typing import Annotated, Any, Literal

from pydantic import Field, Tag, field_validator, model_validator

from gateway.dialects.messages.blocks import Content, TextOrBlocks
from gateway.protocol.bodies.messages import MAX_PIECES, StopTexts, Text, count_pieces
from gateway.protocol.bodies.options import Options, Whole
from gateway.protocol.bodies.output_format import Formats
from gateway.protocol.bodies.tools import MAX_TOOLS, HostedTool, ToolName
from gateway.protocol.bodies.unsupported import HARMLESS
from gateway.protocol.bodies.validation import choose
from gateway.protocol.json_body import Body

# Extensions of /v1/chat/completions that work here as well. What reports tokens has no place in Anthropic's answers.
EXTENSIONS = frozenset(
    {
        *(Options.model_fields.keys() - {"prompt_logprobs", "return_tokens_as_token_ids", "return_token_ids"}),
        *(Formats.model_fields.keys() - {"response_format"}),
        *("seed", "cache_salt", "deadline_ms", "priority", "chat_template", "chat_template_kwargs", "documents"),
        *HARMLESS,
    }
)
# Parameters of /v1/chat/completions that have another name here.
MOVED = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
}


class MessageParam(Body):
    role: Literal["user", "assistant", "system"]
    content: Content


class ClientTool(Body):
    """A tool that the client runs, with the schema of its input."""

    type: Literal["custom"] | None = None
    name: ToolName
    description: Annotated[str, Field(max_length=2**16)] | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None


def _tool_tag(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else None
    return "<client>" if kind in (None, "custom") else "<hosted>"


Tool = Annotated[
    Annotated[ClientTool, Tag("<client>")] | Annotated[HostedTool, Tag("<hosted>")], choose(_tool_tag, "a tool")
]


class ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: Text | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _named(self) -> "ToolChoice":
        if self.type == "tool" and self.name is None:
            raise ValueError("the type tool needs 'name'")
        return self


class Thinking(Body):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    display: Literal["summarized", "omitted"] | None = None


class JsonFormat(Body):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonFormat | None = None


class MessagesRequest(Body):
    model: Text
    messages: Annotated[list[MessageParam], Field(min_length=1, fail_fast=True)]
    max_tokens: Annotated[int, Field(ge=1, le=2**31), Whole] | None = None  # needed, except to count tokens
    system: TextOrBlocks | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=0, le=2**31), Whole] | None = None
    stop_sequences: StopTexts | None = None
    stream: bool | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: JsonFormat | None = None  # the older name of `output_config.format`
    service_tier: Text | None = None
    metadata: dict[str, Any] | None = None  # no effect
    cache_control: dict[str, Any] | None = None  # no effect: the prefix cache needs no marks

    @field_validator("messages", mode="before")
    @classmethod
    def _few_pieces(cls, messages: Any) -> Any:
        if isinstance(messages, list) and count_pieces(messages) > MAX_PIECES:
            raise ValueError(f"must have at most {MAX_PIECES} messages and content blocks in all")
        return messages
