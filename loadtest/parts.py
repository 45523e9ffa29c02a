"""Commands run one after another, each in a process group of its own with a time limit, into one log.

One that fails, hangs or leaves processes behind does not touch the next. Standard library only.
"""

import json
import os
import signal
import subprocess
import tempfile
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

SHORTEST_S = 5.0  # with less left, a part is not begun


@dataclass(frozen=True, slots=True)
class Part:
    """A command, its limit, and the file or last line of output in which it leaves a JSON object (if it does)."""

    name: str
    command: tuple[str, ...]
    limit_s: float
    result_file: Path | None = None
    has_result_line: bool = False
    must_say: str = ""  # in its output, or it did nothing: tests that were all skipped, say


@dataclass(slots=True)
class Outcome:
    """What became of a part. Written by `PartRunner`."""

    name: str
    command: str
    passed: bool = False
    exit_code: int | None = None
    seconds: float = 0.0
    problem: str = ""
    result: dict[str, Any] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        if self.passed:
            return f"passed in {self.seconds:.0f} s"
        reason = self.problem.strip().splitlines()[-1] if self.problem else f"exit code {self.exit_code}"
        return f"FAILED after {self.seconds:.0f} s: {reason}"


class PartRunner:
    """Runs parts one after another into one log, until the time is used up."""

    def __init__(self, directory: Path, log: TextIO, environment: dict[str, str], budget_s: float) -> None:
        self._directory = directory
        self._log = log
        self._environment = environment
        self._until_s = time.monotonic() + budget_s

    def run(self, part: Part) -> Outcome:
        outcome = Outcome(part.name, " ".join(part.command))
        left_s = self._until_s - time.monotonic()
        limit_s = min(part.limit_s, left_s)
        if left_s < min(part.limit_s, SHORTEST_S):
            outcome.problem = "not begun: the time was used up"
        else:
            self._say(f"== {part.name}: {outcome.command}")
            try:
                self._execute(part, limit_s, outcome)
            except Exception:  # unattended: whatever happened, the other parts go on and the log has it
                outcome.problem = traceback.format_exc()
        outcome.passed = outcome.exit_code == 0 and not outcome.problem
        self._say(f"== {part.name}: {outcome.verdict}")
        return outcome

    def _execute(self, part: Part, limit_s: float, outcome: Outcome) -> None:
        started_s = time.monotonic()
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
            process = subprocess.Popen(
                part.command,
                cwd=self._directory,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=self._log,
                text=True,
                start_new_session=True,
            )
            try:
                outcome.exit_code = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                outcome.problem = f"not done within {limit_s:.0f} s"
            finally:
                _end_group(process)
            outcome.seconds = time.monotonic() - started_s
            output.seek(0)
            text = output.read()
        self._say(text.rstrip())
        if not outcome.problem and part.must_say not in text:
            outcome.problem = f"its output does not hold {part.must_say!r}"
        if outcome.exit_code is not None:
            outcome.result = _result(part, text)

    def _say(self, line: str) -> None:
        print(line, file=self._log, flush=True)
        print(line, flush=True)


def _end_group(process: subprocess.Popen[str]) -> None:
    """The part and whatever it started: nothing of it may use the GPU while the next one is measured."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _result(part: Part, text: str) -> dict[str, Any]:
    if part.result_file is not None and part.result_file.exists():
        found = json.loads(part.result_file.read_text(encoding="utf-8"))
    elif part.has_result_line and text.strip():
        found = json.loads(text.strip().splitlines()[-1])
    else:
        return {}
    return found if isinstance(found, dict) else {}
