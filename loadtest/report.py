"""Tables and JSON files of commands that do not build a `Record` yet."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from loadtest.reporting import json_file
from loadtest.reporting.record import Provenance, Record, Table
from loadtest.reporting.text import render_table


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return render_table(Table.of(header, rows))


def write_json(path: Path, result: dict[str, Any], *, seed: int, model: str) -> None:
    json_file.write_json(path, Record(data=result, provenance=Provenance.of_this_run(model, seed)))
