"""The parts that an output is split into: text, reasoning, tool calls, and its tokens with their log probabilities.

Knows no tokens' text, no format of answers and no model.
"""

from dataclasses import dataclass, field

from engine.interface import TokenLogprobs


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """More of one tool call. The first delta of a call has its `id` and `name`; later ones have only `arguments`."""

    index: int  # of the call in its choice
    id: str = ""
    name: str = ""
    arguments: str = ""  # the next part of the arguments, which together are one JSON object


@dataclass(frozen=True, slots=True)
class ReportedToken:
    """A token that the answer reports, because the client asked for token ids or log probabilities."""

    token_id: int
    text_offset: int  # characters of the whole text before this token
    logprobs: TokenLogprobs | None = None  # None: not requested, or nothing precedes the token
    is_prompt: bool = False  # a token of the prompt, which `echo` reports with the output


@dataclass(slots=True)
class Piece:
    """A part of one choice's output, or all of it. Reasoning comes before text, and text before tool calls."""

    text: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCallDelta] = field(default_factory=list)
    tokens: list[ReportedToken] = field(default_factory=list)  # the tokens of this piece, if requested
    prompt_token_ids: tuple[int, ...] = ()  # of the choice's prompt, in its first piece, if requested

    def __bool__(self) -> bool:
        return bool(self.text or self.reasoning or self.tool_calls or self.tokens or self.prompt_token_ids)

    def extend(self, later: "Piece") -> None:
        """Append what `later` adds to the output."""
        self.text += later.text
        self.reasoning += later.reasoning
        self.tool_calls += later.tool_calls
        self.tokens += later.tokens
        self.prompt_token_ids = self.prompt_token_ids or later.prompt_token_ids


def whole_tool_calls(deltas: list[ToolCallDelta]) -> list[ToolCallDelta]:
    """Return each tool call of `deltas` as one delta with all of its arguments, in the order of the calls."""
    calls: dict[int, ToolCallDelta] = {}
    for delta in deltas:
        call = calls.get(delta.index, ToolCallDelta(delta.index))
        calls[delta.index] = ToolCallDelta(
            delta.index, call.id or delta.id, call.name or delta.name, call.arguments + delta.arguments
        )
    return [calls[index] for index in sorted(calls)]
