"""The schema of the body of POST /v1/responses.

Knows OpenAI's names; does not know how a request is answered. Parameters that would change the answer and are not built
are refused by name. Fields that are no parameter of the Responses API are kept in `extensions`: they are parameters of
/v1/chat/completions, which work here as well.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field, Tag, field_validator, model_validator

from gateway.dialects.responses.items import (
    InputItem,
    MessageItem,
    SentItem,
    few_pieces,
    items_left_out,
    served_items,
)
from gateway.dialects.responses.tools import OfferedTool, ToolChoice, Tools, hosted_choice, offered
from gateway.dialects.terms import refuse_moved
from gateway.protocol.bodies.messages import Text
from gateway.protocol.bodies.options import GenerationBody, Whole
from gateway.protocol.bodies.schemas import ChatCompletionRequest
from gateway.protocol.bodies.tools import hosted_tool_chosen, names_left_out
from gateway.protocol.bodies.unsupported import unknown_names
from gateway.protocol.bodies.validation import choose, text_or_list
from gateway.protocol.errors import invalid_request, invalid_value, unsupported_parameter
from gateway.protocol.json_body import Body, parse

# Parameters of /v1/chat/completions that have another name here.
MOVED = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "verbosity": "text.verbosity",
    "reasoning_effort": "reasoning.effort",
    "functions": "tools",
    "function_call": "tool_choice",
    "logprobs": "include",
}
# Parameters of the Responses API that are not built.
NOT_BUILT = ("prompt", "context_management", "moderation", "image")


class TextFormat(Body):
    """The format of the output text. `name` and `schema` are needed for the type `json_schema`."""

    model_config = ConfigDict(serialize_by_alias=True)

    type: Literal["text", "json_object", "json_schema"]
    name: Text | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None
    description: Text | None = None

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.type == "json_schema" and (self.name is None or self.schema_ is None):
            raise ValueError("the type json_schema needs 'name' and 'schema'")
        return self


class TextConfig(Body):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


Summary = Literal["auto", "concise", "detailed"]


class Reasoning(Body):
    """The options of reasoning. A summary is the whole reasoning. Without one, the reasoning is the content of
    reasoning items."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Summary | None = None
    generate_summary: Summary | None = None  # the older name

    @property
    def wanted_summary(self) -> Summary | None:
        return self.summary or self.generate_summary


class StreamOptions(Body):
    include_obfuscation: bool | None = None  # has no effect: nothing is obfuscated


Includable = Literal[
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "reasoning.encrypted_content",
    "message.output_text.logprobs",
]


Input = Annotated[
    Annotated[Text, Tag("<text>")] | Annotated[list[SentItem], Field(fail_fast=True), Tag("<list>")],
    choose(text_or_list, "a string or an array of input items"),
]


class ConversationName(Body):
    id: Text


def _as_object(value: Any) -> Any:
    return {"id": value} if isinstance(value, str) else value


Conversation = Annotated[ConversationName, BeforeValidator(_as_object)]


class ResponseRequest(GenerationBody):
    model_config = ConfigDict(extra="allow")

    input: Input
    instructions: Text | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=2**31), Whole] | None = None
    max_tool_calls: Annotated[int, Field(ge=1), Whole] | None = None  # of tools that run on the server
    top_logprobs: Annotated[int, Field(ge=0, le=20), Whole] | None = None
    text: TextConfig | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    include: Annotated[list[Includable], Field(max_length=16, fail_fast=True)] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    safety_identifier: Annotated[Text, Field(max_length=64)] | None = None
    prompt_cache_key: Text | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    prompt_cache_options: dict[str, Any] | None = None  # hints to OpenAI's cache; here, the prefix cache needs none
    stream_options: StreamOptions | None = None
    store: bool | None = None
    background: bool | None = None
    background_options: dict[str, Any] | None = None  # hints of how soon an answer is needed; `service_tier` says it
    previous_response_id: Text | None = None
    conversation: Conversation | None = None  # in a body also its id alone

    _few_pieces = field_validator("input", mode="before")(few_pieces)

    @property
    def extensions(self) -> dict[str, Any]:
        """Parameters of /v1/chat/completions that the Responses API does not have."""
        return {name: value for name, value in (self.model_extra or {}).items() if name not in self._ignored}

    @property
    def items(self) -> list[InputItem]:
        """The input as items, without those that are left out."""
        if isinstance(self.input, str):
            return [MessageItem(role="user", content=self.input)]
        return served_items(self.input)

    @property
    def offered_tools(self) -> list[OfferedTool]:
        """The tools that the model may call, in their order."""
        return list(offered(self.tools))

    @property
    def wants_logprobs(self) -> bool:
        return "message.output_text.logprobs" in (self.include or ()) or bool(self.top_logprobs)


