"""Write a record as a JSON file: its provenance and its data. Uses only the standard library."""

import json
from dataclasses import asdict
from pathlib import Path

from loadtest.reporting.record import Record


def write_json(path: Path, record: Record) -> None:
    """Write the record to `path`. Missing parent directories are created."""
    provenance = {} if record.provenance is None else asdict(record.provenance)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({**provenance, **record.data}, indent=2, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")
