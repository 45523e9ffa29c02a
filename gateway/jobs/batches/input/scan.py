"""Scan the input of a batch: one reading tells its errors, its size, its digest, and the order of its lines.

The order is written beside the input. Reading blocks and takes long, so callers offload it.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gateway.jobs.batches.input.checks import InputChecks, InputRules, LineError
from gateway.jobs.batches.input.jsonl import MAX_LINE_BYTES, Line, numbered_lines
from gateway.jobs.batches.input.order import LinePrompt, line_prompt, write_order
from gateway.jobs.batches.input.size import WITHOUT_OUTPUT, InputSize, SizeSum
from gateway.protocol.errors import ApiError
from gateway.protocol.json_body import parse_json_object


@dataclass(frozen=True, slots=True)
class InputScan:
    """What one reading of an input tells. If there are `errors`, the batch must not run.

    `total` is the number of its lines, as far as they were checked. `size` counts all lines with a body. `sha256` is in
    hexadecimal.
    """

    total: int
    model: str | None
    errors: tuple[LineError, ...]
    size: InputSize
    sha256: str


def scan_input(path: Path, rules: InputRules) -> InputScan:
    """Read the input at `path`, and write the order of its lines if it has no errors."""
    digest, checks, size, prompts = hashlib.sha256(), InputChecks(rules), SizeSum(), list[LinePrompt]()
    for line in numbered_lines(path, rules.max_line_bytes, digest.update):
        value = _json_object(line.text)
        checks.add(line, value)
        prompt = _add(size, line, value)
        if checks.errors:
            prompts.clear()  # the batch will not run
        elif prompt is not None:
            prompts.append(prompt)
    if checks.total == 0:
        checks.errors.append(LineError("empty_file", "The input file is empty."))
    if not checks.errors:
        write_order(path, prompts)
    return InputScan(checks.total, checks.model, tuple(checks.errors), size.total, digest.hexdigest())


def input_size(path: Path) -> InputSize:
    """Return the size of the input at `path`. Lines that are not valid are left out: validation reports them."""
    size = SizeSum()
    for line in numbered_lines(path, MAX_LINE_BYTES):
        _add(size, line, _json_object(line.text))
    return size.total


def _add(size: SizeSum, line: Line, value: dict[str, Any] | None) -> LinePrompt | None:
    """Add a line to `size`, if it has a body. Return its prompt."""
    body = None if value is None else value.get("body")
    if value is None or not isinstance(body, dict):
        return None
    prompt = line_prompt(line.number, line.offset, body)
    size.add(body, prompt, generates=value.get("url") not in WITHOUT_OUTPUT)
    return prompt


def _json_object(text: bytes) -> dict[str, Any] | None:
    try:
        return parse_json_object(text)
    except ApiError:
        return None
