"""A trace of requests from a JSONL or CSV file: the arrival, the tier and the lengths of each request.

The required columns (CSV) or keys (JSONL) are `arrival_s`, `tier` (the name of a tier or a `service_tier`),
`prompt_tokens` and `output_tokens`. The optional ones are `class` (a name for the report; default: the name of the
tier), `prefix_id` and `prefix_tokens` (a prefix that prompts share), and `deadline_s` (seconds after arrival). Knows
files; does not know tiers.
"""

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator


class TraceError(Exception):
    """The trace cannot be used. The message names the file, the line and the key."""


def _none_where_empty(value: Any) -> Any:
    """Return None for an empty cell of a CSV file, and any other value unchanged."""
    return None if value == "" else value


class TraceRow(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    arrival_s: float = Field(ge=0, allow_inf_nan=False)
    tier: str
    prompt_tokens: int = Field(ge=1)
    output_tokens: int = Field(ge=1)
    traffic_class: str = Field(default="", alias="class")
    prefix_id: str = ""
    prefix_tokens: Annotated[int | None, BeforeValidator(_none_where_empty)] = Field(default=None, ge=1)
    deadline_s: Annotated[float | None, BeforeValidator(_none_where_empty)] = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _prefix_is_whole(self) -> Self:
        if bool(self.prefix_id) != (self.prefix_tokens is not None):
            raise ValueError("prefix_id and prefix_tokens go together")
        if self.prefix_tokens is not None and self.prefix_tokens > self.prompt_tokens:
            raise ValueError("prefix_tokens: a prefix is a part of the prompt")
        return self


def read_trace(path: Path) -> list[TraceRow]:
    """Return all rows in order of arrival. Raises `TraceError`."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            lines = _csv_lines(file) if path.suffix.lower() == ".csv" else _jsonl_lines(file)
            rows = [_row(path, number, data) for number, data in lines]
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}: not UTF-8") from error
    if not rows:
        raise TraceError(f"{path}: holds no request")
    return sorted(rows, key=lambda row: row.arrival_s)


def _csv_lines(file: Iterator[str]) -> Iterator[tuple[int, Any]]:
    reader = csv.DictReader(file)
    for data in reader:
        yield reader.line_num, data


def _jsonl_lines(file: Iterator[str]) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(file, 1):
        if line.strip():
            yield number, line


def _row(path: Path, number: int, data: Any) -> TraceRow:
    try:
        return TraceRow.model_validate(json.loads(data) if isinstance(data, str) else data)
    except json.JSONDecodeError as error:
        raise TraceError(f"{path}:{number}: not JSON: {error.msg}") from error
    except ValidationError as error:
        wrong = (f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors(include_url=False))
        raise TraceError(f"{path}:{number}: " + "; ".join(wrong)) from error
