"""The demo's messages when there is nothing to show. tests/system checks the rest."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tidegate import demo
from tidegate.settings.base import CommonSettings
from tidegate.settings.commands import DemoSettings


@pytest.mark.parametrize(("alone", "beside"), [([], [0.1]), ([0.1], [])])
def test_without_first_tokens_there_is_no_table(alone: list[float], beside: list[float]) -> None:
    with pytest.raises(demo.DemoError, match="first token"):
        demo.table(alone, beside, 0.0)


def test_the_table_compares_medians() -> None:
    assert "2.00 times" in demo.table([0.01, 0.02, 0.03], [0.04], 5.0)


def test_a_server_that_does_not_answer_ends_the_demo_with_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @contextmanager
    def serving_nowhere(_: CommonSettings) -> Iterator[str]:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        yield f"http://127.0.0.1:{port}/v1"

    monkeypatch.setattr(demo, "serving", serving_nowhere)
    assert demo.run_demo(DemoSettings(seconds=1)) == 1
    assert capsys.readouterr().err == "tidegate demo: Connection error.\n"
