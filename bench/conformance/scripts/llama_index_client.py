"""llama-index with an OpenAI-like server: chat, completion, structured output by tools, streams."""

from typing import Literal

from checks import API_KEY, BASE_URL, MODEL, check, main
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

HELLO = [ChatMessage(role="user", content="Hello!")]


class City(BaseModel):
    """A city."""

    name: Literal["Paris", "Oslo"]  # a small model may never end a free text


def model(**options: object) -> OpenAILike:
    return OpenAILike(model=MODEL, api_base=BASE_URL, api_key=API_KEY, context_window=2048, **options)


@check
def chat() -> None:
    """chat and its stream"""
    assert model(is_chat_model=True).chat(HELLO).message.content
    assert "".join(part.delta or "" for part in model(is_chat_model=True).stream_chat(HELLO))


@check
def completion() -> None:
    """completion"""
    assert model().complete("Tidegate is").text


@check
def structured() -> None:
    """as_structured_llm with function calling"""
    made = model(is_chat_model=True, is_function_calling_model=True).as_structured_llm(City)
    assert isinstance(made.chat(HELLO).raw, City)


main()
