"""Requests of a batch from rows: each row fills a prompt template.

Pure. Knows the line format of OpenAI's Batch API; does not know files or servers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from string import Formatter
from typing import Any

from tidegate.batch.rows import BatchProblem, Row

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
EMBEDDINGS = "/v1/embeddings"
ENDPOINTS = (CHAT, COMPLETIONS, RESPONSES, EMBEDDINGS)


@dataclass(frozen=True, slots=True)
class Template:
    """What the requests of all rows have in common.

    `text` names columns in braces: `Summarise: {text}`. `parameters` are further fields of each request's body.
    """

    text: str
    model: str
    endpoint: str = CHAT
    system: str | None = None
    id_column: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)

    def request(self, row: Row, number: int) -> dict[str, Any]:
        """Return the input line of row `number` (from 1). Raises `BatchProblem` if a column is missing."""
        body = {"model": self.model, **self._prompt(self._filled(self.text, row)), **self.parameters}
        custom_id = row_id(row, number, self.id_column)
        return {"custom_id": custom_id, "method": "POST", "url": self.endpoint, "body": body}

    def _filled(self, text: str, row: Row) -> str:
        try:
            return _Columns().vformat(text, (), row)
        except (KeyError, IndexError):
            raise BatchProblem(
                f"The template {text!r} names a column that is not there; there is {_names(row)}."
            ) from None
        except (ValueError, TypeError, AttributeError) as error:
            raise BatchProblem(
                f"The template {text!r} is not valid: {error}; a brace as text is {{{{ or }}}}."
            ) from None

    def _prompt(self, text: str) -> dict[str, Any]:
        if self.endpoint == COMPLETIONS:
            return {"prompt": text}
        if self.endpoint == EMBEDDINGS:
            return {"input": text}
        if self.endpoint == RESPONSES:
            return {"input": text} | ({} if self.system is None else {"instructions": self.system})
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return {"messages": [*system, {"role": "user", "content": text}]}


class _Columns(Formatter):
    """Fills in columns by their whole names, which may contain dots and brackets."""

    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return (kwargs[field_name], field_name) if field_name in kwargs else super().get_field(field_name, args, kwargs)


def row_id(row: Row, number: int, column: str | None) -> str:
    """Return the custom_id of row `number` (from 1). Raises `BatchProblem` if the row has no such `column`."""
    if column is None:
        return f"row-{number}"
    if column not in row:
        raise BatchProblem(f"Row {number} has no column {column!r}; it has {_names(row)}.")
    return str(row[column])


def is_request(row: Row) -> bool:
    """Whether a row of a JSONL file is an input line of a batch already."""
    return "custom_id" in row and "body" in row


def answer_of(body: Any) -> str | list[float] | None:
    """Return the text of an answer of any endpoint, or its first embedding, numbers or base64; None if it has none."""
    match body:
        case {"data": [{"embedding": str() | list() as vector}, *_]}:
            return vector
        case {"choices": [{"message": {"content": text}}, *_]} | {"choices": [{"text": text}, *_]}:
            return text if isinstance(text, str) else None
        case {"output": [*items]}:
            parts = [part for item in items if item.get("type") == "message" for part in item.get("content", ())]
            return "".join(part.get("text", "") for part in parts) or None
    return None


def error_text(result: Mapping[str, Any]) -> str | None:
    """Return the error of a result line as one string; None if the line succeeded."""
    error = result.get("error")
    if error is None:
        response = result.get("response") or {}
        if response.get("status_code", 200) < 400:
            return None
        error = (response.get("body") or {}).get("error") or {"message": f"status {response['status_code']}"}
    code = error.get("code") or error.get("type")
    return f"{code}: {error.get('message')}" if code else str(error.get("message"))


def _names(row: Row) -> str:
    return ", ".join(repr(name) for name in row) or "none"
