"""The output items of one response while it is generated, and the events that report each change to them.

Knows pieces and OpenAI's items and events; does not know streams, requests or the response object. Events get their
sequence numbers where they are framed (gateway/dialects/responses/answer.py).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from gateway.dialects.responses.items import Item, item_id, sealed
from gateway.dialects.responses.tools import OfferedTool, custom_input
from gateway.output.piece import Piece, ToolCallDelta
from gateway.requests.answers.token_report import TokenReport

Event = dict[str, Any]
ItemStatus = Literal["in_progress", "completed", "incomplete"]


@dataclass(slots=True)
class _Growing:
    """The item that gets the next output. An output has at most one such item, and it is the last one."""

    kind: Literal["message", "reasoning", "function_call", "custom_tool_call"]
    id: str
    position: int  # index in the response's output
    call: dict[str, Any] = field(default_factory=dict)  # of a call: its id and the name of its tool
    text: str = ""  # text of a message, or of reasoning, or the arguments of a call
    logprobs: list[dict[str, Any]] = field(default_factory=list)  # of the tokens of a message, if requested
    is_summary: bool = False  # the reasoning is shown as its own summary
    is_sealed: bool = False  # the reasoning is also shown as `encrypted_content`

    def item(self, status: ItemStatus) -> Item:
        """Return the item as a JSON object. An item in progress has no content yet, as in OpenAI's events."""
        begun = status == "in_progress"
        if self.call:
            given = {"input": self.input} if self.kind == "custom_tool_call" else {"arguments": self.text}
            given = dict.fromkeys(given, "") if begun else given
            return {"id": self.id, "type": self.kind, "status": status, **self.call, **given}
        content = [] if begun else [self.part(self.text, self.logprobs)]
        if self.kind == "reasoning":
            shown: Item = (
                {"summary": content, "content": []} if self.is_summary else {"summary": [], "content": content}
            )
            if self.is_sealed:
                shown["encrypted_content"] = None if begun else sealed(self.text)
            return {"id": self.id, "type": self.kind, "status": status, **shown}
        return {"id": self.id, "type": self.kind, "status": status, "role": "assistant", "content": content}

    def part(self, text: str, logprobs: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
        if self.kind == "reasoning":
            return {"type": "summary_text" if self.is_summary else "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}

    @property
    def input(self) -> str:
        """The input of a custom tool."""
        return custom_input(self.text) if self.text else ""

    @property
    def place(self) -> dict[str, Any]:
        place = {"item_id": self.id, "output_index": self.position}
        if self.call:
            return place
        return place | ({"summary_index": 0} if self.is_summary else {"content_index": 0})

    @property
    def part_event(self) -> str:
        """The common beginning of the names of the events that report the item's part."""
        return "response.reasoning_summary_part" if self.is_summary else "response.content_part"

    @property
    def text_event(self) -> str:
        """The common beginning of the names of the events that report the text of the item's part."""
        if self.kind == "message":
            return "response.output_text"
        return "response.reasoning_summary_text" if self.is_summary else "response.reasoning_text"


class Output:
    """The output of the response `response_id`. `items` holds the finished items.

    `report` is None if the client asked for no log probabilities. They are reported of text only. With `summaries`,
    reasoning is shown as its own summary: nothing here could write a shorter one. With `seals`, it is shown as
    `encrypted_content` as well. `tools` are the tools that may be called; calls of others keep their names.
    """

    def __init__(
        self,
        response_id: str,
        report: TokenReport | None = None,
        *,
        summaries: bool = False,
        seals: bool = False,
        tools: Iterable[OfferedTool] = (),
    ) -> None:
        self._response_id = response_id
        self._summaries = summaries
        self._seals = seals
        self._tools = {tool.chat_name: tool for tool in tools}
        self._report = report
        self._growing: _Growing | None = None
        self.items: list[Item] = []

    @property
    def has_begun(self) -> bool:
        return self._growing is not None or bool(self.items)

    def feed(self, piece: Piece) -> Iterator[Event]:
        """Add a piece. Yield the events that report what it changes."""
        if piece.reasoning:
            yield from self._begin("reasoning")
            yield from self._add(f"{self._current.text_event}.delta", piece.reasoning)
        if piece.text:
            yield from self._begin("message")
            logprobs = self._logprobs(piece)
            self._current.logprobs += logprobs
            yield from self._add(f"{self._current.text_event}.delta", piece.text, logprobs=logprobs)
        for delta in piece.tool_calls:
            if delta.id:
                yield from self._begin_call(delta)
            if self._current.kind == "custom_tool_call":
                self._current.text += delta.arguments  # its input is reported at its end: before, it is cut JSON
            elif delta.arguments:
                yield from self._add("response.function_call_arguments.delta", delta.arguments)

    def finish(self, status: ItemStatus) -> Iterator[Event]:
        """End the output. `status` is that of the last item. Yield the events that end this item.

        An output without any item gets an empty message, because clients expect an item.
        """
        if not self.has_begun:
            yield from self._begin("message")
        yield from self._end(status)

    def _begin(self, kind: Literal["message", "reasoning"]) -> Iterator[Event]:
        """Make an item of `kind` the growing item, unless it is one already."""
        if self._growing is not None and self._growing.kind == kind:
            return
        yield from self._end("completed")
        is_summary = self._summaries and kind == "reasoning"
        item = _Growing(kind, self._next_id(kind), len(self.items), is_summary=is_summary, is_sealed=self._seals)
        yield self._open(item)
        yield self._event(f"{self._current.part_event}.added", part=self._current.part(""))

    def _begin_call(self, delta: ToolCallDelta) -> Iterator[Event]:
        yield from self._end("completed")
        tool = self._tools.get(delta.name)
        name = {"name": delta.name} if tool is None else tool.own_name
        kind: Literal["function_call", "custom_tool_call"] = "function_call"
        if tool is not None and tool.is_custom:
            kind = "custom_tool_call"
        yield self._open(_Growing(kind, self._next_id(kind), len(self.items), {"call_id": delta.id, **name}))

    def _open(self, growing: _Growing) -> Event:
        self._growing = growing
        item = growing.item("in_progress")
        return {"type": "response.output_item.added", "output_index": growing.position, "item": item}

    def _add(self, event: str, text: str, **more: Any) -> Iterator[Event]:
        self._current.text += text
        yield self._event(event, delta=text, **more)

    def _end(self, status: ItemStatus) -> Iterator[Event]:
        growing = self._growing
        if growing is None:
            return
        if growing.kind == "function_call":
            name = growing.call["name"]
            yield self._event("response.function_call_arguments.done", name=name, arguments=growing.text)
        elif growing.kind == "custom_tool_call":
            yield self._event("response.custom_tool_call_input.delta", delta=growing.input)
            yield self._event("response.custom_tool_call_input.done", input=growing.input)
        else:
            logprobs = {"logprobs": growing.logprobs} if growing.kind == "message" else {}
            yield self._event(f"{growing.text_event}.done", text=growing.text, **logprobs)
            yield self._event(f"{growing.part_event}.done", part=growing.part(growing.text, growing.logprobs))
        item = growing.item(status)
        self._growing = None
        self.items.append(item)
        yield {"type": "response.output_item.done", "output_index": growing.position, "item": item}

    def _logprobs(self, piece: Piece) -> list[dict[str, Any]]:
        found = self._report.chat_logprobs(piece.tokens) if self._report is not None else None
        return found["content"] if found is not None else []

    @property
    def _current(self) -> _Growing:
        assert self._growing is not None, "an item has begun"
        return self._growing

    def _next_id(self, kind: str) -> str:
        return item_id(self._response_id, kind, len(self.items))

    def _event(self, kind: str, **fields: Any) -> Event:
        return {"type": kind, **self._current.place, **fields}
