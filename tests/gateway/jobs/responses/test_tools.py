"""Tools, formats, reasoning and log probabilities in /v1/responses. The stand's worker writes the calls."""

import json
from typing import Any

import pytest
from redis.asyncio import Redis

from engine.interface import TokenLogprobs
from gateway.protocol.bodies.unsupported import IGNORED_HEADER
from scheduler.registry.worker_status import WorkerStatus
from scheduler.request import Request, TokenEvent
from tests.gateway import scripted_worker
from tests.gateway.jobs.responses.test_chat import AGENT_TOOLS
from tests.gateway.routes.test_tools import ADD, CALL, stand, tokenizer
from tests.gateway.scripted_worker import answer_with, token_by_token
from tests.gateway.stand import running_stand
from tests.gateway.tiny_model import CONTEXT, MODEL, text_of, token_ids

TOOLS: Any = [{"type": "function", "name": "add", "description": "Add.", "parameters": ADD}]
REQUIRED: Any = "required"


async def test_the_events_of_a_call() -> None:
    async with stand(CALL) as running:
        stream = await running.client.responses.create(
            model=MODEL, input="1 + 2?", tools=TOOLS, tool_choice=REQUIRED, stream=True
        )
        events = [event async for event in stream]
        assert running.worker.served[0].sampling.grammar is not None
    deltas = [event for event in events if event.type == "response.function_call_arguments.delta"]
    done = next(event for event in events if event.type == "response.function_call_arguments.done")
    assert len(deltas) > 5, "the arguments grow"
    assert "".join(event.delta for event in deltas) == done.arguments
    assert json.loads(done.arguments) == {"a": 1, "b": 2}
    assert [event.type for event in events if not event.type.endswith("delta")] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]


async def test_two_turns_with_a_tool(redis_client: Redis) -> None:
    async with running_stand(answer_with(CALL), tokenizer=tokenizer(), redis=redis_client) as running:
        first = await running.client.responses.create(model=MODEL, input="1 + 2?", tools=TOOLS)
        call = first.output[0]
        assert call.type == "function_call"
        running.worker.script = answer_with("It is 3.")
        second = await running.client.responses.create(
            model=MODEL,
            previous_response_id=first.id,
            input=[{"type": "function_call_output", "call_id": call.call_id, "output": "3"}],
            tools=TOOLS,
        )
        prompt = text_of(running.worker.served[-1].prompt_token_ids)
    assert second.output_text == "It is 3."
    assert "<tool_call>add a=1 b=2</tool_call>" in prompt
    assert "<|im_start|>tool add\n3<|im_end|>" in prompt


async def test_a_bad_schema_is_named_as_in_the_responses_api() -> None:
    body = {"format": {"type": "json_schema", "name": "n", "schema": {"type": "nonsense"}}}
    async with stand("{}") as running:
        answer = await running.post("/v1/responses", {"model": MODEL, "input": "x", "text": body})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith("text.format")


async def test_a_requested_summary_of_reasoning_is_the_reasoning() -> None:
    async with stand("<think>Hm, hm.</think>It is 3.") as running:
        asked: Any = {"model": MODEL, "input": "1 + 2?", "reasoning": {"summary": "auto"}}
        async with running.client.responses.stream(**asked) as stream:
            events = [event async for event in stream]
            response = await stream.get_final_response()
        items: Any = [*(item.to_dict() for item in response.output), {"role": "user", "content": "Sure?"}]
        await running.client.responses.create(model=MODEL, input=items)
        prompt = text_of(running.worker.served[-1].prompt_token_ids)
    reasoning = response.output[0]
    assert reasoning.type == "reasoning" and [part.text for part in reasoning.summary] == ["Hm, hm."]
    assert response.reasoning is not None and response.reasoning.summary == "auto"
    assert "".join(e.delta for e in events if e.type == "response.reasoning_summary_text.delta") == "Hm, hm."
    assert "<think>Hm, hm.</think>It is 3.<|im_end|>" in prompt


def with_logprobs(request: Request) -> list[TokenEvent]:
    events = token_by_token(request, token_ids("<think>a</think>bc"))
    return [
        TokenEvent(
            event.request_id,
            event.kind,
            event.index,
            event.token_ids,
            event.finish_reason,
            logprobs=tuple(TokenLogprobs(token, -0.5, ((token, -0.5),)) for token in event.token_ids),
        )
        for event in events
    ]


async def test_log_probabilities_are_those_of_the_text_only() -> None:
    options: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    async with running_stand(with_logprobs, tokenizer=tokenizer()) as running:
        response = await running.client.responses.create(model=MODEL, input="x", **options)
        stream = await running.client.responses.create(model=MODEL, input="x", stream=True, **options)
        events = [event async for event in stream]
        assert running.worker.served[0].sampling.logprobs == 1
    part = response.output[-1].content[0]  # type: ignore[union-attr]
    assert part.type == "output_text" and part.text == "bc"
    assert part.logprobs is not None
    assert [entry.token for entry in part.logprobs] == ["b", "c"]
    assert part.logprobs[0].top_logprobs[0].logprob == -0.5
    deltas = [entry.token for event in events if event.type == "response.output_text.delta" for entry in event.logprobs]
    assert deltas == ["b", "c"]


