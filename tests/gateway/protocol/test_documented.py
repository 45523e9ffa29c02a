"""The table of parameters in docs/api.md has every parameter that the server knows, and no other."""

import re
from pathlib import Path

from gateway.protocol.bodies.schemas import ChatCompletionRequest, CompletionRequest
from gateway.protocol.bodies.unsupported import HARMLESS

PAGE = Path(__file__).parents[3] / "docs" / "api.md"


def documented() -> dict[str, str]:
    """Return what the table says of each parameter."""
    section = PAGE.read_text(encoding="utf-8").partition("## Parameters")[2].partition("\n### ")[0]
    rows = re.findall(r"^\| (`.+?) \| (.+) \|$", section, re.MULTILINE)
    return {name: text for names, text in rows for name in re.findall(r"`(\w+)`", names)}


def test_every_parameter_is_documented_and_no_other() -> None:
    known = {*ChatCompletionRequest.model_fields, *CompletionRequest.model_fields, *HARMLESS}
    assert documented().keys() == known


def test_what_is_refused_is_documented_as_refused() -> None:
    refused = {name for name, text in documented().items() if text.startswith("Refused")}
    assert refused - {"chat_template"} == set(HARMLESS)
