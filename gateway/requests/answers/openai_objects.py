"""The response objects of the two completion endpoints, with OpenAI's field names."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gateway.output.piece import Piece, whole_tool_calls
from gateway.requests.answers.choice import Choice
from gateway.requests.answers.chunks import (
    CHAT_CHUNKS,
    LEGACY_CHUNKS,
    TEXT_CHUNKS,
    ChunkEncoder,
    Usage,
    output_ids,
    reasoning,
)
from gateway.requests.answers.token_report import TokenReport


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

    def __init__(self, head: AnswerHead, report: TokenReport | None = None, *, legacy_calls: bool = False) -> None:
        self._head = head
        self._report = report
        self._legacy_calls = legacy_calls  # whether a call is shown in the older form, `function_call`

    def response(self, choices: Sequence[tuple[Choice, Piece]], usage: Usage) -> dict[str, Any]:
        answer = _object(self._head, "chat.completion") | {
            "choices": [
                {
                    "index": choice.index,
                    "message": _message(piece, self._legacy_calls),
                    "logprobs": self._report.chat_logprobs(piece.tokens) if self._report is not None else None,
                    "finish_reason": choice.finish_reason,
                }
                | _extras(choice, piece, self._report)
                for choice, piece in choices
            ],
            "usage": usage.to_dict(),
        }
        return answer | _prompt_extras(*choices[0], self._report)

    def chunks(self, usage_key: bool) -> ChunkEncoder:
        form = LEGACY_CHUNKS if self._legacy_calls else CHAT_CHUNKS
        return ChunkEncoder(_object(self._head, "chat.completion.chunk"), form, usage_key, self._report)


class TextAnswer:
    """A builder of `text_completion` objects. Whole answers and chunks are of the same object type."""

    id_prefix = "cmpl-"

    def __init__(self, head: AnswerHead, report: TokenReport | None = None) -> None:
        self._head = head
        self._report = report

    def response(self, choices: Sequence[tuple[Choice, Piece]], usage: Usage) -> dict[str, Any]:
        return _object(self._head, "text_completion") | {
            "choices": [
                {
                    "index": choice.index,
                    "text": piece.text,
                    "logprobs": self._report.text_logprobs(piece.tokens) if self._report is not None else None,
                    "finish_reason": choice.finish_reason,
                }
                | _extras(choice, piece, self._report)
                | _prompt_extras(choice, piece, self._report)
                for choice, piece in choices
            ],
            "usage": usage.to_dict(),
        }

    def chunks(self, usage_key: bool) -> ChunkEncoder:
        return ChunkEncoder(_object(self._head, "text_completion"), TEXT_CHUNKS, usage_key, self._report)


def _message(piece: Piece, legacy_calls: bool) -> dict[str, Any]:
    """Return the assistant's message. Keys for reasoning and tool calls are present only if there are any."""
    calls = whole_tool_calls(piece.tool_calls)
    message: dict[str, Any] = {
        "role": "assistant",
        "content": piece.text if piece.text or not calls else None,
        "refusal": None,
    }
    if piece.reasoning:
        message |= reasoning(piece.reasoning)
    if calls and legacy_calls:
        message["function_call"] = {"name": calls[0].name, "arguments": calls[0].arguments}
    elif calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in calls
        ]
    return message


def _extras(choice: Choice, piece: Piece, report: TokenReport | None) -> dict[str, Any]:
    """Return the fields that vLLM adds to a choice, if there is something to tell."""
    extras: dict[str, Any] = {} if choice.stop_reason is None else {"stop_reason": choice.stop_reason}
    if report is not None and report.with_ids:
        extras["token_ids"] = output_ids(piece)
    return extras


def _prompt_extras(choice: Choice, piece: Piece, report: TokenReport | None) -> dict[str, Any]:
    """Return the fields about the prompt that vLLM adds, if the client asked for them."""
    extras: dict[str, Any] = {}
    if report is not None and report.with_ids:
        extras["prompt_token_ids"] = piece.prompt_token_ids
    if report is not None and report.num_prompt_logprobs is not None:
        extras["prompt_logprobs"] = report.prompt_logprobs(choice.prompt_logprobs)
    return extras


def _object(head: AnswerHead, name: str) -> dict[str, Any]:
    return {
        "id": head.id,
        "object": name,
        "created": head.created,
        "model": head.model,
        "service_tier": head.service_tier,
        "system_fingerprint": head.system_fingerprint,
    }
