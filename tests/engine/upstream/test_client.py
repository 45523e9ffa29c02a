import asyncio
import socket
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from demo_model.location import demo_model_path
from engine.interface import EngineInfo, FinishReason, SamplingParams, SequenceOutput
from engine.streaming import (
    StreamRequest,
    UpstreamBusy,
    UpstreamLoad,
    UpstreamLost,
    UpstreamRefused,
    UpstreamUnreachable,
    UpstreamUnusable,
)
from engine.upstream.client import HttpUpstream
from engine.upstream.connect import UpstreamConfig, connect
from engine.upstream.dialects import LLAMA_CPP, SGLANG, VLLM
from engine.upstream.http import Address, HttpSender
from engine.upstream.status import ModelCard, load_of
from engine.upstream.texts import Texts
from tests.engine.upstream.scripted import (
    MODEL,
    VOCAB,
    Script,
    ScriptedServer,
    bound_socket,
    scripted_server,
    tokens_after,
)

INFO = EngineInfo("model", 512, VOCAB, 16, 1024, 2048)
CARD = ModelCard(MODEL, "vllm")
PROMPT = (5, 6, 7)
DEMO = Texts(Tokenizer.from_file(str(demo_model_path() / "tokenizer.json")))


def client_of(server: ScriptedServer, **options: Any) -> HttpUpstream:
    return HttpUpstream(server.sender, VLLM, CARD, INFO, **options)


def client_at(bound: socket.socket) -> HttpUpstream:
    return HttpUpstream(HttpSender(Address("127.0.0.1", bound.getsockname()[1])), VLLM, CARD, INFO)


def request(max_tokens: int = 6, output: tuple[int, ...] = (), **sampling: Any) -> StreamRequest:
    params = SamplingParams(max_tokens=max_tokens, **{"temperature": 0.0, **sampling})
    return StreamRequest("r", PROMPT, params, cache_salt="salt", priority=100, output_token_ids=output)


async def collect(upstream: HttpUpstream, sent: StreamRequest, into: list[SequenceOutput] | None = None) -> list[int]:
    outputs = [] if into is None else into
    async for output in upstream.stream(sent):
        outputs.append(output)
    return [token for output in outputs for token in output.token_ids]


async def test_a_stream_brings_all_tokens_and_ends_with_a_reason() -> None:
    traceparent = f"00-{'a' * 32}-{'b' * 16}-01"
    async with scripted_server() as server:
        outputs: list[SequenceOutput] = []
        traced = replace(request(), traceparent=traceparent)
        assert await collect(client_of(server), traced, outputs) == tokens_after(PROMPT, 6)
        await collect(client_of(server), request())
    assert [headers.get("traceparent") for headers in server.request_headers] == [traceparent, None]
    assert [o.finish_reason for o in outputs] == [None] * 5 + [FinishReason.LENGTH]
    assert outputs[-1].num_computed_tokens == len(PROMPT) + 6 - 1
    body = server.bodies[0]
    assert (body["prompt"], body["max_tokens"], body["priority"], body["cache_salt"]) == ([5, 6, 7], 6, -100, "salt")


async def test_a_continued_stream_goes_on_where_the_first_one_ended() -> None:
    whole = tokens_after(PROMPT, 6)
    async with scripted_server() as server:
        assert await collect(client_of(server), request(output=tuple(whole[:2]))) == whole[2:]
    assert server.bodies[0]["prompt"] == [*PROMPT, *whole[:2]]
    assert server.bodies[0]["max_tokens"] == 4


@pytest.mark.parametrize("how", ["cut", "half", "end", "error"])
async def test_a_stream_that_breaks_off_is_lost_and_keeps_its_tokens(how: str) -> None:
    async with scripted_server() as server:
        server.scripts.append(Script(after=3, then=how))
        outputs: list[SequenceOutput] = []
        with pytest.raises(UpstreamLost):
            await collect(client_of(server), request(), outputs)
    assert [o.token_ids[0] for o in outputs] == tokens_after(PROMPT, 3)
    assert all(o.finish_reason is None for o in outputs)


async def test_closing_the_stream_hangs_up() -> None:
    async with scripted_server() as server:
        server.scripts.append(Script(after=2, then="hang"))
        async with aclosing(client_of(server).stream(request())) as outputs:
            await anext(outputs)
            assert server.num_open == 1
        await server.wait_until("num_open", 0)
        assert server.num_hung_up == 1


async def test_cancelling_hangs_up_before_the_first_token() -> None:
    async with scripted_server() as server:
        server.gate.clear()
        task = asyncio.create_task(collect(client_of(server), request()))
        await server.wait_until("num_open", 1)
        task.cancel()
        await server.wait_until("num_open", 0)
        assert server.num_hung_up == 1


