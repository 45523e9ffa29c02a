"""Long streams for tests of how servers end."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from openai import APIConnectionError, APIError, AsyncOpenAI

from tests.system.nonces import MODEL


async def stream_to_its_end(
    client: AsyncOpenAI, max_tokens: int, started: asyncio.Semaphore, goes_on: asyncio.Event | None = None
) -> str | APIError | None:
    """The last finish reason, or the error that the server sent instead. `started` counts first tokens; what follows
    them is read once `goes_on` is set."""
    reasons: list[str | None] = []
    try:
        stream = await client.completions.create(
            model=MODEL, prompt="Tidegate", max_tokens=max_tokens, stream=True, extra_body={"ignore_eos": True}
        )
        async for chunk in stream:
            if not reasons:
                started.release()
                if goes_on is not None:
                    await goes_on.wait()
            reasons += [choice.finish_reason for choice in chunk.choices]
    except APIError as error:
        return error
    return reasons[-1]


@asynccontextmanager
async def long_streams(
    client: AsyncOpenAI, num: int, go_on: asyncio.Event | None = None
) -> AsyncIterator[list["asyncio.Task[str | APIError | None]"]]:
    """Streams that take much longer than a test. They are cancelled at the end.

    With `go_on`, the streams are not read before it is set: reading so many takes as long as generating them.
    """
    started = asyncio.Semaphore(0)
    streams = [asyncio.create_task(stream_to_its_end(client, 1900, started, go_on)) for _ in range(num)]
    try:
        async with asyncio.timeout(60):
            for _ in range(num):
                await started.acquire()
        yield streams
    finally:
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)


def ended_by_the_server(answer: str | APIError | None) -> bool:
    """Whether the answer is complete, or an error that the server sent, not a broken connection."""
    return answer == "length" or (isinstance(answer, APIError) and not isinstance(answer, APIConnectionError))
