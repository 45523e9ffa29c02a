"""The dialects, and what the documentation says of them."""

from collections.abc import Callable
from pathlib import Path

import pytest

from engine.upstream.dialects import DIALECTS, Dialect

PAGE = Path(__file__).parents[3] / "docs" / "engines.md"
# Rows of the table of dialects, and what makes them true.
ROWS: dict[str, Callable[[Dialect], object]] = {
    "salts of the prefix cache": lambda dialect: dialect.salt,
    "priorities": lambda dialect: dialect.priority,
    "log probabilities": lambda dialect: dialect.logprobs,
    "JSON schemas": lambda dialect: dialect.json_schema,
    "its own metrics": lambda dialect: dialect.metrics,
}


def cells(row: str) -> list[str]:
    [line] = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith(f"| {row} |")]
    return [cell.strip() for cell in line.split("|")[2:-1]]


@pytest.mark.parametrize("row", ROWS)
def test_the_documentation_says_what_each_dialect_can(row: str) -> None:
    said = [cell.startswith(("yes", "if ", "with ")) for cell in cells(row)]
    assert said == [bool(ROWS[row](dialect)) for dialect in DIALECTS.values()]


def test_the_documentation_names_the_route_of_each_dialect() -> None:
    assert cells("route") == [f"`{dialect.path}`" for dialect in DIALECTS.values()]
