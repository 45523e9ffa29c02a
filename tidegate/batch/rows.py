"""Tables of rows: CSV, Parquet and JSONL files, and standard input.

Reads a table row by row, and writes one. Knows formats; does not know batches. A row maps column names to values.
"""

import csv
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from io import TextIOWrapper
from pathlib import Path
from typing import IO, Any, Protocol

Row = dict[str, Any]
STANDARD = Path("-")  # standard input or output
FORMATS = {".csv": "csv", ".tsv": "tsv", ".parquet": "parquet", ".pq": "parquet", ".jsonl": "jsonl", ".ndjson": "jsonl"}
PARQUET_GROUP = 10_000  # rows of a Parquet file that are written at once


class BatchProblem(Exception):
    """Something that the user can mend. The message is one sentence that says what is wrong and what to do."""


def format_of(path: Path, named: str | None = None) -> str:
    """Return the format `named`, or that of the file's suffix. Standard input is JSONL. Raises `BatchProblem`."""
    if named is not None:
        return named
    if path == STANDARD:
        return "jsonl"
    if path.suffix.lower() not in FORMATS:
        raise BatchProblem(f"{path}: the suffix names no known format; add --format csv, tsv, jsonl or parquet.")
    return FORMATS[path.suffix.lower()]


def read_rows(path: Path, kind: str) -> Iterator[Row]:
    """Yield the rows of a table. Raises `BatchProblem` if the file cannot be read as `kind`."""
    try:
        yield from READERS[kind](path)
    except FileNotFoundError:
        raise BatchProblem(f"{path}: there is no such file.") from None
    except UnicodeDecodeError as error:
        raise BatchProblem(f"{path}: this is not UTF-8 text ({error.reason} at byte {error.start}).") from None


class RowWriter(Protocol):
    def write(self, row: Row) -> None: ...


@contextmanager
def row_writer(path: Path, kind: str) -> Iterator[RowWriter]:
    """Return a writer of rows. The file appears under its name when all rows are written, and not at all otherwise."""
    if path == STANDARD:
        yield _JsonLines(sys.stdout)
        return
    partial = path.with_name(f".{path.name}.partial")
    try:
        if kind == "parquet":
            _require_pyarrow()
            writer = _Parquet(partial)
            yield writer
            writer.close()
        else:
            with partial.open("w", encoding="utf-8", newline="") as file:
                yield _JsonLines(file) if kind == "jsonl" else _Csv(file, "\t" if kind == "tsv" else ",")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _read_csv(path: Path, delimiter: str = ",") -> Iterator[Row]:
    csv.field_size_limit(2**30)
    with _text(path) as file:
        reader = csv.DictReader(file, delimiter=delimiter, strict=True)
        try:
            header = reader.fieldnames or ()
            if len(set(header)) < len(header):
                raise BatchProblem(f"{path}: the header names a column twice.")
            for row in reader:
                if None in row or None in row.values():
                    named = f"the header names {len(header)}"
                    raise BatchProblem(f"{path}, line {reader.line_num}: the number of fields differs; {named}.")
                yield row
        except csv.Error as error:
            raise BatchProblem(f"{path}, line {reader.line_num}: {error}.") from None


def _read_jsonl(path: Path) -> Iterator[Row]:
    with _text(path) as file:
        for number, text in enumerate(file, 1):
            if not text.strip():
                continue
            try:
                row = json.loads(text)
            except json.JSONDecodeError as error:
                hint = " For another format, add --format csv, or tsv." if path == STANDARD else ""
                place = "standard input" if path == STANDARD else path
                raise BatchProblem(f"{place}, line {number}: this is not JSON ({error.msg}).{hint}") from None
            if not isinstance(row, dict):
                raise BatchProblem(f"{path}, line {number}: each line must be a JSON object.")
            yield row


def _read_parquet(path: Path) -> Iterator[Row]:
    _require_pyarrow()
    import pyarrow
    from pyarrow.parquet import ParquetFile

    if path == STANDARD:
        raise BatchProblem("Parquet cannot be read from standard input: name the file.")
    try:
        with ParquetFile(path) as file:
            for group in file.iter_batches():
                yield from group.to_pylist()
    except pyarrow.ArrowInvalid as error:
        raise BatchProblem(f"{path}: this is no Parquet file ({error}).") from None


@contextmanager
def _text(path: Path) -> Iterator[IO[str]]:
    encoding, newline = "utf-8-sig", ""  # -sig: some editors write a byte order mark
    if path == STANDARD:
        text = TextIOWrapper(sys.stdin.buffer, encoding, newline=newline)
        try:
            yield text
        finally:
            text.detach()  # standard input stays open
        return
    with path.open(encoding=encoding, newline=newline) as file:
        yield file


READERS: Mapping[str, Callable[[Path], Iterator[Row]]] = {
    "csv": _read_csv,
    "tsv": lambda path: _read_csv(path, "\t"),
    "jsonl": _read_jsonl,
    "parquet": _read_parquet,
}


class _JsonLines:
    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def write(self, row: Row) -> None:
        self._file.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")


class _Csv:
    """The columns are those of the first row."""

    def __init__(self, file: IO[str], delimiter: str) -> None:
        self._file, self._delimiter = file, delimiter
        self._writer: csv.DictWriter[str] | None = None

    def write(self, row: Row) -> None:
        if self._writer is None:
            self._writer = csv.DictWriter(self._file, list(row), delimiter=self._delimiter, extrasaction="ignore")
            self._writer.writeheader()
        self._writer.writerow({name: _cell(value) for name, value in row.items()})


class _Parquet:
    """Writes groups of rows. The columns are those of the first row, and their types those of the first group."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._types: dict[str, Any] = {}
        self._rows: list[Row] = []
        self._writer: Any = None

    def write(self, row: Row) -> None:
        self._rows.append(row)
        if len(self._rows) == PARQUET_GROUP:
            self._flush()

    def close(self) -> None:
        self._flush()
        self._writer.close()  # there is a writer: a run has at least one row

    def _flush(self) -> None:
        import pyarrow
        from pyarrow.parquet import ParquetWriter

        types = dict.fromkeys(self._rows[0]) if self._writer is None else self._types
        columns = {name: _column(name, [row.get(name) for row in self._rows], kind) for name, kind in types.items()}
        table = pyarrow.table(columns)
        if self._writer is None:
            self._types = dict(zip(table.schema.names, table.schema.types, strict=True))
            self._writer = ParquetWriter(self._path, table.schema)
        self._writer.write_table(table)
        self._rows = []


def _column(name: str, values: Sequence[Any], kind: Any) -> Any:
    """Return values as a column of Parquet of the type `kind`; None: their own type, or texts if they have several.

    A column without any value has the type of text, as the columns of answers and errors have. Raises `BatchProblem`.
    """
    import pyarrow

    try:
        column = pyarrow.array(values, kind)
    except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError, OverflowError) as error:
        if kind is not None and not pyarrow.types.is_string(kind):
            raise BatchProblem(
                f"The column {name!r} has other values than in its first rows, which Parquet cannot hold ({error}). "
                "The server keeps the results: write them with `tidegate batch fetch`, or choose another format."
            ) from None
        return pyarrow.array([_text_of(value) for value in values], pyarrow.string())
    return column.cast(pyarrow.string()) if pyarrow.types.is_null(column.type) else column


def _text_of(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _cell(value: Any) -> Any:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, (dict, list)) else value


def _require_pyarrow() -> None:
    if find_spec("pyarrow") is None:
        raise BatchProblem("Parquet needs pyarrow: pip install 'tidegate[parquet]'.")
