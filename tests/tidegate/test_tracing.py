"""Traces: the spans of gateway and worker in memory, their way to a collector, and nothing where they are off."""

import asyncio
import gzip
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import msgspec
import pytest
import structlog

from scheduler.worker.request_intake import RequestTracer
from tests.gateway.stand import Stand, running_stand
from tests.gateway.tiny_model import MODEL
from tests.scheduler.world import World, run_world
from tidegate.tracing.start import TracingError, traced

sdk = pytest.importorskip("opentelemetry.sdk.trace", reason="traces need tidegate[otel]")
export = pytest.importorskip("opentelemetry.sdk.trace.export")
in_memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
exporter_module = pytest.importorskip("tidegate.tracing.exporter")

TRACE, CLIENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, NOT_SAMPLED = f"00-{TRACE}-{CLIENT}-01", f"00-{TRACE}-{CLIENT}-00"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 50, "temperature": 0.5}
MS = 1_000_000  # ns


class Recorder:
    """The spans of one process, in memory."""

    def __init__(self, part: str) -> None:
        self._spans = in_memory.InMemorySpanExporter()
        self.tracing = exporter_module.Tracing(part, "one", export.SimpleSpanProcessor(self._spans))

    def spans(self, name: str = "") -> list[Any]:
        return [s for s in self._spans.get_finished_spans() if s.name == name or not name]

    def span(self, name: str) -> Any:
        [found] = self.spans(name)
        return found


def id_of(span: Any) -> str:
    return f"{span.context.span_id:016x}"


def length_ms(span: Any) -> float:
    return float(span.end_time - span.start_time) / MS


# -- gateway -----------------------------------------------------------------------------------------------------------


async def ask(stand: Stand, traceparent: str = SAMPLED, **changes: Any) -> Any:
    answer = await stand.post("/v1/chat/completions", {**CHAT, **changes}, headers={"traceparent": traceparent})
    await asyncio.sleep(0)  # the span ends after the answer is sent
    return answer


@pytest.mark.parametrize("stream", [False, True])
async def test_the_gateways_span_goes_on_with_the_clients_trace_and_says_what_was_asked_and_answered(
    stream: bool,
) -> None:
    recorder = Recorder("gateway")
    async with running_stand("Hello there!", tracing=recorder.tracing) as stand:
        answer = await ask(stand, stream=stream, service_tier="flex")
        [served] = stand.worker.served
    span = recorder.span(f"chat {MODEL}")
    assert f"{span.context.trace_id:032x}" == TRACE and f"{span.parent.span_id:016x}" == CLIENT
    assert served.traceparent == f"00-{TRACE}-{id_of(span)}-01", "the worker's spans belong under it"
    said = span.attributes
    assert said["gen_ai.operation.name"] == "chat" and said["gen_ai.provider.name"] == "tidegate"
    assert said["gen_ai.request.model"] == said["gen_ai.response.model"] == MODEL
    assert (said["gen_ai.request.max_tokens"], said["gen_ai.request.temperature"]) == (50, 0.5)
    assert (said["gen_ai.request.stream"], said["openai.request.service_tier"]) == (stream, "flex")
    assert said["gen_ai.usage.input_tokens"] == len(served.prompt_token_ids)
    assert said["gen_ai.usage.output_tokens"] > 1 and said["gen_ai.response.finish_reasons"] == ("stop",)
    assert (said["tidegate.tier"], said["http.response.status_code"]) == ("bulk", 200)
    assert said["gen_ai.response.time_to_first_chunk"] > 0
    assert said["tidegate.request_id"] == answer.headers["x-request-id"]
    assert "Hello" not in repr(dict(said)) and "Hi" not in said.values(), "no text of prompts or answers"


@pytest.mark.parametrize(
    ("changes", "with_worker", "status", "is_error"),
    [({"temperature": 9}, True, 400, False), ({"model": "nope"}, True, 404, False), ({}, False, 503, True)],
)
async def test_refusals_have_a_span_and_only_the_servers_own_are_errors(
    changes: dict[str, Any], with_worker: bool, status: int, is_error: bool
) -> None:
    recorder = Recorder("gateway")
    async with running_stand(tracing=recorder.tracing, with_worker=with_worker) as stand:
        assert (await ask(stand, **changes)).status_code == status
    [root] = [span for span in recorder.spans() if span.kind.name == "SERVER"]
    assert root.attributes["http.response.status_code"] == status
    assert (root.status.status_code.name == "ERROR") == is_error
    assert ("error.type" in root.attributes) == is_error


async def test_what_the_client_does_not_sample_is_not_recorded_but_passed_on() -> None:
    recorder = Recorder("gateway")
    async with running_stand(tracing=recorder.tracing) as stand:
        await ask(stand, NOT_SAMPLED)
        assert stand.worker.served[0].traceparent.startswith(f"00-{TRACE}-")
        assert stand.worker.served[0].traceparent.endswith("-00")
        await ask(stand, "nonsense")
    roots = [span for span in recorder.spans() if span.kind.name == "SERVER"]
    assert len(roots) == 1 and roots[0].parent is None, "a malformed header begins a new trace"


# -- worker ------------------------------------------------------------------------------------------------------------


def play(story: Any) -> Recorder:
    recorder = Recorder("worker")
    tracer: RequestTracer = recorder.tracing.requests_of("w1")
    run_world(story, tracer=tracer)
    return recorder


async def ask_traced(
    world: World, request_id: str, tier: str, max_tokens: int, traceparent: str = SAMPLED, prompt: int = 32
) -> None:
    request = world.request(request_id, tier, prompt, max_tokens)
    async with await world.submit(msgspec.structs.replace(request, traceparent=traceparent)) as events:
        async for _ in events:
            pass


