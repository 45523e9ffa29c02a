"""Whole answers of /v1/messages: bodies that clients send, content blocks, reasons of the end, and token counts."""

from typing import Any

import pytest

from engine.interface import FinishReason
from tests.gateway.routes.test_tools import ADD, CALL, stand
from tests.gateway.scripted_worker import answer_with
from tests.gateway.stand import running_stand
from tests.gateway.tiny_model import CONTEXT, MODEL

HI: Any = [{"role": "user", "content": "What is 1 + 2?"}]
TOOLS: Any = [{"name": "add", "description": "Add.", "input_schema": ADD}]
TURNS: Any = [*HI, {"role": "assistant", "content": "3."}, {"role": "user", "content": "Sure?"}]
BLOCKS: Any = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
ERROR: Any = {"type": "tool_result", "tool_use_id": "t1", "is_error": True, "content": "No such city"}
CALLED: Any = {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}}]}

ACCEPTED: list[tuple[str, dict[str, Any]]] = [
    ("a conversation", {"messages": TURNS}),
    ("content blocks", {"messages": BLOCKS}),
    ("a system prompt", {"system": "Be brief."}),
    ("a system prompt of blocks", {"system": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]}),
    ("sampling", {"temperature": 0.5, "top_p": 0.9, "top_k": 40}),
    ("stop sequences", {"stop_sequences": ["\n", "END"]}),
    ("metadata", {"metadata": {"user_id": "x" * 2000, "more": None}}),
    ("reasoning", {"thinking": {"type": "enabled", "budget_tokens": 1024}}),
    ("effort", {"thinking": {"type": "adaptive"}, "output_config": {"effort": "high"}}),
    ("the result of a call", {"messages": [*HI, CALLED, {"role": "user", "content": [{**ERROR, "is_error": False}]}]}),
    ("a failed call", {"messages": [*HI, CALLED, {"role": "user", "content": [ERROR]}], "tools": TOOLS}),
    ("cache marks", {"cache_control": {"type": "ephemeral", "ttl": "1h"}}),
    ("a tier of Anthropic's", {"service_tier": "standard_only"}),
    ("an extension of chats", {"seed": 1, "min_p": 0.1, "cache_salt": "s"}),
]


@pytest.mark.parametrize(("_", "body"), ACCEPTED, ids=[name for name, _ in ACCEPTED])
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages?beta=true"])
async def test_what_clients_send_is_answered(path: str, _: str, body: dict[str, Any]) -> None:
    async with stand("It is 3.") as running:
        answer = await running.post(path, {"model": MODEL, "max_tokens": 50, "messages": HI, **body})
    assert answer.status_code == 200, answer.text
    message = answer.json()
    assert message["id"].startswith("msg_") and answer.headers["request-id"].startswith("req_")
    assert (message["type"], message["role"], message["model"]) == ("message", "assistant", MODEL)
    assert message["content"] == [{"type": "text", "text": "It is 3."}]
    assert (message["stop_reason"], message["stop_sequence"]) == ("end_turn", None)
    assert message["usage"]["input_tokens"] > 0 and message["usage"]["output_tokens"] > 0
    assert "object" not in message and "choices" not in message


async def test_reasoning_text_and_a_call_are_blocks_in_this_order() -> None:
    async with stand("<think>Hm, hm.</think>One moment." + CALL) as running:
        answer = await running.post("/v1/messages", {"model": MODEL, "max_tokens": 90, "messages": HI, "tools": TOOLS})
    message = answer.json()
    thinking, text, call = message["content"]
    assert (thinking["type"], thinking["thinking"]) == ("thinking", "Hm, hm.") and thinking["signature"]
    assert text == {"type": "text", "text": "One moment."}
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "add", {"a": 1, "b": 2})
    assert message["stop_reason"] == "tool_use"
    assert message["usage"]["output_tokens_details"]["thinking_tokens"] > 0


@pytest.mark.parametrize(
    ("choice", "is_forced"),
    [
        ({"type": "auto"}, False),
        ({"type": "any"}, True),
        ({"type": "tool", "name": "add"}, True),
        ({"type": "auto", "disable_parallel_tool_use": True}, True),
        (None, False),
    ],
)
async def test_a_choice_of_tools_forces_a_call_by_a_grammar(choice: Any, is_forced: bool) -> None:
    body = {"model": MODEL, "max_tokens": 90, "messages": HI, "tools": TOOLS, "tool_choice": choice}
    async with stand(CALL) as running:
        answer = await running.post("/v1/messages", body)
        grammar = running.worker.served[0].sampling.grammar
    assert answer.json()["stop_reason"] == "tool_use"
    assert (grammar is not None) == is_forced


async def test_no_tool_is_offered_where_none_may_be_called() -> None:
    body = {"model": MODEL, "max_tokens": 9, "messages": HI, "tools": TOOLS, "tool_choice": {"type": "none"}}
    async with stand(CALL) as running:
        answer = await running.post("/v1/messages", body)
    assert answer.json()["content"][0]["type"] == "text"


@pytest.mark.parametrize("name", ["output_config", "output_format"])
async def test_an_output_format_is_kept_by_a_grammar(name: str) -> None:
    wanted = {"type": "json_schema", "schema": ADD}
    body = {name: {"format": wanted} if name == "output_config" else wanted}
    async with stand('{"a": 1, "b": 2}') as running:
        answer = await running.post("/v1/messages", {"model": MODEL, "max_tokens": 90, "messages": HI, **body})
        grammar = running.worker.served[0].sampling.grammar
    assert answer.status_code == 200
    assert grammar is not None and "integer" in grammar


