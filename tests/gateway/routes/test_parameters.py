"""Parameters on their way: from the body to the engine's sampling parameters, to the prompt, and to the answer."""

import json
from typing import Any

import pytest

from engine.interface import SamplingParams
from gateway.identity import Keyring
from tests.gateway.api_keys import key
from tests.gateway.stand import Stand, running_stand
from tests.gateway.tiny_model import CONTEXT, MODEL, text_of, token_ids

HI = [{"role": "user", "content": "hi"}]
CHAT: dict[str, Any] = {"model": MODEL, "messages": HI}
TEXT: dict[str, Any] = {"model": MODEL, "prompt": "the tide falls"}
SAMPLING: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"presence_penalty": 1.5}, {"presence_penalty": 1.5}),
    ({"frequency_penalty": -2}, {"frequency_penalty": -2.0}),
    ({"repetition_penalty": 1.2}, {"repetition_penalty": 1.2}),
    ({"logit_bias": {"5": -100, "7": 2.5}}, {"logit_bias": ((5, -100.0), (7, 2.5))}),
    ({"min_p": 0.25}, {"min_p": 0.25}),
    ({"min_tokens": 3}, {"min_tokens": 3}),
    ({"stop_token_ids": [5, 6]}, {"stop_token_ids": (5, 6)}),
    ({"ignore_eos": True}, {"ignore_eos": True}),
    ({"top_k": -1}, {"top_k": 0}),
    ({"seed": -1}, {"seed": 2**63 - 1}),
    ({"prompt_logprobs": 2}, {"prompt_logprobs": 2}),
    ({"best_of": 2}, {"logprobs": 0}),
    ({"allowed_token_ids": [5, 6]}, {"allowed_token_ids": (5, 6)}),
    ({"bad_words": ["tide", " a"]}, {"bad_words": tuple(map(token_ids, ("tide", " tide", "a", " a")))}),
    ({"temperature": 0, "max_tokens": 5.0}, {"temperature": 0.0, "max_tokens": 5}),
    ({"temperature": 0.5, "top_p": 0.9, "top_k": 5}, {"temperature": 0.5, "top_p": 0.9, "top_k": 5}),
]


async def served(stand: Stand, path: str, body: dict[str, Any]) -> Any:
    """Return the scheduler request that `body` becomes."""
    stand.worker.served.clear()
    response = await stand.post(path, body)
    assert response.status_code == 200, response.text
    return stand.worker.served[0]


async def test_sampling_parameters_reach_the_engine() -> None:
    plain = SamplingParams(max_tokens=1)
    async with running_stand() as stand:
        for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)):
            for change, expected in SAMPLING:
                sampling = (await served(stand, path, {**body, **change})).sampling
                assert {name: getattr(sampling, name) for name in expected} == expected
                others = set(SamplingParams.__struct_fields__) - {*expected, "max_tokens", "seed"}
                assert all(getattr(sampling, name) == getattr(plain, name) for name in others), change
        free = {
            "max_completion_tokens": 9,
            "max_tokens": 5,
            "user": "somebody",
            "metadata": {"a": "b"},
            "new": {"x": 1},
        }
        assert (
            await served(stand, "/v1/chat/completions", {**CHAT, **free, "model": "alias"})
        ).sampling.max_tokens == 9
        chat = {**CHAT, "logprobs": True, "top_logprobs": 3}
        assert (await served(stand, "/v1/chat/completions", chat)).sampling.logprobs == 3
        assert (await served(stand, "/v1/chat/completions", {**CHAT, "logprobs": False})).sampling.logprobs is None
        assert (await served(stand, "/v1/completions", {**TEXT, "logprobs": 4})).sampling.logprobs == 4


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"truncate_prompt_tokens": 3}, slice(-3, None)),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, slice(3)),
        ({"truncate_prompt_tokens": 10**6}, slice(None)),
        ({"truncate_prompt_tokens": -1}, slice(None)),
    ],
)
async def test_a_prompt_is_truncated(change: dict[str, Any], expected: slice) -> None:
    async with running_stand() as stand:
        prompt = (await served(stand, "/v1/completions", {**TEXT, **change})).prompt_token_ids
    assert prompt == token_ids(TEXT["prompt"])[expected]


async def test_a_prompt_is_truncated_to_what_fits() -> None:
    async with running_stand() as stand:
        body = {**TEXT, "prompt": "x" * 20 * CONTEXT, "max_tokens": 6, "truncate_prompt_tokens": -1}
        assert len((await served(stand, "/v1/completions", body)).prompt_token_ids) == CONTEXT - 6
        chat = {**CHAT, "messages": [{"role": "user", "content": "x" * 20 * CONTEXT}], "truncate_prompt_tokens": 9}
        prompt = (await served(stand, "/v1/chat/completions", chat)).prompt_token_ids
    assert text_of(prompt).endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("change", "prompt"),
    [
        ({}, "<|im_start|>user\nhi<|im_end|><|im_start|>assistant\n"),
        ({"add_generation_prompt": False}, "<|im_start|>user\nhi<|im_end|>"),
        ({"continue_final_message": True}, "<|im_start|>user\nhi"),
        ({"chat_template_kwargs": {"unheard_of": [1]}}, "<|im_start|>user\nhi<|im_end|><|im_start|>assistant\n"),
        ({"chat_template_kwargs": {}}, "<|im_start|>user\nhi<|im_end|><|im_start|>assistant\n"),
    ],
)
async def test_what_the_chat_template_makes_of_a_request(change: dict[str, Any], prompt: str) -> None:
    async with running_stand() as stand:
        assert text_of((await served(stand, "/v1/chat/completions", {**CHAT, **change})).prompt_token_ids) == prompt


