"""Prints the project's dependencies for `pip install -r`, with torch separate from the rest.

    python docker/requirements.py pyproject.toml            # everything except torch: enough for a gateway
    python docker/requirements.py pyproject.toml --torch    # only torch: for a worker whose base image has none
    python docker/requirements.py pyproject.toml --extras otel gpu    # only what these extras add

pyproject.toml stays the only list. Uses only the standard library, because it runs before anything is installed.
"""

import re
import sys
import tomllib
from pathlib import Path

NAME = re.compile(r"[A-Za-z0-9._-]+")


def split_torch(pyproject: Path) -> tuple[list[str], list[str]]:
    """Return (all requirements except torch, torch)."""
    dependencies: list[str] = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]["dependencies"]
    torch = [d for d in dependencies if (name := NAME.match(d)) and name.group().lower() == "torch"]
    return [d for d in dependencies if d not in torch], torch


def extras(pyproject: Path, names: list[str]) -> list[str]:
    """Return the requirements of the extras with these names."""
    found: dict[str, list[str]] = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"][
        "optional-dependencies"
    ]
    return [requirement for name in names for requirement in found[name]]


def main(arguments: list[str]) -> None:
    pyproject, flags = Path(arguments[0]), arguments[1:]
    if flags[:1] == ["--extras"]:
        print("\n".join(extras(pyproject, flags[1:])))
        return
    rest, torch = split_torch(pyproject)
    print("\n".join(torch if "--torch" in flags else rest))


if __name__ == "__main__":
    main(sys.argv[1:])
