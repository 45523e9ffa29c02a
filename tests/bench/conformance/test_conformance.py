"""The clients' scripts are run in their environments, and each check has an outcome."""

import json
import sys
from pathlib import Path

import httpx
import pytest

from bench.conformance import clients
from bench.conformance.clients import CLIENTS, Client, InstallError, install
from bench.conformance.command import _run_script
from bench.conformance.scripted_model import answer_to, scripted_model
from loadtest.client.http import Target

CLIENT = Client("some", "some.py", ())
CHECKS = """
from checks import BASE_URL, MODEL, check, main

@check
def passes():
    \"\"\"sees the server\"\"\"
    assert (BASE_URL, MODEL) == ("http://127.0.0.1:1/v1", "m")

@check
async def fails():
    raise ValueError("no")

print("a client's own line")
main()
"""


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of scripts with the module `checks`, beside an environment with this Python."""
    scripts, bin_folder = tmp_path / "scripts", tmp_path / "environment" / "bin"
    scripts.mkdir()
    bin_folder.mkdir(parents=True)
    (bin_folder / "python").symlink_to(sys.executable)
    (scripts / "checks.py").write_text((clients.SCRIPTS / "checks.py").read_text())
    monkeypatch.setattr(clients, "SCRIPTS", scripts)
    return scripts


async def run(scripts: Path, text: str) -> list[tuple[str, str]]:
    (scripts / CLIENT.script).write_text(text)
    outcomes = await _run_script(CLIENT, scripts.parent / "environment", Target("127.0.0.1", 1, model="m"))
    return [(outcome.check, outcome.error) for outcome in outcomes]


async def test_each_check_has_an_outcome(scripts: Path) -> None:
    assert await run(scripts, CHECKS) == [("sees the server", ""), ("fails", "ValueError: no")]


async def test_a_script_that_breaks_is_a_failed_check(scripts: Path) -> None:
    [(check, error)] = await run(scripts, "import nothing_of_this_name")
    assert check == "the script runs" and "nothing_of_this_name" in error


def test_each_client_has_its_script() -> None:
    assert {client.script for client in CLIENTS} | {"checks.py", "checks.mjs"} == {
        path.name for path in clients.SCRIPTS.glob("*.*")
    }
    assert len({client.name for client in CLIENTS}) == len(CLIENTS)


def test_an_installation_that_fails_is_one_sentence_and_is_tried_again(tmp_path: Path) -> None:
    client = Client("some", "some.py", ("./there-is-no-such-package",))
    for _ in range(2):
        with pytest.raises(InstallError, match="pip failed"):
            install(client, tmp_path)
    assert not (tmp_path / "some" / "installed.txt").exists()


def test_an_environment_of_its_own_is_made_by_its_script(tmp_path: Path) -> None:
    script = tmp_path / "make.sh"
    script.write_text('#!/bin/sh\necho "$1" > "$2/made_with"\n')
    script.chmod(0o755)
    folder = install(Client("some", "some.py", ("some",), environment=script), tmp_path)
    assert (folder / "made_with").read_text().strip() == sys.executable


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [
        ('Please CALL {"name": "Bash"} THEN 42', '<tool_call>\n{"name": "Bash"}\n</tool_call>'),
        ('CALL {"name": "Bash"} THEN 42 ... <tool_response>tide-42', "The tool said tide-42."),
        ("Write a title", "A short task"),
    ],
)
def test_the_scripted_model_calls_a_tool_and_then_tells_its_result(prompt: str, answer: str) -> None:
    assert answer_to(prompt) == answer


def test_the_scripted_model_streams_its_answer() -> None:
    with scripted_model() as url:
        assert httpx.get(f"{url}/v1/models").json()["data"][0]["max_model_len"] > 32_000
        events = httpx.post(f"{url}/v1/completions", json={"prompt": "Write a title"}).text.split("\n\n")
    choices = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events[:-2]]
    assert "".join(choice["text"] for choice in choices) == "A short task"
    assert [choice["finish_reason"] for choice in choices] == [None, "stop"] and events[-2] == "data: [DONE]"