async def test_the_tools_of_an_agent_and_their_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scripted_worker, "CONTEXT", 2048)
    calls = [("team__run", {"a": 1}), ("patch", {"input": "*** Begin\n+x\n"})]
    written = [{"name": name, "arguments": arguments} for name, arguments in calls]
    async with stand("\n".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in written)) as running:
        asked: Any = {"model": MODEL, "tools": AGENT_TOOLS}
        raw = await running.client.responses.with_raw_response.create(input="go", **asked)
        response = raw.parse()
        stream = await running.client.responses.create(input="go", stream=True, **asked)
        events = [event async for event in stream]
        outputs = [
            {"type": "function_call_output", "call_id": response.output[0].call_id, "output": "ran"},  # type: ignore
            {"type": "custom_tool_call_output", "call_id": response.output[1].call_id, "output": "done"},  # type: ignore
        ]
        items: Any = ["go", *response.output, *outputs]
        items[0] = {"role": "user", "content": "go"}
        await running.client.responses.create(input=[i if isinstance(i, dict) else i.to_dict() for i in items], **asked)
        prompt = text_of(running.worker.served[-1].prompt_token_ids)
    assert raw.headers[IGNORED_HEADER] == "tools.web_search"
    assert [tool.type for tool in response.tools] == ["function", "namespace", "custom"]
    run, patch = response.output
    assert run.type == "function_call" and (run.namespace, run.name) == ("team", "run")
    assert patch.type == "custom_tool_call" and (patch.name, patch.input) == ("patch", "*** Begin\n+x\n")
    kinds = [event.type for event in events if event.type.startswith("response.custom")]
    assert kinds == ["response.custom_tool_call_input.delta", "response.custom_tool_call_input.done"]
    assert "<tool_call>team__run a=1</tool_call>" in prompt
    assert "<|im_start|>tool patch\ndone<|im_end|>" in prompt


async def test_reasoning_goes_to_the_client_and_back_as_encrypted_content() -> None:
    async with stand("<think>Hm, hm.</think>It is 3.") as running:
        asked: Any = {"model": MODEL, "store": False, "include": ["reasoning.encrypted_content"]}
        response = await running.client.responses.create(input="1 + 2?", **asked)
        reasoning = response.output[0].to_dict() | {"content": None}
        foreign = {"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"}
        items: Any = [reasoning, response.output[1].to_dict(), foreign, {"role": "user", "content": "Sure?"}]
        await running.client.responses.create(input=items, **asked)
        prompt = text_of(running.worker.served[-1].prompt_token_ids)
    assert prompt.startswith("<|im_start|>assistant\n<think>Hm, hm.</think>It is 3.<|im_end|><|im_start|>user\nSure?")


SEARCHED = {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "q"}}
CLICKED = {"type": "computer_call", "id": "cu_1", "call_id": "c1", "action": {"type": "screenshot"}, "status": "x"}
SEEN = {"type": "computer_call_output", "call_id": "c1", "output": {"type": "computer_screenshot", "image_url": "x"}}
SAID = [{"type": "output_text", "text": "It is 3.", "annotations": []}]


@pytest.mark.parametrize("path", ["", "/input_tokens", "/compact"])
async def test_items_of_hosted_tools_are_left_out_of_a_history(path: str) -> None:
    """What a client sends that has used OpenAI's own server before."""
    thought = [{"type": "reasoning", "id": f"rs_{number}", "summary": []} for number in range(2)]
    said = {"type": "message", "role": "assistant", "content": SAID}
    question, thanks = {"role": "user", "content": "1 + 2?"}, {"role": "user", "content": "Sure?"}
    history = [question, thought[0], SEARCHED, CLICKED, SEEN, SEARCHED, thought[1], said, thanks]
    without = [question, *thought, said, thanks]
    async with running_stand("Yes.") as running:
        answers = [
            await running.post(f"/v1/responses{path}", {"model": MODEL, "input": items}) for items in (history, without)
        ]
        prompts = [request.prompt_token_ids for request in running.worker.served]
        if not path:
            kept = (await running.http.get(f"/v1/responses/{answers[0].json()['id']}/input_items")).json()["data"]
            assert [item["type"] for item in kept] == ["message", "message", "reasoning", "reasoning", "message"]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert len(set(prompts)) == (path != "/input_tokens")
    named = "input.web_search_call, input.computer_call, input.computer_call_output"
    assert [answer.headers.get(IGNORED_HEADER) for answer in answers] == [named, None]


@pytest.mark.parametrize("syntax", ["lark", "regex"])
@pytest.mark.parametrize("unsupported", [(), ("grammar",)])
async def test_the_grammar_of_a_custom_tool_is_enforced_where_all_workers_can(
    syntax: str, unsupported: tuple[str, ...]
) -> None:
    definition = 'start: "x"' if syntax == "lark" else "x+"
    tool = {
        "type": "custom",
        "name": "patch",
        "format": {"type": "grammar", "syntax": syntax, "definition": definition},
    }
    other = WorkerStatus("w2", (MODEL,), CONTEXT, 1000, 0, unsupported=unsupported)
    async with running_stand("Yes.", workers=[other]) as running:
        answer = await running.post("/v1/responses", {"model": MODEL, "input": "hi", "tools": [tool]})
        [served] = running.worker.served
    assert answer.status_code == 200
    assert (served.sampling.grammar is None) is bool(unsupported)
