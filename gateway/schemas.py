"""The bodies of /v1/chat/completions and /v1/completions, as pydantic sees them.

Strict: no string passes for a number and no bool for an integer. Unknown fields are ignored, as real clients
send many; known ones that this server does not build are refused by gateway/unsupported.py.
"""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
)

from gateway.body import parse
from gateway.errors import invalid_value
from gateway.unsupported import refuse_unsupported

MAX_CHOICES = 2048  # choices of one answer, over all its prompts
INT64 = 2**63


def _well_formed(text: str) -> str:
    """Lone surrogates are legal in JSON's escapes, but no text: no tokenizer takes them."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("must be well-formed Unicode text") from None
    return text


def _tag(value: Any) -> str | None:
    """Which member of a union a value means; decided by its outside, so that faults name the right path."""
    if value is None or isinstance(value, str):
        return "<text>"
    if isinstance(value, list):
        inner = value[0] if value else None
        return "<ids>" if isinstance(inner, int) else "<id-lists>" if isinstance(inner, list) else "<list>"
    return None


def _choose(expected: str) -> Discriminator:
    return Discriminator(_tag, custom_error_type="union_type", custom_error_message=f"Must be {expected}")


Text = Annotated[str, AfterValidator(_well_formed)]
StopText = Annotated[Text, Field(min_length=1, max_length=1024)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1, fail_fast=True)]


class _Lenient(BaseModel):
    """Strict about what it knows, indifferent to what it does not."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class TextPart(_Lenient):
    type: Literal["text"]
    text: Text


class RefusalPart(_Lenient):
    type: Literal["refusal"]
    refusal: Text


def _part_tag(value: Any) -> str:
    return "<refusal>" if isinstance(value, dict) and value.get("type") == "refusal" else "<text>"


Part = Annotated[
    Annotated[TextPart, Tag("<text>")] | Annotated[RefusalPart, Tag("<refusal>")], Discriminator(_part_tag)
]
Parts = Annotated[list[Part], Field(min_length=1, fail_fast=True)]
PartsTags = Annotated[Parts, Tag("<list>")]


def _content_tag(value: Any) -> str | None:
    return "<list>" if isinstance(value, list) else _tag(value)


Content = Annotated[
    Annotated[Text | None, Tag("<text>")] | PartsTags,
    Discriminator(
        _content_tag,
        custom_error_type="content_type",
        custom_error_message="Must be a string or an array of content parts",
    ),
]


class Message(_Lenient):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content = None
    name: Text | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: Text | None = None

    def for_template(self) -> dict[str, Any]:
        """As chat templates expect it: content is one string."""
        content = self.content or ""
        if isinstance(content, list):
            content = "\n".join(part.text if isinstance(part, TextPart) else part.refusal for part in content)
        extras = {"name": self.name, "tool_calls": self.tool_calls, "tool_call_id": self.tool_call_id}
        return {"role": self.role, "content": content, **{k: v for k, v in extras.items() if v is not None}}


class StreamOptions(_Lenient):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # guidellm's and vLLM's: running usage on every chunk


class GenerationRequest(_Lenient):
    """What both endpoints take."""

    model: Text
    max_tokens: Annotated[int, Field(ge=1, le=2**31)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31)] | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    seed: Annotated[int, Field(ge=-INT64, lt=INT64)] | None = None
    stop: Annotated[
        Annotated[StopText | None, Tag("<text>")] | Annotated[list[StopText], Field(max_length=4), Tag("<list>")],
        _choose("a string or an array of strings"),
    ] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    service_tier: Text | None = None
    user: Text | None = None
    metadata: (
        Annotated[
            dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
            Field(max_length=16),
        ]
        | None
    ) = None

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class ChatCompletionRequest(GenerationRequest):
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=2**31)] | None = None

    @property
    def output_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class CompletionRequest(GenerationRequest):
    prompt: Annotated[
        Annotated[Text, Field(min_length=1), Tag("<text>")]
        | Annotated[
            list[Annotated[Text, Field(min_length=1)]],
            Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True),
            Tag("<list>"),
        ]
        | Annotated[TokenIds, Tag("<ids>")]
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True), Tag("<id-lists>")],
        _choose("a string, an array of strings, an array of token ids, or an array of such arrays"),
    ]

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """One entry a prompt, whichever of the four forms was sent."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt


R = TypeVar("R", bound=GenerationRequest)


def parse_generation(kind: type[R], body: dict[str, Any]) -> R:
    """`body` as a `kind`. Raises `ApiError` 400 that names the parameter at fault."""
    request = parse(kind, body)
    if request.stream_options is not None and not request.stream:
        message = "The 'stream_options' parameter is only allowed when 'stream' is enabled."
        raise invalid_value("stream_options", message)
    refuse_unsupported(body)
    return request
