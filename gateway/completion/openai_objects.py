"""The response objects and stream chunks of the two completion endpoints.

Knows only OpenAI's field names. A stream has one chunk per token, so encoding chunks is the hottest path of the
gateway. The parts that all chunks of a stream have in common are therefore encoded only once per stream.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from gateway.completion.choice import Choice
from gateway.output.piece import Piece, ToolCallDelta, whole_tool_calls

encode_json = msgspec.json.encode
_LEGACY_CALLS = (b'"delta":{"function_call":', b"}")


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int = 0

    def to_dict(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens, "audio_tokens": 0},
            "completion_tokens_details": {
                "reasoning_tokens": self.reasoning_tokens,
                "audio_tokens": 0,
                "accepted_prediction_tokens": 0,
                "rejected_prediction_tokens": 0,
            },
        }


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """The fields that all objects of one answer have in common."""

    id: str
    created: int  # Unix seconds
    model: str
    service_tier: str
    system_fingerprint: str


class ChatAnswer:
    """A builder of `chat.completion` and `chat.completion.chunk` objects."""

    id_prefix = "chatcmpl-"

    def __init__(self, head: AnswerHead, *, legacy_calls: bool = False) -> None:
        self._head = head
        self._legacy_calls = legacy_calls  # whether a call is shown in the older form, `function_call`

    def response(self, choices: Sequence[tuple[Choice, Piece]], usage: Usage) -> dict[str, Any]:
        return _object(self._head, "chat.completion") | {
            "choices": [
                {
                    "index": choice.index,
                    "message": _message(piece, self._legacy_calls),
                    "logprobs": None,
                    "finish_reason": choice.finish_reason,
                }
                for choice, piece in choices
            ],
            "usage": usage.to_dict(),
        }

    def chunks(self, usage_key: bool) -> "ChunkEncoder":
        head = _object(self._head, "chat.completion.chunk")
        return ChunkEncoder(
            head,
            opening=b'"delta":{"role":"assistant","content":"","refusal":null}',
            text=(b'"delta":{"content":', b"}"),
            reasoning=(b'"delta":', b""),
            tool_calls=_LEGACY_CALLS if self._legacy_calls else (b'"delta":{"tool_calls":[', b"]}"),
            legacy_calls=self._legacy_calls,
            closing=b'"delta":{}',
            usage_key=usage_key,
        )


class TextAnswer:
    """A builder of `text_completion` objects. Whole answers and chunks are of the same object type."""

    id_prefix = "cmpl-"

    def __init__(self, head: AnswerHead) -> None:
        self._head = head

    def response(self, choices: Sequence[tuple[Choice, Piece]], usage: Usage) -> dict[str, Any]:
        return _object(self._head, "text_completion") | {
            "choices": [
                {"index": choice.index, "text": piece.text, "logprobs": None, "finish_reason": choice.finish_reason}
                for choice, piece in choices
            ],
            "usage": usage.to_dict(),
        }

    def chunks(self, usage_key: bool) -> "ChunkEncoder":
        head = _object(self._head, "text_completion")
        text = (b'"text":', b"")  # plain completions are not parsed, so there is nothing but text
        return ChunkEncoder(
            head, opening=None, text=text, reasoning=text, tool_calls=text, closing=b'"text":""', usage_key=usage_key
        )


Answer = ChatAnswer | TextAnswer


class ChunkEncoder:
    """An encoder of the `data: …` frames of one stream.

    If `usage_key` is true, every chunk has the key `usage`. Its value is null if the caller gives no usage.
    """

    def __init__(
        self,
        head: dict[str, Any],
        *,
        opening: bytes | None,
        text: tuple[bytes, bytes],
        reasoning: tuple[bytes, bytes],
        tool_calls: tuple[bytes, bytes],
        closing: bytes,
        usage_key: bool,
        legacy_calls: bool = False,
    ) -> None:
        self._before = b"data: " + encode_json(head)[:-1] + b',"choices":['
        self._opening = opening
        self._text = text
        self._reasoning = reasoning
        self._tool_calls = tool_calls
        self._closing = closing
        self._usage_key = usage_key
        self._legacy_calls = legacy_calls

    def opening(self, index: int, usage: Usage | None = None) -> bytes:
        """Return the first frame of a choice; no bytes if the endpoint has no such frame."""
        return b"" if self._opening is None else self._frame(index, self._opening, b"null", usage)

    def piece(self, index: int, piece: Piece, usage: Usage | None = None) -> bytes:
        """Return the frames of a piece: none if it is empty, else one for each of its kinds of output."""
        frames = b""
        if piece.reasoning:
            frames += self._content(index, self._reasoning, _reasoning(piece.reasoning), usage)
        if piece.text:
            frames += self._content(index, self._text, piece.text, usage)
        for delta in piece.tool_calls:
            value = _function_call_delta(delta) if self._legacy_calls else _tool_call_delta(delta)
            frames += self._content(index, self._tool_calls, value, usage)
        return frames

    def _content(self, index: int, around: tuple[bytes, bytes], value: Any, usage: Usage | None) -> bytes:
        return self._frame(index, around[0] + encode_json(value) + around[1], b"null", usage)

    def closing(self, index: int, finish_reason: str | None, usage: Usage | None = None) -> bytes:
        return self._frame(index, self._closing, encode_json(finish_reason), usage)

    def total(self, usage: Usage) -> bytes:
        """Return the last chunk of a stream with `include_usage`. It has no choices, only the usage of the answer."""
        return self._before + b"]" + self._after(usage)

    def _frame(self, index: int, content: bytes, finish_reason: bytes, usage: Usage | None) -> bytes:
        choice = b'{"index":%d,%b,"logprobs":null,"finish_reason":%b}]' % (index, content, finish_reason)
        return self._before + choice + self._after(usage)

    def _after(self, usage: Usage | None) -> bytes:
        if usage is not None:
            return b',"usage":' + encode_json(usage.to_dict()) + b"}\n\n"
        return b',"usage":null}\n\n' if self._usage_key else b"}\n\n"


def _message(piece: Piece, legacy_calls: bool) -> dict[str, Any]:
    """Return the assistant's message. Keys for reasoning and tool calls are present only if there are any."""
    calls = whole_tool_calls(piece.tool_calls)
    message: dict[str, Any] = {
        "role": "assistant",
        "content": piece.text if piece.text or not calls else None,
        "refusal": None,
    }
    if piece.reasoning:
        message |= _reasoning(piece.reasoning)
    if calls and legacy_calls:
        message["function_call"] = {"name": calls[0].name, "arguments": calls[0].arguments}
    elif calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in calls
        ]
    return message


def _reasoning(text: str) -> dict[str, Any]:
    """Return the reasoning under both of its names: vLLM and others had `reasoning_content` before `reasoning`."""
    return {"reasoning_content": text, "reasoning": text}


def _function_call_delta(delta: ToolCallDelta) -> dict[str, Any]:
    """Return more of a call in the older form."""
    return {**({"name": delta.name} if delta.id else {}), "arguments": delta.arguments}


def _tool_call_delta(delta: ToolCallDelta) -> dict[str, Any]:
    if not delta.id:
        return {"index": delta.index, "function": {"arguments": delta.arguments}}
    function = {"name": delta.name, "arguments": delta.arguments}
    return {"index": delta.index, "id": delta.id, "type": "function", "function": function}


def _object(head: AnswerHead, name: str) -> dict[str, Any]:
    return {
        "id": head.id,
        "object": name,
        "created": head.created,
        "model": head.model,
        "service_tier": head.service_tier,
        "system_fingerprint": head.system_fingerprint,
    }
