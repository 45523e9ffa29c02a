"""What a check has found, and what to do about it."""

from dataclasses import dataclass
from enum import Enum


class Level(Enum):
    """How serious a finding is. The values are the words that are printed."""

    OK = "ok"
    WARNING = "warning"  # the server starts, but slower, less safe or with less than asked for
    ERROR = "error"  # `tidegate serve` with these settings does not start, or cannot answer


@dataclass(frozen=True, slots=True)
class Finding:
    subject: str  # what was checked, one or two words
    text: str
    level: Level = Level.OK
    remedy: str = ""  # what to do; empty if there is nothing to do


def warning(subject: str, text: str, remedy: str) -> Finding:
    return Finding(subject, text, Level.WARNING, remedy)


def error(subject: str, text: str, remedy: str = "") -> Finding:
    return Finding(subject, text, Level.ERROR, remedy)
