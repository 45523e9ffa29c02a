"""The README's map names what is there: no file more, no package's file less."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
MAPPED = (
    "tidegate",
    "gateway",
    "gateway/routes",
    "scheduler",
    "scheduler/queue",
    "scheduler/events",
    "engine",
    "engine/cpu",
    "engine/cuda",
    "loadtest/engine_bench",
    "loadtest/coserve",
    "loadtest/simulation",
    "loadtest/calibration",
)


def named_files() -> set[str]:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    map_text = text[text.index("## Where things are") :]
    return set(re.findall(r"\b([a-z_]+\.py)\b", map_text))


def test_every_file_that_the_map_names_exists() -> None:
    existing = {path.name for path in ROOT.glob("*/**/*.py") if ".venv" not in path.parts}
    assert named_files() <= existing


def test_every_module_is_on_the_map() -> None:
    modules = {path.name for package in MAPPED for path in (ROOT / package).glob("*.py")}
    assert modules - {"__init__.py", "__main__.py"} <= named_files()


def test_the_commands_that_it_names_exist() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    targets = set(re.findall(r"\bmake ([a-z-]+)\b", text)) - {"PYTHON"}
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert targets
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)
