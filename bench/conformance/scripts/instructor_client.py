"""instructor in its default mode (a named tool), with JSON schema, and streamed."""

from typing import Literal

import instructor
from checks import API_KEY, BASE_URL, MODEL, check, main
from openai import OpenAI
from pydantic import BaseModel

QUESTION = [{"role": "user", "content": "Which city?"}]


class City(BaseModel):
    name: Literal["Paris", "Oslo"]  # a small model may never end a free text


def client(**options: object) -> instructor.Instructor:
    return instructor.from_openai(OpenAI(base_url=BASE_URL, api_key=API_KEY), **options)


@check
def tools() -> None:
    """the default mode"""
    assert isinstance(client().chat.completions.create(model=MODEL, messages=QUESTION, response_model=City), City)


@check
def json_schema() -> None:
    """the mode of JSON schemas"""
    made = client(mode=instructor.Mode.JSON_SCHEMA)
    assert isinstance(made.chat.completions.create(model=MODEL, messages=QUESTION, response_model=City), City)


@check
def partial() -> None:
    """objects that grow while they stream"""
    parts = list(client().chat.completions.create_partial(model=MODEL, messages=QUESTION, response_model=City))
    assert parts and parts[-1].name is not None


main()
