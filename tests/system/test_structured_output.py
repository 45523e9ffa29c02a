"""Grammars from a body to the engine: the demo model writes calls and formats that it was never trained for."""

import json
from typing import Any, Literal

import pytest
from openai import AsyncOpenAI
from pydantic import BaseModel, Field

pytestmark = pytest.mark.full

MODEL = "tidegate-demo"
HI: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "unit"],
}
TOOLS: Any = [{"type": "function", "function": {"name": "get_weather", "parameters": WEATHER, "strict": True}}]


class Report(BaseModel):
    place: str = Field(max_length=6)
    degrees: int = Field(ge=-99, le=99)
    sky: Literal["clear", "cloudy"]


async def test_a_forced_call_matches_its_schema(client: AsyncOpenAI) -> None:
    required: Any = "required"
    answer = await client.chat.completions.create(
        model=MODEL, messages=HI, tools=TOOLS, tool_choice=required, parallel_tool_calls=False
    )
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.type == "function" and call.function.name == "get_weather"
    arguments = json.loads(call.function.arguments)
    assert set(arguments) == {"city", "unit"} and arguments["unit"] in ("C", "F") and len(arguments["city"]) <= 8


async def test_a_forced_call_as_a_stream(client: AsyncOpenAI) -> None:
    options: Any = {"tool_choice": {"type": "function", "function": {"name": "get_weather"}}, "tools": TOOLS}
    async with client.chat.completions.stream(model=MODEL, messages=HI, **options) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_completion()
    assert kinds.count("tool_calls.function.arguments.done") == 1
    calls = final.choices[0].message.tool_calls
    assert calls is not None and set(json.loads(calls[0].function.arguments)) == {"city", "unit"}


async def test_a_parsed_answer(client: AsyncOpenAI) -> None:
    answer = await client.chat.completions.parse(model=MODEL, messages=HI, response_format=Report)
    assert isinstance(answer.choices[0].message.parsed, Report) and answer.choices[0].finish_reason == "stop"
