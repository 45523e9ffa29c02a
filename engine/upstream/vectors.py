"""A server that embeds texts or ranks documents, by /v1/embeddings or /v1/rerank: one text, or one pair, a request.

The server mixes what is in flight in its own batches. Texts go there as token ids where it takes these. Pairs go as
texts, because /v1/rerank takes nothing else; they are decoded here, so the number of tokens is approximate.
"""

import struct
from collections.abc import AsyncGenerator

import msgspec

from engine.interface import EngineInfo, FinishReason, ModelKind, SamplingParams, SequenceOutput
from engine.streaming import StreamRequest, UpstreamLost
from engine.upstream.client import HttpUpstream, refusal
from engine.upstream.dialects import Dialect
from engine.upstream.http import HttpSender
from engine.upstream.status import ModelCard
from engine.upstream.texts import Texts

PATHS: dict[ModelKind, str] = {"embedding": "/v1/embeddings", "rerank": "/v1/rerank"}
SAMPLING = SamplingParams(max_tokens=1, temperature=0.0)
STANDS_FOR_VECTOR = 0  # the token id


class _Embedding(msgspec.Struct):
    embedding: list[float]


class _Result(msgspec.Struct):
    relevance_score: float


class _Answer(msgspec.Struct):
    data: list[_Embedding] = []
    results: list[_Result] = []


class VectorUpstream(HttpUpstream):
    """One server and `card`, one of its models, which is of the kind `kind`."""

    def __init__(
        self, sender: HttpSender, dialect: Dialect, card: ModelCard, info: EngineInfo, texts: Texts, kind: ModelKind
    ) -> None:
        super().__init__(sender, dialect, card, info, texts)
        self._kind = kind
        self._decoder = texts
        self.unsupported = frozenset()

    def can_continue(self, sampling: SamplingParams, is_seeded: bool) -> bool:
        return False  # there is nothing between the beginning and the end

    def can_repeat(self, sampling: SamplingParams) -> bool:
        return True

    async def stream(self, request: StreamRequest) -> AsyncGenerator[SequenceOutput, None]:
        body, exchange = msgspec.json.encode(self._body(request)), None
        try:
            exchange = await self._sender("POST", PATHS[self._kind], body, request.traceparent)
            if await exchange.wait_for_status() != 200:
                raise await refusal(exchange)
            vector = _vector_of(await exchange.read_all())
        finally:
            if exchange is not None:
                exchange.hang_up()
        yield SequenceOutput(
            request.seq_id,
            num_computed_tokens=request.num_tokens,
            token_ids=(STANDS_FOR_VECTOR,),
            finish_reason=FinishReason.LENGTH,
            vector=vector,
        )

    async def try_out(self) -> bool:
        """Ask for one vector, and return whether it came. Raises `UpstreamError`."""
        ids = tuple(self._decoder.ids("a"))
        trial = StreamRequest("trial", ids, SAMPLING)
        if self._kind == "rerank":
            trial = StreamRequest("trial", (*ids, *ids), SAMPLING, second_from=len(ids))
        return any([output.vector async for output in self.stream(trial)])

    def _body(self, request: StreamRequest) -> dict[str, object]:
        ids, texts = request.prompt_token_ids, self._decoder
        if self._kind == "rerank":
            query, document = texts.plain(ids[: request.second_from]), texts.plain(ids[request.second_from :])
            return {"model": self._card.id, "query": query, "documents": [document]}
        return {"model": self._card.id, "input": list(ids) if self._dialect.takes_ids else texts.plain(ids)}


def _vector_of(answer: bytes) -> bytes:
    """Return the embedding or the score of an answer.

    Raises `UpstreamLost` if it has not exactly one, or a number that no float32 holds.
    """
    try:
        found = msgspec.json.decode(answer, type=_Answer)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UpstreamLost(f"The server's answer has another form than expected: {error}.") from error
    vectors = [entry.embedding for entry in found.data] or [[result.relevance_score] for result in found.results]
    if len(vectors) != 1 or not vectors[0]:
        raise UpstreamLost(f"The server's answer to one input has {len(vectors)} vectors.")
    try:
        return struct.pack(f"<{len(vectors[0])}f", *vectors[0])
    except OverflowError:
        raise UpstreamLost("The server's answer has a number beyond those of float32.") from None
