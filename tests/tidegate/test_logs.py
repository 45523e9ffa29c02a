"""The format of log lines: for people on a terminal, JSON elsewhere."""

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import structlog
from tidegate.logs import configure_logging
configure_logging("gateway", "info", "{log_format}")
try:
    1 / 0
except ZeroDivisionError:
    structlog.get_logger().exception("it failed", request_id="r1")
"""


def said(log_format: str, *, on_terminal: bool, cwd: Path) -> str:
    """Return what a process logs, whose stderr is a terminal or a pipe."""
    program = [sys.executable, "-c", PROGRAM.format(log_format=log_format)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    if not on_terminal:
        return subprocess.run(program, cwd=cwd, env=environment, check=True, capture_output=True, text=True).stderr
    ours, theirs = pty.openpty()
    with os.fdopen(ours, "rb", buffering=0) as terminal:
        process = subprocess.Popen(program, cwd=cwd, env=environment, stderr=theirs)
        os.close(theirs)
        text = b""
        try:
            while part := terminal.read(4096):
                text += part
        except OSError:  # Linux says so at the end of a terminal
            pass
        assert process.wait(30) == 0
    return text.decode()


@pytest.mark.parametrize(
    ("log_format", "on_terminal", "is_json"),
    [("auto", False, True), ("auto", True, False), ("json", True, True), ("console", False, False)],
)
def test_the_format_suits_the_reader(log_format: str, on_terminal: bool, is_json: bool, tmp_path: Path) -> None:
    text = said(log_format, on_terminal=on_terminal, cwd=tmp_path)
    assert "it failed" in text and "ZeroDivisionError" in text
    if is_json:
        [line] = text.splitlines()
        assert json.loads(line)["part"] == "gateway" and json.loads(line)["request_id"] == "r1"
    else:
        assert not text.startswith("{") and "Traceback" in text
