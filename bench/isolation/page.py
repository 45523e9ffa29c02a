"""A report as one HTML file that needs nothing beside it: sections of text, tables, drawings and figures.

Knows the template; not what is reported.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, StrictUndefined


@dataclass(frozen=True, slots=True)
class Row:
    cells: tuple[str, ...]
    mark: str = ""  # a CSS class


@dataclass(frozen=True, slots=True)
class Table:
    """`text_columns` are read from the left, `note_columns` may take several lines; what stands in `verdict_column` is
    coloured by its word."""

    header: tuple[str, ...]
    rows: tuple[Row, ...]
    text_columns: tuple[int, ...] = (0,)
    note_columns: tuple[int, ...] = ()
    verdict_column: int | None = None


@dataclass(frozen=True, slots=True)
class Drawing:
    svg: str  # trusted: made by this program
    title: str = ""
    caption: str = ""


@dataclass(frozen=True, slots=True)
class Fold:
    title: str
    text: str


@dataclass(frozen=True, slots=True)
class Frame:
    """A whole page of somebody else's, kept apart from this one."""

    title: str
    html: str


@dataclass(frozen=True, slots=True)
class Card:
    value: str
    label: str


@dataclass(frozen=True, slots=True)
class Section:
    title: str = ""
    text: str = ""
    table: Table | None = None
    figures: tuple[Drawing, ...] = ()
    facts: tuple[tuple[str, str], ...] = ()
    folds: tuple[Fold, ...] = ()
    frames: tuple[Frame, ...] = ()


@dataclass(frozen=True, slots=True)
class Page:
    kicker: str
    title: str
    date: str
    hardware: str
    sections: Sequence[Section]
    cards: Sequence[Card] = ()
    warnings: Sequence[str] = ()


def render_page(page: Page) -> str:
    """All text is escaped but the drawings."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string((files("bench") / "isolation" / "page.html.j2").read_text(encoding="utf-8"))
    fields = {name: getattr(page, name) for name in Page.__slots__}
    return template.render(fields)


def write_page(directory: Path, page: Page) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "index.html"
    path.write_text(render_page(page), encoding="utf-8")
    return path
