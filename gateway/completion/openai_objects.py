"""The response objects and stream chunks of the two completion endpoints.

Knows only OpenAI's field names. A stream has one chunk per token, so encoding chunks is the hottest path of the
gateway. The parts that all chunks of a stream have in common are therefore encoded only once per stream.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from gateway.completion.choice import Choice
from gateway.completion.piece import Piece, ToolCallDelta, whole_tool_calls
from gateway.http.sse import DONE

encode_json = msgspec.json.encode


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    def to_dict(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens, "audio_tokens": 0},
            "completion_tokens_details": {
                "reasoning_tokens": 0,
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

    def __init__(self, head: AnswerHead) -> None:
        self._head = head

    def response(self, choices: Sequence[tuple[Choice, Piece]], usage: Usage) -> dict[str, Any]:
        return _object(self._head, "chat.completion") | {
            "choices": [
                {
                    "index": choice.index,
                    "message": _message(piece),
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
            reasoning=(b'"delta":{"reasoning_content":', b"}"),
            tool_calls=(b'"delta":{"tool_calls":', b"}"),
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
    ) -> None:
        self._before = b"data: " + encode_json(head)[:-1] + b',"choices":['
        self._opening = opening
        self._text = text
        self._reasoning = reasoning
        self._tool_calls = tool_calls
        self._closing = closing
        self._usage_key = usage_key

    def begin(self) -> bytes:
        return b""

    def opening(self, index: int, usage: Usage | None = None) -> bytes:
        """Return the first frame of a choice; no bytes if the endpoint has no such frame."""
        return b"" if self._opening is None else self._frame(index, self._opening, b"null", usage)

    def piece(self, index: int, piece: Piece, usage: Usage | None = None) -> bytes:
        """Return the frames of a piece: none if it is empty, else one for each of its kinds of output."""
        frames = b""
        if piece.reasoning:
            frames += self._content(index, self._reasoning, piece.reasoning, usage)
        if piece.text:
            frames += self._content(index, self._text, piece.text, usage)
        for delta in piece.tool_calls:
            frames += self._content(index, self._tool_calls, [_tool_call_delta(delta)], usage)
        return frames

    def _content(self, index: int, around: tuple[bytes, bytes], value: Any, usage: Usage | None) -> bytes:
        return self._frame(index, around[0] + encode_json(value) + around[1], b"null", usage)

    def closing(self, index: int, finish_reason: str | None, usage: Usage | None = None) -> bytes:
        return self._frame(index, self._closing, encode_json(finish_reason), usage)

    def end(self, usage: Usage) -> bytes:
        """Return the last frames. With `include_usage`, a chunk without choices reports the usage of the answer."""
        total = self._before + b"]" + self._after(usage) if self._usage_key else b""
        return total + DONE

    def _frame(self, index: int, content: bytes, finish_reason: bytes, usage: Usage | None) -> bytes:
        choice = b'{"index":%d,%b,"logprobs":null,"finish_reason":%b}]' % (index, content, finish_reason)
        return self._before + choice + self._after(usage)

    def _after(self, usage: Usage | None) -> bytes:
        if usage is not None:
            return b',"usage":' + encode_json(usage.to_dict()) + b"}\n\n"
        return b',"usage":null}\n\n' if self._usage_key else b"}\n\n"


def _message(piece: Piece) -> dict[str, Any]:
    """Return the assistant's message. Keys for reasoning and tool calls are present only if there are any."""
    calls = whole_tool_calls(piece.tool_calls)
    message: dict[str, Any] = {
        "role": "assistant",
        "content": piece.text if piece.text or not calls else None,
        "refusal": None,
    }
    if piece.reasoning:
        message["reasoning_content"] = piece.reasoning
    if calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in calls
        ]
    return message


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
