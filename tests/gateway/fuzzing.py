"""Hypothesis strategies for requests that are nearly right: valid bodies, mixed and then changed in a few places.

Purely random bodies would all be refused by the first check. Knows JSON and this API's parameters; does not know how
the answers are judged.
"""

import copy
import json
from typing import Any

from hypothesis import strategies as st

from gateway.dialects.messages.request import MessagesRequest
from gateway.dialects.responses.request import ResponseRequest
from gateway.protocol.bodies.schemas import ChatCompletionRequest, CompletionRequest
from gateway.protocol.bodies.vectors import EmbeddingRequest, RerankRequest

HI = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "get_weather", "description": "The weather", "parameters": SCHEMA}
CALL = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}}
HISTORY = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
]
ITEMS = [
    {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
    {"type": "function_call", "call_id": "call_1", "name": "get_weather", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "call_1", "output": "sunny"},
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "so"}]},
    {"type": "item_reference", "id": "msg_" + "0" * 36},
]
BLOCKS = [
    {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "so", "signature": "x"},
            {"type": "tool_use", "id": "t1", "name": "get_weather", "input": {"city": "Oslo"}},
        ],
    },
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "sunny", "is_error": False}]},
    {"role": "system", "content": "Be brief."},
]
SAMPLING: dict[str, Any] = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 7, "min_tokens": 1}
LIMITS: dict[str, Any] = {"max_tokens": 8, "stop": ["x", "yz"], "stop_token_ids": [3], "ignore_eos": True, "n": 2}
PENALTIES: dict[str, Any] = {"presence_penalty": 0.5, "frequency_penalty": -1.0, "logit_bias": {"5": 3}}
FORMATS: list[dict[str, Any]] = [
    {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}},
    {"response_format": {"type": "json_object"}},
    {"structured_outputs": {"regex": "[a-z]+"}},
    {"guided_choice": ["yes", "no"]},
]
PARTS: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [
        *FORMATS,
        {"messages": HISTORY, "tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "required"},
        {"functions": [FUNCTION], "function_call": "auto"},
        {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        {"messages": HISTORY[:2], "continue_final_message": True, "add_generation_prompt": False},
        {"priority": 1, "truncate_prompt_tokens": 4, "chat_template_kwargs": {"a": 1}, "user": "u"},
        {"logprobs": True, "top_logprobs": 2, "service_tier": "flex", "metadata": {"a": "b"}},
    ],
    "/v1/completions": [
        *FORMATS,
        {"prompt": [[1, 2], [3]], "stream": True},
        {"prompt": ["a", "b"], "best_of": 3, "echo": True},
        {"logprobs": 2, "echo": True, "max_tokens": 0},
        {"prompt_logprobs": 1, "return_token_ids": True, "suffix": ""},
    ],
    "/v1/responses": [
        {"input": ITEMS[:4]},
        {"input": ITEMS, "stream": True},
        {"previous_response_id": "resp_" + "0" * 32, "store": True, "truncation": "auto"},
        {"conversation": {"id": "conv_" + "0" * 32}},
        {"background": True, "stream": True, "include": ["message.output_text.logprobs"], "top_logprobs": 2},
        {"text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}, "max_output_tokens": 8},
        {"tools": [{"type": "function", **FUNCTION}], "tool_choice": {"type": "function", "name": "get_weather"}},
        {"reasoning": {"effort": "low", "summary": "auto"}, "instructions": "Be brief.", "metadata": {"a": "b"}},
    ],
    "/v1/responses/compact": [{"input": ITEMS}, {"previous_response_id": "resp_" + "0" * 32, "input": None}],
    "/v1/messages": [
        {"messages": BLOCKS, "system": [{"type": "text", "text": "x-anthropic-billing-header: a\nBe kind."}]},
        {"messages": BLOCKS[:2], "stream": True, "stop_sequences": ["x"]},
        {"tools": [{"name": "get_weather", "input_schema": SCHEMA}], "tool_choice": {"type": "any"}},
        {"tools": [{"type": "web_search_20260318", "name": "web_search"}], "thread": {"type": "create"}},
        {"output_config": {"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}}},
        {"thinking": {"type": "adaptive", "display": "omitted"}, "service_tier": "standard_only"},
        {"metadata": {"user_id": "u"}, "context_management": {"edits": []}, "max_tokens": 32_000},
    ],
    "/v1/embeddings": [
        {"input": ["a", "b b"], "encoding_format": "base64", "dimensions": 2},
        {"input": [[1, 2], [3]], "service_tier": "flex"},
        {"input": [5, 6, 7], "truncate_prompt_tokens": 2, "user": "u"},
        {"input": "a " * 300, "truncate_prompt_tokens": -1, "priority": 1},
    ],
    "/v1/rerank": [
        {"documents": ["a", {"text": "b"}, ""], "top_n": 2, "return_documents": True},
        {"query": "a b", "truncate_prompt_tokens": 6, "deadline_ms": 1000, "metadata": {"a": "b"}},
    ],
    "/tokenize": [{"messages": HISTORY, "prompt": None, "add_special_tokens": False}, {"return_token_strs": True}],
    "/detokenize": [{"tokens": [1, 2, 3]}],
}
NEEDED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/responses/compact": {"input": "hi"},
    "/v1/messages": {"messages": HI, "max_tokens": 8},
    "/v1/embeddings": {"input": "hi"},
    "/v1/rerank": {"query": "hi", "documents": ["a"]},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": []},
}
BODIES = (
    *(ChatCompletionRequest, CompletionRequest, ResponseRequest, MessagesRequest),
    *(EmbeddingRequest, RerankRequest),
)
NAMES = sorted({name for body in BODIES for name in body.model_fields})

ODD_TEXTS = ["", " ", "\x00", "\ud800", "é😀", "a" * 3000, "1", "null", "auto", "none", "<|im_end|>", "{{ 1 }}", "../x"]
ODD_NUMBERS = [0, -1, 1, 2**31, 2**63, 2**64, 10**30, 0.5, -0.0, 1e308, 5e-324, 1.0]
ODD = st.recursive(
    st.sampled_from([None, True, False, *ODD_NUMBERS, *ODD_TEXTS]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*NAMES, "type", ""]), inner, max_size=3)
    ),
    max_leaves=5,
)
HEADER_NAMES = """
    accept anthropic-version authorization content-type idempotency-key openai-organization origin x-client-request-id
    expect x-llm-d-slo-ttft-ms x-stainless-retry-count x-tidegate-cache x-tidegate-receipt
"""
HEADER_VALUES = ["", "0", "-1", "1", "1e9", "nan", "é".encode(), "Bearer x", "a" * 600, "null", "text/plain", "*/*"]
HEADERS = st.dictionaries(st.sampled_from(HEADER_NAMES.split()), st.sampled_from(HEADER_VALUES), max_size=3)


