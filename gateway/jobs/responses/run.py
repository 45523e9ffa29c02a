"""One response while it is generated. Its end is stored before it is reported.

Knows the answer, its stream of tokens and the store; does not know HTTP.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import structlog

from gateway.dialects.responses.answer import ResponseAnswer
from gateway.dialects.responses.items import Item
from gateway.http.sse import PING, Write
from gateway.jobs.responses.conversations import Conversations
from gateway.jobs.responses.event_log import EventWriter
from gateway.jobs.responses.store import NoRoom, ResponseStore
from gateway.protocol.errors import ApiError, internal_error, store_failed
from gateway.requests.generate.generation import Generation
from gateway.requests.generate.waiting import WaitingGeneration
from scheduler.clock import Clock
from scheduler.config import Tier
from scheduler.store.errors import STORE_AWAY

log = structlog.get_logger(__name__)

Tell = Callable[[dict[str, Any], str | None], Awaitable[None]]

RETRY_S = 1.0  # seconds between attempts to store the end of a background response
SHUT_DOWN = "The server was shut down before the response was complete. Please create it again."


class ResponseRun:
    """A submitted response. Call `respond`, `stream` or `run_in_background`, and only once.

    `store` is None if the response is not to be stored. `owner` is the name of the caller's API key.
    """

    def __init__(
        self,
        stream: Generation | WaitingGeneration,
        items: Sequence[Item],
        owner: str | None,
        store: ResponseStore | None,
        conversations: Conversations,
    ) -> None:
        assert isinstance(stream.answer, ResponseAnswer)
        self.answer = stream.answer
        self._stream = stream
        self._items = items
        self._owner = owner
        self._store = store
        self._conversations = conversations
        self._is_end_stored = False

    @property
    def tier(self) -> Tier:
        """The tier that serves the request. This may be the lower tier of a demotion."""
        return self._stream.tier

    async def respond(self) -> dict[str, Any]:
        """Return the whole response. Raises `ApiError` if the generation fails; nothing is stored then."""
        if self.answer.reports_tokens:  # the pieces tell to which item the tokens belong
            await self._stream.stream(_discard)
        else:
            await self._stream.respond()
        self._add_receipt()
        await self._create(self.answer.ending)
        return self.answer.ending

    async def stream(self, write: Write) -> None:
        """Write the events of the response. A failed generation is reported by the event `response.failed`."""
        try:
            await self._stream.stream(write)
        except ApiError as error:
            self.answer.failed(error)
        self._add_receipt()
        try:
            await self._create(self.answer.ending)
        except STORE_AWAY as error:
            self.answer.failed(store_failed(error))
        await write(self.answer.events.last())

    async def run_in_background(self, writer: EventWriter, store: ResponseStore, clock: Clock, tell: Tell) -> None:
        """Generate a response that is stored as queued. If it is cancelled meanwhile, its end is not stored.

        `tell` is called with the stored end and the response's owner.

        If the store takes no writes, the response fails; its end is stored when the store takes writes again.
        """
        try:
            await self._stream.stream(self._background_write(writer, store))
        except ApiError as error:
            self.answer.failed(error)
        except STORE_AWAY as error:
            self.answer.failed(store_failed(error))
        except Exception:  # a bug; nobody else could tell the client
            log.exception("background_response_failed", response_id=self.answer.id)
            self.answer.failed(internal_error())
        except BaseException:  # the task was cancelled: by the client, or because the gateway ends
            self.answer.failed(internal_error(SHUT_DOWN))
            await self._end_in_background(writer, store, tell)
            raise
        while True:
            try:
                return await self._end_in_background(writer, store, tell)
            except STORE_AWAY:
                await clock.sleep(RETRY_S)

    async def _end_in_background(self, writer: EventWriter, store: ResponseStore, tell: Tell) -> None:
        """Store the end and report it. The events of a cancelled response end without a last event."""
        self._add_receipt()
        self._is_end_stored = self._is_end_stored or await store.update(self.answer.ending)
        if self._is_end_stored:
            await self._add_to_conversation(self.answer.ending)
        await writer.write(self.answer.events.last() if self._is_end_stored else b"", is_last=True)
        if self._is_end_stored:
            await tell(self.answer.ending, self._owner)

    def _background_write(self, writer: EventWriter, store: ResponseStore) -> Write:
        is_queued = True

        async def write(frames: bytes) -> None:
            nonlocal is_queued
            if frames == PING:
                return
            await writer.write(frames)
            if is_queued and self.answer.output.has_begun:
                is_queued = False
                await store.update(self.answer.unfinished("in_progress"))

        return write

    def _add_receipt(self) -> None:
        if (receipt := self._stream.receipt) is not None:
            self.answer.ending["tidegate"] = receipt

    async def _add_to_conversation(self, response: dict[str, Any]) -> None:
        """Add the response's input and output to its conversation, if it has one and has not failed."""
        conversation, items = response["conversation"], [*self._items, *response["output"]]
        if conversation is None or response["status"] == "failed":
            return
        try:
            await self._conversations.append(conversation["id"], items, self._owner)
        except ApiError as error:  # it was generated, so the client gets it
            log.warning("a response is not in its conversation", response_id=self.answer.id, reason=error.message)

    async def _create(self, response: dict[str, Any]) -> None:
        await self._add_to_conversation(response)
        if self._store is None:
            return
        try:
            await self._store.create(response, self._items, self._owner)
        except NoRoom:  # it was generated, so the client gets it
            response["store"] = False
            log.warning("a response is not stored: there is no room", response_id=self.answer.id)


async def _discard(frames: bytes) -> None:
    pass