async def test_a_call_that_is_cut_keeps_its_text() -> None:
    body = {"model": MODEL, "max_tokens": 30, "messages": HI, "tools": TOOLS}
    async with stand(CALL[:50], reason=FinishReason.LENGTH) as running:
        message = (await running.post("/v1/messages", body)).json()
    assert message["content"][0]["type"] == "tool_use"
    assert message["content"][0]["input"] == {"invalid_arguments": '{"a": 1, '}


@pytest.mark.parametrize(
    ("text", "reason", "body", "end"),
    [
        ("3", FinishReason.STOP, {}, ("end_turn", None)),
        ("3", FinishReason.LENGTH, {"max_tokens": 1}, ("max_tokens", None)),
        ("3", FinishReason.LENGTH, {"max_tokens": 32_000}, ("model_context_window_exceeded", None)),
        ("3; 4", FinishReason.STOP, {"stop_sequences": [*"abcdefx", ";"]}, ("stop_sequence", ";")),
        (CALL, FinishReason.STOP, {"tools": TOOLS, "stop_sequences": ["</tool_call>"]}, ("tool_use", None)),
        (CALL, FinishReason.STOP, {"tools": TOOLS, "stop_sequences": ['"b']}, ("stop_sequence", '"b')),
    ],
)
async def test_why_a_message_ended(text: str, reason: FinishReason, body: Any, end: Any) -> None:
    async with running_stand(answer_with(text, reason=reason)) as running:
        answer = await running.post("/v1/messages", {"model": MODEL, "max_tokens": 9, "messages": HI, **body})
    assert (answer.json()["stop_reason"], answer.json()["stop_sequence"]) == end


async def test_a_maximum_that_does_not_fit_is_lowered() -> None:
    async with running_stand() as running:
        answer = await running.post("/v1/messages", {"model": MODEL, "max_tokens": 32_000, "messages": HI})
        request = running.worker.served[0]
    assert answer.status_code == 200
    assert request.sampling.max_tokens == CONTEXT - len(request.prompt_token_ids)


async def test_cached_tokens_are_counted_apart() -> None:
    async with running_stand(answer_with("3", cached=8)) as running:
        answer = await running.post("/v1/messages", {"model": MODEL, "max_tokens": 9, "messages": HI})
        num_tokens = len(running.worker.served[0].prompt_token_ids)
    usage = answer.json()["usage"]
    assert (usage["cache_read_input_tokens"], usage["input_tokens"]) == (8, num_tokens - 8)
    assert (usage["cache_creation_input_tokens"], usage["output_tokens"]) == (0, 1)


@pytest.mark.parametrize(
    ("asked", "tier", "reported"),
    [
        (None, "realtime", "standard"),
        ("auto", "realtime", "standard"),
        ("standard_only", "realtime", "standard"),
        ("priority", "realtime", "priority"),
        ("flex", "bulk", "flex"),
    ],
)
async def test_tiers_of_both_vendors_are_served(asked: str | None, tier: str, reported: str) -> None:
    async with running_stand() as running:
        body = {"model": MODEL, "max_tokens": 9, "messages": HI, "service_tier": asked}
        answer = await running.post("/v1/messages", body)
        assert running.worker.served[0].tier == tier
    assert answer.json()["usage"]["service_tier"] == reported


async def test_tools_of_other_servers_are_left_out_and_named() -> None:
    search = {"type": "web_search_20260318", "name": "web_search", "max_uses": 2}
    body = {"model": MODEL, "max_tokens": 9, "messages": HI, "tools": [*TOOLS, search], "thread": {"type": "create"}}
    async with stand("3") as running:
        answer = await running.post("/v1/messages", body)
        alone = await running.post("/v1/messages", body | {"tools": [search], "tool_choice": {"type": "auto"}})
        chosen = await running.post("/v1/messages", body | {"tool_choice": {"type": "tool", "name": "web_search"}})
    assert answer.headers["x-tidegate-ignored-parameters"] == "thread, tools.web_search_20260318"
    assert alone.status_code == 200
    assert chosen.status_code == 400 and "web_search" in chosen.json()["error"]["message"]


async def test_a_receipt_is_given_where_it_is_asked_for() -> None:
    async with running_stand() as running:
        body = {"model": MODEL, "max_tokens": 9, "messages": HI}
        answer = await running.post("/v1/messages", body, headers={"x-tidegate-receipt": "1"})
    assert answer.json()["tidegate"]["tier_served"] == "realtime"


@pytest.mark.parametrize(
    ("more", "is_longer"), [({}, False), ({"system": "Be brief."}, True), ({"tools": TOOLS}, True)]
)
async def test_tokens_are_counted_without_an_answer(more: Any, is_longer: bool) -> None:
    async with stand("3") as running:
        plain = await running.post("/v1/messages", {"model": MODEL, "max_tokens": 9, "messages": HI})
        answer = await running.post("/v1/messages/count_tokens", {"model": MODEL, "messages": HI, "thread": 1, **more})
        assert len(running.worker.served) == 1
    assert answer.headers["x-tidegate-ignored-parameters"] == "thread"
    assert answer.json().keys() == {"input_tokens"}
    assert (answer.json()["input_tokens"] > plain.json()["usage"]["input_tokens"]) == is_longer
