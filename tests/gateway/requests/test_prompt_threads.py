"""Prompts of interactive tiers wait neither for bulk prompts nor for the long texts of others."""

import asyncio
import threading
from collections.abc import Iterator

import pytest

from gateway.requests.tokens.prompt_threads import SHORT_THREADS, PromptThreads
from tests.gateway.offline import TIERS
from tests.waiting import until

INTERACTIVE, BULK = TIERS.tiers[TIERS.default_tier], TIERS.tiers[TIERS.batch_tier]


class Work:
    """Work that ends when it is told to."""

    def __init__(self) -> None:
        self.started, self.may_end = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.started.set()
        self.may_end.wait(60)


@pytest.fixture
def works() -> Iterator[list[Work]]:
    works = [Work() for _ in range(2 * SHORT_THREADS + 4)]
    yield works
    for work in works:
        work.may_end.set()


async def test_a_prompt_waits_for_no_bulk_prompts_and_no_long_texts(works: list[Work]) -> None:
    threads = PromptThreads()
    tasks = [asyncio.create_task(threads.of(BULK, "a")(work, is_long=i % 2 == 0)) for i, work in enumerate(works[:4])]
    tasks += [asyncio.create_task(threads.of(INTERACTIVE, "a")(work, is_long=True)) for work in works[4:]]
    await until(lambda: works[0].started.is_set() and works[1].started.is_set() and works[4].started.is_set())
    assert await threads.of(INTERACTIVE, "b")(lambda: 5, is_long=False) == 5
    for work in works:
        work.may_end.set()
    await asyncio.gather(*tasks)
