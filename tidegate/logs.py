"""Logging for all processes: structlog, one JSON object per line on stderr, or a console format for people.

Records of other libraries (uvicorn, transformers) get the same format. No caller passes prompt text to a log.
"""

import logging
import os
import sys

import structlog
from structlog.typing import Processor

# Removes what stands in the terminal's line: another process may show its progress there.
CLEAR_LINE = "\r\x1b[2K"


def configure_logging(part: str, level: str, log_format: str) -> None:
    """Set up the logging of this process. Every line has the field `part`.

    `log_format` is `json`, `console`, or `auto`: `console` if stderr is a terminal.
    """
    for_people = is_for_people(log_format)
    if not for_people:
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # also of transformers, and in child processes
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _add_part(part),
        *(() if for_people else (structlog.processors.format_exc_info,)),
    ]
    renderer: Processor = structlog.dev.ConsoleRenderer() if for_people else structlog.processors.JSONRenderer()
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared,
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
    )
    handler = _StderrHandler(CLEAR_LINE if for_people and sys.stderr.isatty() else "")
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())
    for noisy in ("httpx", "httpx2", "httpcore", "urllib3", "filelock", "uvicorn", "aiobotocore"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    structlog.configure(
        processors=[structlog.stdlib.filter_by_level, *shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )


def is_for_people(log_format: str) -> bool:
    """Return whether logs in this format are read by people as they come."""
    return log_format == "console" or (log_format == "auto" and sys.stderr.isatty())


class _StderrHandler(logging.Handler):
    """Writes `before` and the record to what is stderr now: while a line of progress is shown, that prints above it."""

    def __init__(self, before: str) -> None:
        super().__init__()
        self._before = before

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(f"{self._before}{self.format(record)}\n")
            sys.stderr.flush()
        except Exception:
            self.handleError(record)


def _add_part(part: str) -> Processor:
    def add(_: object, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        event.setdefault("part", part)
        return event

    return add
