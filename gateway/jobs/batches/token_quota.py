"""The limit of the prompt tokens that the unfinished batches of one API key may have together.

Each key with a limit has a hash in Redis with the tokens of its batches. A batch counts for as long as it is among the
unfinished batches of the store, so its tokens are free again when it is over, however it ended, and no crash can leak
them. Tokens are counted only for keys with a limit, and only until the limit is exceeded. The tokens that the chat
template adds are not counted.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from redis.asyncio import Redis

from gateway.identity import Keyring
from gateway.jobs.batches.input.checks import LineError
from gateway.jobs.batches.input.lines import read_chunks
from gateway.jobs.batches.input.prompt_text import prompt_parts
from gateway.jobs.batches.model import Batch
from gateway.store_keys import GatewayKeys
from scheduler.store.scripts import load_script

CountTokens = Callable[[str | None, Sequence[str]], Awaitable[int]]  # of a model, in these texts


class TokenQuota:
    def __init__(self, redis: Redis, keyring: Keyring, count_tokens: CountTokens) -> None:
        self._keys = GatewayKeys.of(redis)
        self._reserve = load_script(redis, "gateway.jobs.batches", "reserve_tokens")
        self._keyring = keyring
        self._count_tokens = count_tokens

    async def reserve(self, batch: Batch, path: Path) -> tuple[LineError, ...]:
        """Count the prompt tokens of the checked input at `path` against the limit of the batch's key.

        Return the error with which the batch fails if they exceed the limit. A repeated call counts them once.
        """
        key = self._keyring.named(batch.owner)
        if key is None or key.batch_enqueued_tokens is None:
            return ()
        limit = key.batch_enqueued_tokens
        tokens = await self._count(path, partial(self._count_tokens, batch.size.model if batch.size else None), limit)
        if tokens > limit:
            return (_too_large(key.name, limit),)
        args: list[str | int] = [batch.id, tokens, limit]
        others = int(
            await self._reserve(keys=[self._keys.batch_tokens(key.name), self._keys.batches_unfinished], args=args)
        )
        return () if others + tokens <= limit else (_exceeded(key.name, limit, others, tokens),)

    async def _count(self, path: Path, count_tokens: Callable[[Sequence[str]], Awaitable[int]], limit: int) -> int:
        """Return the number of prompt tokens; a smaller number that is above `limit` if they exceed it."""
        total, prompts = 0, _prompts(path)
        while total <= limit and (found := await asyncio.to_thread(next, prompts, None)) is not None:
            texts, num_ids = found
            total += num_ids + await count_tokens(texts)
        return total


def _prompts(path: Path) -> Iterator[tuple[list[str], int]]:
    """Yield the texts of each chunk's prompts, and the number of their token ids. Reading blocks."""
    for chunk in read_chunks(path):
        parts = [prompt_parts(line.body) for line in chunk]
        yield [text for texts, _ in parts for text in texts], sum(num_ids for _, num_ids in parts)


def _exceeded(name: str, limit: int, others: int, tokens: int) -> LineError:
    message = (
        f"Enqueued token limit reached for the API key {name!r}. Limit: {limit:,} enqueued tokens; its unfinished "
        f"batches have {others:,}, and this one has {tokens:,}. Please try again once some in_progress batches have "
        "been completed."
    )
    return LineError("token_limit_exceeded", message)


def _too_large(name: str, limit: int) -> LineError:
    message = (
        f"Enqueued token limit reached for the API key {name!r}. Limit: {limit:,} enqueued tokens; this batch alone "
        "has more. Please split it into smaller batches."
    )
    return LineError("token_limit_exceeded", message)