async def test_an_own_chat_template_needs_trust() -> None:
    body = {**CHAT, "chat_template": "{{ documents[0].text }}{{ mood }}:{{ messages[0].content }}"}
    values = {"chat_template_kwargs": {"mood": " glad"}, "documents": [{"text": "so"}]}
    async with running_stand() as stand:
        refused = (await stand.post("/v1/chat/completions", body)).json()["error"]
        assert (refused["param"], refused["code"]) == ("chat_template", "unsupported_parameter")
        assert "--trust-request-chat-template" in refused["message"]
    async with running_stand(trust_request_chat_template=True) as stand:
        prompt = (await served(stand, "/v1/chat/completions", {**body, **values})).prompt_token_ids
        assert text_of(prompt) == "so glad:hi"
        broken = await stand.post("/v1/chat/completions", {**CHAT, "chat_template": "{% if %}"})
        assert broken.json()["error"]["param"] == "messages"


async def test_documents_that_the_template_does_not_take_are_refused() -> None:
    async with running_stand() as stand:
        refused = (await stand.post("/v1/chat/completions", {**CHAT, "documents": [{"text": "a"}]})).json()["error"]
        assert (refused["param"], refused["code"]) == ("documents", "unsupported_parameter")
        assert (await stand.post("/v1/chat/completions", {**CHAT, "documents": []})).status_code == 200


async def test_priority_asks_for_a_tier_that_the_key_may_use() -> None:
    keys = {
        "all": key("all"),
        "one": key("one", frozenset({"realtime"})),
        "low": key("low", frozenset({"bulk"}), "bulk"),
    }
    async with running_stand(keyring=Keyring(list(keys.values()))) as stand:

        async def tier(key: str, headers: dict[str, str] | None = None, **body: Any) -> tuple[str, str]:
            auth = {"authorization": f"Bearer sk-{key}", **(headers or {})}
            answer = await stand.post("/v1/chat/completions", {**CHAT, **body}, headers=auth)
            return stand.worker.served[-1].tier, answer.json()["service_tier"]

        assert await tier("all") == ("realtime", "default")
        assert await tier("all", priority=5) == ("bulk", "flex")
        assert await tier("all", priority=5, service_tier="default") == ("realtime", "default")
        assert await tier("one", priority=5) == ("realtime", "default")
        assert await tier("low", priority=-5) == ("bulk", "flex")
        assert await tier("all", {"x-llm-d-slo-ttft-ms": "800"}) == ("realtime", "default")
        assert await tier("low", {"x-llm-d-slo-ttft-ms": "800"}) == ("bulk", "flex")
        wrong = {"authorization": "Bearer sk-all", "x-llm-d-slo-ttft-ms": "soon"}
        refused = await stand.post("/v1/chat/completions", CHAT, headers=wrong)
        assert refused.json()["error"]["param"] == "x-llm-d-slo-ttft-ms"


async def test_continuous_usage_follows_vllm() -> None:
    """Nothing before the first token, then the counts of the chunk's own choice, and nothing without include_usage."""

    async def usages(stand: Stand, options: dict[str, Any]) -> list[Any]:
        body = {**CHAT, "stream": True, "n": 2, "stream_options": {"continuous_usage_stats": True, **options}}
        frames = (await stand.post("/v1/chat/completions", body)).text.removesuffix("\n\n").split("\n\n")
        return [json.loads(frame.removeprefix("data: ")) for frame in frames[:-1]]

    async with running_stand("abcdef") as stand:
        silent = await usages(stand, {})
        chunks = await usages(stand, {"include_usage": True})
    num_tokens = len(token_ids("abcdef"))
    assert all("usage" not in chunk for chunk in silent)
    for index in (0, 1):
        own = [c["usage"]["completion_tokens"] for c in chunks[:-1] if c["choices"][0]["index"] == index]
        assert own[0] == 0 and own == sorted(own) and own[-1] == num_tokens
    assert chunks[-1]["usage"]["completion_tokens"] == 2 * num_tokens


@pytest.mark.parametrize("given", [{}, {"model": ""}, {"model": None}])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": HI}),
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", {"messages": HI, "max_tokens": 9}),
    ],
)
async def test_without_a_model_the_only_one_answers(path: str, body: dict[str, Any], given: dict[str, Any]) -> None:
    async with running_stand() as stand:
        answer = await stand.post(path, body | given)
    assert (answer.status_code, answer.json()["model"]) == (200, MODEL)


@pytest.mark.parametrize(
    ("messages", "begins"),
    [
        ([*HI, {"role": "assistant", "content": "Well, "}], "Well, "),
        ([*HI, {"role": "assistant", "content": [{"type": "text", "text": "So: "}]}], "So: "),
        (HI, ""),
    ],
)
async def test_a_chats_echo_begins_with_the_assistants_last_message(messages: list[Any], begins: str) -> None:
    body = {"model": MODEL, "messages": messages, "echo": True, "logprobs": True}
    async with running_stand("yes.") as stand:
        whole = (await stand.post("/v1/chat/completions", body)).json()["choices"][0]
        stream = await stand.post("/v1/chat/completions", {**body, "stream": True})
    frames = [json.loads(line[6:]) for line in stream.text.splitlines() if line.startswith("data: {")]
    assert whole["message"]["content"] == begins + "yes."
    assert "".join(frame["choices"][0]["delta"].get("content", "") for frame in frames) == begins + "yes."
    assert whole["logprobs"]["content"] == [], "the scripted worker gives none, and the message has none"
