"""A response from its request until it is submitted.

Knows the request, the conversation that it continues, and how both become a chat; does not know tiers or admission.
"""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from gateway.dialects.responses.answer import ResponseAnswer, ResponseHead
from gateway.dialects.responses.chat import chat_request, in_terms_of_responses
from gateway.dialects.responses.items import RESPONSE_PREFIX, Item
from gateway.dialects.responses.request import ResponseRequest
from gateway.jobs.responses.conversations import Conversations
from gateway.jobs.responses.history import MANY_ITEMS, History, turns_of, without_turns_before
from gateway.jobs.responses.run import ResponseRun
from gateway.jobs.responses.store import ResponseStore
from gateway.protocol.bodies.schemas import ChatCompletionRequest
from gateway.protocol.errors import ApiError
from gateway.requests.answers.answer import Answer
from gateway.requests.answers.token_report import TokenReport
from gateway.requests.generate.generation import Generation
from gateway.requests.generate.service import CompletionService
from gateway.requests.generate.waiting import WaitingGeneration, may_wait
from gateway.requests.prepare.placement import Placement
from gateway.requests.prepare.prepared import PreparedRequest
from scheduler.clock import Clock

Prepare = Callable[[list[Item]], Awaitable[PreparedRequest]]


class NewResponse:
    """A response that is being created. Call `prepare`, submit the result, and call `run` with its generation.

    `store` is None if the response is not to be stored.
    """

    def __init__(
        self,
        request: ResponseRequest,
        completions: CompletionService,
        history: History,
        conversations: Conversations,
        store: ResponseStore | None,
        clock: Clock,
    ) -> None:
        self._request = request
        self._completions = completions
        self._history = history
        self._conversations = conversations
        self._store = store
        self._clock = clock
        self._items: list[Item] = []  # of its own input
        self.owner: str | None = None
        self._prepared: PreparedRequest | None = None

    async def prepare(self, placement: Placement) -> PreparedRequest:
        """Return the response as a request that can be submitted, as `Preparation.prepare` does.

        Raises `ApiError` 400 or 404 if the request cannot be answered. Parameters are named as in the Responses API.
        """
        response_id = RESPONSE_PREFIX + placement.request_id.removeprefix("req_")
        owner = self.owner = placement.owner
        self._items = await self._history.input_of(self._request, response_id, owner)
        conversation = [*await self._history.before(self._request, owner), *self._items]
        answer_as = partial(self._answer, response_id, self._clock.wall_ms() // 1000)

        async def prepare(items: list[Item]) -> PreparedRequest:
            return await self._completions.prepare(await chat_of(self._request, items), placement, answer_as)

        with in_terms_of_responses(self._request.offered_tools):
            if self._request.truncation == "auto":
                self._prepared = await longest_that_fits(conversation, prepare)
            else:
                self._prepared = await prepare(conversation)
        return self._prepared

    def waiting(self, refusal: ApiError) -> WaitingGeneration | None:
        """Return the generation of the prepared response when it is taken; None if it will not be."""
        if self._prepared is None or not may_wait(refusal, self._prepared):
            return None
        return WaitingGeneration(self._prepared, refusal, self._completions.submit_again, self._clock)

    def run(self, generation: Generation | WaitingGeneration) -> ResponseRun:
        """Return the run of the response, which was submitted."""
        return ResponseRun(generation, self._items, self.owner, self._store, self._conversations)

    async def store_queued(self, lease_ms: int) -> dict[str, Any]:
        """Store the response as queued, and return it. It was prepared."""
        assert self._store is not None and self._prepared is not None
        queued = self._queued(self._prepared)
        await self._store.create(queued, self._items, self.owner, lease_ms)
        return queued

    async def withdraw(self) -> None:
        """Remove what `store_queued` has stored."""
        if self._store is not None and self._prepared is not None:
            await self._store.delete(self._queued(self._prepared)["id"], self.owner)

    def _queued(self, prepared: PreparedRequest) -> dict[str, Any]:
        assert isinstance(prepared.answer, ResponseAnswer)
        return prepared.answer.unfinished("queued")

    def _answer(self, response_id: str, created_at: int, service_tier: str, report: TokenReport | None) -> Answer:
        head = ResponseHead(
            id=response_id,
            created_at=created_at,
            service_tier=service_tier,
            stored=self._store is not None,
            request=self._request,
            defaults=self._completions.model.defaults,
        )
        return ResponseAnswer(head, lambda: self._clock.wall_ms() // 1000, report)


async def chat_of(request: ResponseRequest, items: list[Item]) -> ChatCompletionRequest:
    make = partial(chat_request, request, items)
    return await asyncio.to_thread(make) if len(items) > MANY_ITEMS else make()


async def longest_that_fits(conversation: list[Item], prepare: Prepare) -> PreparedRequest:
    """Return `conversation` as it is submitted, without the first turns that do not fit into the context."""

    async def attempt(start: int) -> PreparedRequest | ApiError:
        try:
            return await prepare(without_turns_before(conversation, start))
        except ApiError as error:
            if error.code != "context_length_exceeded":
                raise
            return error

    starts = turns_of(conversation)
    whole = await attempt(0)
    if not isinstance(whole, ApiError):
        return whole
    low, high = 1, len(starts)  # from turn `low - 1` on, it is too long; from turn `high` on, it fits or is empty
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
