"""The stream chunks of the two completion endpoints.

A stream has one chunk per token, so encoding chunks is the hottest path of the gateway. The parts that all chunks of a
stream have in common are therefore encoded only once per stream.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import msgspec

from gateway.http.sse import DONE
from gateway.output.piece import Piece, ToolCallDelta
from gateway.requests.answers.choice import Choice
from gateway.requests.answers.token_report import TokenReport

encode_json = msgspec.json.encode


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
class ChunkForm:
    """The bytes of a choice that are the same in all chunks of an endpoint: around its outputs, and at its ends."""

    text: tuple[bytes, bytes]
    reasoning: tuple[bytes, bytes]
    tool_calls: tuple[bytes, bytes]
    closing: bytes
    opening: bytes | None  # None: a choice begins with its first output
    legacy_calls: bool = False  # whether a call is shown in the older form, `function_call`

    @property
    def is_chat(self) -> bool:
        return self.opening is not None


CHAT_CHUNKS = ChunkForm(
    text=(b'"delta":{"content":', b"}"),
    reasoning=(b'"delta":', b""),
    tool_calls=(b'"delta":{"tool_calls":[', b"]}"),
    closing=b'"delta":{}',
    opening=b'"delta":{"role":"assistant","content":"","refusal":null}',
)
LEGACY_CHUNKS = replace(CHAT_CHUNKS, tool_calls=(b'"delta":{"function_call":', b"}"), legacy_calls=True)
_TEXT = (b'"text":', b"")  # plain completions are not parsed, so there is nothing but text
TEXT_CHUNKS = ChunkForm(_TEXT, _TEXT, _TEXT, closing=b'"text":""', opening=None)


class ChunkEncoder:
    """An encoder of the `data: …` frames of one stream.

    If `usage_key` is true, every chunk has the key `usage`. Its value is null if the caller gives no usage.
    """

    keeps_tokens: ClassVar = False

    def __init__(self, head: dict[str, Any], form: ChunkForm, usage_key: bool, report: TokenReport | None) -> None:
        self._before = b"data: " + encode_json(head)[:-1] + b',"choices":['
        self._form = form
        self._usage_key = usage_key
        self._report = report

    def begin(self) -> bytes:
        return b""

    def opening(self, index: int, usage: Usage | None = None) -> bytes:
        """Return the first frame of a choice; no bytes if the endpoint has no such frame."""
        return b"" if self._form.opening is None else self._frame(index, self._form.opening, b"null", usage)

    def piece(self, index: int, piece: Piece, usage: Usage | None = None) -> bytes:
        """Return the frames of a piece: none if it is empty, else one for each of its kinds of output.

        The first frame has what the answer reports of the tokens of the piece.
        """
        if self._report is None and piece.text and not (piece.reasoning or piece.tool_calls):
            return self._frame(index, self._form.text[0] + encode_json(piece.text) + self._form.text[1], b"null", usage)
        logprobs, extra, top = self._reported(piece)
        frames = b""
        for around, value in self._contents(piece):
            content = around[0] + encode_json(value) + around[1]
            frames += self._frame(index, content, b"null", usage, logprobs, extra, top)
            logprobs, extra, top = b"null", b"", b""
        return frames

    def _contents(self, piece: Piece) -> list[tuple[tuple[bytes, bytes], Any]]:
        """Return the outputs of `piece` in their order, each with the bytes around its value.

        If the piece has only tokens that show nothing, return one empty text, for what is reported of these tokens.
        """
        contents: list[tuple[tuple[bytes, bytes], Any]] = []
        if piece.reasoning:
            contents.append((self._form.reasoning, reasoning(piece.reasoning)))
        if piece.text:
            contents.append((self._form.text, piece.text))
        call_delta = _function_call_delta if self._form.legacy_calls else _tool_call_delta
        contents += [(self._form.tool_calls, call_delta(delta)) for delta in piece.tool_calls]
        return contents or ([(self._form.text, "")] if piece else [])

    def _reported(self, piece: Piece) -> tuple[bytes, bytes, bytes]:
        """Return what the answer reports of the tokens of `piece`.

        This is the value of `logprobs`, more fields of the choice, and more fields of the chunk.
        """
        report = self._report
        if report is None:
            return b"null", b"", b""
        logprobs = report.chat_logprobs(piece.tokens) if self._form.is_chat else report.text_logprobs(piece.tokens)
        ids = b',"token_ids":' + encode_json(output_ids(piece)) if report.with_ids else b""
        prompt_ids = b',"prompt_token_ids":' + encode_json(piece.prompt_token_ids) if piece.prompt_token_ids else b""
        extra, top = (ids, prompt_ids) if self._form.is_chat else (ids + prompt_ids, b"")
        return encode_json(logprobs), extra, top

    def closing(self, choice: Choice, usage: Usage | None = None) -> bytes:
        return self._frame(choice.index, self._form.closing, encode_json(choice.finish_reason), usage)

    def end(self, usage: Usage) -> bytes:
        """Return the last frames. With `include_usage`, a chunk without choices reports the usage of the answer."""
        total = self._before + b"]" + self._after(usage) if self._usage_key else b""
        return total + DONE

    def _frame(
        self,
        index: int,
        content: bytes,
        finish_reason: bytes,
        usage: Usage | None,
        logprobs: bytes = b"null",
        extra: bytes = b"",
        top: bytes = b"",
    ) -> bytes:
        fields = (index, content, logprobs, finish_reason, extra, top)
        choice = b'{"index":%d,%b,"logprobs":%b,"finish_reason":%b%b}]%b' % fields
        return self._before + choice + self._after(usage)

    def _after(self, usage: Usage | None) -> bytes:
        if usage is not None:
            return b',"usage":' + encode_json(usage.to_dict()) + b"}\n\n"
        return b',"usage":null}\n\n' if self._usage_key else b"}\n\n"


def reasoning(text: str) -> dict[str, Any]:
    """Return the reasoning under both of its names: vLLM and others had `reasoning_content` before `reasoning`."""
    return {"reasoning_content": text, "reasoning": text}


def _function_call_delta(delta: ToolCallDelta) -> dict[str, Any]:
    """Return more of a call in the older form."""
    return {**({"name": delta.name} if delta.id else {}), "arguments": delta.arguments}


def output_ids(piece: Piece) -> list[int]:
    return [token.token_id for token in piece.tokens if not token.is_prompt]


def _tool_call_delta(delta: ToolCallDelta) -> dict[str, Any]:
    if not delta.id:
        return {"index": delta.index, "function": {"arguments": delta.arguments}}
    function = {"name": delta.name, "arguments": delta.arguments}
    return {"index": delta.index, "id": delta.id, "type": "function", "function": function}
