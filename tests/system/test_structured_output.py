"""Grammars from a body to the engine: the demo model writes calls and formats that it was never trained for."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any, Literal

import jsonschema
import pytest
from openai import AsyncOpenAI
from pydantic import BaseModel, Field

from tests.system.random_schemas import Schema, random_schemas

MODEL = "tidegate-demo"
HI: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "unit"],
}
PROMPTS = (
    "What is the weather in Paris?",
    "Give me an example.",
    "Extract the person: Ada Lovelace, born 1815 in London, likes mathematics.",
    "hi",
    "List three users with their addresses.",
)
AT_ONCE = 4  # requests that are open at the same time: the realtime tier gives each a minute
TOOLS: Any = [{"type": "function", "function": {"name": "get_weather", "parameters": WEATHER, "strict": True}}]


class Step(BaseModel):
    explanation: str
    output: str


class MathReasoning(BaseModel):
    steps: list[Step]
    final_answer: str


class CalendarEvent(BaseModel):
    name: str
    date: str
    participants: list[str]


class ResearchPaper(BaseModel):
    title: str
    authors: list[str]
    abstract: str
    keywords: list[str]


class Attribute(BaseModel):
    name: str
    value: str


class Element(BaseModel):
    type: Literal["div", "button", "header", "section", "field", "form"]
    label: str
    children: list["Element"]
    attributes: list[Attribute]


class Report(BaseModel):
    place: str = Field(max_length=6)
    degrees: int = Field(ge=-99, le=99)
    sky: Literal["clear", "cloudy"]


@pytest.mark.full
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


@pytest.mark.full
async def test_a_forced_call_as_a_stream(client: AsyncOpenAI) -> None:
    options: Any = {"tool_choice": {"type": "function", "function": {"name": "get_weather"}}, "tools": TOOLS}
    async with client.chat.completions.stream(model=MODEL, messages=HI, **options) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_completion()
    assert kinds.count("tool_calls.function.arguments.done") == 1
    calls = final.choices[0].message.tool_calls
    assert calls is not None and set(json.loads(calls[0].function.arguments)) == {"city", "unit"}


@pytest.mark.full
async def test_a_parsed_answer(client: AsyncOpenAI) -> None:
    answer = await client.chat.completions.parse(model=MODEL, messages=HI, response_format=Report)
    assert isinstance(answer.choices[0].message.parsed, Report) and answer.choices[0].finish_reason == "stop"


async def invalid(client: AsyncOpenAI, schemas: Sequence[Schema | None], **options: Any) -> list[str]:
    """Ask for an answer of each schema, or for any object, at temperature 1; return what was wrong, with its schema."""
    turns = asyncio.Semaphore(AT_ONCE)

    async def fault(seed: int, schema: Schema | None) -> str | None:
        named = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
        response_format: Any = named if schema else {"type": "json_object"}
        async with turns:
            answer = await client.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": PROMPTS[seed % len(PROMPTS)]}],
                response_format=response_format,
                temperature=1,
                seed=seed,
                **options,
            )
        text = answer.choices[0].message.content or ""
        try:
            jsonschema.Draft202012Validator(schema or {"type": "object"}).validate(json.loads(text))
        except (ValueError, jsonschema.ValidationError) as error:
            return f"{answer.choices[0].finish_reason}: {error}: {schema}: {text[-100:]}"
        return None

    faults = await asyncio.gather(*(fault(seed, schema) for seed, schema in enumerate(schemas)))
    return [text for text in faults if text is not None]


@pytest.mark.full
async def test_answers_match_schemas_that_nobody_has_seen(client: AsyncOpenAI) -> None:
    assert await invalid(client, [*random_schemas(1, 12), None, None], max_tokens=400) == []


@pytest.mark.full
@pytest.mark.parametrize("form", [MathReasoning, CalendarEvent, ResearchPaper, Element])
async def test_openais_examples_of_parse(client: AsyncOpenAI, form: type[BaseModel]) -> None:
    for seed in range(3):
        answer = await client.chat.completions.parse(model=MODEL, messages=HI, response_format=form, seed=seed)
        assert isinstance(answer.choices[0].message.parsed, form)
