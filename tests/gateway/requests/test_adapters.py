"""A LoRA adapter is a further model name; the worker gets it with the request."""

from tests.gateway.stand import running_stand
from tests.gateway.tiny_model import MODEL


async def test_a_request_for_an_adapter_carries_its_name_and_others_do_not() -> None:
    async with running_stand(adapters=["mine=/nowhere"]) as stand:
        for model in ("mine", MODEL, "alias"):
            answer = await stand.client.completions.create(model=model, prompt="hi")
            assert answer.model == model
        assert [request.sampling.adapter for request in stand.worker.served] == ["mine", None, None]
        assert "mine" in {model.id async for model in stand.client.models.list()}
