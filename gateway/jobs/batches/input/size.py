"""The size of a batch's input: how many requests, how much text, how many output tokens they may ask for.

Counts without a tokenizer, because a batch is answered before its 100,000 lines could be tokenised. Lines that are not
valid are left out: validation reports them. Reading blocks, so callers offload it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gateway.jobs.batches.input.jsonl import MAX_LINE_BYTES, numbered_lines
from gateway.protocol.errors import ApiError
from gateway.protocol.json_body import parse_json_object

MAX_DEPTH = 64  # of a body's values, as in a request
# Bytes of a prompt that are compared at once. A text begins like an earlier one as far as their first blocks are equal.
BLOCK_BYTES = 512
TOKEN_BYTES = 4  # usual length of a token in English text; a prompt that is a list of token ids counts as such a text
COMPLETIONS_MAX_TOKENS = 16  # of /v1/completions without `max_tokens`
LIMITS = ("max_completion_tokens", "max_output_tokens", "max_tokens")
PROMPT_FIELDS = ("instructions", "messages", "prompt", "input", "tools")


@dataclass(frozen=True, slots=True)
class InputSize:
    """The sums over the requests of an input.

    `distinct_bytes` is the part of the prompts that no earlier prompt begins with: the prefix cache saves no more than
    the rest. Of `choices`, `unlimited` have no maximum of output tokens; the others generate at most `max_output`
    tokens together. `min_output` tokens are generated in any case.
    """

    lines: int = 0
    choices: int = 0
    prompt_bytes: int = 0
    distinct_bytes: int = 0
    min_output: int = 0
    max_output: int = 0
    unlimited: int = 0
    model: str | None = None  # of the first line

    def plus(self, other: "InputSize") -> "InputSize":
        """Return the size of both inputs together. Prompts of one that begin like prompts of the other count fully."""
        return InputSize(
            self.lines + other.lines,
            self.choices + other.choices,
            self.prompt_bytes + other.prompt_bytes,
            self.distinct_bytes + other.distinct_bytes,
            self.min_output + other.min_output,
            self.max_output + other.max_output,
            self.unlimited + other.unlimited,
            self.model or other.model,
        )


@dataclass(frozen=True, slots=True)
class LineSize:
    """The size of one request."""

    prompt_bytes: int
    choices: int
    limit: int | None  # maximum of output tokens of a choice; None: what the context leaves
    min_output: int  # tokens that a choice generates in any case


def line_size(body: Mapping[str, Any]) -> LineSize:
    """Return the size of a request from its body. It was valid: all that stands among token ids counts as one."""
    lengths = [length for name in PROMPT_FIELDS for length in _lengths(body.get(name), MAX_DEPTH)]
    return _line_size(body, sum(lengths) + max(0, len(lengths) - 1))


class SizeSum:
    """The size of an input whose requests are added one after the other: `total`."""

    def __init__(self) -> None:
        self.total = InputSize()
        self._seen: set[int] = set()

    def add(self, body: Mapping[str, Any]) -> None:
        text, model = _prompt_text(body), body.get("model")
        size = _line_size(body, len(text))
        n, limit, distinct = size.choices, size.limit, _distinct(text, self._seen)
        model = model if isinstance(model, str) else None
        counts = (1, n, len(text), distinct, n * size.min_output, n * (limit or 0), n * (limit is None))
        self.total = self.total.plus(InputSize(*counts, model))


def input_size(path: Path) -> InputSize:
    """Return the size of a batch input."""
    size = SizeSum()
    for body in _bodies(path):
        size.add(body)
    return size.total


def _bodies(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the bodies of the lines, within the limits in memory that validation has too."""
    for line in numbered_lines(path, MAX_LINE_BYTES):
        try:
            value = parse_json_object(line.text)
        except ApiError:
            continue
        if isinstance(body := value.get("body"), dict):
            yield body


def _line_size(body: Mapping[str, Any], prompt_bytes: int) -> LineSize:
    choices = max(_count(body.get("n")) or 1, _count(body.get("best_of")) or 1)
    prompts = body.get("prompt")
    if isinstance(prompts, list) and prompts and not isinstance(prompts[0], int):
        choices *= len(prompts)
    limits = [limit for name in LIMITS if (limit := _count(body.get(name))) is not None]
    limit = min(limits) if limits else COMPLETIONS_MAX_TOKENS if "prompt" in body else None
    least = limit if body.get("ignore_eos") is True else _count(body.get("min_tokens"))
    return LineSize(prompt_bytes, choices, limit, least or 0)


def _count(value: object) -> int | None:
    """Return a number of tokens or choices; None if `value` is none."""
    return value if isinstance(value, int) and 0 <= value < 2**31 else None


def _prompt_text(body: Mapping[str, Any]) -> bytes:
    """Return all texts of the prompt, one after the other."""
    return b"\0".join(text for name in PROMPT_FIELDS for text in _texts(body.get(name), MAX_DEPTH))


def _texts(value: object, max_depth: int) -> Iterator[bytes]:
    """Yield the texts in `value`; deeper texts are left out, because no valid request has them."""
    match value:
        case str():
            yield value.encode("utf-8", "replace")
        case [int(), *_]:
            yield b"".join(n.to_bytes(TOKEN_BYTES, "big") for token in value if (n := _count(token)) is not None)
        case list() | dict() if max_depth:
            for item in value.values() if isinstance(value, dict) else value:
                yield from _texts(item, max_depth - 1)


def _lengths(value: object, max_depth: int) -> Iterator[int]:
    """Yield the lengths of the texts in `value`, in bytes. A million token ids are not looked at one by one."""
    match value:
        case str():
            yield len(value) if value.isascii() else len(value.encode("utf-8", "replace"))
        case [int(), *_]:
            yield TOKEN_BYTES * len(value)
        case list() | dict() if max_depth:
            for item in value.values() if isinstance(value, dict) else value:
                yield from _lengths(item, max_depth - 1)


def _distinct(text: bytes, seen: set[int]) -> int:
    """Return how many bytes of `text` follow the longest beginning that an earlier text has too."""
    block = 0
    for start in range(0, len(text), BLOCK_BYTES):
        block = hash((block, text[start : start + BLOCK_BYTES]))
        if block not in seen:
            _remember(text, start, block, seen)
            return len(text) - start
    return 0


def _remember(text: bytes, start: int, block: int, seen: set[int]) -> None:
    """Add the blocks of `text` from `start` on to `seen`. `block` is the hash of the first of them."""
    seen.add(block)
    for begin in range(start + BLOCK_BYTES, len(text), BLOCK_BYTES):
        block = hash((block, text[begin : begin + BLOCK_BYTES]))
        seen.add(block)
