"""Schemas of the parameters that fix the format of the output text.

Knows OpenAI's `response_format` (with llama.cpp's `schema` in it), vLLM's `structured_outputs`, and the parameters that
say one kind of format each: vLLM's older `guided_*`, SGLang's `json_schema`, `regex` and `ebnf`, and llama.cpp's
`json_schema` and `grammar`. Does not know grammars.
"""

from typing import Annotated, Any, Literal

from pydantic import Field, Tag, model_validator

from gateway.protocol.bodies.validation import choose
from gateway.protocol.json_body import Body

MAX_CHOICES_LENGTH = 2**16  # characters of all texts of a `choice` together
MAX_LENGTH = 2**16  # characters of a grammar
Grammar = Annotated[str, Field(min_length=1, max_length=MAX_LENGTH)]
Choices = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=2**12)]], Field(min_length=1, max_length=2**12, fail_fast=True)
]
Schema = dict[str, Any]


class JsonSchema(Body):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")] | None = None  # OpenAI requires it
    description: str | None = None
    schema_: Schema | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextFormat(Body):
    type: Literal["text"]


class JsonObjectFormat(Body):
    type: Literal["json_object"]
    schema_: Schema | None = Field(default=None, alias="schema")


class JsonSchemaFormat(Body):
    type: Literal["json_schema"]
    json_schema: JsonSchema


class StructuralTagFormat(Body):
    """vLLM's older structural tag: free text in which each `begin` is followed by its schema and `end`."""

    type: Literal["structural_tag"]
    structures: Annotated[list["Structure"], Field(min_length=1, max_length=128, fail_fast=True)]
    triggers: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=256)]], Field(min_length=1, max_length=128, fail_fast=True)
    ]


class Structure(Body):
    begin: Annotated[str, Field(min_length=1, max_length=1024)]
    schema_: Schema = Field(alias="schema")
    end: Annotated[str, Field(max_length=1024)]


def _format_tag(value: Any) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return f"<{kind}>" if kind in ("text", "json_object", "json_schema", "structural_tag") else None


ResponseFormat = Annotated[
    Annotated[TextFormat, Tag("<text>")]
    | Annotated[JsonObjectFormat, Tag("<json_object>")]
    | Annotated[JsonSchemaFormat, Tag("<json_schema>")]
    | Annotated[StructuralTagFormat, Tag("<structural_tag>")],
    choose(_format_tag, "an object whose type is text, json_object, json_schema or structural_tag"),
]


class StructuredOutputs(Body):
    """vLLM's `structured_outputs`: exactly one of the first six fields."""

    json_: str | Schema | None = Field(default=None, alias="json")  # a JSON schema, or its text
    regex: Grammar | None = None
    choice: Choices | None = None
    grammar: Grammar | None = None  # Lark or GBNF
    json_object: bool | None = None
    structural_tag: Grammar | None = None  # the JSON text of a `StructuralTagFormat`
    whitespace_pattern: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None

    @model_validator(mode="after")
    def _exactly_one(self) -> "StructuredOutputs":
        constraints = (self.json_, self.regex, self.choice, self.grammar, self.json_object or None, self.structural_tag)
        if sum(constraint is not None for constraint in constraints) != 1:
            raise ValueError("must have exactly one of json, regex, choice, grammar, json_object and structural_tag")
        if self.choice is not None and sum(map(len, self.choice)) > MAX_CHOICES_LENGTH:
            raise ValueError(f"choice must have at most {MAX_CHOICES_LENGTH} characters in all")
        return self


class Formats(Body):
    """The parameters of a body that fix the format of its output."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | Schema | None = None
    guided_regex: Grammar | None = None
    guided_choice: Choices | None = None
    guided_grammar: Grammar | None = None
    guided_whitespace_pattern: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    json_schema: str | Schema | None = None
    # Clients of llama.cpp send empty texts for none.
    regex: Annotated[str, Field(max_length=MAX_LENGTH)] | None = None
    ebnf: Annotated[str, Field(max_length=MAX_LENGTH)] | None = None
    grammar: Annotated[str, Field(max_length=MAX_LENGTH)] | None = None
