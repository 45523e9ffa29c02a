"""The service behind /v1/responses: creates, looks up, follows, cancels and deletes responses.

A response is answered as a chat by the completion service, so tiers, admission and timeouts are the same. Does not know
HTTP.
"""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from redis.asyncio import Redis

from gateway.completion.answer import Answer
from gateway.completion.response import PreparedRequest
from gateway.completion.service import CompletionService
from gateway.completion.token_report import TokenReport
from gateway.http.sse import PING, Write
from gateway.identity import ResolvedTier
from gateway.protocol.errors import ApiError, invalid_value
from gateway.protocol.json_body import is_large
from gateway.protocol.schemas import ChatCompletionRequest
from gateway.responses.answer import ResponseAnswer, ResponseHead, last_event
from gateway.responses.background import BackgroundRuns
from gateway.responses.chat import chat_request, in_terms_of_responses
from gateway.responses.conversation import Conversations, turns_of, without_turns_before
from gateway.responses.event_log import EventWriter, follow
from gateway.responses.items import RESPONSE_PREFIX, Item
from gateway.responses.request import ResponseRequest, parse_response_request
from gateway.responses.run import ResponseRun
from gateway.responses.store import ResponseStore, StoredResponse
from scheduler.clock import Clock
from scheduler.config import Tier

Prepare = Callable[[ChatCompletionRequest], Awaitable[PreparedRequest]]

ENDPOINT = "/v1/responses"
LOST = "The server that generated the response has ended. Please create it again."