@st.composite
def bodies(draw: st.DrawFn, path: str, model: str) -> bytes:
    """Return the bytes of a body for `path` in which a few things may be wrong."""
    parts = [*PARTS[path], SAMPLING, LIMITS, PENALTIES] if path.startswith("/v1") else PARTS[path]
    body = copy.deepcopy({"model": model, **NEEDED[path]})
    for part in draw(st.lists(st.sampled_from(parts), max_size=3)):
        body |= copy.deepcopy(part)
    for _ in range(draw(st.integers(0, 3))):
        _change(draw, body)
    data = json.dumps(body).encode()
    if draw(st.integers(0, 9)) == 0:  # broken JSON, now and then
        at = draw(st.integers(0, len(data)))
        data = data[:at] + draw(st.binary(max_size=4)) + data[at + draw(st.integers(0, 4)) :]
    return data


def _change(draw: st.DrawFn, body: dict[str, Any]) -> None:
    """Replace, add or remove one value, somewhere in `body`."""
    node: Any = body
    while True:
        inner = [key for key, value in _items(node) if isinstance(value, dict | list) and value]
        if not inner or draw(st.booleans()):
            break
        node = node[draw(st.sampled_from(inner))]
    keys = [key for key, _ in _items(node)]
    if isinstance(node, dict) and draw(st.booleans()):
        keys = NAMES if node is body else [*keys, "type", "id"]
    if not keys:
        return
    key = draw(st.sampled_from(keys))
    if draw(st.integers(0, 5)) == 0:
        if isinstance(node, dict):
            node.pop(key, None)
        else:
            del node[key]
    else:
        node[key] = draw(ODD)


def _items(node: Any) -> list[tuple[Any, Any]]:
    return list(node.items()) if isinstance(node, dict) else list(enumerate(node))
