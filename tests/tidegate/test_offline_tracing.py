"""Traces of what runs later: lines of batches and tasks."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from engine.static.http_endpoint import HttpEndpoint
from engine.static.interface import CallFailed, ItemResult
from scheduler.request import EventKind, Request, TokenEvent
from scheduler.tasks.task import TaskState
from tests.gateway.jobs.tasks.test_tasks import TASK_WORKER
from tests.gateway.offline import jsonl
from tests.gateway.scripted_worker import answer_with
from tests.gateway.stand import Stand, running_stand
from tests.gateway.tiny_model import MODEL
from tests.scheduler.drivers.calls.stand import Stand as TaskStand
from tests.scheduler.tasks.builders import make_task
from tests.tidegate.test_tracing import CLIENT, NOT_SAMPLED, SAMPLED, TRACE, Recorder, id_of
from tests.waiting import until

pytest.importorskip("opentelemetry.sdk.trace", reason="traces need tidegate[otel]")
batch_spans = pytest.importorskip("tidegate.tracing.batch_spans")

OTHER_TRACE = "11" * 16


# -- batches -----------------------------------------------------------------------------------------------------------


def line(custom_id: str, **body: object) -> dict[str, object]:
    whole = {"model": MODEL, "messages": [{"role": "user", "content": custom_id}], "max_tokens": 20, **body}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": whole}


async def run_batch(stand: Stand, lines: Sequence[dict[str, object]], traceparent: str) -> str:
    """Run a batch with `lines` to its end, and return its id."""
    upload = {"file": ("in.jsonl", jsonl(lines))}
    file = (await stand.http.post("/v1/files", files=upload, data={"purpose": "batch"})).json()
    body = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    headers = {"traceparent": traceparent} if traceparent else {}
    batch_id: str = (await stand.post("/v1/batches", body, headers=headers)).json()["id"]

    async def is_over() -> bool:
        return (await stand.http.get(f"/v1/batches/{batch_id}")).json()["status"] == "completed"

    await until(is_over)
    return batch_id


async def traced_batch(
    redis: Redis, data_dir: Path, lines: Sequence[dict[str, object]], traceparent: str = SAMPLED, script: Any = "Hi!"
) -> tuple[Recorder, str, list[Request]]:
    recorder = Recorder("gateway")
    async with running_stand(script, redis=redis, data_dir=data_dir, tracing=recorder.tracing) as stand:
        batch_id = await run_batch(stand, lines, traceparent)
        sampled = traceparent == SAMPLED  # the span is recorded after clients see the end
        await until(lambda: not sampled or bool(recorder.spans(f"batch {MODEL}")))
        return recorder, batch_id, list(stand.worker.served)


async def test_a_batch_is_in_the_trace_of_its_creation_and_its_lines_are_below_it(
    redis_client: Redis, tmp_path: Path
) -> None:
    lines = [line("a"), line("b"), line("refused", temperature=9)]
    recorder, batch_id, served = await traced_batch(redis_client, tmp_path, lines)
    created, batch = recorder.span("POST /v1/batches"), recorder.span(f"batch {MODEL}")
    assert f"{created.context.trace_id:032x}" == TRACE and f"{created.parent.span_id:016x}" == CLIENT
    assert batch.parent.span_id == created.context.span_id
    said = batch.attributes
    assert (said["tidegate.batch.id"], said["tidegate.batch.status"]) == (batch_id, "completed")
    assert [said[f"tidegate.batch.{name}"] for name in ("lines", "completed", "failed")] == [3, 2, 1]
    assert [e.name.rpartition(".")[2] for e in batch.events] == ["in_progress", "finalizing", "completed"]

    found = {
        s.attributes["tidegate.batch.custom_id"]: s for s in recorder.spans() if "tidegate.batch.line" in s.attributes
    }
    assert set(found) == {"a", "b", "refused"}
    assert {s.parent.span_id for s in found.values()} == {batch.context.span_id}
    assert {f"00-{TRACE}-{id_of(found[name])}-01" for name in ("a", "b")} == {r.traceparent for r in served}
    assert found["a"].name == f"chat {MODEL}" and found["a"].attributes["tidegate.batch.line"] == 1
    assert found["a"].attributes["gen_ai.usage.output_tokens"] > 0 and found["a"].attributes["tidegate.attempts"] == 1
    assert found["refused"].attributes["http.response.status_code"] == 400
    assert found["refused"].status.status_code.name != "ERROR", "the line is wrong, not the server"
    assert (
        sum(s.attributes["gen_ai.usage.output_tokens"] for s in (found["a"], found["b"]))
        == said["tidegate.output_tokens"]
    )


async def test_attempts_of_a_line_are_counted(
    redis_client: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.jobs.batches.lines.line.FIRST_PAUSE_S", 0.001)
    failing = [True, True, False]

    def script(request: Request) -> Sequence[TokenEvent]:
        failed = [TokenEvent(request.id, EventKind.FAILED, error="boom")]
        return failed if failing.pop(0) else answer_with("Hi!")(request)

    recorder, _, served = await traced_batch(redis_client, tmp_path, [line("a")], script=script)
    span = recorder.span(f"chat {MODEL}")
    assert span.attributes["tidegate.attempts"] == 3 == len(served)
    assert {r.traceparent for r in served} == {f"00-{TRACE}-{id_of(span)}-01"}


@pytest.mark.parametrize("traceparent", [NOT_SAMPLED, SAMPLED])
async def test_the_sampling_of_a_batch_is_that_of_its_creation_and_few_lines_have_spans(
    traceparent: str, redis_client: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_spans, "MAX_LINES", 3)
    lines = [line(str(number)) for number in range(1, 10)]
    recorder, _, served = await traced_batch(redis_client, tmp_path, lines, traceparent)
    numbers = [s.attributes["tidegate.batch.line"] for s in recorder.spans(f"chat {MODEL}")]
    is_sampled = traceparent == SAMPLED
    assert sorted(numbers) == ([1, 4, 7] if is_sampled else [])
    assert sorted(r.traceparent[-2:] for r in served) == (["00"] * 6 + ["01"] * 3 if is_sampled else ["00"] * 9)
    assert {r.traceparent[3:35] for r in served} == {TRACE}, "servers that compute the tokens are told, too"
    assert is_sampled or recorder.spans() == []


# -- tasks -------------------------------------------------------------------------------------------------------------


async def test_a_task_keeps_the_trace_of_its_creation_through_the_store(redis_client: Redis) -> None:
    recorder = Recorder("gateway")
    async with running_stand(redis=redis_client, workers=[TASK_WORKER], tracing=recorder.tracing) as stand:
        created = await stand.post("/v1/tasks", {"inputs": [1, 2]}, headers={"traceparent": SAMPLED})
        assert created.status_code == 202
        ids = [task["id"] for task in created.json()["data"]]
        stored = await stand.gateway.tasks.get_all(ids, None)
    span = recorder.span("POST /v1/tasks")
    assert {found.task.traceparent for found in stored} == {f"00-{TRACE}-{id_of(span)}-01"}
    assert recorder.spans() == [span], "nothing is prepared and nothing is put out"


@pytest.fixture
def recorder(stand: TaskStand) -> Recorder:
    """The spans of the worker of `stand`."""
    recorder = Recorder("worker")
    stand.tracer = recorder.tracing.tasks_of("w1", "scripted")
    return recorder


@pytest.fixture
async def stand(redis_client: Redis) -> Any:
    stand = TaskStand(redis_client)
    yield stand
    await stand.close()


async def put(stand: TaskStand, *traceparents: str) -> list[Any]:
    tasks = [make_task(arrival_ms=stand.clock.wall_ms(), traceparent=traceparent) for traceparent in traceparents]
    assert await stand.queue.put(tasks, 1000) is None
    return tasks


async def test_a_call_goes_on_with_the_trace_of_its_first_sampled_task_and_is_linked_to_the_others(
    stand: TaskStand, recorder: Recorder
) -> None:
    other = f"00-{OTHER_TRACE}-{CLIENT}-01"
    tasks = await put(stand, NOT_SAMPLED, SAMPLED, other, SAMPLED, "")
    stand.start()
    await stand.ended(tasks)
    await until(lambda: len(recorder.spans("tidegate.task")) == 3)
    call = recorder.span("tidegate.call")
    assert f"{call.context.trace_id:032x}" == TRACE and f"{call.parent.span_id:016x}" == CLIENT
    assert [f"{link.context.trace_id:032x}" for link in call.links] == [OTHER_TRACE]
    assert (call.attributes["tidegate.call.items"], call.attributes["tidegate.call.outcome"]) == (5, "ok")
    assert stand.endpoint.traceparents == [f"00-{TRACE}-{id_of(call)}-01"]
    for span in recorder.spans("tidegate.task"):
        assert f"{span.parent.span_id:016x}" == CLIENT and span.attributes["tidegate.status"] == "done"
        assert [link.context.span_id for link in span.links] == [call.context.span_id]
        [queue] = [q for q in recorder.spans("tidegate.queue") if q.parent.span_id == span.context.span_id]
        assert span.start_time == queue.start_time and queue.end_time == call.start_time <= span.end_time


async def test_a_dead_letter_is_an_error_with_its_attempts(stand: TaskStand, recorder: Recorder) -> None:
    def script(items: Sequence[bytes]) -> list[ItemResult]:
        raise CallFailed("out of memory")

    stand.endpoint.script = script
    tasks = await put(stand, SAMPLED)
    stand.start()
    [ended] = await stand.ended(tasks)
    assert ended.state is TaskState.DEAD
    await until(lambda: bool(recorder.spans("tidegate.task")))
    span, calls = recorder.span("tidegate.task"), recorder.spans("tidegate.call")
    assert span.status.status_code.name == "ERROR"
    assert span.attributes["tidegate.attempts"] == span.attributes["tidegate.failures"] == len(calls) == ended.attempts
    assert {call.attributes["error.type"] for call in calls} == {"failed"}


async def test_without_traces_in_the_worker_the_first_tasks_context_is_passed_on(stand: TaskStand) -> None:
    tasks = await put(stand, SAMPLED, NOT_SAMPLED)
    stand.start()
    await stand.ended(tasks)
    assert stand.endpoint.traceparents == [SAMPLED]


async def test_an_endpoint_behind_http_gets_the_header() -> None:
    seen: list[str | None] = []

    def handle(request: httpx.Request) -> httpx.Response:
        seen.append(request.headers.get("traceparent"))
        return httpx.Response(200, json={"results": [{"output": 1}]})

    endpoint = HttpEndpoint("http://endpoint.test", 1, 5.0, httpx.MockTransport(handle))
    await endpoint.call([b"1"], SAMPLED)
    await endpoint.call([b"1"])
    await endpoint.close()
    assert seen == [SAMPLED, None]
