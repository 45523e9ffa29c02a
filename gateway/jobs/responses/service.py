"""The service behind /v1/responses: creates, looks up, follows, cancels and deletes responses.

A response is answered as a chat by the completion service, so tiers, admission and timeouts are the same. Does not know
HTTP.
"""

from contextlib import aclosing
from functools import partial
from typing import Any

from redis.asyncio import Redis

from gateway.dialects.responses.answer import last_event
from gateway.dialects.responses.items import RESPONSE_PREFIX
from gateway.dialects.responses.request import ResponseRequest, parse_response_request
from gateway.fairness import UnderWay
from gateway.http.sse import PING, Write
from gateway.jobs.responses import background
from gateway.jobs.responses.background import BackgroundRuns
from gateway.jobs.responses.compaction import NewCompaction
from gateway.jobs.responses.conversations import Conversations
from gateway.jobs.responses.creation import NewResponse
from gateway.jobs.responses.event_log import EventWriter, follow
from gateway.jobs.responses.history import History
from gateway.jobs.responses.response_ends import Announcer, ResponseEnds
from gateway.jobs.responses.store import NoRoom, ResponseStore, StoredResponse
from gateway.protocol.errors import invalid_value, too_many_followers, too_many_responses
from gateway.requests.generate.generation import Generation
from gateway.requests.generate.service import CompletionService, Endpoint
from gateway.requests.generate.waiting import WaitingGeneration
from scheduler.clock import Clock

ENDPOINT = "/v1/responses"
ONLINE, NOT_HERE = ("stream", "background"), "it is not possible here"
# Followers of responses that are still generated, each of which has a connection to the store.
MAX_FOLLOWERS, MAX_FOLLOWERS_OF_KEY = 512, 128
LOST = "The server that generated the response has ended. Please create it again."


