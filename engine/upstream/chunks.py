"""Reads the events of a token stream: from bytes to the tokens that each event brings, for each dialect.

Does no I/O. Knows the events of OpenAI's, SGLang's and llama.cpp's servers; does not know connections.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from engine.interface import FinishReason, TokenLogprobs
from engine.streaming import UpstreamLost, UpstreamRefused
from engine.upstream.dialects import Dialect

_DONE = b"[DONE]"
BAD_REQUEST = 400  # SGLang says so in the stream, as the finish reason
MAX_ID_DIGITS = 18  # of a token id; Python refuses to convert much longer numbers


@dataclass(slots=True)
class Piece:
    """What one event brings."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    cached_tokens: int = 0
    prompt_tokens: int = 0  # 0: the event does not say it
    lacks_ids: bool = False  # whether `text` is that of further tokens before those in `token_ids`

    def __post_init__(self) -> None:
        if len(self.logprobs) not in (0, len(self.token_ids)) or min(self.cached_tokens, self.prompt_tokens) < 0:
            raise UpstreamLost("The server sent an event whose numbers do not fit each other.")


class Reader(Protocol):
    """Reads the data of one event after the other. Raises `UpstreamLost` for an event of another form."""

    def read(self, data: bytes) -> Piece: ...


class EventSplitter:
    """Splits the bytes of a stream of server-sent events into the data of its events."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Return the data of all events that are complete now."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                event = line[5:].strip()
                if event and event != _DONE:
                    yield event


def reader_of(dialect: Dialect) -> Reader:
    if dialect.is_chat:
        return _OpenAIReader()
    if dialect.name == "sglang":
        return _SGLangReader()
    return _LlamaReader() if dialect.name == "llama.cpp" else _OpenAIReader()


def _reason(name: Any) -> FinishReason | None:
    """Return why the sequence is finished; None if it is not. Raises `UpstreamLost` if the server has given it up."""
    if not name:
        return None
    if not isinstance(name, str):
        raise UpstreamLost("The server sent an event with a finish reason that is no text.")
    if name in ("abort", "error", "cancelled"):
        raise UpstreamLost(f"The server gave the request up ({name}).")
    return FinishReason.LENGTH if name == "length" else FinishReason.STOP


def _decode(decoder: Any, data: bytes) -> Any:
    """Return an event. Raises `UpstreamLost` if it cannot be read, or if the server reports an error by it."""
    try:
        chunk = decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UpstreamLost(f"The server sent an event that cannot be read: {error}.") from error
    if chunk.error is not None:
        raise UpstreamLost(f"The server reported an error: {str(chunk.error)[:300]}.")
    return chunk


class _OpenAILogprobs(msgspec.Struct):
    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] | None = None


class _OpenAIDelta(msgspec.Struct):
    content: str | None = None


class _OpenAIChoice(msgspec.Struct):
    text: str = ""
    delta: _OpenAIDelta | None = None  # of a chat, in place of `text`
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    logprobs: _OpenAILogprobs | None = None


class _OpenAIDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _OpenAIUsage(msgspec.Struct):
    prompt_tokens: int | None = None
    prompt_tokens_details: _OpenAIDetails | None = None


class _OpenAIChunk(msgspec.Struct):
    choices: list[_OpenAIChoice] = []
    usage: _OpenAIUsage | None = None
    error: Any = None


class _OpenAIReader:
    _decoder = msgspec.json.Decoder(_OpenAIChunk)

    def read(self, data: bytes) -> Piece:
        chunk: _OpenAIChunk = _decode(self._decoder, data)
        if not chunk.choices:
            usage = chunk.usage or _OpenAIUsage()
            details = usage.prompt_tokens_details or _OpenAIDetails()
            return Piece(cached_tokens=details.cached_tokens or 0, prompt_tokens=usage.prompt_tokens or 0)
        choice = chunk.choices[0]
        text = choice.text if choice.delta is None else choice.delta.content
        logprobs = [] if choice.logprobs is None else _openai_logprobs(choice.logprobs)
        return Piece(choice.token_ids or [], text or "", _reason(choice.finish_reason), logprobs)


def _openai_logprobs(reported: _OpenAILogprobs) -> list[TokenLogprobs]:
    tops = reported.top_logprobs or [None] * len(reported.tokens)
    if not len(reported.tokens) == len(reported.token_logprobs) == len(tops):
        raise UpstreamLost("The server did not send one log probability for each token.")
    found = []
    for token, logprob, top in zip(reported.tokens, reported.token_logprobs, tops, strict=True):
        likeliest = sorted((top or {}).items(), key=lambda item: -item[1])
        pairs = tuple((_token_id(text), value) for text, value in likeliest)
        found.append(TokenLogprobs(_token_id(token), logprob if logprob is not None else 0.0, pairs))
    return found


def _token_id(text: str) -> int:
    """Return the id in a token that is reported as `token_id:ID`."""
    number = text.removeprefix("token_id:")
    if not number.isdecimal() or len(number) > MAX_ID_DIGITS:
        raise UpstreamLost("The server does not report log probabilities by token ids.")
    return int(number)


class _SGLangMeta(msgspec.Struct):
    completion_tokens: int = 0
    cached_tokens: int = 0
    finish_reason: Any = None


class _SGLangChunk(msgspec.Struct):
    output_ids: list[int] = []
    meta_info: _SGLangMeta = msgspec.field(default_factory=_SGLangMeta)
    error: Any = None


class _SGLangReader:
    """Each event holds all tokens so far, or only the new ones: the server's flags decide."""

    _decoder = msgspec.json.Decoder(_SGLangChunk)

    def __init__(self) -> None:
        self._num_read = 0

    def read(self, data: bytes) -> Piece:
        chunk: _SGLangChunk = _decode(self._decoder, data)
        ids, meta = chunk.output_ids, chunk.meta_info
        is_whole = len(ids) == meta.completion_tokens
        new = ids[self._num_read :] if is_whole else ids
        self._num_read += len(new)
        finish = meta.finish_reason
        if isinstance(finish, dict) and finish.get("status_code") == BAD_REQUEST:
            raise UpstreamRefused(f"The model's server refuses the request: {str(finish.get('message'))[:300]}.")
        reason = _reason(finish.get("type") if isinstance(finish, dict) else finish)
        return Piece(new, finish_reason=reason, cached_tokens=meta.cached_tokens)


