"""Open Responses: what its compliance suite asks over HTTP, with answers and events checked by its types.

The suite itself is in no package registry. Not asked: its images, which the demo model cannot see, and its WebSocket.
"""

import json
from collections.abc import Iterator
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from checks import BASE_URL, MODEL, check, main
from openresponses_types import types

SAY = {"type": "message", "role": "user", "content": "Say hello in exactly 3 words."}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "name": "get_weather", "description": "Get the weather of a city", "parameters": PARAMETERS}
EVENTS = {
    next(iter(kind.model_fields["type"].annotation)).value: kind  # an enum of one name
    for name, kind in vars(types).items()
    if name.endswith("StreamingEvent")
}


def post(path: str, **body: Any) -> Any:
    headers = {"content-type": "application/json"}
    return urlopen(Request(f"{BASE_URL}{path}", json.dumps({"max_output_tokens": 40, **body}).encode(), headers))


def respond(*items: dict[str, Any], **more: Any) -> dict[str, Any]:
    answer: dict[str, Any] = json.load(post("/responses", model=MODEL, input=items, **more))
    types.ResponseResource.model_validate(answer)
    assert answer["output"] and answer["status"] in ("completed", "incomplete"), answer
    return answer


def events_of(*items: dict[str, Any], **more: Any) -> Iterator[dict[str, Any]]:
    for line in post("/responses", model=MODEL, input=items, stream=True, **more):
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            EVENTS[event["type"]].model_validate(event)
            yield event


@check
def text() -> None:
    """a text"""
    respond(SAY)


@check
def stream() -> None:
    """a stream of events"""
    assert [event["type"] for event in events_of(SAY)][-1] in ("response.completed", "response.incomplete")


@check
def system_prompt() -> None:
    """a system prompt"""
    respond({"type": "message", "role": "system", "content": "You are a pirate."}, SAY)


@check
def several_turns() -> None:
    """several turns, with phases"""
    respond(SAY, {"type": "message", "role": "assistant", "phase": "final_answer", "content": "Hello to you!"}, SAY)


@check
def tool() -> None:
    """a call of a tool, whole and streamed"""
    ask = {"type": "message", "role": "user", "content": "What is the weather in Oslo?"}
    options = {"tools": [TOOL], "tool_choice": "required", "temperature": 0}
    assert respond(ask, **options)["output"][-1]["type"] == "function_call"
    kinds = [event["type"] for event in events_of(ask, **options)]
    assert "response.function_call_arguments.done" in kinds, kinds


@check
def compaction() -> None:
    """a compaction, which a later request continues"""
    compacted = json.load(post("/responses/compact", model=MODEL, input=[SAY], prompt_cache_key="k"))
    types.CompactResource.model_validate(compacted)
    assert compacted["output"][-1]["type"] == "compaction", compacted
    respond(*compacted["output"], SAY)


@check
def compaction_without_a_model() -> None:
    """a compaction without a model is refused"""
    try:
        post("/responses/compact", input=[SAY])
    except HTTPError as error:
        assert error.code == 400, error
    else:
        raise AssertionError("it was answered")


main()
