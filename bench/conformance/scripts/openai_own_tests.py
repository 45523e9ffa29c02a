"""The official client's own tests of its endpoints, from its source package, against a real server.

They are made for a mock server that accepts every id, so before a request is sent, an id of theirs is replaced by that
of an object that was made for it. What they ask for and this server refuses is listed with the reason; those tests must
end with a refusal that names the parameter or the endpoint.
"""

import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import openai
import pytest
from checks import API_KEY, BASE_URL, MODEL, check, main
from openai._base_client import AsyncAPIClient, SyncAPIClient

FILES = (
    "chat/test_completions.py",
    "chat/completions/test_messages.py",
    "test_completions.py",
    "test_models.py",
    "test_files.py",
    "test_batches.py",
    "test_responses.py",
    "responses/test_input_items.py",
    "responses/test_input_tokens.py",
)
REFUSED = {
    "chat/completions/test_messages.py::*list*": "chats are not stored",
    "chat/test_completions.py::*_retrieve*": "chats are not stored",
    "chat/test_completions.py::*_update*": "chats are not stored",
    "chat/test_completions.py::*_list*": "chats are not stored",
    "chat/test_completions.py::*_delete*": "chats are not stored",
    "chat/test_completions.py::*create_with_all_params*": "audio, and 'foo' as a token id",
    "test_completions.py::*create_with_all_params*": "'foo' as a token id",
    "test_models.py::*_delete*": "there are no fine-tuned models",
    "test_files.py::*list_with_all_params*": "limit=0",
    "test_batches.py::*list_with_all_params*": "limit=0",
    "test_responses.py::*_create*": "no input, and in the tests of all parameters a conversation",
    "test_responses.py::*retrieve_with_all_params_overload_1*": "starting_after without a stream",
    "test_responses.py::*_compact*": "no input",
    "responses/test_input_items.py::*list_with_all_params*": "limit=0",
    "responses/test_input_tokens.py::*_count*": "no input, and in the tests of all parameters a conversation",
}
BATCH_LINES = 100  # so many that a batch still runs when a test cancels it
client = openai.OpenAI(base_url=BASE_URL, api_key=API_KEY)


def new_file() -> str:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hello!"}]}
    line = {"method": "POST", "url": "/v1/chat/completions", "body": body}
    lines = (json.dumps({"custom_id": str(number), **line}) for number in range(BATCH_LINES))
    return client.files.create(file=("input.jsonl", "\n".join(lines).encode()), purpose="batch").id


def new_batch() -> str:
    return client.batches.create(input_file_id=new_file(), endpoint="/v1/chat/completions", completion_window="24h").id


def new_response() -> str:
    return client.responses.create(model=MODEL, input="Hello!", background=True, max_output_tokens=16).id


MAKERS: dict[str, Callable[[], str]] = {
    "file_id": new_file,
    "input_file_id": new_file,
    "batch_id": new_batch,
    "response_id": new_response,
    "resp_677efb5139a88190b512bc3fef8e535d": new_response,
}
MODELS = ("gpt-6-astra", "gpt-3.5-turbo-instruct", "gpt-4o-mini")


def with_real_ids(options: Any) -> Any:
    parts = [MAKERS[part]() if part in MAKERS else part for part in options.url.split("/")]
    options.url = "/".join(MODEL if part in MODELS else part for part in parts)
    if isinstance(options.json_data, dict):
        named = {key: MAKERS[key]() for key, value in options.json_data.items() if value == key and key in MAKERS}
        if options.json_data.get("model"):
            named["model"] = MODEL
        options.json_data = {**options.json_data, **named}
    return options


async def with_real_ids_async(self: Any, options: Any) -> Any:
    return with_real_ids(options)


class Outcomes:
    """A plugin of pytest that keeps what became of each test."""

    def __init__(self) -> None:
        self.passed: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.wrong: dict[str, list[str]] = {}

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Leave out the tests that bring a mock of the server with them."""
        items[:] = [item for item in items if "respx2_mock" not in item.fixturenames]

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
        yield
        path, _, name = item.nodeid.partition("::")
        path = path.removeprefix("tests/api_resources/")
        error = call.excinfo.value if call.excinfo is not None else None
        if error is None:
            self.passed[path] += call.when == "call"
        elif is_refusal(error) and any(fnmatch(f"{path}::{name}", pattern) for pattern in REFUSED):
            self.refused[path] += 1
        elif not isinstance(error, pytest.skip.Exception):
            self.wrong.setdefault(path, []).append(f"{name}: {type(error).__name__}: {error}"[:200])


def is_refusal(error: BaseException) -> bool:
    """Whether the server refused the request in OpenAI's form."""
    return isinstance(error, openai.APIStatusError) and error.status_code < 500 and isinstance(error.body, dict)


def unpack_source(folder: Path) -> Path:
    """Return the folder of the client's source package, in the installed version."""
    wanted = f"openai=={openai.__version__}"
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--no-deps", "--no-binary", ":all:", "--dest", folder, wanted], check=True)
    [package] = folder.glob("*.tar.gz")
    with tarfile.open(package) as archive:
        archive.extractall(folder, filter="data")
    return folder / package.name.removesuffix(".tar.gz")


def run_tests(source: Path) -> Outcomes:
    """Run the tests in `source`; their configuration is not used, because it wants plugins for development."""
    outcomes = Outcomes()
    os.environ["TEST_API_BASE_URL"] = BASE_URL
    sys.path.insert(0, str(source))
    SyncAPIClient._prepare_options = lambda self, options: with_real_ids(options)  # type: ignore[method-assign]
    AsyncAPIClient._prepare_options = with_real_ids_async  # type: ignore[method-assign]
    options = "asyncio_mode=auto", "asyncio_default_fixture_loop_scope=session"
    flags = [f"--override-ini={option}" for option in options]
    files = [str(source / "tests" / "api_resources" / name) for name in FILES]
    pytest.main(["-c", "/dev/null", f"--rootdir={source}", *flags, "-q", "--tb=no", *files], plugins=[outcomes])
    return outcomes


def register(path: str, outcomes: Outcomes) -> None:
    def judge() -> None:
        wrong = outcomes.wrong.get(path, [])
        assert not wrong, f"{len(wrong)} failed, first {wrong[0]}"
        assert outcomes.passed[path] + outcomes.refused[path], "no test ran"

    judge.__doc__ = f"{path}: {outcomes.passed[path]} tests pass, {outcomes.refused[path]} are refused as listed"
    check(judge)


with tempfile.TemporaryDirectory() as folder:
    source = unpack_source(Path(folder))
    found = run_tests(source)
for path in FILES:
    register(path, found)
main()
