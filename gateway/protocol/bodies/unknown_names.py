"""Find the names in a body that this server does not know, and refuse names that are probably misspelt.

Knows only names. A name near a known one is a mistake that would silently change the answer (`max_token`). Other
unknown names are of other servers' extensions, which clients send to everybody; they have no effect, and the answer
names them in the header `x-tidegate-ignored-parameters`.
"""

import re
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import Any

from gateway.protocol.bodies.unsupported import HARMLESS
from gateway.protocol.errors import ApiError, invalid_request

IGNORED_HEADER = "x-tidegate-ignored-parameters"
# Least similarity (difflib's ratio, 0 … 1) of a name to the known one that it is likely to mean, without underscores
# and case. `max_new_tokens` is 0.86 like `max_tokens`; `top_a`, an option of other servers, is 0.75 like `top_p`.
NEAR = 0.85
MAX_NAMES = 32  # names compared and reported: a comparison with all known names takes 1 ms
MAX_LENGTH = 64  # characters of a name that are compared and reported


def unknown_names(body: Mapping[str, Any], known: Collection[str]) -> tuple[str, ...]:
    """Return the names in `body` that are neither in `known` nor refused by name. At most `MAX_NAMES` are returned.

    Raises `ApiError` 400 for a name near a known one.
    """
    names = [name[:MAX_LENGTH] for name in body if name not in known and name not in HARMLESS][:MAX_NAMES]
    for name in names:
        if (meant := _nearest(name, known)) is not None:
            raise _misspelt(name, meant)
    return tuple(names)


def header_value(names: Collection[str]) -> str:
    """Return `names` as the value of a header: printable ASCII, separated by commas."""
    return ", ".join(re.sub(r"[^!-+\--~]", "?", name) for name in names)


def _nearest(name: str, known: Collection[str]) -> str | None:
    candidates = {_plain(candidate): candidate for candidate in (*HARMLESS, *known)}
    found = get_close_matches(_plain(name), candidates, n=1, cutoff=NEAR)
    return candidates[found[0]] if found else None


def _plain(name: str) -> str:
    return name.replace("_", "").lower()


def _misspelt(name: str, meant: str) -> ApiError:
    message = f"Unknown parameter: '{name}'. Did you mean '{meant}'?"
    return invalid_request(message, name, "unknown_parameter")
