"""What the README says can be done: its commands exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_commands_that_it_names_exist() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    targets = set(re.findall(r"\bmake ([a-z-]+)\b", text)) - {"PYTHON"}
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert targets
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)
