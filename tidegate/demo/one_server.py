"""The demo of one server: ask questions, run bulk requests beside chat, compare the first tokens.

Starts `tidegate serve` as a user would, and uses the official openai client. Knows nothing of Tidegate's internals. All
processes that the demo starts end with it.
"""

import asyncio
import itertools
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median

from openai import AsyncOpenAI

from tidegate.demo.parts import STOP_TIMEOUT_S, DemoError, free_port, start, wait_until_ready
from tidegate.settings.base import DEMO_MODEL, CommonSettings
from tidegate.settings.commands import DemoSettings
from tidegate.supervision.process import end_child

BULK_STREAMS = 32  # number of bulk requests in flight at any time
QUESTIONS = ("What is Tidegate?", "What does flex mean?", "How much is 17 + 25?", "Repeat: k7Qz-09ab")


def show_one_server(settings: DemoSettings) -> None:
    """Show it on a free port. Raises `DemoError` or `OpenAIError`."""
    with serving(settings) as base_url:
        asyncio.run(_show(base_url, settings.seconds))


@contextmanager
def serving(settings: CommonSettings) -> Iterator[str]:
    """Run `tidegate serve` with `settings` on a free port and an empty data directory. Yield its base URL."""
    port, settings = free_port(), settings.model_copy(update={"log_level": "warning"})
    with tempfile.TemporaryDirectory(prefix="tidegate-demo-") as data_dir:
        server = start("serve", settings, "--port", str(port), "--data-dir", data_dir)
        try:
            wait_until_ready([server], f"http://127.0.0.1:{port}")
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            end_child(server, STOP_TIMEOUT_S)


async def _show(base_url: str, seconds: float) -> None:
    async with AsyncOpenAI(base_url=base_url, api_key="demo", max_retries=0) as client:
        models = [m.id async for m in await client.models.list()]
        model = DEMO_MODEL if DEMO_MODEL in models else models[0]
        for question in QUESTIONS:
            print(f"> {question}\n{await _ask(client, model, question)}\n")
        await _first_tokens(client, model, 1.0)  # opens connections; not counted
        alone = await _first_tokens(client, model, max(2.0, seconds / 6))
        beside, bulk_per_s = await _beside_bulk(client, model, seconds)
    print(table(alone, beside, bulk_per_s))


async def _ask(client: AsyncOpenAI, model: str, question: str) -> str:
    answer = await client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": question}], temperature=0, max_tokens=120
    )
    return answer.choices[0].message.content or ""


async def _first_tokens(client: AsyncOpenAI, model: str, seconds: float) -> list[float]:
    """Return the TTFTs in seconds of short chats, which are sent one after another, at most five per second."""
    until_s = time.monotonic() + seconds
    times = []
    while time.monotonic() < until_s:
        sent_s = time.monotonic()
        stream = await client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "What is Tidegate?"}],
            temperature=0,
            max_tokens=8,
            stream=True,
        )
        async with stream:
            async for chunk in stream:
                if chunk.choices and chunk.choices[0].delta.content:
                    times.append(time.monotonic() - sent_s)
                    break
        await asyncio.sleep(0.2)
    return times


async def _beside_bulk(client: AsyncOpenAI, model: str, seconds: float) -> tuple[list[float], float]:
    """Return the TTFTs of chats while `BULK_STREAMS` bulk requests run, and the bulk tokens per second."""
    numbers = itertools.count()
    produced = [0]
    until_s = time.monotonic() + seconds

    async def bulk_stream() -> None:
        while time.monotonic() < until_s:
            text = f"Count from {next(numbers) % 50} to {100}"
            answer = await client.chat.completions.create(
                model=model,
                messages=[{"role": "user", "content": text}],
                service_tier="flex",
                max_tokens=128,
                extra_body={"ignore_eos": True},
            )
            produced[0] += answer.usage.completion_tokens if answer.usage else 0

    started_s = time.monotonic()
    streams = [asyncio.create_task(bulk_stream()) for _ in range(BULK_STREAMS)]
    try:
        beside = await _first_tokens(client, model, seconds)
        await asyncio.gather(*streams)
    finally:
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
    return beside, produced[0] / (time.monotonic() - started_s)


def table(alone: list[float], beside: list[float], bulk_per_s: float) -> str:
    """Return the measurements as lines of text. Raises `DemoError` if a measurement is missing."""
    if not alone or not beside:
        raise DemoError("no chat got a first token: there is nothing to compare")
    a, b = median(alone) * 1000, median(beside) * 1000
    return (
        f"median time to first token, alone             {a:8.1f} ms   ({len(alone)} requests)\n"
        f"median time to first token, beside bulk       {b:8.1f} ms   ({len(beside)} requests)   {b / a:.2f} times\n"
        f"bulk, {BULK_STREAMS} streams, meanwhile                   {bulk_per_s:8.0f} tokens/s"
    )
