"""Completion windows as text and seconds."""

import pytest

from gateway.jobs.batches.completion_window import InvalidWindow, window_s


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("15m", 900), ("1h", 3600), ("24h", 86_400), ("7d", 604_800), ("30d", 2_592_000)]
)
def test_a_duration_is_a_window(text: str, seconds: int) -> None:
    assert window_s(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "24", "h", "0h", "59s", "31d", "-1h", "1.5h", "24 h", "24H", "1h30m", "١h", "9" * 99]
)
def test_anything_else_is_refused_with_the_windows_that_there_are(text: str) -> None:
    with pytest.raises(InvalidWindow, match='from "1m" to "30d"'):
        window_s(text)