class ResponseService:
    """The responses of one gateway. `redis` and `store` are None if this server stores no responses.

    `drain_s` is how long `close` waits for background responses to end.
    """

    def __init__(
        self,
        completions: CompletionService,
        clock: Clock,
        redis: Redis | None = None,
        store: ResponseStore | None = None,
        drain_s: float = 0.0,
    ) -> None:
        self._completions = completions
        self._clock = clock
        self._redis = redis
        self._store = store
        self._conversations = Conversations(store)
        self._background = None if store is None else BackgroundRuns(store, clock, drain_s)

    async def close(self) -> None:
        if self._background is not None:
            await self._background.close()

    async def submit(
        self,
        request: ResponseRequest,
        *,
        tier: Tier,
        service_tier: str,
        request_id: str,
        owner: str | None,
        demotion: ResolvedTier | None = None,
    ) -> ResponseRun:
        """Submit a response in `tier` or, if that is overloaded, in the tier of `demotion`.

        The arguments are those of `CompletionService.prepare`. Raises `ApiError` if the request is refused.
        """
        prepared, items = await self._prepare(request, tier, service_tier, request_id, owner, demotion)
        stream = await self._completions.submit(prepared)
        return ResponseRun(stream, items, owner, self._store if request.store is not False else None)

    async def submit_background(
        self,
        request: ResponseRequest,
        *,
        tier: Tier,
        service_tier: str,
        request_id: str,
        owner: str | None,
        demotion: ResolvedTier | None = None,
    ) -> dict[str, Any]:
        """Submit a response that is generated in the background. Return it as it is stored: queued."""
        if self._store is None or self._background is None or self._redis is None:
            raise invalid_value("background", "This server stores no responses, so it has no background responses.")
        prepared, items = await self._prepare(request, tier, service_tier, request_id, owner, demotion)
        assert isinstance(prepared.answer, ResponseAnswer)
        queued = prepared.answer.unfinished("queued")
        # It is stored before it is submitted: nothing may run that nobody could find.
        await self._store.create(queued, items, owner, self._background.lease_ms())
        try:
            stream = await self._completions.submit(prepared)
        except BaseException:
            await self._store.delete(queued["id"], owner)
            raise
        run = ResponseRun(stream, items, owner, self._store)
        writer = EventWriter(self._redis, queued["id"], self._store.ttl_s)
        self._background.launch(queued["id"], run.run_in_background(writer, self._store))
        return run.answer.unfinished("queued")

    async def complete(
        self,
        endpoint: str,
        body: dict[str, Any],
        *,
        tier: Tier,
        service_tier: str,
        request_id: str,
        owner: str | None = None,
    ) -> tuple[int, dict[str, Any]]:
        """Answer one request without streaming, as `CompletionService.complete` does, also for /v1/responses."""
        if endpoint != ENDPOINT:
            return await self._completions.complete(
                endpoint, body, tier=tier, service_tier=service_tier, request_id=request_id, owner=owner
            )
        parse = partial(parse_response_request, body)
        try:
            request = await asyncio.to_thread(parse) if is_large(body) else parse()
            if request.stream or request.background:
                param = "stream" if request.stream else "background"
                raise invalid_value(param, f"Invalid value for '{param}': it is not possible here.")
            run = await self.submit(request, tier=tier, service_tier=service_tier, request_id=request_id, owner=owner)
            return 200, await run.respond()
        except ApiError as error:
            return error.status, error.body()

    async def count_input_tokens(self, request: ResponseRequest, tier: Tier, request_id: str, owner: str | None) -> int:
        """Return the number of tokens of the prompt that `request` would have."""
        prepared, _ = await self._prepare(request, tier, "auto", request_id, owner, None)
        return len(prepared.requests[0].prompt_token_ids)

    async def get(self, response_id: str, owner: str | None) -> StoredResponse | None:
        """Return a stored response; None if `owner` has no such response.

        A response whose generation was lost with its gateway has the status `failed`.
        """
        found = await self._store.get(response_id, owner) if self._store is not None else None
        if found is None or not found.is_running or found.lease_ms >= self._clock.wall_ms():
            return found
        fault = {"code": "server_error", "message": LOST}
        return await self._replace(found, {"status": "failed", "error": fault}, owner)

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
        if self._store is None or not await self._store.delete(response_id, owner):
            return False
        assert self._background is not None
        self._background.cancel(response_id)
        return True

    async def follow(self, response_id: str, owner: str | None, after: int, write: Write) -> None:
        """Write the events of a background response that have a sequence number greater than `after`."""
        found = await self.get(response_id, owner)
        assert self._redis is not None
        waits = found is not None and found.is_running
        async for number, frames in follow(self._redis, response_id, after, waits):
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
        """Change a running response, unless it has ended meanwhile. Return it as it is stored then."""
        assert self._store is not None
        await self._store.update(found.response | changes)
        return await self._store.get(found.response["id"], owner)

    async def _prepare(
        self,
        request: ResponseRequest,
        tier: Tier,
        service_tier: str,
        request_id: str,
        owner: str | None,
        demotion: ResolvedTier | None,
    ) -> tuple[PreparedRequest, list[Item]]:
        """Return the request as it is submitted, and its own input items."""
        response_id = RESPONSE_PREFIX + request_id.removeprefix("req_")
        items = await self._conversations.input_of(request, response_id, owner)
        conversation = [*await self._conversations.before(request, owner), *items]
        created_at = self._clock.wall_ms() // 1000
        stored = self._store is not None and request.store is not False

        def answer_as(reported: str, report: TokenReport | None) -> Answer:
            head = ResponseHead(response_id, created_at, reported, stored, request, self._completions.defaults)
            return ResponseAnswer(head, lambda: self._clock.wall_ms() // 1000, report)

        prepare = partial(
            self._completions.prepare,
            tier=tier,
            service_tier=service_tier,
            request_id=request_id,
            owner=owner,
            demotion=demotion,
            answer_as=answer_as,
        )
        with in_terms_of_responses():
            if request.truncation == "auto":
                return await _longest_that_fits(request, conversation, prepare), items
            return await prepare(chat_request(request, conversation)), items


async def _longest_that_fits(request: ResponseRequest, conversation: list[Item], prepare: Prepare) -> PreparedRequest:
    """Return `conversation` as it is submitted, without the first turns that do not fit into the context."""

    async def attempt(start: int) -> PreparedRequest | ApiError:
        try:
            return await prepare(chat_request(request, without_turns_before(conversation, start)))
        except ApiError as error:
            if error.code != "context_length_exceeded":
                raise
            return error

    starts = turns_of(conversation)
    whole = await attempt(0)
    if not isinstance(whole, ApiError):
        return whole
    low, high = 1, len(starts)  # turn `low - 1` is too long as the first one; turn `high` fits, or does not exist
    found: PreparedRequest | None = None
    while low < high:
        middle = (low + high) // 2
        outcome = await attempt(starts[middle])
        if isinstance(outcome, ApiError):
            low = middle + 1
        else:
            found, high = outcome, middle
    if found is None:
        raise whole
    return found