@pytest.mark.parametrize(
    ("kind", "status"),
    [(UpstreamBusy, status) for status in (429, 503)]
    + [(UpstreamLost, status) for status in (408, 500, 501, 502, 504, 520, 524)]
    + [(UpstreamRefused, status) for status in (400, 413, 422)]
    + [(UpstreamUnusable, status) for status in (204, 301, 307, 401, 402, 403, 404, 405, 410)],
)
async def test_statuses_say_whether_another_attempt_makes_sense(kind: type[Exception], status: int) -> None:
    said = "" if status == 204 else "no place here"
    async with scripted_server() as server:
        server.scripts.append(Script(status=status, headers={"Retry-After": "7"}, body=said.replace("e h", "e\nh")))
        with pytest.raises(kind, match=f"{status}: {said}") as caught:
            await collect(client_of(server), request())
    assert type(caught.value) is kind
    if isinstance(caught.value, UpstreamBusy):
        assert caught.value.retry_after_s == 7


async def test_a_server_that_is_not_there_is_unreachable() -> None:
    with bound_socket() as bound:
        upstream = client_at(bound)
        with pytest.raises(UpstreamUnreachable, match="does not take connections"):
            await collect(upstream, request())
        with pytest.raises(UpstreamUnreachable):
            await upstream.load()


async def test_what_is_not_http_is_a_lost_stream() -> None:
    async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-server\r\n\r\n")
        await writer.drain()
        writer.close()

    bound = bound_socket()
    async with await asyncio.start_server(babble, sock=bound):
        with pytest.raises(UpstreamLost, match="not HTTP"):
            await collect(client_at(bound), request())


async def test_the_servers_own_metrics_tell_its_load() -> None:
    text = 'vllm:num_requests_running{m="a"} 3.0\nvllm:num_requests_waiting{m="a"} 2.0\nvllm:kv_cache_usage_perc 0.5\n'
    async with scripted_server(metrics=text + "other 7\n") as server:
        assert await client_of(server).load() == UpstreamLoad(3, 2, 0.5)
        server.metrics = "other 7\n"
        assert await client_of(server).load() == UpstreamLoad(None, None, None)
        server.metrics = ""
        assert await client_of(server).load() is None


@pytest.mark.parametrize(
    ("properties", "num_places"),
    [('{"total_slots": 16, "model_path": "m"}', 16)]
    + [(text, None) for text in ("{}", "[]", "no", '{"total_slots": 0}', '{"total_slots": "16"}', "[" * 9999)],
)
async def test_llama_cpp_tells_its_places_with_and_without_metrics(properties: str, num_places: int | None) -> None:
    async with scripted_server(properties=properties) as server:
        upstream = HttpUpstream(server.sender, LLAMA_CPP, CARD, INFO)
        assert await upstream.load() == UpstreamLoad(num_places=num_places)
        server.metrics = "llamacpp:requests_deferred 2\n"
        assert await upstream.load() == UpstreamLoad(num_waiting=2, num_places=num_places)
        server.properties = ""
        assert await upstream.load() == UpstreamLoad(num_waiting=2)


async def test_llama_cpps_characters_of_several_tokens_are_whole() -> None:
    character, text = "\U0001fae5", "a\U0001fae5b"
    async with scripted_server(owned_by="llamacpp") as server:
        upstream = await connect(UpstreamConfig(server.url, str(demo_model_path())))
        one, whole, two = (DEMO.ids(piece) for piece in ("a", character, "b"))
        assert len(whole) == 4
        events = [
            {"content": "a", "tokens": one, "tokens_predicted": 1},
            {"content": character, "tokens": whole[-1:], "tokens_predicted": 5},
            {"content": "b", "tokens": two, "tokens_predicted": 6},
        ]
        last = {"stop": True, "stop_type": "eos", "tokens_predicted": 6}
        probs = [{"completion_probabilities": [{"id": e["tokens"][-1], "logprob": -1.0}]} for e in events]
        for more in ([{}] * 3, probs):
            script = [{**event, **each} for event, each in zip(events, more, strict=True)]
            server.scripts.append(Script(events=(*script, last)))
        outputs: list[SequenceOutput] = []
        ids = await collect(upstream, request(max_tokens=9), outputs)
        assert ids == [*one, *whole, *two] and DEMO.plain(ids) == text
        assert outputs[-1].finish_reason is FinishReason.STOP
        assert outputs[-1].num_computed_tokens == len(PROMPT) + 6 - 1
        outputs.clear()
        assert await collect(upstream, request(max_tokens=9, logprobs=1), outputs) == ids
        logprobs = [each.logprob for output in outputs for each in output.logprobs]
        assert logprobs == [-1, 0, 0, 0, -1, -1], "those of the tokens that the server did not send are not known"


@pytest.mark.parametrize("stop_type", ["eos", "limit"])
async def test_the_event_after_the_last_token_says_why_the_answer_ended(stop_type: str) -> None:
    """llama.cpp sends the token that ends an answer as any other."""
    async with scripted_server() as server:
        tokens = [{"content": " w", "tokens": [number], "tokens_predicted": number - 4} for number in (5, 6)]
        last = {"stop": True, "stop_type": stop_type, "timings": {"cache_n": 2}}
        server.scripts.append(Script(events=(*tokens, last)))
        outputs: list[SequenceOutput] = []
        await collect(HttpUpstream(server.sender, LLAMA_CPP, CARD, INFO), request(max_tokens=2), outputs)
    reason = FinishReason.STOP if stop_type == "eos" else FinishReason.LENGTH
    assert (outputs[-1].finish_reason, outputs[-1].num_cached_tokens) == (reason, 2)


