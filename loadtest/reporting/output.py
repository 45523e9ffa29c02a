"""Publish a record: print it to the terminal and, if the user asked for it, write a JSON file."""

from pathlib import Path

from loadtest.reporting.json_file import write_json
from loadtest.reporting.record import Record
from loadtest.reporting.text import render_text


def publish(record: Record, json_file: Path | None = None) -> None:
    print(render_text(record))
    if json_file is not None:
        write_json(json_file, record)
