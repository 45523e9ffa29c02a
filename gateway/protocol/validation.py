"""Turn pydantic's errors into the one fault that OpenAI's error object has room for.

Knows pydantic's error records; does not know HTTP or any particular body. A message names the place of the fault and
what is allowed there, and never repeats the input.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

TAG = "<"  # begins the tags of union members (`<text>`, `<parts>`), which are left out of paths


@dataclass(frozen=True, slots=True)
class Fault:
    message: str
    param: str | None
    code: str


def first_fault(errors: Sequence[Mapping[str, Any]], skip: Sequence[str] = ()) -> Fault:
    """Return the first of `errors`, with a path like `messages[0].content[1].type`.

    The first part of a path is left out if it is in `skip`: FastAPI's records begin with the value's source.
    """
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
    """Return a location as a path such as `messages[0].role`."""
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
