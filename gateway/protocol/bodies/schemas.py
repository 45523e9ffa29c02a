"""Schemas of the bodies of /v1/chat/completions and /v1/completions.

Types are strict: a string is not accepted as a number, and a bool is not accepted as an integer. Unknown fields are
ignored, because clients send many of them. gateway/protocol/bodies/unsupported.py refuses those that are misspelt, and
fields of OpenAI's API that this server does not implement.

Every list and mapping has a maximum length, which is checked before its items. Validation of the items stops at the
first error. Both rules save memory: an error takes 100 times the memory of the bytes that cause it, so a body of 16 MB
with an error in every item would exhaust the process.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, PrivateAttr, Tag, field_validator

from gateway.protocol.bodies.messages import (
    MAX_PIECES,
    Message,
    StopText,
    StopTexts,
    Text,
    TokenIds,
    count_pieces,
    tag_of,
)
from gateway.protocol.bodies.options import INT64, Count, GenerationBody, NumTop, Options, Whole
from gateway.protocol.bodies.output_format import Formats
from gateway.protocol.bodies.tools import (
    MAX_TOOLS,
    FunctionChoice,
    FunctionDefinition,
    Tool,
    ToolChoice,
)
from gateway.protocol.bodies.unsupported import refuse_parameters_of_chats, refuse_unsupported, unknown_names
from gateway.protocol.bodies.validation import choose
from gateway.protocol.errors import invalid_value
from gateway.protocol.json_body import Body, has_more_values, has_too_many_values, parse

MAX_CHOICES = 2048  # choices of one answer, summed over all its prompts
MAX_VALUES = 2**16  # of tools, of a format, or of the arguments of all calls: they are written in one step, of 20 ms
MAX_PROMPT_IDS = 2**20  # token ids of a body, summed over all its prompts


class StreamOptions(Body):
    include_usage: bool | None = None
    # Asks for the usage so far in every chunk. An extension of vLLM, which guidellm sends.
    continuous_usage_stats: bool | None = None


class GenerationRequest(GenerationBody, Options, Formats):
    """The fields that the bodies of both endpoints have in common."""

    _limit_shrinks: bool = PrivateAttr(False)

    max_tokens: Annotated[int, Field(ge=1, le=2**31), Whole] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31), Whole] | None = None
    n: Annotated[int, Field(ge=1, le=128), Whole] | None = None
    best_of: Annotated[int, Field(ge=1, le=128), Whole] | None = None
    seed: Annotated[int, Field(ge=-INT64, lt=INT64), Whole] | None = None
    stop: Annotated[
        Annotated[StopText | None, Tag("<text>")] | Annotated[StopTexts, Tag("<list>")],
        choose(tag_of, "a string or an array of strings"),
    ] = None
    stream_options: StreamOptions | None = None
    deadline_ms: Annotated[int, Field(ge=1, le=2**53), Whole] | None = None  # maximum ms from arrival to the last token
    # An extension of vLLM: requests share cached KV only if they have the same salt.
    cache_salt: Annotated[Text, Field(min_length=1, max_length=1024)] | None = None

    @property
    def limit_shrinks(self) -> bool:
        """Whether a maximum of output tokens that does not fit into the context is lowered, and not refused."""
        return self._limit_shrinks

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def chooses_best(self) -> bool:
        """Whether more sequences are generated than the answer has choices."""
        return self.best_of is not None and self.best_of > (self.n or 1)

    @property
    def num_sequences(self) -> int:
        """The number of sequences to generate for each prompt."""
        return max(self.n or 1, self.best_of or 1)


class ChatCompletionRequest(GenerationRequest):
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=2**31), Whole] | None = None
    logprobs: bool | None = None
    top_logprobs: NumTop | None = None
    # Extensions of vLLM, for the chat template.
    add_generation_prompt: bool | None = None
    echo: bool | None = None  # the answer begins with the assistant's last message, if that is the last one
    continue_final_message: bool | None = None
    chat_template: Text | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=64)] | None = None
    documents: Annotated[list[dict[str, Any]], Field(max_length=1024, fail_fast=True)] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[list[FunctionDefinition], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    function_call: FunctionChoice | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    include_reasoning: bool | None = None  # an extension of vLLM; false: the answer does not show the reasoning
    # The following fields have no effect on this server, but invalid values are refused, as OpenAI does.
    verbosity: Literal["low", "medium", "high"] | None = None
    safety_identifier: Annotated[Text, Field(max_length=64)] | None = None
    prompt_cache_key: Text | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    store: bool | None = None

    @field_validator("messages", mode="before")
    @classmethod
    def _few_pieces(cls, messages: Any) -> Any:
        if isinstance(messages, list) and count_pieces(messages) > MAX_PIECES:
            raise ValueError(f"must have at most {MAX_PIECES} messages, content parts and tool calls in all")
        return messages

    @property
    def echoed(self) -> str:
        """The text of the message with which the answer begins; empty: there is none."""
        last = self.messages[-1]
        return str(last.for_template()["content"]) if self.echo and last.role == "assistant" else ""

    @property
    def output_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def output_limit_name(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def num_logprobs(self) -> int | None:
        """The number of likeliest tokens to report at each position; None: no log probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def num_prompt_logprobs(self) -> int | None:
        """As `num_logprobs`, for the tokens of the prompt."""
        return self.prompt_logprobs


Prompts = Annotated[
    Annotated[Text, Field(min_length=1), Tag("<text>")]
    | Annotated[
        list[Annotated[Text, Field(min_length=1)]],
        Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True),
        Tag("<list>"),
    ]
    | Annotated[TokenIds, Tag("<ids>")]
    | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True), Tag("<id-lists>")],
    choose(tag_of, "a string, an array of strings, an array of token ids, or an array of such arrays"),
]


