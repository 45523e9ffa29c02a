"""Logging for all processes: structlog, one JSON object per line on stderr, or a console format for people.

Records of other libraries (uvicorn, transformers) get the same format. No caller passes prompt text to a log.
"""

import logging
import sys

import structlog
from structlog.typing import Processor


def configure_logging(part: str, level: str, log_format: str) -> None:
    """Set up the logging of this process. Every line has the field `part`.

    `log_format` is `json`, `console`, or `auto`: `console` if stderr is a terminal.
    """
    is_for_people = log_format == "console" or (log_format == "auto" and sys.stderr.isatty())
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _add_part(part),
        *(() if is_for_people else (structlog.processors.format_exc_info,)),
    ]
    renderer: Processor = structlog.dev.ConsoleRenderer() if is_for_people else structlog.processors.JSONRenderer()
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared,
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())
    for noisy in ("httpx", "httpx2", "httpcore", "urllib3", "filelock", "uvicorn"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    structlog.configure(
        processors=[structlog.stdlib.filter_by_level, *shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )


def _add_part(part: str) -> Processor:
    def add(_: object, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        event.setdefault("part", part)
        return event

    return add
