"""The README's figures: the commands that measure them, and the rows that their results make."""

from pathlib import Path

import pytest
from pydantic_settings import CliApp

from bench.__main__ import Bench
from bench.readme_figures import ReadmeFigures, figures, strict_tiers
from bench.simulator_accuracy import Compared
from loadtest.simulation.summary import spread
from scheduler.config import parse_tiers

RATIO = {"value": 1.03, "low": 0.76, "high": 1.37}
ISOLATION = {
    "versus_alone": {"OURS": {"ttft_p50": RATIO, "ttft_p99": None, "bulk_kept": 0.8}},
    "arms": {
        "OURS": {"attainment": {"chat": {"met": 9, "offered": 10}}, "bulk_tokens_per_s": 30.2},
        "A2": {"attainment": {"chat": {"met": 0, "offered": 10}}, "bulk_tokens_per_s": 37.0},
    },
}
OVERLOAD = {
    "scenario": {"classes": {"typing": {"service_tier": "priority"}, "chat": {"service_tier": "default"}}},
    "arms": {arm: {"attainment": {"typing": {"share": share}}} for arm, share in (("OURS", 1.0), ("A3", 0.7))},
}
ENGINES = {
    "jobs": [
        {"system": "tidegate", "tokens_per_s": {"value": 651.4}, "ours_over_it": None},
        {"system": "vllm", "tokens_per_s": {"value": 590.0}, "ours_over_it": {"value": 1.104}},
    ]
}
COMPARED = [
    Compared("chat", "TTFT", spread([1.0]), spread([0.97])),
    Compared("chat", "mean gap", spread([1.0]), spread([0.9])),
]


def test_each_result_makes_its_row() -> None:
    rows = figures({"isolation": ISOLATION, "overload": OVERLOAD, "engines": ENGINES}, COMPARED)
    assert [row[1] for row in rows] == [
        "1.03 (0.76–1.37) and –; 90.0 %",
        "0.80",
        "0.0 %",
        "651 tokens/s",
        "0.97 and 0.97",
    ]
    assert [row[2] for row in rows][1:4] == [
        "30 tokens/s against first come: 37 tokens/s",
        "strict priority alone: 30.0 %",
        "1.10 × vllm",
    ]


@pytest.mark.parametrize("vllm_python", [None, Path("python")])
def test_the_commands_exist_with_their_flags(vllm_python: Path | None, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = ReadmeFigures(vllm_python=vllm_python).commands()
    assert ("on-vllm" in commands) == (vllm_python is not None)
    monkeypatch.setattr(Bench, "cli_cmd", lambda self: None)
    for package, *flags in commands.values():
        if package == "bench":
            CliApp.run(Bench, cli_args=flags)


def test_the_overload_is_measured_with_strict_admission() -> None:
    tiers = parse_tiers(strict_tiers())
    assert [tier.name for tier in tiers.by_priority if tier.admission.predict] == ["realtime"]
