"""Run one line of a batch as an ordinary completion, in the batch tier.

A line must not fail because the queue was full or a worker died. After such answers, the line is therefore tried again,
with growing pauses. Knows HTTP statuses; does not know Redis, files, or how many lines run at once.
"""

import logging
import random
import secrets
from typing import Any, Protocol

import structlog
from redis.exceptions import ConnectionError as StoreUnreachable
from redis.exceptions import TimeoutError as StoreSilent

from gateway.batches.input import BatchLine
from gateway.batches.model import Batch, LineResult
from gateway.batches.output import answered_line
from gateway.identity import service_tier_of
from gateway.protocol.errors import internal_error
from scheduler.clock import Clock
from scheduler.config import Tier

log = logging.getLogger(__name__)

RECEIPT_KEY = "x-tidegate-receipt"  # of a batch's metadata; "1": the answers of its lines have receipts
BUSY = (429, 503)  # a full queue, a missing worker: the line is tried again until the completion window ends
MAX_FAILURES = 4  # attempts that end with another server error; the last of these errors is the line's answer
FIRST_PAUSE_S = 0.1  # seconds between the first and the second attempt; each pause is twice the one before
LONGEST_PAUSE_S = 10.0  # seconds


class Completions(Protocol):
    """The part of CompletionService (gateway/completion/service.py) that a batch needs."""

    async def complete(
        self,
        endpoint: str,
        body: dict[str, Any],
        *,
        tier: Tier,
        service_tier: str,
        request_id: str,
        owner: str | None,
        wants_receipt: bool,
    ) -> tuple[int, dict[str, Any]]: ...


class LineRunner:
    def __init__(self, completions: Completions, tier: Tier, clock: Clock) -> None:
        self._completions = completions
        self._clock = clock
        self.reconfigure(tier)

    def reconfigure(self, tier: Tier) -> None:
        """Use `tier` for every attempt that begins from now on."""
        self._tier = tier
        self._service_tier = service_tier_of(tier)

    async def run(self, batch: Batch, line: BatchLine) -> LineResult:
        """Run a line until it has a final answer, and return the result. To stop the generation, cancel this call."""
        failures = pauses = 0
        while True:
            # Each attempt needs a new id, because the queue ignores a request whose id it still holds.
            request_id = f"req_{secrets.token_hex(16)}"
            structlog.contextvars.bind_contextvars(request_id=request_id, tier=self._tier.name)
            status, body = await self._attempt(batch, line, request_id)
            if status < 500 and status not in BUSY:
                return answered_line(batch.id, line, request_id, status, body)
            failures += status not in BUSY
            if failures == MAX_FAILURES:
                return answered_line(batch.id, line, request_id, status, body)
            await self._clock.sleep(_pause_s(pauses))
            pauses += 1

    async def _attempt(self, batch: Batch, line: BatchLine, request_id: str) -> tuple[int, dict[str, Any]]:
        try:
            return await self._completions.complete(
                batch.endpoint,
                line.body,
                tier=self._tier,
                service_tier=self._service_tier,
                request_id=request_id,
                owner=batch.owner,
                wants_receipt=(batch.metadata or {}).get(RECEIPT_KEY) in ("1", "true"),
            )
        except (StoreUnreachable, StoreSilent):
            return 503, internal_error("The store is not reachable at the moment.").body()
        except Exception:  # a bug that one line triggers must not end the other lines
            log.exception("a batch line failed")
            return 500, internal_error().body()


def _pause_s(pauses: int) -> float:
    """Return the seconds of the next pause, after `pauses` earlier pauses.

    Each pause is twice as long as the one before, up to `LONGEST_PAUSE_S`. It is then shortened by a random part of up
    to 25 %, so that lines do not retry all at once.
    """
    pause_s: float = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(pauses, 20))
    return pause_s * random.uniform(0.75, 1.0)
