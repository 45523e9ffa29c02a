"""A record as one HTML file that needs no other file: cards, warnings, and sections of tables, drawings and facts."""

from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, StrictUndefined

from loadtest.reporting.record import Record


def render_page(record: Record) -> str:
    """Return the page. Everything is escaped except drawings."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string((files("bench") / "reporting" / "page.html.j2").read_text(encoding="utf-8"))
    return template.render(record=record)


def write_page(directory: Path, record: Record) -> Path:
    """Write `index.html` into the directory, which is made where it is missing. Return the file's path."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "index.html"
    path.write_text(render_page(record), encoding="utf-8")
    return path
