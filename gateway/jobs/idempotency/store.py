"""Idempotency keys: a request that is sent again with the same key gets the answer of the first one.

The records are in Redis, for all gateways, and survive restarts. A record belongs to one API key, and lives for a day,
or until the key has too many bytes of answers.
Only good answers are kept: after an error, the same key may be used again. While the first request runs, a repetition
is refused with 409, as Stripe does, and not made to wait: it would hold a connection until the first one ends.

If a gateway dies, its attempt's lease ends, and a repetition then takes the attempt over. It gets the id that the first
attempt has chosen for what it creates, so that a batch that was created just before the crash is found again.

The libraries for this (fastapi-idempotency, asgi-idempotency-header) are young or abandoned, hold whole bodies in
memory, and know no such id. Knows keys, fingerprints and answers as bytes; does not know HTTP bodies or routes.
"""

import asyncio
import contextlib
import hashlib
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError

from gateway.protocol.errors import ApiError, retry_after
from gateway.store_keys import IDEMPOTENCY_S, GatewayKeys
from scheduler.clock import Clock
from scheduler.store.scripts import load_script

log = structlog.get_logger(__name__)

MAX_ANSWER_BYTES = 64 * 2**20  # of one owner
LEASE_S = 30.0  # seconds without a renewal after which an attempt counts as lost
RENEW_S = 10.0  # seconds between two renewals; two may fail


@dataclass(frozen=True, slots=True)
class KeptAnswer:
    """The answer of a request. It `is_replayed` if an earlier request with the same key had it."""

    answer: bytes
    is_replayed: bool


@dataclass(frozen=True, slots=True)
class Attempt:
    """An attempt that runs. `id` is for what the request creates: 24 hex digits, the same for all attempts."""

    record: str
    token: str
    id: str
    owner: str | None


class IdempotencyStore:
    def __init__(self, redis: Redis, clock: Clock) -> None:
        self._keys = GatewayKeys.of(redis)
        self._begin = load_script(redis, "gateway.jobs.idempotency", "begin")
        self._update = load_script(redis, "gateway.jobs.idempotency", "update")
        self._keep = load_script(redis, "gateway.jobs.idempotency", "keep")
        self._clock = clock

    async def run(
        self, key: str, owner: str | None, fingerprint: str, execute: Callable[[str], Awaitable[bytes | None]]
    ) -> KeptAnswer | None:
        """Return the answer of the first request with this key, or of `execute(id)` if this is the first one.

        Return None if `execute` does: it had no answer that may be repeated. Raises `ApiError` 409 while the first
        request runs, and 422 if it was another request.
        """
        attempt = await self._attempt(key, owner, fingerprint)
        if isinstance(attempt, KeptAnswer):
            return attempt
        answer = None
        try:
            async with self._renewed(attempt):
                answer = await execute(attempt.id)
        finally:
            await self._end(attempt, answer)
        return None if answer is None else KeptAnswer(answer, is_replayed=False)

    async def _attempt(self, key: str, owner: str | None, fingerprint: str) -> Attempt | KeptAnswer:
        scope = hashlib.sha256(f"{owner or ''}\0{key}".encode()).hexdigest()
        record, token = self._keys.idempotency + scope, secrets.token_hex(8)
        times = [self._clock.wall_ms(), self._lease_ms(), IDEMPOTENCY_S * 1000]
        kind, *rest = await self._begin(keys=[record], args=[fingerprint, token, secrets.token_hex(12), *times])
        if kind == b"new":
            return Attempt(record, token, rest[0].decode(), owner)
        if kind == b"done":
            return KeptAnswer(rest[0], is_replayed=True)
        raise _in_use() if kind == b"running" else _other_request()

    @contextlib.asynccontextmanager
    async def _renewed(self, attempt: Attempt) -> AsyncIterator[None]:
        renewing = asyncio.create_task(self._renew(attempt))
        try:
            yield
        finally:
            renewing.cancel()
            await asyncio.wait([renewing])

    async def _renew(self, attempt: Attempt) -> None:
        while True:
            await self._clock.sleep(RENEW_S)
            with contextlib.suppress(RedisError):  # two renewals may fail
                await self._update(keys=[attempt.record], args=[attempt.token, "lease_ms", self._lease_ms()])

    async def _end(self, attempt: Attempt, answer: bytes | None) -> None:
        """Keep the answer; without one, forget the attempt, so that the next one may run at once."""
        try:
            if answer is None:
                await self._update(keys=[attempt.record], args=[attempt.token])
            else:
                owner = attempt.owner or ""
                owned = [self._keys.idempotency_answers + owner, self._keys.idempotency_bytes + owner]
                args: list[str | bytes | int] = [attempt.token, answer]
                args += [self._clock.wall_ms(), IDEMPOTENCY_S * 1000, MAX_ANSWER_BYTES]
                await self._keep(keys=[attempt.record, *owned], args=args)
        except RedisError as error:  # the next attempt runs when the lease has ended
            log.warning("the end of an idempotent request is not stored", error=str(error))

    def _lease_ms(self) -> int:
        return self._clock.wall_ms() + int(LEASE_S * 1000)


def _in_use() -> ApiError:
    message = "A request with this Idempotency-Key is still running. Send it again to get its answer."
    return ApiError(409, message, param="Idempotency-Key", code="idempotency_key_in_use", headers=retry_after(1.0))


def _other_request() -> ApiError:
    message = (
        "This Idempotency-Key was used for another request within the last 24 hours: another endpoint, or another "
        "body. Use a new key for a new request."
    )
    return ApiError(422, message, param="Idempotency-Key", code="idempotency_key_reused")
