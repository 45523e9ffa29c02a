"""The writers of a record: text for the terminal, a JSON file, and one HTML page that needs no other file.

The page has cards, warnings, and sections with tables, drawings and facts.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path

from loadtest.reporting.record import Record, Section, Table


def render_text(record: Record) -> str:
    """Return the title, the sections and the warnings as text, with an empty line between them."""
    paragraphs = [record.title, *map(_section, record.sections), _lines(f"WARNING: {w}" for w in record.warnings)]
    return "\n\n".join(filter(None, paragraphs))


def _section(section: Section) -> str:
    table = render_table(section.table) if section.table is not None else ""
    facts = [f"{name}: {value}" for name, value in section.facts]
    if not (table or section.notes or facts):
        return ""
    return _lines([section.title, table, *section.notes, *facts])


def _lines(parts: Iterable[str]) -> str:
    return "\n".join(filter(None, parts))


def render_table(table: Table) -> str:
    """Return the table as lines of text. Each column is as wide as its longest cell.

    Numbers are aligned right, words are aligned left.
    """
    lines = [table.header, *(row.cells for row in table.rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(table.header))]
    rule = "  ".join("─" * width for width in widths)
    first, *rest = [_aligned(line, widths, table.word_columns) for line in lines]
    return "\n".join([first, rule, *rest])


def _aligned(cells: Sequence[str], widths: Sequence[int], word_columns: Sequence[int]) -> str:
    padded = zip(cells, widths, strict=True)
    placed = (c.ljust(w) if i in word_columns else c.rjust(w) for i, (c, w) in enumerate(padded))
    return "  ".join(placed).rstrip()


def write_json(path: Path, record: Record) -> None:
    """Write the record to `path`. Missing parent directories are created."""
    provenance = {} if record.provenance is None else asdict(record.provenance)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({**provenance, **record.data}, indent=2, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


def publish(record: Record, json_file: Path | None = None) -> None:
    print(render_text(record))
    if json_file is not None:
        write_json(json_file, record)


def render_page(record: Record) -> str:
    """Return the page as HTML. All text is escaped; drawings are not."""
    from jinja2 import Environment, StrictUndefined  # `make gpu-check` writes text and JSON without any package

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
