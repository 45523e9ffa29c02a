"""Render a record as text for the terminal: paragraphs of tables and lines. Uses only the standard library."""

from collections.abc import Iterable, Sequence

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
