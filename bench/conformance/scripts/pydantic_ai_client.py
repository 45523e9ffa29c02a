"""pydantic-ai with typed output, which it asks for by a required tool, over both endpoints."""

from typing import Literal

from checks import API_KEY, BASE_URL, MODEL, check, main
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider


class City(BaseModel):
    name: Literal["Paris", "Oslo"]  # a small model may never end a free text


def models() -> tuple[OpenAIChatModel, OpenAIResponsesModel]:
    provider = OpenAIProvider(base_url=BASE_URL, api_key=API_KEY)
    return OpenAIChatModel(MODEL, provider=provider), OpenAIResponsesModel(MODEL, provider=provider)


@check
async def plain() -> None:
    """an agent answers, over both endpoints"""
    for model in models():
        assert (await Agent(model).run("Hello!")).output


@check
async def typed() -> None:
    """typed output by a tool, over both endpoints"""
    for model in models():
        assert isinstance((await Agent(model, output_type=City).run("Which city?")).output, City)


@check
async def native() -> None:
    """typed output by the response format, over both endpoints"""
    for model in models():
        assert isinstance((await Agent(model, output_type=NativeOutput(City)).run("Which city?")).output, City)


@check
async def streamed() -> None:
    """streamed text, over both endpoints"""
    for model in models():
        async with Agent(model).run_stream("Hello!") as result:
            assert [text async for text in result.stream_text()]


main()
