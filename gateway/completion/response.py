"""One submitted job, answered: token events in, a response object or a stream of frames out.

Knows choices, the answer's shape and the tier's patience; does not know HTTP's requests or responses. The
`ResponseStream` owns the generation: whichever way it ends, what is unfinished is cancelled.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import structlog

from gateway.completion.choice import Choice
from gateway.completion.openai_objects import Answer, ChunkEncoder, Usage
from gateway.completion.stop_strings import StopMatcher
from gateway.completion.tokenizer import Tokenizer
from gateway.http.sse import DONE, PING, Write
from gateway.protocol.errors import ApiError, internal_error, timed_out
from scheduler.client.token_stream import TokenStream
from scheduler.clock import Clock
from scheduler.config import Tier
from scheduler.request import EventKind, Request, TokenEvent

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Demotion:
    """Where a job may go if its own tier cannot serve it in time; `answer` says so."""

    tier: Tier
    answer: Answer
    deadline_ms: int


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A validated body, tokenised and ready to be submitted: `n` requests for each prompt, by choice index."""

    answer: Answer
    tier: Tier
    requests: tuple[Request, ...]
    n: int
    stops: tuple[str, ...] = ()
    include_usage: bool = False
    continuous_usage: bool = False
    demotion: Demotion | None = None

    def demoted(self, to: Demotion) -> "PreparedRequest":
        requests = (replace(r, tier=to.tier.name, deadline_ms=to.deadline_ms) for r in self.requests)
        return replace(self, answer=to.answer, tier=to.tier, requests=tuple(requests), demotion=None)


class ResponseStream:
    def __init__(
        self, job: PreparedRequest, generation: TokenStream, tokenizer: Tokenizer, clock: Clock, ping_s: float
    ) -> None:
        self._job = job
        self._generation = generation
        self._clock = clock
        self._ping_s = ping_s
        self._choices = {
            request.id: Choice(index, request.id, tokenizer.decoder(), StopMatcher(job.stops) if job.stops else None)
            for index, request in enumerate(job.requests)
        }
        self._num_open = len(self._choices)
        self._heard_s = clock.now()  # when the last event came

    @property
    def tier(self) -> Tier:
        """The one that serves."""
        return self._job.tier

    async def respond(self) -> dict[str, Any]:
        """The whole answer. Raises `ApiError` where the generation fails or the tier's timeout passes."""
        texts: dict[int, str] = {choice.index: "" for choice in self._choices.values()}
        async with self._generation:
            while self._num_open:
                for choice, text in await self._advance(None):
                    texts[choice.index] += text
        self._log_usage()
        choices = [(choice, texts[choice.index]) for choice in self._choices.values()]
        return self._job.answer.response(choices, self._usage())

    async def stream(self, write: Write) -> None:
        """The answer as frames. Raises like `respond`; what was written until then stays valid."""
        chunks = self._job.answer.chunks(self._job.include_usage)
        opened: set[int] = set()
        wrote_s = self._clock.now()
        async with self._generation:
            while self._num_open:
                quiet_s = self._clock.now() - wrote_s
                frames = self._frames(await self._advance(max(0.0, self._ping_s - quiet_s)), chunks, opened)
                # Tokens may come and show nothing: half a character, or what may become a stop string.
                if not frames and self._clock.now() - wrote_s >= self._ping_s:
                    frames = PING
                if frames:
                    await write(frames)
                    wrote_s = self._clock.now()
        last = chunks.total(self._usage()) if self._job.include_usage else b""
        await write(last + DONE)
        self._log_usage()

    async def _advance(self, patience_s: float | None) -> list[tuple[Choice, str]]:
        """What all waiting events add, merged by choice; nothing where none came for `patience_s`."""
        events = await self._generation.take(self._wait_s(patience_s))
        if not events and self._wait_s(None) == 0:
            raise timed_out(self._job.tier.name)
        if events:
            self._heard_s = self._clock.now()
        texts: dict[str, str] = {}
        for event in events:
            choice = self._choices[event.request_id]
            if choice.finish_reason is None:
                texts[event.request_id] = texts.get(event.request_id, "") + self._feed(choice, event)
        for request_id in texts:
            if self._choices[request_id].stopped_early:
                await self._generation.cancel(request_id)
        return [(self._choices[request_id], text) for request_id, text in texts.items()]

    def _feed(self, choice: Choice, event: TokenEvent) -> str:
        if event.kind is EventKind.FAILED:
            log.warning("generation_failed", sequence=event.request_id, reason=event.error)
            raise internal_error("The generation was interrupted by an error of the server.")
        if event.kind is EventKind.CANCELLED:
            raise ApiError(503, "The server cancelled the request.", "server_error", code="server_overloaded")
        text = choice.feed(event)
        self._num_open -= choice.finish_reason is not None
        return text

    def _wait_s(self, patience_s: float | None) -> float | None:
        """Until the tier's timeout without any event, `patience_s` at most; None: for ever."""
        timeout_ms = self._job.tier.timeout_ms
        if timeout_ms is None:
            return patience_s
        left_s = max(0.0, self._heard_s + timeout_ms / 1000 - self._clock.now())
        return left_s if patience_s is None else min(patience_s, left_s)

    def _frames(self, pieces: Sequence[tuple[Choice, str]], chunks: ChunkEncoder, opened: set[int]) -> bytes:
        usage = self._usage() if self._job.continuous_usage else None
        frames = []
        for choice, text in pieces:
            if choice.index not in opened:
                opened.add(choice.index)
                frames.append(chunks.opening(choice.index, usage))
            if text:
                frames.append(chunks.text(choice.index, text, usage))
            if choice.finish_reason is not None:
                frames.append(chunks.closing(choice.index, choice.finish_reason, usage))
        return b"".join(frames)

    def _usage(self) -> Usage:
        """A prompt counts once, however many choices it has; so does what the cache held of it."""
        choices = list(self._choices.values())
        first_of_prompt = slice(None, None, self._job.n)
        return Usage(
            prompt_tokens=sum(len(r.prompt_token_ids) for r in self._job.requests[first_of_prompt]),
            completion_tokens=sum(choice.num_tokens for choice in choices),
            cached_tokens=sum(choice.cached_tokens for choice in choices[first_of_prompt]),
        )

    def _log_usage(self) -> None:
        usage = self._usage()
        structlog.contextvars.bind_contextvars(
            prompt_tokens=usage.prompt_tokens, completion_tokens=usage.completion_tokens
        )