def test_a_request_has_a_span_for_each_phase_and_they_fill_it() -> None:
    async def story(world: World) -> None:
        await ask_traced(world, "r", "realtime", max_tokens=20)

    recorder = play(story)
    root = recorder.span("tidegate.request")
    assert f"{root.context.trace_id:032x}" == TRACE and f"{root.parent.span_id:016x}" == CLIENT
    phases = [recorder.span(f"tidegate.{name}") for name in ("queue", "prefill", "decode")]
    assert {phase.parent.span_id for phase in phases} == {root.context.span_id}
    assert sum(length_ms(phase) for phase in phases) == pytest.approx(length_ms(root), abs=0.01)
    assert [a.end_time - b.start_time for a, b in zip(phases, phases[1:], strict=False)] == [0, 0]
    said = root.attributes
    assert (said["tidegate.input_tokens"], said["tidegate.output_tokens"]) == (32, 20)
    assert said["gen_ai.server.time_to_first_token"] * 1000 == pytest.approx(
        length_ms(phases[0]) + length_ms(phases[1])
    )
    assert (said["tidegate.tier"], said["tidegate.worker"], said["tidegate.status"]) == ("realtime", "w1", "finished")
    assert not [name for name in said if name.startswith("gen_ai.usage")], "backends would count the tokens twice"
    assert [event.name for event in root.events] == ["tidegate.claimed"]


def test_pauses_are_spans_in_the_phase_that_they_interrupt() -> None:
    async def story(world: World) -> None:
        bulk = [asyncio.create_task(ask_traced(world, f"b{i}", "bulk", max_tokens=150)) for i in range(3)]
        await world.clock.sleep(0.2)
        await world.ask("rt", max_tokens=4)
        await asyncio.gather(*bulk)

    recorder = play(story)
    roots, pauses = recorder.spans("tidegate.request"), recorder.spans("tidegate.pause")
    decodes = {span.context.span_id: span for span in recorder.spans("tidegate.decode")}
    assert (len(roots), len(pauses)) == (3, 3), "the interactive request is not traced"
    for pause in pauses:
        decode = decodes[pause.parent.span_id]
        assert decode.start_time <= pause.start_time < pause.end_time <= decode.end_time
        assert pause.attributes["tidegate.preemption_mode"] == "pause"
    assert {root.attributes["tidegate.pauses"] for root in roots} == {1}
    total_ms = sum(1000 * root.attributes["tidegate.paused_s"] for root in roots)
    assert total_ms == pytest.approx(sum(length_ms(pause) for pause in pauses), abs=0.01)


def test_cancelled_and_failed_requests_have_a_trace_too() -> None:
    async def story(world: World) -> None:
        asking = asyncio.create_task(ask_traced(world, "gone", "realtime", max_tokens=100))
        await world.clock.sleep(0.1)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await ask_traced(world, "long", "realtime", max_tokens=1, prompt=10**5)
        await world.clock.sleep(1.0)

    recorder = play(story)
    roots = {span.attributes["tidegate.sequence_id"]: span for span in recorder.spans("tidegate.request")}
    assert roots["gone"].attributes["tidegate.status"] == "cancelled"
    assert roots["long"].attributes["tidegate.status"] == "failed"
    assert roots["long"].status.status_code.name == "ERROR" and roots["gone"].status.status_code.name != "ERROR"


# -- on, off, and the collector ----------------------------------------------------------------------------------------


@contextmanager
def collector() -> Iterator[tuple[str, list[Any]]]:
    """A receiver of OTLP over HTTP, with OpenTelemetry's own protocol definitions: its URL, and what it has got."""
    service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    received: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            body = gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body
            request = service.ExportTraceServiceRequest.FromString(body)
            received.extend((self.path, resource) for resource in request.resource_spans)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Nothing: the test's output is not an access log."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", received
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


async def test_spans_reach_a_collector_before_the_process_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    with collector() as (url, received):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        with traced("gateway", "gateway 8000", False) as tracing:
            assert tracing is not None, "the environment alone is enough"
            async with running_stand(tracing=tracing) as stand:
                await ask(stand)
    names = {span.name for _, resource in received for scope in resource.scope_spans for span in scope.spans}
    assert names == {f"chat {MODEL}", "tidegate.prepare", "tidegate.output"}
    path, resource = received[0]
    attributes = {a.key: a.value.string_value for a in resource.resource.attributes}
    assert path == "/v1/traces"
    assert (attributes["service.name"], attributes["service.instance.id"]) == ("tidegate-gateway", "gateway 8000")


def test_a_collector_that_is_away_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(exporter_module, "FLUSH_S", 0.01)
    tracing, has_answered = exporter_module.Tracing.to_collector("worker", "w1"), threading.Event()
    monkeypatch.setattr(tracing._provider, "shutdown", has_answered.wait)
    tracing.close()
    has_answered.set()


def test_what_cannot_be_sent_is_an_error_only_where_traces_were_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}
    with structlog.testing.capture_logs() as logs, traced("worker", "w", False, environment) as tracing:
        assert tracing is None
    assert "http/protobuf" in logs[0]["reason"]
    with pytest.raises(TracingError, match="grpc"), traced("worker", "w", True, environment):
        pass
    monkeypatch.setitem(sys.modules, "tidegate.tracing.exporter", None)
    with pytest.raises(TracingError, match=r"tidegate\[otel\]"), traced("worker", "w", True, {}):
        pass
