"""The response object of /v1/responses, and the events that stream it.

Knows OpenAI's names and the request that the object repeats; does not know the store or HTTP.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from gateway.dialects.responses.items import Item
from gateway.dialects.responses.output import Event, ItemStatus, Output
from gateway.dialects.responses.request import ResponseRequest
from gateway.dialects.responses.tools import CustomTool, FunctionTool, NamespaceTool
from gateway.output.piece import Piece
from gateway.protocol.bodies.tools import HostedTool
from gateway.protocol.errors import ApiError
from gateway.requests.answers.choice import Choice
from gateway.requests.answers.chunks import Usage, encode_json
from gateway.requests.answers.token_report import TokenReport
from gateway.requests.tokens.model_files import SamplingDefaults


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """The fields of a response that are known before it is generated."""

    id: str
    created_at: int  # Unix seconds
    service_tier: str
    stored: bool
    request: ResponseRequest
    defaults: SamplingDefaults

    def to_json(self) -> dict[str, Any]:
        """Return the response object without its status, its output and what belongs to them."""
        request, text = self.request, self.request.text
        reasoning = request.reasoning
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created_at,
            "background": bool(request.background),
            "conversation": request.conversation.model_dump() if request.conversation else None,
            "frequency_penalty": request.extensions.get("frequency_penalty") or 0,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "max_tool_calls": request.max_tool_calls,
            "metadata": request.metadata or {},
            "model": request.model,
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "presence_penalty": request.extensions.get("presence_penalty") or 0,
            "previous_response_id": request.previous_response_id,
            "prompt_cache_key": request.prompt_cache_key,
            "reasoning": {
                "effort": reasoning.effort if reasoning else None,
                "summary": reasoning.wanted_summary if reasoning else None,
            },
            "safety_identifier": request.safety_identifier,
            "service_tier": self.service_tier,
            "store": self.stored,
            "temperature": _first(request.temperature, self.defaults.temperature),
            "text": {
                "format": text.format.model_dump(exclude_none=True) if text and text.format else {"type": "text"},
                "verbosity": (text.verbosity if text else None) or "medium",
            },
            "tool_choice": _dumped(request.tool_choice) or "auto",
            "tools": [_tool(tool) for tool in request.tools or () if not isinstance(tool, HostedTool)],
            "top_logprobs": request.top_logprobs or 0,
            "top_p": _first(request.top_p, self.defaults.top_p),
            "truncation": request.truncation or "disabled",
            "user": request.user,
        }


class ResponseAnswer:
    """A builder of the response object. Implements `gateway.requests.answers.answer.Answer`.

    `now_s` returns the time in Unix seconds. `report` is None if the client asked for no log probabilities.
    """

    def __init__(self, head: ResponseHead, now_s: Callable[[], int], report: TokenReport | None = None) -> None:
        self._head = head.to_json()
        self._now_s = now_s
        self.is_background = bool(head.request.background)
        self.id = head.id
        self.reports_tokens = report is not None
        reasoning = head.request.reasoning
        self.output = Output(
            head.id,
            report,
            summaries=reasoning is not None and bool(reasoning.wanted_summary),
            seals="reasoning.encrypted_content" in (head.request.include or ()),
            tools=head.request.offered_tools,
        )
        self.events = ResponseEvents(self)
        self._final: dict[str, Any] | None = None

    def response(self, choices: Sequence[tuple[Choice, Piece]], usage: Usage) -> dict[str, Any]:
        choice, piece = choices[0]
        for _ in (*self.output.feed(piece), *self.output.finish(item_status(choice.finish_reason))):
            pass  # nobody watches the items grow
        return self.ended(choice.finish_reason, usage)

    def chunks(self, usage_key: bool) -> "ResponseEvents":
        return self.events

    def unfinished(self, status: str) -> dict[str, Any]:
        """Return the response while it is generated. `status` is `queued` or `in_progress`."""
        return self._object(status, [])

    def ended(self, finish_reason: str | None, usage: Usage) -> dict[str, Any]:
        """Return the response after its regular end, and keep it as `ending`."""
        if item_status(finish_reason) == "incomplete":
            reason = "content_filter" if finish_reason == "content_filter" else "max_output_tokens"
            details = {"incomplete_details": {"reason": reason}}
            self._final = self._object("incomplete", self.output.items, usage=usage_object(usage), **details)
        else:
            self._final = self._object(
                "completed", self.output.items, usage=usage_object(usage), completed_at=self._now_s()
            )
        return self._final

    def failed(self, error: ApiError) -> dict[str, Any]:
        """Return the response after a failure, and keep it as `ending`."""
        fault = {"code": "rate_limit_exceeded" if error.status == 429 else "server_error", "message": error.message}
        self._final = self._object("failed", self.output.items, error=fault)
        return self._final

    @property
    def ending(self) -> dict[str, Any]:
        """The response as it ended."""
        assert self._final is not None, "the response has ended"
        return self._final

    def _object(self, status: str, output: list[Item], **more: Any) -> dict[str, Any]:
        empty = {"completed_at": None, "error": None, "incomplete_details": None, "usage": None}
        return {**self._head, "status": status, "output": output, **empty, **more}


class ResponseEvents:
    """An encoder of the events of one stream. Implements `gateway.requests.answers.answer.StreamEncoder`.

    `end` gives no frames: the response is stored first, and `last` gives the event that reports its end.
    """

    keeps_tokens: ClassVar = True  # the whole response is reported at its end

    def __init__(self, answer: ResponseAnswer) -> None:
        self._answer = answer
        self._number = 0
        self._finish_reason: str | None = None

    def begin(self) -> bytes:
        """Return `response.created` and the event of the state that follows."""
        status = "queued" if self._answer.is_background else "in_progress"
        return self._snapshot("response.created", status) + self._snapshot(f"response.{status}", status)

    def opening(self, index: int, usage: Usage | None = None) -> bytes:
        return self._snapshot("response.in_progress", "in_progress") if self._answer.is_background else b""

    def piece(self, index: int, piece: Piece, usage: Usage | None = None) -> bytes:
        return b"".join([self._frame(event) for event in self._answer.output.feed(piece)])

    def closing(self, choice: Choice, usage: Usage | None = None) -> bytes:
        self._finish_reason = choice.finish_reason
        events = self._answer.output.finish(item_status(choice.finish_reason))
        return b"".join([self._frame(event) for event in events])

    def end(self, usage: Usage) -> bytes:
        self._answer.ended(self._finish_reason, usage)
        return b""

    def last(self) -> bytes:
        """Return the last event: `response.completed`, `response.incomplete` or `response.failed`."""
        return last_event(self._answer.ending, self._number)

    def _snapshot(self, kind: str, status: str) -> bytes:
        return self._frame({"type": kind, "response": self._answer.unfinished(status)})

    def _frame(self, event: Event) -> bytes:
        frame = _frame(event, self._number)
        self._number += 1
        return frame


def last_event(response: dict[str, Any], number: int) -> bytes:
    """Return the frame of the event that reports the end of `response`. `number` is its sequence number."""
    return _frame({"type": f"response.{response['status']}", "response": response}, number)


def _frame(event: Event, number: int) -> bytes:
    data = encode_json({**event, "sequence_number": number})
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), data)


def item_status(finish_reason: str | None) -> ItemStatus:
    """Return the status of the last output item of an answer that ended for `finish_reason`."""
    return "incomplete" if finish_reason in ("length", "content_filter") else "completed"


def usage_object(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _first(value: float | None, default: float) -> float:
    return default if value is None else value


def _tool(tool: FunctionTool | CustomTool | NamespaceTool) -> dict[str, Any]:
    if isinstance(tool, FunctionTool):
        return tool.model_dump() | {"strict": bool(tool.strict)}
    inner = {"tools": [_tool(t) for t in tool.tools]} if isinstance(tool, NamespaceTool) else {}
    return tool.model_dump(exclude={"tools"}, exclude_none=True) | inner


def _dumped(choice: Any) -> Any:
    return choice if choice is None or isinstance(choice, str) else choice.model_dump()
