"""Writes a record as one HTML page that needs no other file.

The page has cards, warnings, and sections with tables, drawings and facts.
"""

from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, StrictUndefined

from loadtest.reporting.record import Record


def render_page(record: Record) -> str:
    """Return the page as HTML. All text is escaped; drawings are not."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string((files("loadtest") / "reporting" / "page.html.j2").read_text(encoding="utf-8"))
    return template.render(record=record)


def write_page(directory: Path, record: Record) -> Path:
    """Write `index.html` into the directory and return the file's path. Create the directory if it is missing."""
    return write_page_file(directory / "index.html", record)


def write_page_file(path: Path, record: Record) -> Path:
    """Write the page to `path` and return it. Missing parent directories are created."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render_page(record), encoding="utf-8")
    return path
