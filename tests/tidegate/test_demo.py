"""The demo's messages when there is nothing to show, and its tables. tests/system runs it."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tidegate.demo import command, fleet, one_server
from tidegate.demo.parts import DemoError, free_port
from tidegate.settings.base import CommonSettings
from tidegate.settings.commands import DemoSettings


@pytest.mark.parametrize(("alone", "beside"), [([], [0.1]), ([0.1], [])])
def test_without_first_tokens_there_is_no_table(alone: list[float], beside: list[float]) -> None:
    with pytest.raises(DemoError, match="first token"):
        one_server.table(alone, beside, 0.0)


def test_the_table_compares_medians() -> None:
    assert "2.00 times" in one_server.table([0.01, 0.02, 0.03], [0.04], 5.0)


def test_a_server_that_does_not_answer_ends_the_demo_with_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @contextmanager
    def serving_nowhere(_: CommonSettings) -> Iterator[str]:
        yield f"http://127.0.0.1:{free_port()}/v1"

    monkeypatch.setattr(one_server, "serving", serving_nowhere)
    assert command.run_demo(DemoSettings(seconds=1)) == 1
    assert capsys.readouterr().err == "tidegate demo: Connection error.\n"


def test_the_table_of_a_fleet_has_a_row_for_each_model_in_each_phase() -> None:
    chats = {
        ("alone", "alpha"): fleet.Chats([0.010, 0.012, 0.5]),
        ("alone", "beta"): fleet.Chats([0.020]),
        ("both gateways restarted", "alpha"): fleet.Chats([0.015], ["no gateway"], sent_again=7),
    }
    header, *rows, _, again, cores = fleet.table(chats).splitlines()
    assert header.split() == ["model", "chats", "first", "token", "p50", "longest", "failed"]
    assert [row.split() for row in rows] == [
        ["alone", "alpha", "3", "12.0", "ms", "500", "ms", "0"],
        ["beta", "1", "20.0", "ms", "20", "ms", "0"],
        ["both", "gateways", "restarted", "alpha", "1", "15.0", "ms", "15", "ms", "1"],
    ]
    assert again.startswith("7 chats") and "cores" in cores


def test_a_fleet_whose_chats_all_fail_says_why() -> None:
    chats = {("alone", "alpha"): fleet.Chats([0.01]), ("alone", "beta"): fleet.Chats([], ["the queue is full"])}
    with pytest.raises(DemoError, match="no chat with beta got an answer while alone: the queue is full"):
        fleet.table(chats)
