"""The record of a run: what every command hands to the writers of text, JSON and HTML.

Plain data, and the standard library only. A command builds one record; the writers decide how it looks.
"""

import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from loadtest.machine import hardware


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a table. `mark` is the name of the emphasis that the page gives it, if any."""

    cells: tuple[str, ...]
    mark: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells. The page breaks lines in `note_columns` and colours the words in `verdict_column`."""

    header: tuple[str, ...]
    rows: tuple[Row, ...]
    note_columns: tuple[int, ...] = ()
    verdict_column: int | None = None

    @classmethod
    def of(cls, header: Sequence[str], rows: Iterable[Sequence[str]]) -> Self:
        return cls(tuple(header), tuple(Row(tuple(cells)) for cells in rows))

    @property
    def word_columns(self) -> tuple[int, ...]:
        """Columns that hold words, which are read from the left; all others hold numbers."""
        columns = range(len(self.header))
        return tuple(i for i in columns if any(row.cells[i][:1].isalpha() for row in self.rows))


@dataclass(frozen=True, slots=True)
class Drawing:
    svg: str  # inserted as it is: only drawings made by this program
    title: str = ""
    caption: str = ""


@dataclass(frozen=True, slots=True)
class Fold:
    """A long text that the page shows when the reader opens it."""

    title: str
    text: str


@dataclass(frozen=True, slots=True)
class Frame:
    """A whole page of another program, kept apart from this one."""

    title: str
    html: str


@dataclass(frozen=True, slots=True)
class Card:
    """One figure that the page shows in large type at its head."""

    value: str
    label: str


@dataclass(frozen=True, slots=True)
class Section:
    """One part of a report. Only the page shows explanation, drawings, folds and frames."""

    title: str = ""
    table: Table | None = None
    notes: tuple[str, ...] = ()
    facts: tuple[tuple[str, str], ...] = ()  # (name, value)
    explanation: str = ""
    drawings: tuple[Drawing, ...] = ()
    folds: tuple[Fold, ...] = ()
    frames: tuple[Frame, ...] = ()


@dataclass(frozen=True, slots=True)
class Provenance:
    """What is needed to run the command again."""

    command: str
    date: str  # ISO 8601, UTC
    hardware: str
    model: str
    seed: int

    @classmethod
    def of_this_run(cls, model: str, seed: int) -> Self:
        command = shlex.join([Path(sys.orig_argv[0]).name, *sys.orig_argv[1:]])
        return cls(command, datetime.now(UTC).isoformat(timespec="seconds"), hardware(), model, seed)


@dataclass(frozen=True, slots=True)
class Record:
    """`data` is the result as JSON holds it. A record without provenance is the same on every machine and day."""

    title: str = ""
    sections: Sequence[Section] = ()
    data: Mapping[str, Any] = field(default_factory=dict)
    provenance: Provenance | None = None
    warnings: Sequence[str] = ()
    cards: Sequence[Card] = ()
    kicker: str = ""  # a word above the page's title
