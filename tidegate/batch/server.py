"""The Batch API of a server, as `tidegate batch` uses it.

Works with any server that has OpenAI's Files and Batch API. Knows the API; does not know tables or runs.
"""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from time import sleep
from typing import Any

import openai
from openai.types import Batch

from gateway.jobs.batches.input.size import InputSize
from tidegate.away import away
from tidegate.batch.rows import BatchProblem

TERMINAL = {"completed", "failed", "expired", "cancelled"}
FIRST_POLL_S, MAX_POLL_S = 0.2, 5.0
WINDOW = "24h"
NO_ROUTE = (404, 405, 501)
PARTIAL_CONTENT, RANGE_NOT_SATISFIABLE = 206, 416  # HTTP statuses
MAX_DOWNLOAD_FAILURES = 10  # lost connections in one download


class BatchServer:
    """One server. Its answers that a user can mend become a `BatchProblem`. Close it after use."""

    def __init__(self, base_url: str, api_key: str) -> None:
        self._url = base_url
        self._client = openai.OpenAI(base_url=base_url, api_key=api_key)

    def close(self) -> None:
        self._client.close()

    def first_model(self) -> str:
        with self._problems():
            for model in self._client.models.list():
                return model.id
        raise BatchProblem(f"{self._url} serves no model.")

    def upload(self, path: Path, retry_key: str) -> str:
        """Upload an input file and return its id. A call with the same `retry_key` may return the same file."""
        with self._problems(), path.open("rb") as file:
            headers = {"Idempotency-Key": f"{retry_key}-file"}
            return self._client.files.create(file=file, purpose="batch", extra_headers=headers).id

    def create(
        self,
        file_id: str,
        endpoint: str,
        metadata: dict[str, str],
        window: str,
        retry_key: str,
        best_effort: bool = False,
    ) -> Batch:
        with self._problems():
            return self._client.batches.create(
                input_file_id=file_id,
                endpoint=endpoint,  # type: ignore[arg-type]
                completion_window=window,  # type: ignore[arg-type]
                metadata=metadata or None,
                extra_headers={"Idempotency-Key": f"{retry_key}-batch"},
                extra_body={"best_effort": True} if best_effort else None,
            )

    def estimate(self, endpoint: str, window: str, size: InputSize) -> dict[str, Any] | None:
        """Return the server's estimate for an input of this size; None if the server makes none."""
        body = {"endpoint": endpoint, "completion_window": window, **asdict(size)}
        try:
            with self._problems():
                answer = self._client.post("/batches/estimate", body=body, cast_to=object)
        except BatchProblem as problem:
            if isinstance(problem.__context__, openai.APIStatusError) and problem.__context__.status_code in NO_ROUTE:
                return None
            raise
        return answer if isinstance(answer, dict) and answer.get("object") == "batch.estimate" else None

    def retrieve(self, batch_id: str) -> Batch:
        with self._problems():
            return self._client.batches.retrieve(batch_id)

    def cancel(self, batch_id: str) -> Batch:
        with self._problems():
            return self._client.batches.cancel(batch_id)

    def newest(self, limit: int) -> Iterator[Batch]:
        """Yield up to `limit` batches, newest first."""
        with self._problems():
            for count, batch in enumerate(self._client.batches.list(limit=min(limit, 100)), 1):
                yield batch
                if count == limit:
                    return

    def download(self, file_id: str, path: Path) -> None:
        """Write the file to `path`, which appears when it is complete.

        A download that was cut off goes on where it was, also in a later call, if the server takes ranges.
        """
        partial = path.with_name(f"{path.name}.partial")
        with self._problems():
            failures = 0
            while not self._is_downloaded(file_id, partial):
                failures += 1
                if failures == MAX_DOWNLOAD_FAILURES:
                    raise BatchProblem(f"The download of {file_id} is cut off again and again. Run the command again.")
        partial.replace(path)

    def _is_downloaded(self, file_id: str, partial: Path) -> bool:
        """Add to `partial` what is missing. Return False if the connection is lost before the end."""
        have = partial.stat().st_size if partial.exists() else 0
        wanted = {"Accept-Encoding": "identity", **({"Range": f"bytes={have}-"} if have else {})}
        content = self._client.files.with_streaming_response.content
        try:
            with content(file_id, extra_headers=wanted) as response, partial.open(_mode(response)) as file:
                for piece in response.iter_bytes():
                    file.write(piece)
        except openai.APIStatusError as error:
            if error.status_code != RANGE_NOT_SATISFIABLE:
                raise
            partial.unlink()  # it has the whole file, or another one
            return False
        except _connection_errors():
            return False
        return True

    def updates(self, batch_id: str, tell: Callable[[str], None]) -> Iterator[Batch]:
        """Yield the batch again and again, until it has ended. A server that is away for a while is waited for."""
        wait_s, away = FIRST_POLL_S, False
        while True:
            try:
                batch = self._client.batches.retrieve(batch_id)
            except (openai.APIConnectionError, openai.InternalServerError, openai.RateLimitError) as error:
                if not away:
                    tell(f"{self._url} does not answer ({_reason(error)}); waiting for it.")
                away = True
            except openai.APIStatusError as error:
                raise BatchProblem(f"{self._url} answered {error.status_code}: {_reason(error)}") from None
            else:
                away = False
                yield batch
                if batch.status in TERMINAL:
                    return
            sleep(wait_s)
            wait_s = min(wait_s * 1.5, MAX_POLL_S)

    @contextmanager
    def _problems(self) -> Iterator[None]:
        try:
            yield
        except openai.APIConnectionError as error:
            raise BatchProblem(away(self._url, error)) from None
        except openai.AuthenticationError as error:
            raise BatchProblem(f"{_reason(error)} Set TIDEGATE_API_KEY or OPENAI_API_KEY.") from None
        except openai.APIStatusError as error:
            raise BatchProblem(f"{self._url} answered {error.status_code}: {_reason(error)}") from None


