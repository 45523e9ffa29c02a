"""POST /v1/chat/completions through the official client, in its strict mode."""

from openai.types.chat import ChatCompletionMessageParam

from scheduler.request import Delivery
from tests.gateway.scripted_worker import answer_with
from tests.gateway.stand import running_stand
from tests.gateway.tiny_model import CONTEXT, MODEL, text_of, token_ids
from tests.waiting import until

HI: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]


async def test_a_plain_answer() -> None:
    async with running_stand(answer_with("Hello there!", cached=3)) as stand:
        answer = await stand.client.chat.completions.create(model=MODEL, messages=HI)
        request = stand.worker.served[0]
    assert answer.id.startswith("chatcmpl-")
    assert answer.object == "chat.completion"
    assert answer.model == MODEL
    assert answer.service_tier == "default"
    assert answer.choices[0].message.content == "Hello there!"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens == len(request.prompt_token_ids)
    assert answer.usage.completion_tokens == len(token_ids("Hello there!"))
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details.cached_tokens == 3
    assert request.deadline_ms == request.arrival_ms + 60_000


async def test_the_prompt_is_the_chat_template() -> None:
    async with running_stand() as stand:
        await stand.client.chat.completions.create(
            model=MODEL,
            messages=[
                {"role": "developer", "content": "be brief"},
                {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
                {"role": "assistant", "content": None, "tool_calls": []},
                {"role": "user", "content": "c"},
            ],
        )
        prompt = text_of(stand.worker.served[0].prompt_token_ids)
    assert prompt == (
        "<|im_start|>system\nbe brief<|im_end|><|im_start|>user\na\nb<|im_end|>"
        "<|im_start|>assistant\n<|im_end|><|im_start|>user\nc<|im_end|><|im_start|>assistant\n"
    )


async def test_without_a_limit_the_output_may_fill_the_context() -> None:
    async with running_stand() as stand:
        await stand.client.chat.completions.create(model=MODEL, messages=HI)
        await stand.client.chat.completions.create(model=MODEL, messages=HI, top_p=0, seed=-1)
        first, second = stand.worker.served
    assert first.max_total_tokens == CONTEXT
    assert first.sampling.temperature == 1.0
    assert second.sampling.temperature == 0.0
    assert second.sampling.seed >= 0
    assert first.sampling.seed != second.sampling.seed


async def test_a_stop_string_ends_the_answer_and_the_generation() -> None:
    async with running_stand("one two three four") as stand:
        answer = await stand.client.chat.completions.create(model=MODEL, messages=HI, stop=["three", "xx"])
        await until(lambda: stand.waiting == 0)
    assert answer.choices[0].message.content == "one two "
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(token_ids("one two three"))


async def test_tokens_are_delivered_each_step_only_where_needed() -> None:
    async with running_stand() as stand:
        create = stand.client.chat.completions.create
        await create(model=MODEL, messages=HI, service_tier="flex")
        await create(model=MODEL, messages=HI, service_tier="flex", stop="zzz")
        await create(model=MODEL, messages=HI)
        await create(model=MODEL, messages=HI, stop="zzz")
        [_ async for _ in await create(model=MODEL, messages=HI, stream=True)]
        deliveries = [(r.delivery, r.is_whole) for r in stand.worker.served]
    each_step = (Delivery.EACH_STEP, False)
    assert deliveries == [(Delivery.AT_END, False), each_step, (Delivery.EACH_STEP, True), each_step, each_step]
