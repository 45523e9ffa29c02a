"""langchain-openai: chat, structured output in its three methods, tools, and /v1/responses."""

from typing import Literal

from checks import API_KEY, BASE_URL, MODEL, check, main
from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class City(BaseModel):
    """A city."""

    name: Literal["Paris", "Oslo"]  # a small model may never end a free text


def get_weather(city: str) -> str:
    """Get the weather of a city."""
    return "sunny, 21 degrees"


def chat(**options: object) -> ChatOpenAI:
    return ChatOpenAI(model=MODEL, base_url=BASE_URL, api_key=API_KEY, **options)


@check
def plain() -> None:
    """invoke and stream"""
    assert chat().invoke("Hello!").content
    assert "".join(part.content for part in chat().stream("Hello!"))


@check
def structured() -> None:
    """with_structured_output by its default, by function calling, and by JSON schema"""
    for options in ({}, {"method": "function_calling"}, {"method": "json_schema", "strict": True}):
        assert isinstance(chat().with_structured_output(City, **options).invoke("Which city?"), City), options


@check
def responses() -> None:
    """the same over /v1/responses"""
    model = chat(use_responses_api=True)
    assert model.invoke("Hello!").text
    assert isinstance(model.with_structured_output(City).invoke("Which city?"), City)


@check
def agent() -> None:
    """an agent calls a tool by itself and answers with its result"""
    made = create_agent(chat(temperature=0), tools=[get_weather])
    found = made.invoke({"messages": [{"role": "user", "content": "What is the weather in Paris?"}]})
    assert [message.type for message in found["messages"]] == ["human", "ai", "tool", "ai"]


main()