def _mode(response: openai.APIResponse[Any]) -> str:
    """Return how the file is opened that gets the response: to append to it, if the response goes on where it ends."""
    return "ab" if response.status_code == PARTIAL_CONTENT else "wb"


def _connection_errors() -> tuple[type[Exception], ...]:
    """Return the errors of a body that is cut off: those of httpx or httpx2, whichever the openai package uses."""
    modules = (sys.modules.get(name) for name in ("httpx", "httpx2"))
    return tuple(module.TransportError for module in modules if module is not None)


def _reason(error: openai.APIError) -> str:
    match error.body:
        case {"message": str(message)}:
            return message
    return error.message


def describe(batch: Batch) -> str:
    """Return the state of a batch as one line."""
    counts = batch.request_counts
    done = "" if counts is None else f"  {counts.completed + counts.failed}/{counts.total} lines"
    failed = f", {counts.failed} failed" if counts is not None and counts.failed else ""
    note = f"  {json.dumps(batch.metadata)}" if batch.metadata else ""
    eta = f"  {text}" if (text := eta_of(batch)) else ""
    return f"{batch.id}  {batch.status:11}{done}{failed}{eta}  {batch.endpoint}{note}"


def eta_of(batch: Batch) -> str:
    """Return when the server expects the batch to end, and its pace; empty if the server does not say."""
    said = (batch.model_extra or {}).get("tidegate")
    if not isinstance(said, dict) or not isinstance(estimate := said.get("estimate"), dict):
        return ""
    ends = [datetime.fromtimestamp(estimate[key], UTC).astimezone() for key in ("finish_at", "earliest", "latest")]
    form = "%H:%M" if ends[2].date() == datetime.now().astimezone().date() else "%a %H:%M"
    finish, earliest, latest = (end.strftime(form) for end in ends)
    pace = (said.get("progress") or {}).get("tokens_per_s")
    return f"ends about {finish} ({earliest}–{latest})" + (f", {pace:.0f} tokens/s" if pace else "")


def errors_of(batch: Batch) -> Iterator[str]:
    """Yield one line for each error of the batch's input."""
    for error in (batch.errors.data if batch.errors else None) or ():
        place = "" if error.line is None else f"line {error.line}: "
        yield f"{place}{error.message} ({error.code})"


def results_of(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the custom_id and the whole of each result line of a downloaded file. A missing file has none."""
    if path.exists():
        with path.open(encoding="utf-8") as file:
            for text in file:
                result = json.loads(text)
                yield result["custom_id"], result
