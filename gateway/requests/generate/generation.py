"""Turn the token events of a submitted request into a response object or a stream of frames.

Knows choices, the answer's format and the tier's timeout; does not know HTTP requests or responses. A `Generation`
owns its token stream: when the `Generation` ends, the scheduler requests that have not finished are cancelled.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import structlog

from gateway.dead_letters import DeadLetters
from gateway.fairness import FairLock
from gateway.http.sse import PING, Write
from gateway.http.trace import UNTRACED, RequestTrace
from gateway.output.piece import Piece
from gateway.protocol.errors import ApiError, timed_out
from gateway.requests.answers.answer import Answer, StreamEncoder
from gateway.requests.answers.choice import Choice
from gateway.requests.answers.chunks import Usage
from gateway.requests.answers.receipt import receipt_object, with_receipt
from gateway.requests.generate.failures import dead_letter_of, failure_of
from gateway.requests.generate.metering import UNMETERED, Account
from gateway.requests.prepare.prepared import PreparedRequest
from gateway.requests.prepare.trace_attributes import describe_answer
from gateway.requests.tokens.tokenizer import Tokenizer
from scheduler.client.token_stream import TokenStream
from scheduler.clock import Clock
from scheduler.config import Tier
from scheduler.request import GIVEN_UP, Delivery, EventKind, Receipt, Request, TokenEvent

log = structlog.get_logger(__name__)

T = TypeVar("T")

VECTOR_BYTES = 64  # of vectors, which take as long to write as one log probability
INLINE_LOGPROBS = 2**12  # log probabilities, about 8 ms to write; more are written in a thread, off the event loop


class Generation:
    """One answer while it is generated. Call either `respond` or `stream`, and only once.

    `ping_s` is the longest silence of a stream in seconds. After such a silence, a comment is sent as keep-alive.
    Answers whose tokens come all at once are written under `lock`, one at a time.
    """

    def __init__(
        self,
        prepared: PreparedRequest,
        tokens: TokenStream,
        tokenizer: Tokenizer,
        clock: Clock,
        ping_s: float,
        lock: FairLock,
        account: Account = UNMETERED,
        trace: RequestTrace = UNTRACED,
        dead_letters: DeadLetters | None = None,
    ) -> None:
        self._prepared = prepared
        self._tokens = tokens
        self._clock = clock
        self._ping_s = ping_s
        self._lock = lock
        self._choices = {
            request.id: _choice(index, request, prepared, tokenizer) for index, request in enumerate(prepared.requests)
        }
        self._account = account
        self._trace = trace
        self._dead_letters = dead_letters
        self._events: list[TokenEvent] = []  # those that the account wants to keep
        self._num_open = len(self._choices)
        self._receipts: dict[str, Receipt] = {}  # the newest receipt of each scheduler request, by its id
        self._last_event_s = clock.now()

    @property
    def tier(self) -> Tier:
        """The tier that serves the request. This may be the lower tier of a demotion."""
        return self._prepared.tier

    @property
    def headers(self) -> dict[str, str]:
        """The headers that the answer gets because of its key's limits and the answer cache."""
        return self._account.headers

    @property
    def answer(self) -> Answer:
        """The answer's format. A demotion replaces it."""
        return self._prepared.answer

    @property
    def receipt(self) -> dict[str, Any] | None:
        """The receipt of the answer so far; None if the client asked for none."""
        return None if self._prepared.placement.receipt_for is None else self._receipt()

    async def respond(self) -> dict[str, Any]:
        """Return the whole answer.

        Raises `ApiError` if the generation fails, or if no event arrives during the tier's timeout.
        """
        outputs: dict[int, Piece] = {choice.index: Piece() for choice in self._choices.values()}
        async with self._generation():
            while self._num_open:
                for choice, piece in await self._advance(None):
                    outputs[choice.index].extend(piece)
        usage = self._logged_usage()
        choices = [(choice, outputs[choice.index]) for choice in self._choices.values()]
        write = partial(self._prepared.answer.response, self._best_of(choices), usage)
        answer = await self._written(write, choices)
        receipt = self.receipt
        return answer if receipt is None else {**answer, "tidegate": receipt}

    def _best_of(self, choices: list[tuple[Choice, Piece]]) -> list[tuple[Choice, Piece]]:
        """Return the choices that the answer has, with their final indexes."""
        n, num_kept = self._prepared.n, self._prepared.num_kept
        if num_kept is None:
            return choices
        best: list[tuple[Choice, Piece]] = []
        for first in range(0, len(choices), n):
            ranked = sorted(choices[first : first + n], key=lambda found: -found[0].mean_logprob)
            best += ranked[:num_kept]
        for index, (choice, _) in enumerate(best):
            choice.index = index
        return best

    async def stream(self, write: Write) -> None:
        """Write the answer as frames. Raises the same errors as `respond`, also after the first frames are written."""
        chunks = self._prepared.answer.chunks(self._prepared.include_usage)
        opened: set[int] = set()
        held = b""  # the last frames of a stream whose end has a receipt
        wrote_s = self._clock.now()
        async with self._generation():
            if first := chunks.begin():
                await write(first)
            while self._num_open:
                silent_s = self._clock.now() - wrote_s
                pieces = await self._advance(max(0.0, self._ping_s - silent_s))
                frames = await self._written(partial(self._frames, pieces, chunks, opened), pieces)
                # New tokens may give no text yet: they may be a part of a character or of a possible stop string.
                if not frames and self._clock.now() - wrote_s >= self._ping_s:
                    frames = PING
                if not self._num_open and self._prepared.placement.receipt_for is not None:
                    held, frames = frames, b""
                if frames:
                    await write(frames)
                    wrote_s = self._clock.now()
                if not (chunks.keeps_tokens or self._account.keeps_events):
                    self._tokens.forget_received()
        end = chunks.end(self._logged_usage())
        # A format without an end of its own reports it later, with the receipt.
        last = self._with_receipt(held + end) if end else held
        if last:
            await write(last)

    async def _written(self, write: Callable[[], T], pieces: Sequence[tuple[Choice, Piece]]) -> T:
        """Return `write()`, which writes `pieces`. It is called in a thread if they report many log probabilities."""
        sampling = self._prepared.requests[0].sampling
        num_reported = 0
        if sampling.logprobs is not None:
            num_reported += (1 + sampling.logprobs) * sum(len(piece.tokens) for _, piece in pieces)
        if sampling.prompt_logprobs is not None:
            num_reported += (1 + sampling.prompt_logprobs) * sum(len(choice.prompt_logprobs) for choice, _ in pieces)
        num_reported += sum(len(choice.vector) for choice, _ in pieces) // VECTOR_BYTES
        return await asyncio.to_thread(write) if num_reported > INLINE_LOGPROBS else write()

    @asynccontextmanager
    async def _generation(self) -> AsyncIterator[None]:
        """The token stream. At its end, also an early one, what the answer has used is settled."""
        try:
            async with self._tokens:
                yield
        except ApiError as error:
            if error.code in GIVEN_UP and self._dead_letters is not None:
                await self._dead_letters.add(dead_letter_of(self._prepared, error.message, self._clock.wall_ms()))
            raise
        finally:
            reasons = [c.finish_reason for c in self._choices.values() if c.finish_reason is not None]
            usage = self._usage()
            describe_answer(self._trace, self.tier.name, usage, reasons)
            await self._account.close(self.tier.name, usage, self._whole_output())

    def _whole_output(self) -> Sequence[TokenEvent]:
        """Return the events to keep; none if the output was not generated to its end, or is not to be kept."""
        was_stopped = any(choice.stopped_early for choice in self._choices.values())
        is_whole = self._events and (was_stopped or self._events[-1].kind is EventKind.FINISHED)
        return self._events if is_whole else ()

    async def _advance(self, timeout_s: float | None) -> list[tuple[Choice, Piece]]:
        """Wait for events, and return what they add to each choice.

        Returns an empty list if no event arrives within `timeout_s` seconds (None: no limit). Raises `ApiError` if the
        generation fails, or if the tier's timeout has passed since the last event.
        """
        events = await self._tokens.receive(self._wait_s(timeout_s))
        if not events and self._wait_s(None) == 0:
            raise timed_out(self._prepared.tier.name)
        if events:
            self._last_event_s = self._clock.now()
            self._trace.note_tokens()
            if self._prepared.requests[0].delivery is Delivery.AT_END:  # one step may end many such answers
                await self._lock.acquire(self._prepared.owner or "")
        pieces: dict[str, Piece] = {}
        for event in events:
            choice = self._choices[event.request_id]
            if choice.finish_reason is None:
                if self._account.keeps_events:
                    self._events.append(event)
                pieces.setdefault(event.request_id, Piece()).extend(self._feed(choice, event))
        for request_id in pieces:
            if self._choices[request_id].stopped_early:
                await self._tokens.cancel(request_id)
        return [(self._choices[request_id], piece) for request_id, piece in pieces.items()]

    def _feed(self, choice: Choice, event: TokenEvent) -> Piece:
        if (failure := failure_of(event, has_grammar=self._prepared.output.grammar is not None)) is not None:
            raise failure
        if event.receipt is not None:
            self._receipts[event.request_id] = event.receipt
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

    def _frames(self, pieces: Sequence[tuple[Choice, Piece]], chunks: StreamEncoder, opened: set[int]) -> bytes:
        frames = []
        for choice, piece in pieces:
            usage = self._usage_of(choice) if self._prepared.continuous_usage else None
            if choice.index not in opened:
                opened.add(choice.index)
                before = replace(usage, completion_tokens=0) if usage is not None else None
                frames.append(chunks.opening(choice.index, before))
            if piece:
                frames.append(chunks.piece(choice.index, piece, usage))
            if choice.finish_reason is not None:
                frames.append(chunks.closing(choice, usage))
        return b"".join(frames)

    def _with_receipt(self, last_frames: bytes) -> bytes:
        receipt = self.receipt
        return last_frames if receipt is None else with_receipt(last_frames, receipt)

    def _receipt(self) -> dict[str, Any]:
        total_ms = self._clock.wall_ms() - self._prepared.requests[0].arrival_ms
        found = [
            (self._receipts[request_id], choice.cached_tokens)
            for request_id, choice in self._choices.items()
            if request_id in self._receipts
        ]
        placement, tier = self._prepared.placement, self._prepared.tier.name
        return receipt_object(placement.receipt_for or "auto", tier, total_ms, found, placement.rule)

    def _usage_of(self, choice: Choice) -> Usage:
        """Return the token counts of one choice so far. Its chunks report these, as those of vLLM do."""
        return Usage(choice.prompt_tokens, choice.num_tokens, choice.cached_tokens, choice.num_reasoning_tokens)

    def _usage(self) -> Usage:
        """Return the token counts of the answer.

        A prompt and its cached part are counted only once, even if the prompt has several choices.
        """
        choices = list(self._choices.values())
        if len(choices) == 1:
            return self._usage_of(choices[0])
        first_of_prompt = slice(None, None, self._prepared.n)
        return Usage(
            prompt_tokens=sum(choice.prompt_tokens for choice in choices[first_of_prompt]),
            completion_tokens=sum(choice.num_tokens for choice in choices),
            cached_tokens=sum(choice.cached_tokens for choice in choices[first_of_prompt]),
            reasoning_tokens=sum(choice.num_reasoning_tokens for choice in choices),
        )

    def _logged_usage(self) -> Usage:
        """Return the token counts of the answer, and put them into the request's log lines."""
        usage = self._usage()
        structlog.contextvars.bind_contextvars(
            prompt_tokens=usage.prompt_tokens, completion_tokens=usage.completion_tokens
        )
        return usage


def _choice(index: int, request: Request, prepared: PreparedRequest, tokenizer: Tokenizer) -> Choice:
    prompt_text = prepared.prompt_texts[index // prepared.n]
    return prepared.options.choice(index, tokenizer, request.prompt_token_ids, prompt_text, prepared.output)
