"""The stream of one answer, frame by frame, on a clock that the test moves."""

import asyncio

from gateway.fairness import FairLock
from gateway.http.sse import DONE, PING
from gateway.requests.answers.answer_options import AnswerOptions
from gateway.requests.answers.openai_objects import AnswerHead, TextAnswer
from gateway.requests.generate.generation import Generation
from gateway.requests.prepare.placement import Placement
from gateway.requests.prepare.prepared import PreparedRequest
from scheduler.client.client import SchedulerClient
from scheduler.client.token_stream import TokenStream
from scheduler.events.memory import MemoryEventChannel
from scheduler.queue.memory import MemoryQueue
from scheduler.registry.memory import MemoryWorkerRegistry
from scheduler.request import EventKind, TokenEvent
from tests.gateway.stand import make_tiers
from tests.gateway.tiny_model import tiny_tokenizer, token_ids
from tests.scheduler.queue.harness import ManualClock, make_request
from tests.waiting import until


async def test_tokens_without_text_do_not_suppress_pings() -> None:
    clock, tiers, request = ManualClock(), make_tiers(realtime={"timeout_ms": 20_000}), make_request()
    registry = MemoryWorkerRegistry(clock, ttl_s=600)
    client = SchedulerClient(MemoryQueue(clock), MemoryEventChannel(), registry, tiers, clock, "gateway-1")
    tokens = TokenStream(client.cancel, [request])
    answer = TextAnswer(AnswerHead("cmpl-1", 0, "m", "default", "fp"))
    placement, options = Placement(tiers["realtime"], "default", "req_1"), AnswerOptions(stops=("xxxxxxxxxx",))
    prepared = PreparedRequest(placement, answer, (request,), n=1, options=options)
    stream = Generation(prepared, tokens, tiny_tokenizer(), clock, ping_s=15.0, lock=FairLock())
    written: list[bytes] = []

    async def write(frames: bytes) -> None:
        written.append(frames)

    streaming = asyncio.create_task(stream.stream(write))
    await asyncio.sleep(0)  # lets the stream begin
    for index in range(2):  # less than ping_s (15 s) each, and less than the tier's timeout
        clock.advance(10)
        tokens.deliver(TokenEvent(request.id, EventKind.TOKENS, index, token_ids("x")))
    await until(lambda: bool(written))
    assert written == [PING]
    tokens.deliver(TokenEvent(request.id, EventKind.FINISHED, 2, token_ids("y")))
    await streaming
    assert b'"text":"xxy"' in written[1]
    assert written[2:] == [DONE]
