"""Answer requests: prepare them, submit them to the scheduler, and hand out the generation of their answers.

Knows bodies, tiers and the scheduler's client. Does not know HTTP, how a request is prepared
(gateway/requests/prepare/preparation.py) or how tokens become an answer (gateway/requests/generate/generation.py).
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from gateway.dead_letters import DeadLetters
from gateway.fairness import FairLock
from gateway.http.metrics import ModelMetrics
from gateway.http.sse import Write
from gateway.http.trace import CURRENT_TRACE
from gateway.protocol.bodies.schemas import AnyRequest, ChatCompletionRequest, CompletionRequest, parse_generation
from gateway.protocol.bodies.vectors import EmbeddingRequest, RerankRequest, VectorRequest, parse_vectors
from gateway.protocol.errors import ApiError, invalid_value, rejected
from gateway.protocol.json_body import is_large
from gateway.requests.generate.generation import Generation
from gateway.requests.generate.metering import Metering
from gateway.requests.prepare.placement import Placement
from gateway.requests.prepare.preparation import Model, Preparation
from gateway.requests.prepare.prepared import PreparedRequest
from gateway.requests.prepare.vectors import prepare_vectors
from scheduler.client.client import SchedulerClient
from scheduler.client.rejection import DEMOTES, Rejected
from scheduler.client.token_stream import TokenStream
from scheduler.clock import Clock
from scheduler.config import Tier

PING_S = 15.0  # seconds of silence before a keep-alive; proxies close connections that are silent for 30 to 60 s
ONLINE = {"stream": "streaming is not possible here"}


class Deliverable(Protocol):
    """An answer that is being generated. Only one of its methods is called, and only once."""

    @property
    def tier(self) -> Tier: ...

    async def respond(self) -> dict[str, Any]: ...

    async def stream(self, write: Write) -> None: ...


class NewAnswer(Protocol):
    """An answer to a body. Call `prepare`, submit the result, and call `run` with its generation."""

    async def prepare(self, placement: Placement) -> PreparedRequest: ...

    def run(self, generation: Generation) -> Deliverable: ...


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An endpoint that generates something. `parse` makes a request of a body, and is picklable; `new` an answer of it.

    `online` has the options that need a connection to the client, with what a job is told that uses them.
    """

    parse: Callable[[dict[str, Any]], Any]
    new: Callable[[Any], NewAnswer]
    online: Mapping[str, str] = field(default_factory=dict)


class CompletionService:
    """Answers the requests of one gateway. `endpoints` has those that generate something, by path."""

    def __init__(
        self,
        client: SchedulerClient,
        clock: Clock,
        model: Model,
        metrics: ModelMetrics,
        metering: Metering,
        dead_letters: DeadLetters,
        lock: FairLock,
    ) -> None:
        """`lock` has the turns of all that is done on the event loop for requests, of all models."""
        self.model = model
        self._client = client
        self._clock = clock
        self._lock = lock
        self._metrics = metrics
        self._metering = metering
        self._dead_letters = dead_letters
        self._preparation = Preparation(model, client, clock, self._lock)
        self.prepare, self.encode = self._preparation.prepare, self._preparation.encode
        self.limits = self._preparation.limits
        new, new_vectors = partial(NewCompletion, self._preparation), partial(NewVectors, self._preparation)
        self.endpoints = {
            "/v1/chat/completions": Endpoint(partial(parse_generation, ChatCompletionRequest), new, ONLINE),
            "/v1/completions": Endpoint(partial(parse_generation, CompletionRequest), new, ONLINE),
            "/v1/embeddings": Endpoint(partial(parse_vectors, EmbeddingRequest), new_vectors),
            "/v1/rerank": Endpoint(partial(parse_vectors, RerankRequest), new_vectors),
        }

    async def complete(self, path: str, body: dict[str, Any], placement: Placement) -> tuple[int, dict[str, Any]]:
        """Answer one request without streaming. Return the HTTP status and the JSON body of the answer.

        Refusals and failures are also returned as an answer.
        """
        try:
            await self._lock.acquire(placement.owner or "")
            endpoint = self.endpoints.get(path)
            if endpoint is None:
                raise ApiError(404, "Unknown endpoint.", param="url")
            parse = partial(endpoint.parse, body)
            request = await asyncio.to_thread(parse) if is_large(body) else parse()
            for option, reason in endpoint.online.items():
                if getattr(request, option):
                    raise invalid_value(option, f"Invalid value for '{option}': {reason}.")
            answer = endpoint.new(request)
            generation = await self.submit(await answer.prepare(placement))
            return 200, await answer.run(generation).respond()
        except ApiError as error:
            return error.status, error.body()

    async def submit_again(self, prepared: PreparedRequest) -> Generation:
        """Enqueue `prepared`, which was refused before, as `submit` does. A further refusal is not counted."""
        return await self.submit(prepared, is_counted=False)

    async def submit(self, prepared: PreparedRequest, *, is_counted: bool = True) -> Generation:
        """Enqueue `prepared`, or find its answer in the cache, and return the answer.

        Raises `ApiError` 429 if a limit of the owner's key is reached, and the errors of `_enqueue`.
        """
        account = await self._metering.open(prepared)
        try:
            tokens = account.replay(prepared.requests)
            if tokens is None:
                prepared, tokens = await self._enqueue(prepared, is_counted=is_counted)
        except BaseException:
            await account.cancel(prepared.tier.name)
            raise
        trace = CURRENT_TRACE.get()
        trace.note_submitted()
        shared = (self.model.tokenizer, self._clock, PING_S, self._lock)
        return Generation(prepared, tokens, *shared, account, trace, self._dead_letters)

    async def _enqueue(self, prepared: PreparedRequest, *, is_counted: bool) -> tuple[PreparedRequest, TokenStream]:
        """Enqueue all scheduler requests of `prepared`, or none of them.

        If their own tier cannot serve them in time, they are enqueued in the lower tier of the demotion, if there is
        one. Raises `ApiError` 429 or 503 if admission rejects the requests.
        """
        await self._preparation.let_others_run(len(prepared.requests), prepared.owner)
        outcome = await self._client.submit(prepared.requests)
        demotion = prepared.demotion
        if isinstance(outcome, Rejected) and outcome.reason in DEMOTES and demotion is not None:
            demoted = prepared.demoted(demotion)
            lower_outcome = await self._client.submit(demoted.requests)
            if not isinstance(lower_outcome, Rejected):
                self._metrics.requests_demoted.labels(prepared.tier.name, demoted.tier.name).inc()
                prepared, outcome = demoted, lower_outcome
        if isinstance(outcome, Rejected):
            self._metrics.requests_rejected.labels(prepared.tier.name, outcome.reason.value).inc(is_counted)
            raise rejected(outcome, prepared.tier, prepared.placement.patient)
        return prepared, outcome


@dataclass(frozen=True, slots=True)
class NewCompletion:
    """An answer of one of the two completion endpoints."""

    preparation: Preparation
    request: AnyRequest

    async def prepare(self, placement: Placement) -> PreparedRequest:
        return await self.preparation.prepare(self.request, placement)

    def run(self, generation: Generation) -> Generation:
        return generation


@dataclass(frozen=True, slots=True)
class NewVectors:
    """An answer of /v1/embeddings or /v1/rerank."""

    preparation: Preparation
    request: VectorRequest

    async def prepare(self, placement: Placement) -> PreparedRequest:
        return await prepare_vectors(self.preparation, self.request, placement)

    def run(self, generation: Generation) -> Generation:
        return generation
