"""The answers of /v1/embeddings, in OpenAI's form, and of /v1/rerank, in that of Cohere, Jina and vLLM."""

import math
import struct
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from gateway.output.piece import Piece
from gateway.protocol.errors import ApiError, invalid_value
from gateway.requests.answers.answer import StreamEncoder
from gateway.requests.answers.choice import Choice
from gateway.requests.answers.chunks import Usage, encode_json


@dataclass(frozen=True, slots=True)
class _Whole:
    """An answer that is never streamed."""

    model: str
    service_tier: str

    def chunks(self, usage_key: bool) -> StreamEncoder:
        raise NotImplementedError("bodies that ask for a stream are refused")


@dataclass(frozen=True, slots=True)
class EmbeddingAnswer(_Whole):
    """A builder of a list of `embedding` objects. With `dimensions`, only so many numbers of each are kept."""

    as_base64: bool = False
    dimensions: int | None = None

    def response(self, choices: Sequence[tuple[Choice, Piece]], usage: Usage) -> dict[str, Any]:
        return {
            "object": "list",
            "data": [
                {"object": "embedding", "index": choice.index, "embedding": self._written(_vector_of(choice))}
                for choice, _ in choices
            ],
            "model": self.model,
            "usage": _usage(usage),
            "service_tier": self.service_tier,
        }

    def _written(self, vector: bytes) -> Any:
        """Return a vector as base64, or as JSON: one at a time, so that other threads run between two."""
        if self.dimensions is not None:
            vector = shortened(vector, self.dimensions)
        return b64encode(vector).decode() if self.as_base64 else msgspec.Raw(encode_json(numbers_of(vector)))


@dataclass(frozen=True, slots=True)
class RerankAnswer(_Whole):
    """A builder of a list of documents by their relevance: the first `top_n` (None: all), with their texts if given."""

    id: str = ""
    top_n: int | None = None
    texts: Sequence[str] | None = None

    def response(self, choices: Sequence[tuple[Choice, Piece]], usage: Usage) -> dict[str, Any]:
        scores = [(choice.index, numbers_of(_vector_of(choice))[0]) for choice, _ in choices]
        ranked = sorted(scores, key=lambda found: -found[1])[: self.top_n]
        return {
            "id": self.id,
            "model": self.model,
            "results": [{"index": index, "relevance_score": score} | self._document(index) for index, score in ranked],
            "usage": _usage(usage),
            "service_tier": self.service_tier,
        }

    def _document(self, index: int) -> dict[str, Any]:
        return {} if self.texts is None else {"document": {"text": self.texts[index]}}


def numbers_of(vector: bytes) -> tuple[float, ...]:
    return struct.unpack(f"<{len(vector) // 4}f", vector)


def shortened(vector: bytes, dimensions: int) -> bytes:
    """Return the first numbers of a vector, scaled to the length 1 as OpenAI's are. Raises `ApiError` 400."""
    numbers = numbers_of(vector)[:dimensions]
    if len(numbers) < dimensions:
        raise invalid_value(
            "dimensions", f"Invalid value for 'dimensions': the model's embeddings have {len(numbers)}, not more."
        )
    norm = math.hypot(*numbers) or 1.0
    return struct.pack(f"<{dimensions}f", *(number / norm for number in numbers))


def _vector_of(choice: Choice) -> bytes:
    """Return what the worker has computed. Raises `ApiError` 500 if its engine is one for chats."""
    if not choice.vector:
        message = (
            "The worker that answered has no engine for models of this kind: start it with --engine embedding, or with"
            " --engine openai before a server that has this endpoint."
        )
        raise ApiError(500, message, "server_error")
    return choice.vector


def _usage(usage: Usage) -> dict[str, int]:
    return {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens}
