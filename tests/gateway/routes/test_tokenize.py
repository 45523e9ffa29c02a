"""/tokenize and /detokenize: the shapes of vLLM, and the same tokens as the completion endpoints."""

from typing import Any

import pytest

from gateway.identity import Keyring
from tests.gateway.api_keys import key
from tests.gateway.protocol.test_errors import error_of
from tests.gateway.stand import running_stand
from tests.gateway.tiny_model import CONTEXT, MODEL, TEMPLATE, pretrained, token_ids

HI = [{"role": "user", "content": "hi"}]


async def test_a_text_and_back() -> None:
    text = "the tide 😀 rises"
    async with running_stand() as stand:
        answer = (await stand.post("/tokenize", {"model": MODEL, "prompt": text})).json()
        back = (await stand.post("/detokenize", {"model": MODEL, "tokens": answer["tokens"]})).json()
    ids = list(token_ids(text))
    assert answer == {"count": len(ids), "max_model_len": CONTEXT, "tokens": ids, "token_strs": None}
    assert back == {"prompt": text}


async def test_a_conversation_has_the_tokens_of_its_completion() -> None:
    async with running_stand() as stand:
        answer = (await stand.post("/tokenize", {"messages": HI, "return_token_strs": True})).json()
        await stand.client.chat.completions.create(model=MODEL, messages=HI)
        [served] = stand.worker.served
        text = (await stand.post("/detokenize", {"tokens": answer["tokens"]})).json()["prompt"]
    assert answer["tokens"] == list(served.prompt_token_ids)
    assert answer["token_strs"] == pretrained().convert_ids_to_tokens(answer["tokens"])
    assert text == "<|im_start|>user\nhi<|im_end|><|im_start|>assistant\n", "special tokens are shown"


@pytest.mark.parametrize(
    ("path", "body", "param", "code"),
    [
        ("/tokenize", {}, "prompt", "invalid_value"),
        ("/tokenize", {"prompt": "a", "messages": HI}, "prompt", "invalid_value"),
        ("/tokenize", {"prompt": ["a"]}, "prompt", "invalid_type"),
        ("/tokenize", {"prompt": "a" * 100_000}, "prompt", "context_length_exceeded"),
        ("/tokenize", {"messages": [{"role": "king", "content": "a"}]}, "messages[0].role", "invalid_value"),
        ("/tokenize", {"messages": []}, "messages", "invalid_value"),
        ("/tokenize", {"prompt": "a", "return_token_strs": 1}, "return_token_strs", "invalid_type"),
        ("/detokenize", {}, "tokens", "missing_required_parameter"),
        ("/detokenize", {"tokens": [10**6]}, "tokens", "invalid_value"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]", "invalid_value"),
        ("/detokenize", {"tokens": "a"}, "tokens", "invalid_type"),
    ],
)
async def test_invalid_bodies_name_the_parameter(path: str, body: dict[str, Any], param: str, code: str) -> None:
    async with running_stand() as stand:
        error = error_of(await stand.post(path, body), 400)
    assert (error["param"], error["code"]) == (param, code)


@pytest.mark.parametrize(("path", "body"), [("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": []})])
async def test_the_model_and_the_key_are_checked(path: str, body: dict[str, Any]) -> None:
    keyring = Keyring([key("right")])
    async with running_stand(keyring=keyring) as stand:
        right = {"authorization": "Bearer sk-right"}
        assert (await stand.post(path, body)).status_code == 401
        assert (await stand.post(path, body, headers=right)).status_code == 200
        unknown = await stand.post(path, {**body, "model": "nope"}, headers=right)
    assert error_of(unknown, 404)["code"] == "model_not_found"


async def test_the_tokenizers_configuration_needs_a_key_and_names_no_files() -> None:
    async with running_stand(keyring=Keyring([key("right")])) as stand:
        assert (await stand.http.get("/tokenizer_info")).status_code == 401
        answer = await stand.http.get("/tokenizer_info", headers={"authorization": "Bearer sk-right"})
    config = answer.json()
    assert config["tokenizer_class"] == type(pretrained()).__name__
    assert config["chat_template"] == TEMPLATE and config["eos_token"] == "<|im_end|>"
    assert not [name for name in config if name.endswith(("_file", "_path"))]
