"""POST /v1/responses/compact: the official client, a scripted summary."""

import json
from typing import Any

import pytest
from redis.asyncio import Redis

from gateway.dialects.responses.items import unsealed
from gateway.jobs.responses.compaction import ASK
from tests.gateway.jobs.responses.test_stored import storing
from tests.gateway.scripted_worker import answer_with
from tests.gateway.stand import Stand, running_stand
from tests.gateway.tiny_model import CONTEXT, MODEL, text_of


async def compact(stand: Stand, **parameters: Any) -> dict[str, Any]:
    """Return the JSON of a compaction: the client's types lack users' messages, which OpenAI's own answers have."""
    raw = await stand.client.responses.with_raw_response.compact(model=MODEL, **parameters)
    answer: dict[str, Any] = json.loads(raw.text)
    return answer


TURNS: Any = [
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "two"},
]


async def test_a_compacted_conversation_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.jobs.responses.compaction.ASK", "Sum up.")
    async with running_stand(answer_with("They said one and two.")) as stand:
        compacted = await compact(stand, input=TURNS, instructions="be brief")
        asked = stand.worker.served[0]
        items: Any = compacted["output"]
        await stand.client.responses.create(model=MODEL, input=[*items, {"role": "user", "content": "three"}])
        prompt = text_of(stand.worker.served[-1].prompt_token_ids)
    assert compacted["object"] == "response.compaction" and compacted["id"].startswith("resp_")
    assert compacted["usage"]["input_tokens"] == len(asked.prompt_token_ids)
    assert [item["type"] for item in compacted["output"]] == ["message", "message", "compaction"]
    assert unsealed(items[-1]["encrypted_content"]) == "They said one and two."
    assert asked.sampling.max_tokens == CONTEXT // 4
    wanted = "system\nbe brief|user\none|assistant\nyes|user\ntwo|user\nSum up.|assistant\n"
    assert text_of(asked.prompt_token_ids).replace("<|im_start|>", "").replace("<|im_end|>", "|") == wanted
    summary = "<|im_start|>assistant\nSummary of our conversation so far:\nThey said one and two.<|im_end|>"
    assert prompt.endswith(f"user\ntwo<|im_end|>{summary}<|im_start|>user\nthree<|im_end|><|im_start|>assistant\n")


async def test_a_stored_conversation_is_compacted(redis_client: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.jobs.responses.compaction.ASK", "Sum up.")
    async with storing(redis_client) as stand:
        first = await stand.client.responses.create(model=MODEL, input="one")
        compacted = await compact(stand, previous_response_id=first.id)
        prompt = text_of(stand.worker.served[-1].prompt_token_ids)
    assert [item["type"] for item in compacted["output"]] == ["message", "compaction"]
    assert "Hello there!<|im_end|><|im_start|>user\nSum up." in prompt


async def test_the_first_turns_are_left_out_where_all_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.jobs.responses.compaction.ASK", "Sum up.")
    turns: Any = [{"role": "user", "content": f"{number} {'x' * 40}"} for number in range(8)]
    async with running_stand(answer_with("Numbers.")) as stand:
        compacted = await compact(stand, input=turns)
        prompt = text_of(stand.worker.served[0].prompt_token_ids)
    assert len(compacted["output"]) == 9
    assert "user\n0 x" not in prompt and "user\n7 x" in prompt


@pytest.mark.parametrize(
    ("body", "param", "way_out"),
    [
        ({"model": None}, "model", "Missing required"),  # a test of Open Responses
        ({"model": ""}, "model", "Missing required"),
        ({"input": None}, "input", "empty"),
        ({"stream": True}, "stream", "not supported"),
        ({"input": [{"type": "compaction", "encrypted_content": "gAAA"}]}, "input[0].encrypted_content", "itself"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role", "user"),
    ],
)
async def test_what_is_wrong_is_named(body: dict[str, Any], param: str, way_out: str) -> None:
    async with running_stand() as stand:
        answer = await stand.post("/v1/responses/compact", {"model": MODEL, "input": "hi", **body})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert way_out in error["message"], error
    assert ASK not in error["message"]
