"""The interface between the scheduler and a server that plans its own steps: plain data, errors, and a protocol.

Such a server takes requests and streams their tokens; nobody outside can pause a sequence or form a step. What can be
decided is when a request is sent, when its stream is hung up, and when it is continued from its prompt and the tokens
that it has. Knows sequences and tokens; does not know HTTP, tiers or time.
"""

import json
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from engine.interface import EngineInfo, SamplingParams, SequenceOutput


class UpstreamError(Exception):
    """The end of a stream before its sequence was finished. The message is a sentence for the user."""


class UpstreamRefused(UpstreamError):
    """The server will never serve this request."""


class UpstreamBusy(UpstreamError):
    """The server has no place for the request now (429, 503)."""

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class UpstreamLost(UpstreamError):
    """The stream broke off. Another attempt may succeed."""


class UpstreamUnreachable(UpstreamLost):
    """The server does not take connections."""


class UpstreamUnusable(UpstreamUnreachable):
    """The server answers, but serves nobody who asks as we do: it wants another key, path or model."""


@dataclass(frozen=True, slots=True)
class StreamRequest:
    """A sequence to generate on the server, or to continue there."""

    seq_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    cache_salt: str = ""
    priority: int = 0  # the higher goes first
    is_seeded: bool = False  # whether the user chose the seed
    output_token_ids: tuple[int, ...] = ()  # tokens of an earlier stream, after which this one begins
    second_from: int = 0  # as `NewSequence.second_from`
    traceparent: str = ""  # W3C trace context, passed on to the server; empty: the sequence is not traced
    # Not empty: a chat with images, as the JSON object of what the server's chat endpoint is sent of it. The server
    # applies its chat template, and `prompt_token_ids` are only as many as the prompt is thought to have.
    chat: str = ""

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)


@dataclass(frozen=True, slots=True)
class UpstreamLoad:
    """What the server says of its own load. It is some seconds old; None: the server does not say it."""

    num_running: int | None = None
    num_waiting: int | None = None  # requests in the server's own queue
    kv_usage: float | None = None  # share of its KV blocks in use
    num_places: int | None = None  # the most requests that it runs at once


class Upstream(Protocol):
    """A server that streams tokens."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def unsupported(self) -> frozenset[str]:
        """The options that the server cannot honour, as `options_of` names them.

        `images` are images in chats, and `images+OPTION` is an option of a chat with images; `images+tools` its tools.
        """
        ...

    def keeps_prefixes(self, cache_salt: str) -> bool:
        """Return whether a sequence that is continued finds nearly all of its KV in the server's prefix cache."""
        ...

    def can_continue(self, sampling: SamplingParams, is_seeded: bool) -> bool:
        """Return whether a sequence that is continued from its tokens is the same as one that was never hung up."""
        ...

    def can_repeat(self, sampling: SamplingParams) -> bool:
        """Return whether a sequence that is begun again gets the same tokens."""
        ...

    def stream(self, request: StreamRequest) -> AsyncGenerator[SequenceOutput, None]:
        """Return the tokens of `request` as the server sends them. Closing the generator hangs up.

        The last output has a finish reason. The first or the last one says how many of the request's tokens were found
        in the prefix cache, if the server says it. Raises `UpstreamError`.
        """
        ...

    async def load(self) -> UpstreamLoad | None:
        """Return the server's load; None if it does not tell. Raises `UpstreamUnreachable` if there is no server."""
        ...

    async def try_out(self) -> bool:
        """Generate two tokens, and return whether token ids came. Raises `UpstreamError`."""
        ...


IMAGES = "images"  # see `Upstream.unsupported`
_DEFAULTS = [(f.name, f.default) for f in msgspec.structs.fields(SamplingParams) if not f.required]


def json_schema_of(grammar: str) -> dict[str, Any] | None:
    """Return the JSON schema that a serialised grammar consists of; None if it is another kind of grammar."""
    grammars = json.loads(grammar)["grammars"]
    schema: dict[str, Any] | None = grammars[0].get("json_schema") if len(grammars) == 1 else None
    return schema


def options_of(sampling: SamplingParams) -> frozenset[str]:
    """Return the names of the parameters that are not at their defaults; `json_schema` for a grammar that is one."""
    names = {name for name, default in _DEFAULTS if getattr(sampling, name) != default}
    if sampling.grammar is not None and json_schema_of(sampling.grammar) is not None:
        names = (names - {"grammar"}) | {"json_schema"}
    return frozenset(names)
