"""Batches whose lines are requests of /v1/responses."""

from pathlib import Path

from redis.asyncio import Redis

from tests.gateway.jobs.batches.test_completions import ended, read, submit
from tests.gateway.requests.test_receipt import answer_with_receipts
from tests.gateway.stand import running_stand
from tests.gateway.tiny_model import MODEL


async def test_lines_of_a_batch_may_be_responses(redis_client: Redis, tmp_path: Path) -> None:
    def line(custom_id: str, **body: object) -> dict[str, object]:
        whole = {"model": MODEL, "input": "hi", **body}
        return {"custom_id": custom_id, "method": "POST", "url": "/v1/responses", "body": whole}

    async with running_stand(answer_with_receipts, redis=redis_client, data_dir=tmp_path) as stand:
        http, metadata = stand.http, {"x-tidegate-receipt": "1"}
        entries = [line("good"), line("later", background=True)]
        batch = await ended(http, await submit(http, entries, endpoint="/v1/responses", metadata=metadata))
        output = await read(http, batch["output_file_id"])
        errors = await read(http, batch["error_file_id"])
        answer = output[0]["response"]["body"]
        kept = await http.get(f"/v1/responses/{answer['id']}")
    assert batch["request_counts"] == {"total": 2, "completed": 1, "failed": 1}
    assert answer["output"][0]["content"][0]["text"] == "Hello there!"
    assert batch["usage"]["output_tokens"] == answer["usage"]["output_tokens"] > 0
    assert {e["custom_id"]: e["response"]["body"]["error"]["param"] for e in errors} == {"later": "background"}
    assert kept.json() == answer
    assert answer["tidegate"]["worker"] == "w1"
