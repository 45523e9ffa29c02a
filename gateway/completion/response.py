"""Turn the token events of a submitted request into a response object or a stream of frames.

Knows choices, the answer's format and the tier's timeout; does not know HTTP requests or responses. A `ResponseStream`
owns its token stream: when the `ResponseStream` ends, the scheduler requests that have not finished are cancelled.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import structlog

from gateway.completion.choice import Choice
from gateway.completion.openai_objects import Answer, ChunkEncoder, Usage
from gateway.completion.piece import Piece
from gateway.completion.stop_strings import StopMatcher
from gateway.completion.tokenizer import Tokenizer
from gateway.http.sse import DONE, PING, Write
from gateway.protocol.errors import ApiError, internal_error, timed_out, unavailable
from scheduler.client.token_stream import TokenStream
from scheduler.clock import Clock
from scheduler.config import Tier
from scheduler.request import EventKind, Request, TokenEvent

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Demotion:
    """The lower tier that serves a request if its own tier cannot serve it in time.

    `answer` and `deadline_ms` replace the values for the request's own tier.
    """

    tier: Tier
    answer: Answer
    deadline_ms: int


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A validated and tokenised request, which is ready to be submitted.

    `requests` holds `n` scheduler requests for each prompt, in the order of the choices' indexes.
    """

    answer: Answer
    tier: Tier
    requests: tuple[Request, ...]
    n: int
    stops: tuple[str, ...] = ()
    include_usage: bool = False
    continuous_usage: bool = False
    demotion: Demotion | None = None

    def demoted(self, to: Demotion) -> "PreparedRequest":
        """Return the same request in the tier of `to`, without a further demotion."""
        requests = (replace(r, tier=to.tier.name, deadline_ms=to.deadline_ms) for r in self.requests)
        return replace(self, answer=to.answer, tier=to.tier, requests=tuple(requests), demotion=None)


class ResponseStream:
    """One answer while it is generated. Call either `respond` or `stream`, and only once.

    `ping_s` is the longest silence of a stream in seconds. After such a silence, a comment is sent as keep-alive.
    """

    def __init__(
        self, prepared: PreparedRequest, tokens: TokenStream, tokenizer: Tokenizer, clock: Clock, ping_s: float
    ) -> None:
        self._prepared = prepared
        self._tokens = tokens
        self._clock = clock
        self._ping_s = ping_s
        self._choices = {
            request.id: Choice(index, tokenizer.decoder(), StopMatcher(prepared.stops) if prepared.stops else None)
            for index, request in enumerate(prepared.requests)
        }
        self._num_open = len(self._choices)
        self._last_event_s = clock.now()

    @property
    def tier(self) -> Tier:
        """The tier that serves the request. This may be the lower tier of a demotion."""
        return self._prepared.tier

    async def respond(self) -> dict[str, Any]:
        """Return the whole answer.

        Raises `ApiError` if the generation fails, or if no event arrives during the tier's timeout.
        """
        outputs: dict[int, Piece] = {choice.index: Piece() for choice in self._choices.values()}
        async with self._tokens:
            while self._num_open:
                for choice, piece in await self._advance(None):
                    outputs[choice.index].extend(piece)
        self._log_usage()
        choices = [(choice, outputs[choice.index]) for choice in self._choices.values()]
        return self._prepared.answer.response(choices, self._usage())

    async def stream(self, write: Write) -> None:
        """Write the answer as frames. Raises the same errors as `respond`, also after the first frames are written."""
        chunks = self._prepared.answer.chunks(self._prepared.include_usage)
        opened: set[int] = set()
        wrote_s = self._clock.now()
        async with self._tokens:
            while self._num_open:
                silent_s = self._clock.now() - wrote_s
                frames = self._frames(await self._advance(max(0.0, self._ping_s - silent_s)), chunks, opened)
                # New tokens may give no text yet: they may be a part of a character or of a possible stop string.
                if not frames and self._clock.now() - wrote_s >= self._ping_s:
                    frames = PING
                if frames:
                    await write(frames)
                    wrote_s = self._clock.now()
        last = chunks.total(self._usage()) if self._prepared.include_usage else b""
        await write(last + DONE)
        self._log_usage()

    async def _advance(self, timeout_s: float | None) -> list[tuple[Choice, Piece]]:
        """Wait for events, and return what they add to each choice.

        Returns an empty list if no event arrives within `timeout_s` seconds (None: no limit). Raises `ApiError` if the
        generation fails, or if the tier's timeout has passed since the last event.
        """
        events = await self._tokens.take(self._wait_s(timeout_s))
        if not events and self._wait_s(None) == 0:
            raise timed_out(self._prepared.tier.name)
        if events:
            self._last_event_s = self._clock.now()
        pieces: dict[str, Piece] = {}
        for event in events:
            choice = self._choices[event.request_id]
            if choice.finish_reason is None:
                pieces.setdefault(event.request_id, Piece()).extend(self._feed(choice, event))
        for request_id in pieces:
            if self._choices[request_id].stopped_early:
                await self._tokens.cancel(request_id)
        return [(self._choices[request_id], piece) for request_id, piece in pieces.items()]

    def _feed(self, choice: Choice, event: TokenEvent) -> Piece:
        if event.kind is EventKind.FAILED:
            log.warning("generation_failed", sequence=event.request_id, reason=event.error)
            raise internal_error("The generation was interrupted by an error of the server.")
        if event.kind is EventKind.UNAVAILABLE:
            raise unavailable(event.error)
        if event.kind is EventKind.CANCELLED:
            raise ApiError(503, "The server cancelled the request.", "server_error", code="server_overloaded")
        piece = choice.feed(event)
        self._num_open -= choice.finish_reason is not None
        return piece

    def _wait_s(self, timeout_s: float | None) -> float | None:
        """Return the seconds to wait for the next event: `timeout_s`, or less if the tier's timeout ends earlier.

        The tier's timeout begins at the last event. None means no limit, both for `timeout_s` and for the result.
        """
        tier_timeout_ms = self._prepared.tier.timeout_ms
        if tier_timeout_ms is None:
            return timeout_s
        left_s = max(0.0, self._last_event_s + tier_timeout_ms / 1000 - self._clock.now())
        return left_s if timeout_s is None else min(timeout_s, left_s)

    def _frames(self, pieces: Sequence[tuple[Choice, Piece]], chunks: ChunkEncoder, opened: set[int]) -> bytes:
        usage = self._usage() if self._prepared.continuous_usage else None
        frames = []
        for choice, piece in pieces:
            if choice.index not in opened:
                opened.add(choice.index)
                frames.append(chunks.opening(choice.index, usage))
            if piece:
                frames.append(chunks.piece(choice.index, piece, usage))
            if choice.finish_reason is not None:
                frames.append(chunks.closing(choice.index, choice.finish_reason, usage))
        return b"".join(frames)

    def _usage(self) -> Usage:
        """Return the token counts of the answer.

        A prompt and its cached part are counted only once, even if the prompt has several choices.
        """
        choices = list(self._choices.values())
        first_of_prompt = slice(None, None, self._prepared.n)
        return Usage(
            prompt_tokens=sum(len(r.prompt_token_ids) for r in self._prepared.requests[first_of_prompt]),
            completion_tokens=sum(choice.num_tokens for choice in choices),
            cached_tokens=sum(choice.cached_tokens for choice in choices[first_of_prompt]),
        )

    def _log_usage(self) -> None:
        usage = self._usage()
        structlog.contextvars.bind_contextvars(
            prompt_tokens=usage.prompt_tokens, completion_tokens=usage.completion_tokens
        )
