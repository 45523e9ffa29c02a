"""Check the lines of a batch's input, one after the other.

A line must not be longer than the body of an HTTP request may be. Only the fields of a body that matter to the whole
batch are checked here. The other fields are checked when the line runs.
"""

from dataclasses import dataclass, field
from typing import Any

from gateway.jobs.batches.input.jsonl import MAX_LINE_BYTES, Line
from gateway.jobs.batches.input.lines import MAX_NUMBER

MAX_LINES = 100_000  # twice as many as in OpenAI's Batch API
MAX_ERRORS = 100  # of those that are reported; after them, the rest of the file is not checked
# Of a line's body; another one would promise what a batch has not.
SERVICE_TIERS = (None, "auto", "default", "standard_only", "flex")


@dataclass(frozen=True, slots=True)
class LineError:
    """One error of a batch input. `line` is the line's number, from 1; None if the error concerns the whole file."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


@dataclass(frozen=True, slots=True)
class InputRules:
    """Every line must be for `endpoint` and for one of `model_names`, and no longer than `max_line_bytes`."""

    endpoint: str
    model_names: tuple[str, ...]
    max_lines: int = MAX_LINES
    max_line_bytes: int = MAX_LINE_BYTES


@dataclass(slots=True)
class InputChecks:
    """The errors of the lines so far, and their model and custom_ids, with which later lines are compared.

    All lines must name the same model, and each line needs its own custom_id. `total` is the number of lines that were
    checked. Checking stops early if there are too many lines or errors.
    """

    rules: InputRules
    model: str | None = None
    custom_ids: set[str] = field(default_factory=set)
    errors: list[LineError] = field(default_factory=list)
    total: int = 0
    is_over: bool = False

    def add(self, line: Line, value: dict[str, Any] | None) -> None:
        """Check a line. `value` is what it has as JSON; None: it is not one JSON object."""
        if self.is_over:
            return
        self.total += 1
        if self.total > self.rules.max_lines:
            self._give_up(f"The input file has more than {self.rules.max_lines} requests.")
        elif line.number > MAX_NUMBER:
            self._give_up(f"The input file has more than {MAX_NUMBER} lines. Leave out the blank ones.")
        elif (fault := self._fault(line, value)) is not None:
            self.errors.append(LineError(*fault, line=line.number))
            self.is_over = len(self.errors) == MAX_ERRORS

    def _give_up(self, message: str) -> None:
        self.errors, self.is_over = [LineError("too_many_tasks", message)], True

    def _fault(self, line: Line, value: dict[str, Any] | None) -> tuple[str, str, str | None] | None:
        if not line.text:
            return "line_too_large", f"This line is larger than {self.rules.max_line_bytes} bytes.", None
        if value is None:
            return "invalid_json_line", "This line is not parseable as valid JSON.", None
        return _envelope_fault(value, self) or _body_fault(value["body"], self)


def _envelope_fault(line: dict[str, Any], seen: InputChecks) -> tuple[str, str, str] | None:
    """Return (code, message, param) of the first error outside the body; None if there is none."""
    for name in ("custom_id", "method", "url", "body"):
        if line.get(name) is None:
            return "missing_required_parameter", f"Missing required parameter: '{name}'.", name
    custom_id, body = line["custom_id"], line["body"]
    if not isinstance(custom_id, str):
        return "invalid_type", "The custom_id must be a string.", "custom_id"
    if custom_id in seen.custom_ids:
        message = "The custom_id for this request is a duplicate of another request. It must be unique."
        return "duplicate_custom_id", message, "custom_id"
    seen.custom_ids.add(custom_id)
    if line["method"] != "POST":
        return "invalid_method", "The method must be POST.", "method"
    if line["url"] != seen.rules.endpoint:
        message = f"The url of this request does not match the batch's endpoint {seen.rules.endpoint}."
        return "url_mismatch", message, "url"
    if not isinstance(body, dict):
        return "invalid_type", "The body must be a JSON object.", "body"
    return None


def _body_fault(body: dict[str, Any], seen: InputChecks) -> tuple[str, str, str] | None:
    """Return (code, message, param) of the first error in the body; None if there is none.

    Only the fields that matter to the whole batch are checked.
    """
    model = body.get("model")
    if model is None:
        return "missing_required_parameter", "Missing required parameter: 'body.model'.", "body.model"
    if not isinstance(model, str):
        return "invalid_type", "The model must be a string.", "body.model"
    if model not in seen.rules.model_names:
        return "model_not_found", "The model of this request does not exist.", "body.model"
    seen.model = seen.model or model
    if model != seen.model:
        message = "All requests of a batch must use the same model."
        return "model_mismatch", message, "body.model"
    if body.get("service_tier") not in SERVICE_TIERS:
        message = "Requests of a batch run in the batch tier: their service_tier must be auto, default or flex."
        return "invalid_value", message, "body.service_tier"
    if body.get("stream"):
        return "unsupported_parameter", "Requests of a batch cannot be streamed.", "body.stream"
    return None
