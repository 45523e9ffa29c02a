"""Where the product's own tiers.yaml lies, and its content: the default tiers of a load test."""

from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml


def shipped_tiers_path() -> Path:
    """Return the path: in the package `tidegate` of an installed wheel, at the top of a source tree."""
    installed = Path(str(files("tidegate") / "tiers.yaml"))
    return installed if installed.exists() else installed.parents[1] / "tiers.yaml"


def read_shipped_tiers() -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load(shipped_tiers_path().read_text(encoding="utf-8"))
    return document
