"""The format of an answer, as the completion service needs it: one whole object, or the frames of a stream.

gateway/requests/answers/openai_objects.py has the formats of the two completion endpoints, and gateway/dialects/ those
of /v1/responses and /v1/messages. Knows choices and pieces; does not know how tokens become pieces.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

from gateway.output.piece import Piece
from gateway.requests.answers.choice import Choice
from gateway.requests.answers.chunks import Usage


class StreamEncoder(Protocol):
    """An encoder of the frames of one stream. `usage` is given only if every frame must report the usage so far."""

    keeps_tokens: ClassVar[bool]  # whether its last frames repeat what is reported of all tokens

    def begin(self) -> bytes:
        """Return the frames that are sent at once, before there is any output."""
        ...

    def opening(self, index: int, usage: Usage | None = None) -> bytes:
        """Return the frames that come before the first output of a choice."""
        ...

    def piece(self, index: int, piece: Piece, usage: Usage | None = None) -> bytes:
        """Return the frames of a piece that is not empty."""
        ...

    def closing(self, choice: Choice, usage: Usage | None = None) -> bytes:
        """Return the frames that end a choice, which has its finish reason."""
        ...

    def end(self, usage: Usage) -> bytes:
        """Return the last frames of the stream. `usage` is the usage of the whole answer."""
        ...


class Answer(Protocol):
    """A builder of the objects of one answer."""

    def response(self, choices: Sequence[tuple[Choice, Piece]], usage: Usage) -> dict[str, Any]:
        """Return the whole answer as one object."""
        ...

    def chunks(self, usage_key: bool) -> StreamEncoder:
        """Return an encoder of the answer as a stream. `usage_key` says whether the client asked for the usage."""
        ...
