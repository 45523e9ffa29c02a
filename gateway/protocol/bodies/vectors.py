"""Schemas of the bodies of /v1/embeddings (OpenAI's) and /v1/rerank (that of Cohere, Jina and vLLM).

As in gateway/protocol/bodies/schemas.py, types are strict, lists have a maximum length, and unknown fields are ignored
unless they are near a known name.
"""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import Field, Tag, field_validator

from engine.interface import ModelKind
from gateway.protocol.bodies.messages import Text
from gateway.protocol.bodies.options import GenerationBody, Whole
from gateway.protocol.bodies.schemas import MAX_CHOICES, Prompts, few_ids, prompts_of
from gateway.protocol.bodies.unsupported import unknown_names
from gateway.protocol.bodies.validation import choose
from gateway.protocol.errors import invalid_value
from gateway.protocol.json_body import Body, parse

# What a model reads at once: a text, a pair of texts, or token ids.
Input = str | tuple[str, str] | list[int]


class VectorRequest(GenerationBody):
    """The fields that both bodies have, beside those of all endpoints."""

    kind: ClassVar[ModelKind]  # of the models that answer
    param: ClassVar[str]  # the field with the inputs

    deadline_ms: Annotated[int, Field(ge=1, le=2**53), Whole] | None = None  # maximum ms from arrival to the answer
    # An extension of vLLM: only the first tokens of longer inputs are read; -1: as many as fit.
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=2**31), Whole] | None = None

    @property
    def inputs(self) -> Sequence[Input]:
        raise NotImplementedError


class EmbeddingRequest(VectorRequest):
    kind = "embedding"
    param = "input"

    input: Prompts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1, le=2**31), Whole] | None = None

    _few_ids = field_validator("input", mode="before")(few_ids)

    @property
    def inputs(self) -> Sequence[Input]:
        return prompts_of(self.input)


class Document(Body):
    text: Text


def _tag_of(value: Any) -> str | None:
    return "<text>" if isinstance(value, str) else "<document>" if isinstance(value, dict) else None


class RerankRequest(VectorRequest):
    kind = "rerank"
    param = "documents"

    query: Annotated[Text, Field(min_length=1)]
    documents: Annotated[
        list[
            Annotated[
                Annotated[Text, Tag("<text>")] | Annotated[Document, Tag("<document>")],
                choose(_tag_of, "a string or an object with a text"),
            ]
        ],
        Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True),
    ]
    top_n: Annotated[int, Field(ge=1, le=2**31), Whole] | None = None
    return_documents: bool | None = None

    @property
    def texts(self) -> list[str]:
        return [document if isinstance(document, str) else document.text for document in self.documents]

    @property
    def inputs(self) -> Sequence[Input]:
        return [(self.query, text) for text in self.texts]


V = TypeVar("V", bound=VectorRequest)


def parse_vectors(kind: type[V], body: dict[str, Any]) -> V:
    """Return `body` as an instance of `kind`. Raises `ApiError` 400, which names the parameter that is wrong."""
    request = parse(kind, body)
    if request.stream:
        raise invalid_value("stream", "Invalid value for 'stream': the answer comes as a whole.")
    if request.truncate_prompt_tokens == 0:
        raise invalid_value(
            "truncate_prompt_tokens",
            "Invalid value for 'truncate_prompt_tokens': it must be at least 1, or -1 for all that fit.",
        )
    if ignored := unknown_names(body, kind.model_fields):
        request._ignored = ignored
    return request
