"""Figures, errors by kind and the record, from requests that are given."""

import pytest

from loadtest.measure.figures import figures_of, kind_of, token_rate
from loadtest.measure.report import load_record, tokens_ratio
from loadtest.reporting.record import Provenance
from loadtest.reporting.writers import render_text
from tests.loadtest.measure.builders import answered, cut_off, failed, measured

NOW = Provenance("tidegate loadtest run", "2026-01-01T00:00:00+00:00", "a machine", "m", 1)


def test_rates_count_what_arrived_in_the_window() -> None:
    measurement = measured(None, [answered(0.0), answered(0.5), answered(1.95, ttft_s=0.1)])
    of_class = figures_of(measurement)["load"]["interactive"]
    assert (of_class.summary.completed, of_class.requests_per_s) == (3, 1.0)  # the third ended after the 2 s
    assert of_class.summary.tokens_per_s == 4.0
    assert (of_class.mean_prompt_tokens, of_class.mean_output_tokens) == (10, 4)
    [run] = measurement.runs["load"]
    edges, rates = token_rate(run, "interactive")
    assert edges.tolist() == [0.0, 1.0, 2.0] and rates.tolist() == [8.0, 0.0]


@pytest.mark.parametrize(
    ("status", "error", "kind"),
    [
        (429, "rate_limit_exceeded: Try again in 3 s.", "HTTP 429 rate_limit_exceeded"),
        (500, "500: boom", "HTTP 500"),
        (502, "not an OpenAI answer: JSON is malformed", "HTTP 502"),
        (0, "cannot connect: Connection refused", "cannot connect"),
        (200, "connection lost: closed before the answer was complete", "connection lost"),
        (200, "stream ended without a finish_reason", "stream ended without a finish_reason"),
    ],
)
def test_errors_are_counted_by_kind(status: int, error: str, kind: str) -> None:
    assert kind_of(failed(0.0, status, error)) == kind


def test_both_arms_stand_side_by_side_with_their_ratio() -> None:
    fast, slow = [answered(0.1 * i) for i in range(10)], [answered(10.0, ttft_s=0.4)]
    measurement = measured("batching", fast, slow)
    assert tokens_ratio(figures_of(measurement)) == 10.0
    record = load_record(measurement, {}, NOW)
    lines = {line.split("  ")[0]: line.split() for line in render_text(record).splitlines()}
    assert render_text(record).startswith("Batched against one at a time: 2 interactive users")
    assert lines["requests finished"][2:] == ["10", "1"]
    assert lines["output tokens/s"][2:] == ["20.0", "2.0", "10.00"]
    assert lines["TTFT p50"][2:5] == ["100", "400", "0.25"]
    assert record.cards[0].value == "10.00 ×"
    assert [part["arm"] for part in record.data["parts"]] == ["batched", "one at a time"]


def test_errors_and_missing_ends_are_named_and_warned_of() -> None:
    refused = [failed(0.1 * i, 429, f"rate_limit_exceeded: Try again in {i} s.") for i in range(3)]
    measurement = measured(None, [answered(0.0), *refused, failed(1.0, 0, "cannot connect: refused"), cut_off(1.5)])
    measurement.was_interrupted = True
    record = load_record(measurement, {}, NOW)
    text = render_text(record)
    assert "load, interactive: 4 of 6 failed: 3 × HTTP 429 rate_limit_exceeded, 1 × cannot connect" in text
    assert "1 of 6 requests had no end" in text and "was interrupted" in text
    problems = record.data["arms"]["load"]["interactive"]["problems"]
    assert [(p["kind"], p["count"]) for p in problems] == [("HTTP 429 rate_limit_exceeded", 3), ("cannot connect", 1)]


def test_an_interrupted_comparison_shows_the_arm_that_was_measured() -> None:
    record = load_record(measured("tiers", [answered(0.0)]), {}, NOW)
    assert record.title.startswith("With tiers against without") and list(record.data["arms"]) == ["with tiers"]
    assert record.data["tokens_per_s_ratio"] is None
