"""Sampling parameters and log probabilities of the real server, with the demo model, against transformers."""

from collections import Counter
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


async def test_a_prompt_is_scored_by_echo(server: Server, prompt: list[int], reference: Any) -> None:
    """As lm-eval-harness chooses between answers: by the sum of their log probabilities, several prompts in a body."""
    generated = await complete(server, prompt=prompt, max_tokens=16, return_token_ids=True)
    right: list[int] = generated["choices"][0]["token_ids"]
    texts = [[*prompt, *right], [*prompt, *reversed(right)]]
    answer = await complete(server, prompt=texts, echo=True, logprobs=1, max_tokens=0)
    likely, unlikely = (choice["logprobs"] for choice in answer["choices"])
    rows = logprobs_of(reference, texts[0])
    expected = rows.gather(-1, torch.tensor(texts[0][1:])[:, None])[:, 0].tolist()
    assert likely["token_logprobs"][0] is None
    assert likely["token_logprobs"][len(prompt) :] == pytest.approx(expected[len(prompt) - 1 :], abs=NEAR)
    best = [max(top.values()) for top in likely["top_logprobs"][len(prompt) :]]
    assert best == likely["token_logprobs"][len(prompt) :], "greedy took the likeliest tokens"
    assert sum(likely["token_logprobs"][1:]) > sum(unlikely["token_logprobs"][1:])
    assert answer["choices"][0]["text"].endswith(generated["choices"][0]["text"])
    assert answer["usage"]["completion_tokens"] == 0


async def test_parameters_change_the_output(server: Server, prompt: list[int]) -> None:
    async def ids(**change: Any) -> list[int]:
        body = {"prompt": prompt, "max_tokens": 24, "return_token_ids": True, **change}
        found: list[int] = (await complete(server, **body))["choices"][0]["token_ids"]
        return found

    plain = await ids()
    first, second = plain[:2]
    assert await ids(logit_bias={str(first): -100}) != plain
    assert first not in await ids(logit_bias={str(first): -100})
    assert await ids(logit_bias={str(second): 100}) == [second] * 24
    assert await ids(stop_token_ids=[second]) == [first, second]
    assert (await ids(stop_token_ids=[second], min_tokens=5))[:1] == [first]
    assert len(await ids(stop_token_ids=[second], min_tokens=5)) >= 5
    endless = await ids(ignore_eos=True, max_tokens=200)
    penalised = await ids(ignore_eos=True, max_tokens=200, frequency_penalty=2, presence_penalty=2)
    assert len(endless) == len(penalised) == 200
    most_common = [Counter(output).most_common(1)[0][1] for output in (penalised, endless)]
    assert most_common[0] < most_common[1], "penalties make tokens repeat less often"
    assert await ids(repetition_penalty=5) != plain
    assert set(await ids(allowed_token_ids=[first, second])) <= {first, second}
    assert "Tidegate" not in (await complete(server, prompt=prompt, bad_words=["Tidegate"]))["choices"][0]["text"]


async def test_min_p_of_one_is_greedy(server: Server) -> None:
    body: dict[str, Any] = {"prompt": [40, 50, 60], "max_tokens": 24, "ignore_eos": True}
    greedy = (await complete(server, **body))["choices"][0]["text"]
    sampled = await complete(server, **body | {"max_tokens": 200}, temperature=2, seed=1, n=8)
    narrowed = await complete(server, **body, temperature=2, seed=1, n=8, min_p=1.0)
    assert len({choice["text"] for choice in sampled["choices"]}) > 1
    assert {choice["text"] for choice in narrowed["choices"]} == {greedy}


async def test_the_best_of_is_the_likeliest(server: Server) -> None:
    body: dict[str, Any] = {"prompt": [40, 50, 60], "max_tokens": 12, "temperature": 1.5, "seed": 3, "logprobs": 0}

    def mean(choice: dict[str, Any]) -> float:
        found = choice["logprobs"]["token_logprobs"]
        return sum(found) / len(found)

    every = await complete(server, **body, n=6, ignore_eos=True)
    best = await complete(server, **body, n=2, best_of=6, ignore_eos=True)
    ranked = sorted((mean(choice) for choice in every["choices"]), reverse=True)
    assert [mean(choice) for choice in best["choices"]] == pytest.approx(ranked[:2], abs=NEAR)
    assert best["usage"]["completion_tokens"] == 6 * 12


async def test_special_tokens_and_the_id_of_the_request(server: Server, prompt: list[int]) -> None:
    shown = await complete(server, prompt=prompt, max_tokens=1, echo=True, request_id="abc")
    assert shown["id"] == "cmpl-abc"
    assert "<|user|>" in shown["choices"][0]["text"]