class _LlamaTop(msgspec.Struct):
    id: int
    logprob: float


class _LlamaProb(msgspec.Struct):
    id: int
    logprob: float
    top_logprobs: list[_LlamaTop] = []


class _LlamaTimings(msgspec.Struct):
    cache_n: int = 0


class _LlamaChunk(msgspec.Struct):
    timings: _LlamaTimings = msgspec.field(default_factory=_LlamaTimings)
    content: str = ""
    tokens: list[int] = []
    tokens_predicted: int = 0
    stop: bool = False
    stop_type: str = ""
    completion_probabilities: list[_LlamaProb] = []
    error: Any = None


class _LlamaReader:
    """The server sends only the last id of a character of several tokens, with the whole text."""

    _decoder = msgspec.json.Decoder(_LlamaChunk)

    def __init__(self) -> None:
        self._num_read = 0

    def read(self, data: bytes) -> Piece:
        chunk: _LlamaChunk = _decode(self._decoder, data)
        if chunk.stop:  # the last event repeats the numbers, not the tokens
            reason = FinishReason.LENGTH if chunk.stop_type == "limit" else FinishReason.STOP
            return Piece(finish_reason=reason, cached_tokens=chunk.timings.cache_n)
        logprobs = [
            TokenLogprobs(prob.id, prob.logprob, tuple((top.id, top.logprob) for top in prob.top_logprobs))
            for prob in chunk.completion_probabilities
        ]
        num_read, self._num_read = self._num_read + len(chunk.tokens), chunk.tokens_predicted
        return Piece(chunk.tokens, chunk.content, logprobs=logprobs, lacks_ids=chunk.tokens_predicted > num_read)
