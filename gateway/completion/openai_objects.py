"""The response objects and stream chunks of the two completion endpoints.

Knows only OpenAI's field names. A stream has one chunk per token, so encoding chunks is the hottest path of the
gateway. The parts that all chunks of a stream have in common are therefore encoded only once per stream.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from gateway.completion.choice import Choice

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

    def response(self, choices: Sequence[tuple[Choice, str]], usage: Usage) -> dict[str, Any]:
        return _object(self._head, "chat.completion") | {
            "choices": [
                {
                    "index": choice.index,
                    "message": {"role": "assistant", "content": text, "refusal": None},
                    "logprobs": None,
                    "finish_reason": choice.finish_reason,
                }
                for choice, text in choices
            ],
            "usage": usage.to_dict(),
        }

    def chunks(self, usage_key: bool) -> "ChunkEncoder":
        head = _object(self._head, "chat.completion.chunk")
        return ChunkEncoder(
            head,
            opening=b'"delta":{"role":"assistant","content":"","refusal":null}',
            text=(b'"delta":{"content":', b"}"),
            closing=b'"delta":{}',
            usage_key=usage_key,
        )


class TextAnswer:
    """A builder of `text_completion` objects. Whole answers and chunks are of the same object type."""

    id_prefix = "cmpl-"

    def __init__(self, head: AnswerHead) -> None:
        self._head = head

    def response(self, choices: Sequence[tuple[Choice, str]], usage: Usage) -> dict[str, Any]:
        return _object(self._head, "text_completion") | {
            "choices": [
                {"index": choice.index, "text": text, "logprobs": None, "finish_reason": choice.finish_reason}
                for choice, text in choices
            ],
            "usage": usage.to_dict(),
        }

    def chunks(self, usage_key: bool) -> "ChunkEncoder":
        head = _object(self._head, "text_completion")
        return ChunkEncoder(head, opening=None, text=(b'"text":', b""), closing=b'"text":""', usage_key=usage_key)


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
        closing: bytes,
        usage_key: bool,
    ) -> None:
        self._before = b"data: " + encode_json(head)[:-1] + b',"choices":['
        self._opening = opening
        self._text = text
        self._closing = closing
        self._usage_key = usage_key

    def opening(self, index: int, usage: Usage | None = None) -> bytes:
        """Return the first frame of a choice; no bytes if the endpoint has no such frame."""
        return b"" if self._opening is None else self._frame(index, self._opening, b"null", usage)

    def text(self, index: int, text: str, usage: Usage | None = None) -> bytes:
        before, after = self._text
        return self._frame(index, before + encode_json(text) + after, b"null", usage)

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


def _object(head: AnswerHead, name: str) -> dict[str, Any]:
    return {
        "id": head.id,
        "object": name,
        "created": head.created,
        "model": head.model,
        "service_tier": head.service_tier,
        "system_fingerprint": head.system_fingerprint,
    }
