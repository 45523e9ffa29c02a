"""A request that was refused because too many wait, and whose caller can wait: it is submitted again until it is taken.

Knows refusals and when to come back; does not know how an answer is generated or who waits for it.
"""

from collections.abc import Awaitable, Callable
from typing import Any

from gateway.http.sse import Write
from gateway.protocol.errors import ApiError
from gateway.requests.answers.answer import Answer
from gateway.requests.generate.generation import Generation
from gateway.requests.prepare.prepared import PreparedRequest
from scheduler.clock import Clock
from scheduler.config import Tier

Submit = Callable[[PreparedRequest], Awaitable[Generation]]


def may_wait(refusal: ApiError, prepared: PreparedRequest) -> bool:
    """Return whether `prepared` would be taken later: its bulk tier is full, and its own deadline sets no end."""
    return refusal.code == "resource_unavailable" and _wait_s(refusal) is not None and not prepared.has_own_deadline


def _wait_s(refusal: ApiError) -> float | None:
    """Return after how many seconds a refused request is expected to be taken; None: it never will be."""
    after_ms = refusal.headers.get("retry-after-ms")
    is_final = after_ms is None or refusal.headers.get("x-should-retry") == "false"
    return None if is_final or after_ms is None else float(after_ms) / 1000


class WaitingGeneration:
    """Stands for the generation of a request that was refused. It begins when the request is taken."""

    def __init__(self, prepared: PreparedRequest, refusal: ApiError, submit: Submit, clock: Clock) -> None:
        """`refusal` is the first one. `submit` raises `ApiError` for each further one."""
        self._prepared = prepared
        self._submit = submit
        self._clock = clock
        self._taken: Generation | None = None
        self.expected_s = _wait_s(refusal) or 0.0  # seconds until the request is expected to be taken

    @property
    def answer(self) -> Answer:
        return self._prepared.answer

    @property
    def tier(self) -> Tier:
        return self._prepared.tier

    @property
    def receipt(self) -> dict[str, Any] | None:
        return None if self._taken is None else self._taken.receipt

    async def respond(self) -> dict[str, Any]:
        return await (await self._take()).respond()

    async def stream(self, write: Write) -> None:
        await (await self._take()).stream(write)

    async def _take(self) -> Generation:
        """Wait until the request is taken. Raises `ApiError` if it is refused for good."""
        wait_s: float | None = self.expected_s
        while self._taken is None:
            await self._clock.sleep(wait_s or 0.0)
            try:
                self._taken = await self._submit(self._prepared.at(self._clock.wall_ms()))
            except ApiError as refusal:
                if (wait_s := _wait_s(refusal)) is None:
                    raise
        return self._taken