def few_ids(prompts: Any) -> Any:
    """Refuse `Prompts` with too many token ids before these are checked."""
    if (
        isinstance(prompts, list)
        and len(prompts) + sum(len(p) for p in prompts if isinstance(p, list)) > MAX_PROMPT_IDS
    ):
        raise ValueError(f"must have at most {MAX_PROMPT_IDS} token ids in all")
    return prompts


def prompts_of(prompts: Any) -> list[str] | list[list[int]]:
    """Return `Prompts` as a list, whichever of its four forms it has."""
    return [prompts] if isinstance(prompts, str) or isinstance(prompts[0], int) else prompts


class CompletionRequest(GenerationRequest):
    prompt: Prompts
    _few_ids = field_validator("prompt", mode="before")(few_ids)

    max_tokens: Count | None = None  # 0 is for `echo`: the prompt is scored, and nothing is generated
    logprobs: NumTop | None = None  # OpenAI's maximum is 5
    echo: bool | None = None

    @property
    def output_limit(self) -> int | None:
        return self.max_tokens

    @property
    def output_limit_name(self) -> str:
        return "max_tokens"

    @property
    def num_logprobs(self) -> int | None:
        """The number of likeliest tokens to report at each position; None: no log probabilities."""
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        """As `num_logprobs`, for the tokens of the prompt, which `echo` reports like those of the output."""
        wanted = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((number for number in wanted if number is not None), default=None)

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """All prompts of the request as a list, whichever of its four forms `prompt` has."""
        return prompts_of(self.prompt)


AnyRequest = ChatCompletionRequest | CompletionRequest
R = TypeVar("R", bound=GenerationRequest)
# The parameters that a template or a grammar gets as JSON.
WRITTEN = (
    *("tools", "functions", "documents", "chat_template_kwargs"),
    *("response_format", "structured_outputs", "guided_json", "json_schema"),
)


def parse_generation(kind: type[R], body: dict[str, Any]) -> R:
    """Return `body` as an instance of `kind`.

    Raises `ApiError` 400 if a parameter is wrong or unsupported. The error names the parameter.
    """
    request = parse(kind, body)
    check_combinations(request)
    check_sizes(request)
    refuse_unsupported(body)
    if kind is CompletionRequest:
        refuse_parameters_of_chats(body)
    if ignored := unknown_names(body, kind.model_fields):
        request._ignored = ignored
    return request


def check_combinations(request: GenerationRequest) -> None:
    """Refuse parameters that contradict each other. Raises `ApiError` 400 with the name of one of them."""
    for param, is_wrong, reason in _contradictions(request):
        if is_wrong:
            raise invalid_value(param, f"Invalid value for '{param}': {reason}.")


def check_sizes(request: GenerationRequest) -> None:
    """Refuse parameters with so many values that to write them as JSON would take long. Raises `ApiError` 400."""
    values = [(name, getattr(request, name, None)) for name in WRITTEN]
    if isinstance(request, ChatCompletionRequest):
        calls = [call.function for message in request.messages for call in message.tool_calls or ()]
        calls += [message.function_call for message in request.messages if message.function_call is not None]
        values.append(("messages", [call.arguments for call in calls]))
        values.append(("messages", "".join(call.arguments for call in calls if isinstance(call.arguments, str))))
    for param, value in values:
        if value and _has_more_values(value, MAX_VALUES):
            raise invalid_value(param, f"Invalid value for '{param}': it has more than {MAX_VALUES} values.")


def _has_more_values(value: Any, limit: int) -> bool:
    """Whether `value`, which may be a text in JSON, has more values than `limit`."""
    if isinstance(value, str):
        return has_too_many_values(value.encode(errors="replace"), limit, limit)
    return has_more_values(value, limit)


def _contradictions(request: GenerationRequest) -> Iterator[tuple[str, bool, str]]:
    """Yield (parameter, whether it contradicts another one, the reason)."""
    streams, limit = bool(request.stream), request.max_tokens
    if request.stream_options is not None:
        yield "stream_options", not streams, "it is only allowed if 'stream' is true"
    if request.prompt_logprobs is not None:
        yield "prompt_logprobs", streams, "it is not available if 'stream' is true"
    if request.best_of is not None:
        num_choices = request.n or 1
        yield "best_of", request.best_of < num_choices, "it must be at least 'n'"
        yield "best_of", streams and request.best_of > num_choices, "the best cannot be chosen if 'stream' is true"
    if request.detokenize is False:
        yield "detokenize", bool(request.stop_strings), "stop strings are searched in text, so it must not be false"
    if request.allowed_token_ids is not None:
        others = request.min_tokens or request.bad_words
        yield "allowed_token_ids", bool(others), "with 'bad_words' or 'min_tokens', no token may be left"
    if request.truncate_prompt_tokens is not None:
        keeps_nothing = request.truncate_prompt_tokens == 0
        yield "truncate_prompt_tokens", keeps_nothing, "it must be at least 1, or -1 for all that fit"
    if isinstance(request, ChatCompletionRequest):
        limit = request.output_limit
        yield "top_logprobs", bool(request.top_logprobs) and not request.logprobs, "it needs 'logprobs' to be true"
        both = bool(request.add_generation_prompt and request.continue_final_message)
        yield "continue_final_message", both, "it contradicts 'add_generation_prompt'"
    elif isinstance(request, CompletionRequest):
        yield "max_tokens", limit == 0 and not request.echo, "it must be at least 1; 0 is for 'echo', to score a prompt"
    if request.min_tokens and limit is not None:
        param = "min_tokens"
        yield param, request.min_tokens > limit, "it must not be more than the maximum number of tokens"
