"""A server of OpenAI's kind that streams tokens. Implements `engine.streaming.Upstream`.

Puts the parts of this room together: a body by dialect, one exchange, its events, the tokens that they bring. Knows
HTTP statuses; does not know tiers, attempts or time.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace

import msgspec
from msgspec import structs

from engine.interface import EngineInfo, FinishReason, SamplingParams, SequenceOutput, TokenLogprobs
from engine.streaming import (
    IMAGES,
    StreamRequest,
    UpstreamBusy,
    UpstreamError,
    UpstreamLoad,
    UpstreamLost,
    UpstreamRefused,
    UpstreamUnusable,
)
from engine.upstream.bodies import body_of, can_continue, chat_body_of
from engine.upstream.chunks import EventSplitter, Piece, reader_of
from engine.upstream.dialects import CHAT_DIALECTS, Dialect
from engine.upstream.http import Exchange, HttpSender
from engine.upstream.status import ModelCard, list_models, load_of, num_places_of
from engine.upstream.texts import Texts

MAX_QUOTED = 300  # characters of a server's error message that are passed on
BUSY = (429, 503)
REFUSED = (400, 413, 422)  # the fault is in the request
TIMED_OUT = 408
TRIAL_PRIORITY = 1000  # above all tiers: while a trial runs, nothing else may be sent
USAGE_S = 1.0  # seconds for the event after the last token
TRIAL_TOKENS = 512  # at most, of the prompt that tells whether prefixes are cached: some KV blocks of any server
TRIAL_S = 120.0  # a server may compile kernels for its first tokens


class HttpUpstream:
    """One endpoint of a server, and `card`, one of its models.

    `texts` is needed for a dialect that takes no token ids, and for one of chats. llama.cpp needs it for characters of
    several tokens, of which it sends only the last id.
    """

    def __init__(
        self,
        sender: HttpSender,
        dialect: Dialect,
        card: ModelCard,
        info: EngineInfo,
        texts: Texts | None = None,
        *,
        with_priority: bool = True,
    ) -> None:
        assert texts is not None or (dialect.takes_ids and not dialect.is_chat)
        self._sender = sender
        self._dialect = dialect
        self._card = card
        self.info = info
        self.unsupported = dialect.unsupported
        self._texts = texts
        self._with_priority = with_priority
        self.caches_prefixes = False  # whether the server has found an earlier prompt again, and said so
        self._chats: HttpUpstream | None = None

    def take_images(self, texts: Texts) -> None:
        """Serve chats with images too, by the server's chat endpoint."""
        dialect = CHAT_DIALECTS[self._dialect.name]
        self.info = replace(self.info, takes_images=True)
        self._chats = HttpUpstream(
            self._sender, dialect, self._card, self.info, texts, with_priority=self._with_priority
        )
        less = dialect.unsupported | (frozenset() if dialect.takes_ids else {"tools"})  # others would parse the calls
        self.unsupported |= {f"{IMAGES}+{name}" for name in less - self.unsupported}

    def can_continue(self, sampling: SamplingParams, is_seeded: bool) -> bool:
        return self._dialect.takes_ids and can_continue(sampling, is_seeded)

    def keeps_prefixes(self, cache_salt: str) -> bool:
        return self.caches_prefixes and bool(self._dialect.salt or not cache_salt)

    def can_repeat(self, sampling: SamplingParams) -> bool:
        return self._dialect.takes_ids and (self._dialect.repeats or sampling.temperature == 0)

    async def stream(self, request: StreamRequest) -> AsyncGenerator[SequenceOutput, None]:
        if request.chat and self._chats is not None:
            async with aclosing(self._chats.stream(request)) as outputs:
                async for output in outputs:
                    yield output
            return
        body, exchange = msgspec.json.encode(self._body(request)), None
        try:
            exchange = await self._sender("POST", self._dialect.path, body, request.traceparent)
            if await exchange.wait_for_status() != 200:
                raise await refusal(exchange)
            num_tokens, pieces = request.num_tokens, self._pieces(exchange)
            async for piece in pieces:
                num_tokens += len(piece.token_ids)
                if piece.token_ids or piece.finish_reason is not None:
                    output = self._output(request, piece, num_tokens)
                    if output.finish_reason is None:
                        yield output
                        continue
                    yield await self._with_usage(output, pieces)
                    return
            raise UpstreamLost("The server ended the stream before the answer was whole.")
        finally:
            if exchange is not None:
                exchange.hang_up()

    async def _with_usage(self, last: SequenceOutput, pieces: AsyncGenerator[Piece, None]) -> SequenceOutput:
        """Return the last output with what the server says of the prompt at the end.

        It is how many tokens were found in its prefix cache, and for a chat, how many there are. An event of its own
        may say that the last token was one that ends the answer.
        """
        if self._dialect.usage_last and not last.num_cached_tokens:
            with suppress(UpstreamLost, TimeoutError):  # the answer is whole in any case
                async with asyncio.timeout(USAGE_S):
                    async for piece in pieces:
                        last = structs.replace(last, finish_reason=piece.finish_reason or last.finish_reason)
                        if piece.finish_reason is not None and not piece.cached_tokens:
                            continue
                        num_prompt = piece.prompt_tokens if self._dialect.is_chat else 0
                        counted = {"num_cached_tokens": piece.cached_tokens, "num_prompt_tokens": num_prompt}
                        return structs.replace(last, **counted)
        return last

    async def load(self) -> UpstreamLoad | None:
        if not any(card.is_same_model(self._card) for card in await list_models(self._sender)):
            raise UpstreamUnusable(
                f"The server at {self._sender.address} has another model than at the start of this worker. "
                "If it is the right one, start the worker again."
            )
        load: UpstreamLoad | None = None
        if self._dialect.metrics is not None and (page := await self._page("/metrics")) is not None:
            load = load_of(self._dialect.metrics, page.decode(errors="replace"))
        if self._dialect.properties and (page := await self._page(self._dialect.properties)) is not None:
            load = replace(load or UpstreamLoad(), num_places=num_places_of(page))
        return load

    async def _page(self, path: str) -> bytes | None:
        """Return what the server answers to a GET; None if it has no such page, keeps it to itself, or is too busy."""
        with suppress(UpstreamLost):
            status, body = await self._sender.get(path)
            return body if status == 200 else None
        return None

    async def try_out(self) -> bool:
        first = self.info.eos_token_ids[0] if self.info.eos_token_ids else 0
        sampling = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos="ignore_eos" not in self.unsupported)
        trial = StreamRequest("trial", (first,), sampling, priority=TRIAL_PRIORITY)
        try:
            async with asyncio.timeout(TRIAL_S):
                return any([output.token_ids async for output in self.stream(trial)])
        except TimeoutError:
            raise UpstreamLost("The server sent no token within two minutes.") from None

    async def try_cache(self) -> None:
        """Find out whether the server finds the KV of an earlier prompt again and says so, and how large a block is.

        Of a prompt of whole blocks, it computes the last block again, because it always computes the last token.
        """
        first = self.info.eos_token_ids[0] if self.info.eos_token_ids else 0
        sampling = SamplingParams(max_tokens=1, temperature=0.0)
        num_tokens = min(TRIAL_TOKENS, 1 << (self.info.max_model_len - 1).bit_length() - 1)
        trial = StreamRequest("trial", (first,) * num_tokens, sampling, priority=TRIAL_PRIORITY)
        for _ in range(2):
            num_cached = max([output.num_cached_tokens async for output in self.stream(trial)], default=0)
        self.caches_prefixes = num_cached > 0
        if self.caches_prefixes:
            self.info = replace(self.info, block_size=max(self.info.block_size, num_tokens - num_cached))

    def _body(self, request: StreamRequest) -> dict[str, object]:
        if self._dialect.is_chat:
            return chat_body_of(request, self._dialect, self._card.id, with_priority=self._with_priority)
        known = (*request.prompt_token_ids, *request.output_token_ids)
        texts = None if self._dialect.takes_ids else self._texts
        prompt = list(known) if texts is None else texts.prompt(known)
        return body_of(request, self._dialect, self._card.id, prompt, with_priority=self._with_priority)

    async def _pieces(self, exchange: Exchange) -> AsyncGenerator[Piece, None]:
        splitter, reader = EventSplitter(), reader_of(self._dialect)
        while data := await exchange.read():
            for event in splitter.feed(data):
                piece = reader.read(event)
                if self._texts is not None and (piece.lacks_ids or not (piece.token_ids and self._dialect.takes_ids)):
                    _set_ids(piece, self._texts)
                yield piece

    def _output(self, request: StreamRequest, piece: Piece, num_tokens: int) -> SequenceOutput:
        reason, vocab_size = piece.finish_reason, self.info.vocab_size
        if self._dialect.takes_ids and not all(0 <= token_id < vocab_size for token_id in piece.token_ids):
            raise UpstreamLost(
                f"The server sent token ids outside the vocabulary of {vocab_size}: is it another model?"
            )
        if request.sampling.logprobs is not None and len(piece.logprobs) != len(piece.token_ids):
            raise UpstreamLost("The server sent tokens without the log probabilities that were asked for.")
        if reason is None and self._dialect.takes_ids:
            reason = self._end(request.sampling, piece.token_ids, num_tokens - len(request.prompt_token_ids))
        return SequenceOutput(
            request.seq_id,
            num_computed_tokens=max(0, num_tokens - 1),
            token_ids=tuple(piece.token_ids),
            finish_reason=reason,
            num_cached_tokens=piece.cached_tokens,
            logprobs=tuple(piece.logprobs),
        )

    def _end(self, sampling: SamplingParams, new: Sequence[int], num_output: int) -> FinishReason | None:
        """Return why these tokens end the answer: the event that says so may be lost with the connection."""
        ends = sampling.stop_token_ids if sampling.ignore_eos else (*sampling.stop_token_ids, *self.info.eos_token_ids)
        if new and new[-1] in ends:
            return FinishReason.STOP
        return FinishReason.LENGTH if num_output >= sampling.max_tokens else None


def _set_ids(piece: Piece, texts: Texts) -> None:
    """Give a piece the ids of its text. The log probability of those that the server did not send is unknown: 0."""
    piece.token_ids = texts.ids(piece.text) if piece.text else []
    if piece.logprobs:
        piece.logprobs = [*(TokenLogprobs(i, 0.0, ()) for i in piece.token_ids[:-1]), piece.logprobs[-1]]


async def refusal(exchange: Exchange) -> UpstreamError:
    """Return the error for a response that is no stream."""
    status, text = exchange.status or 0, (await exchange.read_all()).decode(errors="replace")
    said = f"The model's server answered {status}: {' '.join(text.split())[:MAX_QUOTED].rstrip('.')}."
    if status in BUSY:
        after = exchange.headers.get("retry-after", "")
        return UpstreamBusy(said, float(after) if after.isdecimal() else None)
    if status in REFUSED:
        return UpstreamRefused(said)
    return UpstreamLost(said) if status >= 500 or status == TIMED_OUT else UpstreamUnusable(said)