@pytest.mark.parametrize("max_tokens", [1, 6])
@pytest.mark.parametrize(
    ("sampling", "is_end"), [({}, True), ({"stop_token_ids": (5,)}, True), ({"ignore_eos": True}, False)]
)
async def test_an_answer_that_its_last_token_ends_is_whole_without_the_event_after_it(
    sampling: dict[str, Any], is_end: bool, max_tokens: int
) -> None:
    """Else it would be continued behind its end."""
    async with scripted_server() as server:
        info = replace(INFO, eos_token_ids=() if "stop_token_ids" in sampling else (5,))
        server.scripts.append(Script(events=({"content": "", "tokens": [5], "tokens_predicted": 1},)))
        outputs: list[SequenceOutput] = []
        asked = collect(HttpUpstream(server.sender, LLAMA_CPP, CARD, info), request(max_tokens, **sampling), outputs)
        if is_end:
            assert await asked == [5] and outputs[-1].finish_reason is FinishReason.STOP
        elif max_tokens == 1:
            assert await asked == [5] and outputs[-1].finish_reason is FinishReason.LENGTH
        else:
            with pytest.raises(UpstreamLost):
                await asked


async def test_a_server_that_is_too_busy_to_tell_its_load_is_there() -> None:
    """llama.cpp answers /metrics between two steps, which may take longer than anybody waits."""
    async with scripted_server(cuts_pages=True) as server:
        assert await HttpUpstream(server.sender, LLAMA_CPP, CARD, INFO).load() is None


@pytest.mark.parametrize("status", [404, 500, 502, 503])
async def test_only_the_servers_own_answer_tells_that_it_is_there(status: int) -> None:
    """A proxy before a server that is away answers, too."""
    async with scripted_server(models_status=status) as server:
        with pytest.raises(UpstreamUnreachable, match=str(status)):
            await client_of(server).load()
        server.models_status = 429
        with pytest.raises(UpstreamBusy):
            await client_of(server).load()
        server.models_status = 401
        with pytest.raises(UpstreamUnusable, match="TIDEGATE_UPSTREAM_API_KEY"):
            await client_of(server).load()
        server.models_status = 200
        assert await client_of(server).load() is None


@pytest.mark.parametrize(
    "change", [{"models": ("other",)}, {"models": ()}, {"root": "org/other"}, {"owned_by": "sglang"}]
)
async def test_a_server_with_another_model_serves_us_no_longer(change: dict[str, Any]) -> None:
    async with scripted_server(models=("first", MODEL)) as server:
        assert await client_of(server).load() is None
        for name, value in change.items():
            setattr(server, name, value)
        with pytest.raises(UpstreamUnusable, match="another model than at the start of this worker"):
            await client_of(server).load()


@pytest.mark.parametrize("offset", [VOCAB, -VOCAB])
async def test_ids_outside_the_vocabulary_are_a_lost_stream(offset: int) -> None:
    async with scripted_server(token_offset=offset) as server:
        with pytest.raises(UpstreamLost, match="outside the vocabulary"):
            await collect(client_of(server), request())


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf", "-3", "1e300", "1e400", "x", "", '{a="b} 3', "é"])
def test_a_metric_that_is_no_number_of_requests_is_unknown(value: str) -> None:
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    assert VLLM.metrics is not None
    assert load_of(VLLM.metrics, "".join(f"{name} {value}\n" for name in names)) == UpstreamLoad(None, None, None)


@given(
    st.lists(st.sampled_from(["vllm:num_requests_running", "{", "}", '"', "=", " ", "\n", "NaN", "7", "#"]) | st.text())
)
def test_metrics_of_any_form_can_be_read(parts: list[str]) -> None:
    assert VLLM.metrics is not None
    load = load_of(VLLM.metrics, "".join(parts))
    assert load.num_running is None or load.num_running >= 0


async def test_tokens_without_the_log_probabilities_that_were_asked_for_are_a_lost_stream() -> None:
    async with scripted_server() as server:
        with pytest.raises(UpstreamLost, match="log probabilities"):
            await collect(client_of(server), request(logprobs=2))


async def test_what_can_be_continued_and_what_is_the_same_when_it_begins_again() -> None:
    sampled, greedy = SamplingParams(8), SamplingParams(8, temperature=0.0)
    vllm, sglang = (HttpUpstream(ScriptedServer().sender, dialect, CARD, INFO) for dialect in (VLLM, SGLANG))
    async with scripted_server(returns_ids=False) as server:
        plain = await connect(UpstreamConfig(server.url, str(demo_model_path())))
    assert [upstream.can_repeat(sampled) for upstream in (vllm, sglang, plain)] == [True, False, False]
    assert [upstream.can_repeat(greedy) for upstream in (vllm, sglang, plain)] == [True, True, False]
    assert [upstream.can_continue(sampled, False) for upstream in (vllm, sglang, plain)] == [True, True, False]
