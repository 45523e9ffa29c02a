"""How conversations of /v1/messages become prompts, as the chat template writes them."""

import pickle
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from gateway.dialects.messages.chat import chat_to_answer
from gateway.requests.tokens.tokenizer import Tokenizer
from tests.gateway.dialects.messages.test_answers import HI, TOOLS
from tests.gateway.routes.test_tools import stand
from tests.gateway.scripted_worker import answer_with
from tests.gateway.stand import running_stand
from tests.gateway.tiny_model import MODEL, TEMPLATE, pretrained, text_of

FIRST_ONLY = (  # as Qwen's newer templates: a later system message is an error
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DROPPED = FIRST_ONLY.replace(  # as Llama 2's: a later system message is not written
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}", "{% else %}"
).replace("{% endfor %}", "{% endif %}{% endfor %}")


def turn(role: str, text: str) -> str:
    return f"<|im_start|>{role}\n{text}<|im_end|>"


BEGIN = "<|im_start|>assistant\n"
USER = turn("user", "What is 1 + 2?")
CALL: Any = {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1, "b": "x"}}
CALLED = turn("assistant", '<tool_call>add a=1 b="x"</tool_call>')
LATER: Any = [*HI, {"role": "system", "content": "Be brief."}]
BILLING = "x-anthropic-billing-header: cc_version=2.1.197.8f3; cch=00000;"


def result(content: Any, **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "t1", "content": content, **more}


def said(role: str, *blocks: Any) -> dict[str, Any]:
    return {"role": role, "content": list(blocks)}


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


PROMPTS: list[tuple[str, dict[str, Any], str]] = [
    ("a system prompt", {"system": "Be brief."}, turn("system", "Be brief.") + USER + BEGIN),
    ("system blocks", {"system": [text("Be"), text("brief.")]}, turn("system", "Be\nbrief.") + USER + BEGIN),
    (
        "a billing header as a block",
        {"system": [text(BILLING), text("Be brief.")]},
        turn("system", "Be brief.") + USER + BEGIN,
    ),
    ("a billing header as a line", {"system": f"{BILLING}\nBe brief."}, turn("system", "Be brief.") + USER + BEGIN),
    ("a later system message", {"messages": LATER}, USER + turn("system", "Be brief.") + BEGIN),
    ("blocks of text", {"messages": [said("user", text("a"), text("b"))]}, turn("user", "a\nb") + BEGIN),
    ("turns of one role", {"messages": [*HI, said("user", text("b"))]}, turn("user", "What is 1 + 2?\nb") + BEGIN),
    (
        "the result of a call",
        {"messages": [*HI, said("assistant", CALL), said("user", result("3"))]},
        USER + CALLED + turn("tool add", "3") + BEGIN,
    ),
    (
        "a result in blocks, and text before it",
        {"messages": [*HI, said("assistant", CALL), said("user", text("Look:"), result([text("3"), text("!")]))]},
        USER + CALLED + turn("tool add", "3\n!") + turn("user", "Look:") + BEGIN,
    ),
    (
        "an empty result",
        {"messages": [*HI, said("assistant", CALL), said("user", {"type": "tool_result", "tool_use_id": "t1"})]},
        USER + CALLED + turn("tool add", "") + BEGIN,
    ),
    (
        "reasoning in the history",
        {
            "messages": [
                *HI,
                said("assistant", {"type": "thinking", "thinking": "Hm.", "signature": "x"}, text("3.")),
                said("user", text("Sure?")),
            ]
        },
        USER + turn("assistant", "<think>Hm.</think>3.") + turn("user", "Sure?") + BEGIN,
    ),
    (
        "reasoning that nobody can read",
        {"messages": [*HI, said("assistant", {"type": "redacted_thinking", "data": "x"}, text("3.")), *HI]},
        USER + turn("assistant", "3.") + USER + BEGIN,
    ),
    ("the beginning of the answer", {"messages": [*HI, said("assistant", text("It is"))]}, USER + BEGIN + "It is"),
    ("reasoning is off", {"thinking": {"type": "disabled"}}, USER + BEGIN + "<think>\n\n</think>\n\n"),
]


@pytest.mark.parametrize(("_", "body", "prompt"), PROMPTS, ids=[name for name, _, _ in PROMPTS])
async def test_prompts(_: str, body: dict[str, Any], prompt: str) -> None:
    async with stand("3") as running:
        answer = await running.post("/v1/messages", {"model": MODEL, "max_tokens": 9, "messages": HI, **body})
        assert answer.status_code == 200, answer.text
        assert text_of(running.worker.served[0].prompt_token_ids) == prompt


@pytest.mark.parametrize("template", [FIRST_ONLY, DROPPED])
async def test_a_later_system_message_joins_the_first_where_the_template_wants_it(template: str) -> None:
    fast = PreTrainedTokenizerFast(tokenizer_object=pretrained().backend_tokenizer, chat_template=template)
    tokenizer = Tokenizer(fast, max_model_len=2048)
    async with running_stand(answer_with("3"), tokenizer=tokenizer) as running:
        body = {"model": MODEL, "max_tokens": 9, "messages": LATER, "system": "Be kind."}
        answer = await running.post("/v1/messages", body)
        assert answer.status_code == 200, answer.text
        prompt = text_of(running.worker.served[0].prompt_token_ids)
    assert prompt == turn("system", "Be kind.\nBe brief.") + USER + BEGIN
    assert template != TEMPLATE


async def test_a_changing_billing_header_leaves_the_prompt_as_it_is() -> None:
    async with stand("3") as running:
        for mark in ("8f3", "901"):
            system = [text(BILLING.replace("8f3", mark)), text("Be brief.")]
            body = {"model": MODEL, "max_tokens": 9, "messages": HI, "system": system}
            assert (await running.post("/v1/messages", body)).status_code == 200
        first, second = running.worker.served
    assert first.prompt_token_ids == second.prompt_token_ids


async def test_tools_reach_the_template_with_their_schemas() -> None:
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **TOOLS[0]["input_schema"]}
    tools = [
        {**TOOLS[0], "input_schema": schema, "cache_control": {"type": "ephemeral"}, "eager_input_streaming": True}
    ]
    async with stand("3") as running:
        body = {"model": MODEL, "max_tokens": 9, "messages": HI, "tools": tools}
        assert (await running.post("/v1/messages", body)).status_code == 200
        prompt = text_of(running.worker.served[0].prompt_token_ids)
    assert '{"name": "add", "description": "Add.", "parameters": {"$schema"' in prompt and "cache_control" not in prompt


def test_a_chat_comes_back_whole_from_the_process_that_parses_large_bodies() -> None:
    chat = chat_to_answer({"model": MODEL, "max_tokens": 9, "messages": HI, "thread": {"type": "create"}})
    copy = pickle.loads(pickle.dumps(chat))
    assert copy == chat and copy.limit_shrinks and copy.ignored_names == ("thread",)
