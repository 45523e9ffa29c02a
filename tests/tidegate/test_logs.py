"""The format of log lines: for people on a terminal, JSON elsewhere."""

import json
from pathlib import Path

import pytest

from tests.terminal import stderr_of

PROGRAM = """
import structlog
from tidegate.logs import configure_logging
configure_logging("gateway", "info", "{log_format}")
try:
    1 / 0
except ZeroDivisionError:
    structlog.get_logger().exception("it failed", request_id="r1")
"""


@pytest.mark.parametrize(
    ("log_format", "on_terminal", "is_json"),
    [("auto", False, True), ("auto", True, False), ("json", True, True), ("console", False, False)],
)
def test_the_format_suits_the_reader(log_format: str, on_terminal: bool, is_json: bool, tmp_path: Path) -> None:
    text = stderr_of(PROGRAM.format(log_format=log_format), tmp_path, on_terminal=on_terminal)
    assert "it failed" in text and "ZeroDivisionError" in text
    if is_json:
        [line] = text.splitlines()
        assert json.loads(line)["part"] == "gateway" and json.loads(line)["request_id"] == "r1"
    else:
        assert not text.startswith("{") and "Traceback" in text
        assert text.startswith("\r\x1b[2K") == on_terminal, "the line of progress of another process is removed"
