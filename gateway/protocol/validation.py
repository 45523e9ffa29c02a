"""From pydantic's complaints to the one fault that OpenAI's error object has room for.

Knows pydantic's error records; knows neither HTTP nor any particular body. The messages name where the fault
is and what is allowed there, and never repeat the input.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

TAG = "<"  # union members are tagged `<text>`, `<parts>`, … so that they can be left out of a path


@dataclass(frozen=True, slots=True)
class Fault:
    message: str
    param: str | None
    code: str


def first_fault(errors: Sequence[Mapping[str, Any]], skip: Sequence[str] = ()) -> Fault:
    """The first of `errors`, with a path like `messages[0].content[1].type`. A path's first part is left out
    when it is in `skip` (where the value came from, in FastAPI's records)."""
    error = errors[0]
    loc = tuple(error["loc"])
    param = dotted(loc[1:] if loc and loc[0] in skip else loc) or None
    kind, text = str(error["type"]), _sentence(str(error["msg"]))
    if kind == "missing":
        return Fault(f"Missing required parameter: '{param}'.", param, "missing_required_parameter")
    if kind.endswith("_type") or kind.endswith("_parsing"):
        return Fault(f"Invalid type for '{param}': {text}", param, "invalid_type")
    return Fault(f"Invalid value for '{param}': {text}" if param else text, param, "invalid_value")


def dotted(loc: Sequence[int | str]) -> str:
    path = ""
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part != "[key]" and not part.startswith(TAG):
            path += f".{part[:64]}" if path else part[:64]
    return path


def _sentence(message: str) -> str:
    text = message.removeprefix("Value error, ")
    text = text[:1].lower() + text[1:]
    return text if text.endswith(".") else text + "."
