"""Nonce requests: the model repeats a text that only this request contains, so an answer proves its sequence."""

import random
import string
from typing import Any

from openai import AsyncOpenAI

MODEL = "tidegate-demo"


def make_nonce(rng: random.Random) -> str:
    """Return a nonce without a character twice: of others, the demo model gets about one in a thousand wrong."""
    drawn = "".join(rng.sample(string.ascii_letters + string.digits, 8))
    return f"{drawn[:4]}-{drawn[4:]}"


def body(nonce: str, **more: Any) -> dict[str, Any]:
    message = {"role": "user", "content": f"Repeat: {nonce}"}
    return {"model": MODEL, "messages": [message], "temperature": 0, "max_tokens": 40, **more}


async def ask(client: AsyncOpenAI, nonce: str, **more: Any) -> str:
    answer = await client.chat.completions.create(**body(nonce, **more))
    return answer.choices[0].message.content or ""


async def ask_streamed(client: AsyncOpenAI, nonce: str, **more: Any) -> str:
    stream = await client.chat.completions.create(**body(nonce, stream=True, **more))
    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])
