"""The record of a run: the data that every command passes to the writers of text, JSON and HTML.

Holds plain data and uses only the standard library. A command builds one record; the writers decide how it looks.
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
    """One row of a table. `mark` is the name of the emphasis that the HTML page gives the row; empty: no emphasis."""

    cells: tuple[str, ...]
    mark: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """A table with a header and rows.

    The HTML page breaks lines in `note_columns` and colours the words in `verdict_column`.
    """

    header: tuple[str, ...]
    rows: tuple[Row, ...]
    note_columns: tuple[int, ...] = ()
    verdict_column: int | None = None

    @classmethod
    def of(cls, header: Sequence[str], rows: Iterable[Sequence[str]]) -> Self:
        return cls(tuple(header), tuple(Row(tuple(cells)) for cells in rows))

    @property
    def word_columns(self) -> tuple[int, ...]:
        """The indices of the columns that hold words, which are aligned left. All other columns hold numbers."""
        columns = range(len(self.header))
        return tuple(i for i in columns if any(row.cells[i][:1].isalpha() for row in self.rows))


@dataclass(frozen=True, slots=True)
class Drawing:
    svg: str  # inserted without escaping, so it must be made by this program
    title: str = ""
    caption: str = ""
    is_small: bool = False  # small drawings of a section stand beside each other where the page is wide


@dataclass(frozen=True, slots=True)
class Fold:
    """A long text that the HTML page shows only when the reader opens it."""

    title: str
    text: str


@dataclass(frozen=True, slots=True)
class Card:
    """A single figure that the HTML page shows in large type at the top."""

    value: str
    label: str


@dataclass(frozen=True, slots=True)
class Section:
    """One part of a report. Explanation, drawings and folds are shown only on the HTML page."""

    title: str = ""
    table: Table | None = None
    notes: tuple[str, ...] = ()
    facts: tuple[tuple[str, str], ...] = ()  # (name, value)
    explanation: str = ""
    drawings: tuple[Drawing, ...] = ()
    folds: tuple[Fold, ...] = ()


@dataclass(frozen=True, slots=True)
class Provenance:
    """The information that is needed to run the command again."""

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
    """The result of a command. `data` is the content of its JSON file.

    A record without provenance is the same on every machine and on every day.
    """

    title: str = ""
    sections: Sequence[Section] = ()
    data: Mapping[str, Any] = field(default_factory=dict)
    provenance: Provenance | None = None
    warnings: Sequence[str] = ()
    cards: Sequence[Card] = ()
    kicker: str = ""  # a short line above the title of the HTML page
