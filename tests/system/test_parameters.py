"""Sampling parameters and log probabilities of the real server, with the demo model, against transformers."""

from collections.abc import Sequence
from typing import Any

import httpx
import pytest
import torch
from openai import AsyncOpenAI
from transformers import AutoModelForCausalLM, AutoTokenizer

from demo_model.location import demo_model_path
from tests.system.nonces import MODEL
from tests.system.server import Server

pytestmark = pytest.mark.full

QUESTION: list[Any] = [{"role": "user", "content": "What is Tidegate?"}]
NEAR = 0.1  # the server may compute in bfloat16, the reference computes in float32


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    tokenizer = AutoTokenizer.from_pretrained(demo_model_path())
    encoded = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_dict=False)
    return list(encoded)


@pytest.fixture(scope="module")
def reference() -> Any:
    return AutoModelForCausalLM.from_pretrained(demo_model_path(), dtype=torch.float32)


def logprobs_of(reference: Any, ids: Sequence[int]) -> torch.Tensor:
    """Return the log probabilities (len(ids) - 1, vocab) of each token after the first, by transformers."""
    with torch.inference_mode():
        logits = reference(torch.tensor([list(ids)])).logits[0]
    found: torch.Tensor = logits.float().log_softmax(-1)[:-1]
    return found


async def complete(server: Server, **body: Any) -> dict[str, Any]:
    async with httpx.AsyncClient(timeout=60) as http:
        response = await http.post(f"{server.base_url}/completions", json={"model": MODEL, "temperature": 0} | body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def test_greedy_log_probabilities_are_those_of_transformers(
    server: Server, client: AsyncOpenAI, prompt: list[int], reference: Any
) -> None:
    asked: Any = {"logprobs": True, "top_logprobs": 5, "temperature": 0, "max_tokens": 24}
    answer = await client.chat.completions.create(
        model=MODEL, messages=QUESTION, **asked, extra_body={"return_token_ids": True}
    )
    choice = answer.choices[0]
    assert choice.logprobs is not None and choice.logprobs.content is not None
    ids: list[int] = choice.token_ids  # type: ignore[attr-defined]
    assert answer.prompt_token_ids == prompt  # type: ignore[attr-defined]
    expected = logprobs_of(reference, [*prompt, *ids])[len(prompt) - 1 :]
    for entry, token_id, row in zip(choice.logprobs.content, ids, expected, strict=True):
        assert entry.logprob == pytest.approx(float(row[token_id]), abs=NEAR)
        assert entry.top_logprobs[0].token == entry.token, "greedy takes the likeliest token"
        assert entry.top_logprobs[0].logprob == pytest.approx(float(row.max()), abs=NEAR)
    stream = await client.chat.completions.create(model=MODEL, messages=QUESTION, stream=True, **asked)
    chunks = [chunk.choices[0] async for chunk in stream]
    streamed = [e for c in chunks if c.logprobs is not None for e in c.logprobs.content or ()]
    text = "".join(chunk.delta.content or "" for chunk in chunks)
    assert text == choice.message.content
    assert bytes(b for e in streamed for b in e.bytes or ()).decode() == text
    assert [e.logprob for e in streamed] == pytest.approx(
        [e.logprob for e in choice.logprobs.content[: len(streamed)]], abs=NEAR
    )
