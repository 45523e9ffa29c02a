"""The message object of /v1/messages, and the events that stream it.

Knows Anthropic's names; does not know HTTP, or how tokens become pieces.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from gateway.output.piece import Piece, whole_tool_calls
from gateway.protocol.bodies.tools import as_object
from gateway.requests.answers.choice import Choice
from gateway.requests.answers.chunks import Usage, encode_json

MESSAGE_PREFIX = "msg_"


@dataclass(frozen=True, slots=True)
class MessageHead:
    """What is known of a message before it is generated. `max_tokens` is the maximum that the client asked for."""

    id: str
    model: str
    service_tier: str
    max_tokens: int | None

    @property
    def signature(self) -> str:
        """What clients send back beside reasoning. It has no meaning here."""
        return self.id

    def message(self, content: list[dict[str, Any]], usage: Usage, **end: Any) -> dict[str, Any]:
        """Return the message object. `end` has the reason why it ended."""
        fields = {"id": self.id, "type": "message", "role": "assistant", "model": self.model, "content": content}
        return {**fields, "stop_reason": None, "stop_sequence": None, **end, "usage": self.usage(usage)}

    def usage(self, usage: Usage) -> dict[str, Any]:
        """Return the token counts. Tokens from the prefix cache are not among the `input_tokens`."""
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
            "service_tier": "standard" if self.service_tier == "default" else self.service_tier,
        }

    def end(self, choice: Choice, usage: Usage) -> dict[str, Any]:
        """Return why the message ended: Anthropic's `stop_reason` and `stop_sequence`."""
        reason, sequence = "end_turn", None
        if choice.finish_reason == "length":
            is_shorter = self.max_tokens is not None and usage.completion_tokens < self.max_tokens
            reason = "model_context_window_exceeded" if is_shorter else "max_tokens"
        elif choice.finish_reason == "content_filter":
            reason = "refusal"
        elif choice.has_tool_calls:
            reason = "tool_use"
        elif isinstance(choice.stop_reason, str):
            reason, sequence = "stop_sequence", choice.stop_reason
        return {"stop_reason": reason, "stop_sequence": sequence}


class MessageAnswer:
    """A builder of the message object. Implements `gateway.requests.answers.answer.Answer`."""

    def __init__(self, head: MessageHead) -> None:
        self._head = head

    def response(self, choices: Sequence[tuple[Choice, Piece]], usage: Usage) -> dict[str, Any]:
        choice, piece = choices[0]
        content = _content(piece, self._head.signature)
        return self._head.message(content, usage, **self._head.end(choice, usage))

    def chunks(self, usage_key: bool) -> "MessageEvents":
        return MessageEvents(self._head)


def _content(piece: Piece, signature: str) -> list[dict[str, Any]]:
    """Return the whole output as content blocks. An output without any gets an empty text: clients expect a block."""
    calls = whole_tool_calls(piece.tool_calls)
    blocks: list[dict[str, Any]] = []
    if piece.reasoning:
        blocks.append({"type": "thinking", "thinking": piece.reasoning, "signature": signature})
    if piece.text or not (blocks or calls):
        blocks.append({"type": "text", "text": piece.text})
    for call in calls:
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": as_object(call.arguments)})
    return blocks


Kind = Literal["thinking", "text", "tool_use"]
# The object with which a block of text begins, and the names of its delta and of the text in it.
_TEXT: dict[Kind, tuple[dict[str, str], str, str]] = {
    "text": ({"type": "text", "text": ""}, "text_delta", "text"),
    "thinking": ({"type": "thinking", "thinking": "", "signature": ""}, "thinking_delta", "thinking"),
}


class MessageEvents:
    """An encoder of the events of one stream. Implements `gateway.requests.answers.answer.StreamEncoder`.

    Blocks come one after the other; each ends before the next one begins.
    """

    keeps_tokens: ClassVar = False

    def __init__(self, head: MessageHead) -> None:
        self._head = head
        self._index = -1  # of the newest block
        self._growing: Kind | None = None  # the newest block, unless it has ended
        self._choice: Choice | None = None

    def begin(self) -> bytes:
        return b""

    def opening(self, index: int, usage: Usage | None = None) -> bytes:
        assert usage is not None, "every frame is given the usage so far"
        return _frame("message_start", message=self._head.message([], usage))

    def piece(self, index: int, piece: Piece, usage: Usage | None = None) -> bytes:
        frames = self._add_text("thinking", piece.reasoning) + self._add_text("text", piece.text)
        for call in piece.tool_calls:
            if call.id:
                block = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
                frames += self._end_block() + self._begin_block("tool_use", block)
            if call.arguments:
                frames += self._delta("input_json_delta", "partial_json", call.arguments)
        return frames

    def closing(self, choice: Choice, usage: Usage | None = None) -> bytes:
        self._choice = choice
        empty = self._begin_block("text", _TEXT["text"][0]) if self._index < 0 else b""
        return empty + self._end_block()

    def end(self, usage: Usage) -> bytes:
        assert self._choice is not None, "the choice has ended"
        end = self._head.end(self._choice, usage)
        return _frame("message_delta", delta=end, usage=self._head.usage(usage)) + _frame("message_stop")

    def _add_text(self, kind: Kind, text: str) -> bytes:
        if not text:
            return b""
        block, delta, name = _TEXT[kind]
        begin = b"" if self._growing == kind else self._end_block() + self._begin_block(kind, block)
        return begin + self._delta(delta, name, text)

    def _begin_block(self, kind: Kind, block: dict[str, Any]) -> bytes:
        self._index += 1
        self._growing = kind
        return _frame("content_block_start", index=self._index, content_block=block)

    def _end_block(self) -> bytes:
        if self._growing is None:
            return b""
        is_thinking, self._growing = self._growing == "thinking", None
        signature = self._delta("signature_delta", "signature", self._head.signature) if is_thinking else b""
        return signature + _frame("content_block_stop", index=self._index)

    def _delta(self, kind: str, name: str, text: str) -> bytes:
        return _frame("content_block_delta", index=self._index, delta={"type": kind, name: text})


def _frame(kind: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), encode_json({"type": kind, **fields}))