class ResponseService:
    """The responses of one gateway. `redis` and `store` are None if this server stores no responses.

    `drain_s` is how long `close` waits for background responses to end, `announcer` hears of their ends (None: nobody).
    """

    def __init__(
        self,
        clock: Clock,
        redis: Redis | None = None,
        store: ResponseStore | None = None,
        drain_s: float = 0.0,
        announcer: Announcer | None = None,
    ) -> None:
        self._clock = clock
        self._redis = redis
        self._store = store
        self._history = History(store)
        self.conversations = Conversations(store, self._history, clock)
        self._background = None if store is None else BackgroundRuns(store, clock, drain_s)
        self._ends = None if announcer is None or redis is None else ResponseEnds(redis, announcer, clock)
        self._followers = UnderWay(MAX_FOLLOWERS, MAX_FOLLOWERS_OF_KEY)  # of responses that are still generated

    def add_to(self, completions: CompletionService) -> None:
        """Let `completions` answer requests of /v1/responses, of HTTP clients and of batches."""
        new = partial(self.new, completions)
        completions.endpoints[ENDPOINT] = Endpoint(parse_response_request, new, dict.fromkeys(ONLINE, NOT_HERE))

    async def close(self) -> None:
        if self._background is not None:
            await self._background.close()

    async def watch(self) -> None:
        """Tell of the ends of background responses whose gateways have died, until this task is cancelled."""
        if self._ends is not None:
            await self._ends.watch(self.get, self._seems_lost)

    def new(self, completions: CompletionService, request: ResponseRequest) -> NewResponse:
        """Return the response that `request` asks for, of the model of `completions`. It is not prepared yet."""
        store = self._store if request.store is not False else None
        return NewResponse(request, completions, self._history, self.conversations, store, self._clock)

    def new_compaction(self, completions: CompletionService, request: ResponseRequest) -> NewCompaction:
        """Return the compaction that `request` asks for, of the model of `completions`. It is not prepared yet."""
        return NewCompaction(request, completions, self._history, self._clock)

    async def enqueue(self, new: NewResponse) -> None:
        """Store a prepared response as queued, before it is submitted: nothing may run that nobody could find.

        Raises `ApiError` 400 if this server stores no responses, and 503 if there is no room for this one.
        """
        if self._background is None:
            raise invalid_value("background", "This server stores no responses, so it has no background responses.")
        try:
            queued = await new.store_queued(self._background.lease_ms())
        except NoRoom:
            raise too_many_responses() from None
        if self._ends is not None:
            await self._ends.expect(queued, new.owner)

    def launch(self, new: NewResponse, generation: Generation | WaitingGeneration) -> dict[str, Any]:
        """Generate a response in the background. It was stored as queued. Return it as it is now."""
        assert self._store is not None and self._background is not None and self._redis is not None
        run = new.run(generation)
        writer = EventWriter(self._redis, run.answer.id, self._store.ttl_s)
        self._background.launch(run.answer.id, run.run_in_background(writer, self._store, self._clock, self._tell))
        return run.answer.unfinished("queued")

    async def get(self, response_id: str, owner: str | None) -> StoredResponse | None:
        """Return a stored response; None if `owner` has no such response.

        A response whose generation was lost with its gateway has the status `failed`.
        """
        store = self._store_of(response_id)
        found = await store.get(response_id, owner) if store is not None else None
        if found is None or not found.is_running or not self._seems_lost(found):
            return found
        await self._clock.sleep(2 * background.RENEW_S)  # after a clock's jump, a renewed lease may seem to be over
        again = await store.get(response_id, owner) if store is not None else None
        if again is None or not again.is_running or again.lease_ms != found.lease_ms:
            return again
        fault = {"code": "server_error", "message": LOST}
        return await self._replace(found, {"status": "failed", "error": fault}, owner)

    def _store_of(self, response_id: str) -> ResponseStore | None:
        """Return the store, if this can be the id of a response: conversations are kept there as well."""
        return self._store if response_id.startswith(RESPONSE_PREFIX) else None

    def _seems_lost(self, found: StoredResponse) -> bool:
        """Return whether the lease has ended, or ends later than any lease does, because a clock was set back."""
        now_ms = self._clock.wall_ms()
        return not now_ms <= found.lease_ms <= now_ms + 2000 * background.LEASE_S

    async def cancel(self, found: StoredResponse, owner: str | None) -> StoredResponse | None:
        """Cancel a response that is generated in the background. One that has ended stays as it is."""
        if not found.is_running or self._background is None:
            return found
        cancelled = await self._replace(found, {"status": "cancelled"}, owner)
        self._background.cancel(found.response["id"])
        return cancelled

    async def delete(self, response_id: str, owner: str | None) -> bool:
        """Remove a stored response. Return False if `owner` has no such response.

        A response that is still generated ends soon: its gateway notices that the record is gone.
        """
        store = self._store_of(response_id)
        if store is None or not await store.delete(response_id, owner):
            return False
        assert self._background is not None
        self._background.cancel(response_id)
        return True

    async def follow(self, response_id: str, owner: str | None, after: int, write: Write) -> None:
        """Write the events of a background response that have a sequence number greater than `after`.

        Raises what `check_followers` raises, if the response is still generated.
        """
        found = await self.get(response_id, owner)
        if found is None or not found.is_running:
            return await self._follow(response_id, owner, after, write, waits=False)
        self.check_followers(owner)
        end = self._followers.begin(owner)
        try:
            await self._follow(response_id, owner, after, write, waits=True)
        finally:
            end()

    def check_followers(self, owner: str | None) -> None:
        """Raise `ApiError` 429 if `owner`, or all together, follow too many responses that are still generated."""
        if self._followers.is_full(owner):
            raise too_many_followers(self._followers.num_of(owner))

    async def _follow(self, response_id: str, owner: str | None, after: int, write: Write, waits: bool) -> None:
        assert self._redis is not None
        async with aclosing(follow(self._redis, response_id, after, waits)) as events:
            async for number, frames in events:
                if frames:
                    await write(frames)
                    continue
                found = await self.get(response_id, owner)
                if found is None or not found.is_running:
                    return await self._write_end(found, number, write)
                await write(PING)

    async def _write_end(self, found: StoredResponse | None, number: int, write: Write) -> None:
        """Write the last event of a response whose events are not kept any more, or never came."""
        if found is not None and found.response["status"] != "cancelled":
            await write(last_event(found.response, number + 1))

    async def _replace(
        self, found: StoredResponse, changes: dict[str, Any], owner: str | None
    ) -> StoredResponse | None:
        """End a running response, unless it has ended meanwhile. Return it as it is stored then."""
        assert self._store is not None
        changed = found.response | changes
        if await self._store.update(changed):
            await self._tell(changed, owner)
        return await self._store.get(found.response["id"], owner)

    async def _tell(self, response: dict[str, Any], owner: str | None) -> None:
        if self._ends is not None:
            await self._ends.tell(response, owner)
