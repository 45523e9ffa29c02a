"""The models as Anthropic's clients read them: those that send its version header."""

from datetime import datetime

import pytest

from tests.gateway.stand import running_stand
from tests.gateway.tiny_model import CONTEXT, MODEL

VERSION = {"anthropic-version": "2026-10-21"}


async def test_the_list_has_anthropics_shape_for_its_clients_only() -> None:
    async with running_stand() as running:
        theirs = (await running.http.get("/v1/models", headers=VERSION, params={"limit": 20})).json()
        ours = (await running.http.get("/v1/models")).json()
    assert [model["id"] for model in theirs["data"]] == [model["id"] for model in ours["data"]] == [MODEL, "alias"]
    assert (theirs["has_more"], theirs["first_id"], theirs["last_id"]) == (False, MODEL, "alias")
    assert "object" not in theirs and ours["object"] == "list"


@pytest.mark.parametrize("name", [MODEL, "alias"])
async def test_one_model(name: str) -> None:
    async with running_stand() as running:
        model = (await running.http.get(f"/v1/models/{name}", headers=VERSION)).json()
    assert (model["id"], model["type"], model["lifecycle"]) == (name, "model", "active")
    assert model["max_input_tokens"] == CONTEXT
    assert datetime.fromisoformat(model["created_at"])
    assert model["capabilities"]["batch"] == {"supported": True}
    assert model["capabilities"]["image_input"] == {"supported": False}


async def test_an_unknown_model_is_an_error_of_anthropics() -> None:
    async with running_stand() as running:
        answer = await running.http.get("/v1/models/none", headers=VERSION)
    assert (answer.status_code, answer.json()["error"]["type"]) == (404, "not_found_error")
