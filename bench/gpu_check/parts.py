"""The parts of the GPU check, and their runner.

A part is a command. The commands run one after another, each with a time limit and in its own process group.
A command that fails, hangs or leaves processes behind does not disturb the next one. Imports the standard library only.
"""

import json
import os
import shlex
import signal
import subprocess
import tempfile
import time
import traceback
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

SHORTEST_S = 5.0  # seconds; with less time left, a part is not started


@dataclass(frozen=True, slots=True)
class Part:
    """A command with its time limit.

    The command may write its result as one JSON object: into `result_file`, or as its last line if `has_result_line`.
    The part is not started if one of the packages in `needs` is missing.
    """

    name: str
    command: tuple[str, ...]
    limit_s: float
    result_file: Path | None = None
    has_result_line: bool = False
    must_say: str = ""  # text that the output must contain; a part whose tests were all skipped thus fails
    needs: tuple[str, ...] = ()


@dataclass(slots=True)
class Outcome:
    """The outcome of one part. Only `PartRunner` writes to it."""

    name: str
    command: str
    was_begun: bool = False
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
        if not self.was_begun:
            return reason
        return f"FAILED after {self.seconds:.0f} s: {reason}"


class PartRunner:
    """A runner of parts, which runs one after another until `budget_s` seconds are used up, and writes one log."""

    def __init__(self, directory: Path, log: TextIO, environment: dict[str, str], budget_s: float) -> None:
        self._directory = directory
        self._log = log
        self._environment = environment
        self._until_s = time.monotonic() + budget_s

    def run_all(self, parts: Sequence[Part], missing: Collection[str] = ()) -> list[Outcome]:
        """Run all parts and return their outcomes.

        Time that a part does not use is divided among the parts after it, in proportion to their limits.
        """
        waiting, outcomes = list(parts), list[Outcome]()
        while waiting:
            runnable_s = sum(part.limit_s for part in waiting if not set(part.needs) & set(missing))
            part = waiting.pop(0)
            left_s = self._until_s - time.monotonic()
            share_s = left_s * part.limit_s / max(runnable_s, part.limit_s)
            outcomes.append(self.run(part, missing, share_s))
        return outcomes

    def run(self, part: Part, missing: Collection[str] = (), share_s: float | None = None) -> Outcome:
        """Run one part and return its outcome.

        The part may take `share_s` seconds (None: its own limit), but not more than the time that is left.
        """
        outcome = Outcome(part.name, shlex.join(part.command))
        limit_s = min(part.limit_s if share_s is None else share_s, self._until_s - time.monotonic())
        if lacking := [name for name in part.needs if name in missing]:
            outcome.problem = f"not begun: without {', '.join(lacking)}"
        elif limit_s < min(part.limit_s, SHORTEST_S):
            outcome.problem = "not begun: the time was used up"
        else:
            outcome.was_begun = True
            self._say(f"== {part.name}: {outcome.command}")
            try:
                self._execute(part, limit_s, outcome)
            except Exception:  # unattended run: the error is written to the log, and the next part is run
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
    """Kill the part and every process that it started, so that none uses the GPU while the next part is measured."""
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
