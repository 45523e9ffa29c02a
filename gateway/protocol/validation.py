"""Turn pydantic's list of errors into one fault, because OpenAI's error object can report only one.

Knows pydantic's error records; does not know HTTP or any particular body. The message of a fault names the wrong
parameter and says what is allowed. It never repeats the input.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

TAG = "<"  # first character of the tags of union members, such as `<text>`; paths are shown without these tags


@dataclass(frozen=True, slots=True)
class Fault:
    message: str
    param: str | None
    code: str


def first_fault(errors: Sequence[Mapping[str, Any]], skip: Sequence[str] = ()) -> Fault:
    """Return the first of `errors` as a fault. Its `param` is a path such as `messages[0].content[1].type`.

    The first part of the path is left out if it is in `skip`. FastAPI's records begin with the source of the value,
    such as `body` or `query`.
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
    """Return the location in a pydantic error as a path such as `messages[0].role`."""
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
