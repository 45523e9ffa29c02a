"""The path and the content of the shipped tiers.yaml, which holds the default tiers of a load test."""

from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml


def shipped_tiers_path() -> Path:
    """Return the path of the shipped tiers.yaml.

    In an installed wheel the file is in the package `tidegate`; in a source tree it is in the top directory.
    """
    installed = Path(str(files("tidegate") / "tiers.yaml"))
    return installed if installed.exists() else installed.parents[1] / "tiers.yaml"


def read_shipped_tiers() -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load(shipped_tiers_path().read_text(encoding="utf-8"))
    return document
