"""Turn pydantic's list of errors into one fault, because OpenAI's error object can report only one.

Knows pydantic's error records; does not know HTTP or any particular body. The message of a fault names the wrong
parameter and says what is allowed, in words of JSON. It never repeats the input.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import Discriminator

TAG = "<"  # first character of the tags of union members, such as `<text>`; paths are shown without these tags
# What a value must be, for each type of pydantic's errors. The fields in braces are of the error's context.
_MUST: dict[str, str] = {
    "string_type": "be a string",
    "string_pattern_mismatch": "match the pattern {pattern}",
    "int_type": "be an integer",
    "int_parsing": "be an integer",
    "float_type": "be a number",
    "float_parsing": "be a number",
    "finite_number": "be a finite number",
    "bool_type": "be true or false",
    "bool_parsing": "be true or false",
    "list_type": "be an array",
    "dict_type": "be an object",
    "model_type": "be an object",
    "model_attributes_type": "be an object",
    "literal_error": "be {expected}",
    "greater_than_equal": "be at least {ge}",
    "greater_than": "be more than {gt}",
    "less_than_equal": "be at most {le}",
    "less_than": "be less than {lt}",
    "extra_forbidden": "not be there: it is not known",
    "string_too_short": "have at least {min_length} {units}",
    "string_too_long": "have at most {max_length} {units}",
    "too_short": "have at least {min_length} {units}",
    "too_long": "have at most {max_length} {units}",
}


@dataclass(frozen=True, slots=True)
class Fault:
    message: str
    param: str | None
    code: str


def choose(tag_of: Callable[[Any], str | None], expected: str) -> Discriminator:
    """Return what picks the member of a union that validates a value: the one with the tag that `tag_of` returns.

    If all members were tried, the first error could come from the wrong one. `tag_of` returns None if none fits.
    """
    return Discriminator(tag_of, custom_error_type="union_type", custom_error_message=f"Must be {expected}")


def text_or_list(value: Any) -> str | None:
    return "<text>" if isinstance(value, str) else "<list>" if isinstance(value, list) else None


def first_fault(errors: Sequence[Mapping[str, Any]], skip: Sequence[str] = ()) -> Fault:
    """Return the first of `errors` as a fault. Its `param` is a path such as `messages[0].content[1].type`.

    The first part of the path is left out if it is in `skip`. FastAPI's records begin with the source of the value,
    such as `body` or `query`.
    """
    error = errors[0]
    loc = tuple(error["loc"])
    param = dotted(loc[1:] if loc and loc[0] in skip else loc) or None
    kind, text = str(error["type"]), _sentence(error)
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


def _sentence(error: Mapping[str, Any]) -> str:
    """Return what the value must be, as the end of a sentence. Messages of own validators are taken as they are."""
    must = _MUST.get(str(error["type"]))
    if must is None:
        text = str(error["msg"]).removeprefix("Value error, ")
        text = text[:1].lower() + text[1:]
        return text if text.endswith(".") else text + "."
    context = {name: _plain(value) for name, value in dict(error.get("ctx") or {}).items()}
    bound = context.get("min_length", context.get("max_length", 0))
    if error["type"] in ("string_too_short", "too_short") and bound == 1:
        return "it must not be empty."
    # Only of arrays and objects does pydantic say what they are: it calls a text with a validator "Value".
    unit = "entry" if context.get("field_type") in ("List", "Dictionary", "Set", "Tuple") else "character"
    units = unit if bound == 1 else {"entry": "entries", "character": "characters"}[unit]
    return f"it must {must.format(**context, units=units)}."


def _plain(value: Any) -> Any:
    """Return a bound as people write it: 2, not 2.0."""
    return int(value) if isinstance(value, float) and value.is_integer() else value
