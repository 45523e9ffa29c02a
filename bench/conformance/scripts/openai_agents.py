"""OpenAI's agents library, which uses /v1/responses by default, and chat completions if told."""

from typing import Literal

from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from checks import API_KEY, BASE_URL, MODEL, check, main
from openai import AsyncOpenAI
from pydantic import BaseModel

set_tracing_disabled(True)


class City(BaseModel):
    name: Literal["Paris", "Oslo"]  # a small model may never end a free text


@function_tool
def get_weather(city: str) -> str:
    """Get the weather of a city."""
    called.append(city)
    return "sunny, 21 degrees"


called: list[str] = []
QUESTION = "What is the weather in Paris?"


def models() -> tuple[OpenAIResponsesModel, OpenAIChatCompletionsModel]:
    client = AsyncOpenAI(base_url=BASE_URL, api_key=API_KEY)
    return OpenAIResponsesModel(MODEL, client), OpenAIChatCompletionsModel(MODEL, client)


@check
async def plain() -> None:
    """an agent answers, in both modes"""
    for model in models():
        assert (await Runner.run(Agent(name="a", model=model), "Hello!")).final_output


@check
async def tools() -> None:
    """an agent calls a function tool by itself and answers with its result, in both modes"""
    for model in models():
        called.clear()
        agent = Agent(name="a", model=model, tools=[get_weather])
        answer = await Runner.run(agent, QUESTION, max_turns=4)
        assert called == ["Paris"] and "21" in answer.final_output, (called, answer.final_output)


@check
async def streamed() -> None:
    """a streamed run ends with an output, in both modes"""
    for model in models():
        result = Runner.run_streamed(Agent(name="a", model=model), "Hello!")
        assert [event async for event in result.stream_events()]
        assert result.final_output


@check
async def typed() -> None:
    """an agent with an output type gives an object of it, in both modes"""
    for model in models():
        answer = await Runner.run(Agent(name="a", model=model, output_type=City), "Which city?")
        assert isinstance(answer.final_output, City)


main()
