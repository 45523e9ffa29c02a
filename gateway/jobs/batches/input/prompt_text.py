"""The part of a line's body that the model reads: the prompt, as bytes to compare and as texts to count.

Knows the fields of the endpoints; does not know chat templates or tokens.
"""

import re
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from itertools import repeat
from typing import Any

import msgspec

# The fields that make the prompt, in the order in which chat templates write them. Lines with different cache salts
# share nothing, so the salt comes first.
PROMPT_FIELDS = ("cache_salt", "tools", "instructions", "system", "messages", "prompt", "input", "query", "documents")
_FILE = re.compile(rb"[A-Za-z0-9+/]{1024,}=*")  # so long a run of base64 is a file, such as an image, and no text
_MARK = b"base64"  # in each body with such a file: in a `data:` URL or as the type of a source
IMAGE_TYPES = ("image_url", "input_image", "image")  # of the parts of messages, in all APIs
IMAGE_TOKENS = 1024  # a guess at the tokens of an image
OUTPUT_LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens")


def prompt_bytes(body: Mapping[str, Any]) -> bytes:
    """Return the prompt as bytes. Prompts with the same beginning have bytes with the same beginning.

    Digests stand for images, so that these do not count as texts of their length.
    """
    found = msgspec.json.encode([body[name] for name in PROMPT_FIELDS if body.get(name) is not None])
    return _FILE.sub(_digest, found) if _MARK in found else found


def _digest(file: re.Match[bytes]) -> bytes:
    return blake2b(file[0], digest_size=16).hexdigest().encode()


def prompt_parts(body: dict[str, Any]) -> tuple[list[str], int]:
    """Return the texts of the prompt, and the number of its other tokens: ids that are given as numbers, and images."""
    texts: list[str] = []
    num_ids = 0
    for part in _leaves([body.get(name) for name in PROMPT_FIELDS if name != "cache_salt"]):
        if isinstance(part, str):
            texts.append(part)
        else:
            num_ids += 1
    return texts, num_ids


def output_limit(body: Mapping[str, Any]) -> int | None:
    """Return the maximum number of output tokens that the body asks for; None if it names none."""
    limits = (count_of(body.get(name)) for name in OUTPUT_LIMITS)
    return next((limit for limit in limits if limit is not None), None)


def count_of(value: object) -> int | None:
    """Return a number of tokens or choices; None if `value` is none."""
    return value if isinstance(value, int) and 0 <= value < 2**31 else None


def _leaves(value: Any) -> Iterator[str | int]:
    """Yield the texts and numbers inside `value`, in order. JSON has at most 64 levels here."""
    if isinstance(value, dict):
        value = repeat(0, IMAGE_TOKENS) if value.get("type") in IMAGE_TYPES else list(value.values())
    if isinstance(value, list | repeat):
        for part in value:
            yield from _leaves(part)
    elif isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool)):
        yield value