KNOWN = {*ChatCompletionRequest.model_fields, *ResponseRequest.model_fields}


def parse_response_request(body: dict[str, Any]) -> ResponseRequest:
    """Return `body` as a request.

    Raises `ApiError` 400 if a parameter is wrong or not built. The error names the parameter.
    """
    for name in NOT_BUILT:
        if body.get(name) is not None:
            raise unsupported_parameter(name)
    refuse_moved(body, MOVED, "Responses")
    for name in ("n", "best_of"):
        if body.get(name) not in (None, 1):
            message = f"Unsupported parameter: '{name}'. A response is one answer."
            raise invalid_request(message, name, "unsupported_parameter")
    for name in ("prompt_logprobs", "return_token_ids"):  # a response object has no place for them
        if body.get(name) is not None and body.get(name) is not False:
            raise unsupported_parameter(name)
    request = parse(ResponseRequest, _with_additional_tools(body))
    items = () if isinstance(request.input, str) else items_left_out(request.input, "input")
    left_out = (*names_left_out(request.tools or ()), *items)
    if ignored := (*unknown_names(body, KNOWN), *left_out):
        request._ignored = ignored
    _check_together(request)
    return request


def _with_additional_tools(body: dict[str, Any]) -> dict[str, Any]:
    """Return `body` with the tools of its `additional_tools` items behind its own. Newer agents put all tools there."""
    items, tools = body.get("input"), body.get("tools") or []
    if not isinstance(items, list) or not isinstance(tools, list):
        return body
    more = [item for item in items if isinstance(item, dict) and item.get("type") == "additional_tools"]
    if not more or not all(isinstance(item.get("tools"), list) for item in more):
        return body
    left = [item for item in items if item not in more]
    return {**body, "input": left, "tools": [*tools, *(tool for item in more for tool in item["tools"])]}


def parse_compaction(body: dict[str, Any]) -> ResponseRequest:
    """Return a body of /v1/responses/compact as the request whose conversation is to be compacted.

    Raises `ApiError` 400 as `parse_response_request` does, and for what a compaction has not.
    """
    for name in ("stream", "background", "conversation"):
        if body.get(name):
            raise unsupported_parameter(name)
    items = [] if body.get("input") is None else body["input"]
    return parse_response_request({**body, "input": items})


def _check_together(request: ResponseRequest) -> None:
    """Refuse values that are valid alone, but not together."""
    if request.stream_options is not None and not request.stream:
        message = "The 'stream_options' parameter is only allowed when 'stream' is enabled."
        raise invalid_value("stream_options", message)
    if (hosted := hosted_choice(request.tool_choice)) is not None:
        raise hosted_tool_chosen(hosted)
    if request.background and request.store is False:
        raise invalid_value("background", "Background responses must be stored: leave out 'store' or set it to true.")
    if request.conversation is not None and request.previous_response_id is not None:
        raise invalid_value("conversation", "Use either 'conversation' or 'previous_response_id', not both.")
    if not (request.input and request.items) and request.previous_response_id is None and request.conversation is None:
        raise invalid_value("input", "Invalid value for 'input': it must not be empty.")
