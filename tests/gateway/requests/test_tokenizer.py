"""Encoding, the chat template, and decoding without half characters."""

import json
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from gateway.requests.tokens.decoder import MAX_PENDING
from gateway.requests.tokens.tokenizer import INLINE_CHARS, ChatTemplateError, TextTooLong, Tokenizer, Truncation
from tests.gateway.tiny_model import TEMPLATE, pretrained, tiny_tokenizer, token_ids

MANY = 10**9


@given(st.text(), st.integers(1, 40))
def test_decoded_pieces_add_up_to_the_text(text: str, size: int) -> None:
    ids = token_ids(text)
    decoder = tiny_tokenizer().decoder()
    pieces = [decoder.feed(ids[at : at + size]) for at in range(0, len(ids), size)]
    assert "".join(pieces) + decoder.flush() == text


@given(st.text(alphabet=st.characters(exclude_characters="\ufffd", codec="utf-8")))
def test_half_characters_are_held_back(text: str) -> None:
    decoder = tiny_tokenizer().decoder()
    assert "\ufffd" not in "".join(decoder.feed((token,)) for token in token_ids(text))


def test_bytes_that_are_not_utf8_are_replaced_in_the_end() -> None:
    lead = token_ids("😀")[0]
    decoder = tiny_tokenizer().decoder()
    assert decoder.feed((lead,)) == ""
    assert decoder.flush() == "\ufffd"
    endless = "".join(decoder.feed((lead,)) for _ in range(3 * MAX_PENDING))
    assert set(endless) == {"\ufffd"}
    assert (endless + decoder.feed(token_ids("ok")) + decoder.flush()).endswith("ok")


async def test_long_texts_encode_the_same_off_the_loop() -> None:
    tokenizer = tiny_tokenizer()
    text = "the tide " * INLINE_CHARS
    assert [tuple(ids) for ids in await tokenizer.encode([text, "a"], MANY)] == [token_ids(text), token_ids("a")]
    chat = await tokenizer.encode_chat([{"role": "user", "content": text}], MANY)
    assert tuple(chat) == token_ids(f"<|im_start|>user\n{text}<|im_end|><|im_start|>assistant\n")


async def test_texts_that_cannot_fit_are_not_encoded() -> None:
    with pytest.raises(TextTooLong):
        await tiny_tokenizer().encode(["x", "x" * 10_000], max_tokens=10)
    with pytest.raises(TextTooLong):
        await tiny_tokenizer().encode_chat([{"role": "user", "content": "x" * 10_000}], max_tokens=10)


class Watched(Tokenizer):
    """Records the threads in which it encodes."""

    def __init__(self) -> None:
        super().__init__(pretrained())
        self.threads: set[threading.Thread] = set()

    def _encode(self, *args: Any) -> list[int]:
        self.threads.add(threading.current_thread())
        return super()._encode(*args)


@given(st.text(max_size=30), st.integers(1, 500), st.integers(1, 20), st.booleans())
async def test_of_a_text_that_is_truncated_only_a_part_is_encoded(
    text: str, repeats: int, num_tokens: int, keeps_first: bool
) -> None:
    text = (text + " tide") * repeats
    [whole] = await tiny_tokenizer().encode([text], MANY)
    truncation = Truncation(num_tokens, keeps_first)
    [kept] = await tiny_tokenizer().encode([text], 100, truncation=truncation)
    assert kept == (whole[:num_tokens] if keeps_first else whole[-num_tokens:])


async def test_the_loop_encodes_short_texts_and_few() -> None:
    tokenizer = Watched()
    await tokenizer.encode(["the tide"] * 10, MANY)
    await tokenizer.encode_chat([{"role": "user", "content": "the tide"}] * 10, MANY)
    assert tokenizer.threads == {threading.main_thread()}
    tokenizer.threads.clear()
    await tokenizer.encode(["the tide"] * 1000, MANY)
    await tokenizer.encode(["x" * 3000] * 3, MANY)
    await tokenizer.encode_chat([{"role": "user", "content": ""}] * 1000, MANY)
    assert threading.main_thread() not in tokenizer.threads


async def test_a_chat_that_its_template_makes_too_long_is_not_encoded() -> None:
    tokenizer = with_template("{% for m in messages %}{{ m.tool_calls | tojson }}{% endfor %}")
    message = {"role": "assistant", "content": "", "tool_calls": [{"arguments": "x" * 10_000}]}
    with pytest.raises(TextTooLong):
        await tokenizer.encode_chat([message], max_tokens=10)


def with_template(template: str | None) -> Tokenizer:
    backend = pretrained().backend_tokenizer
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template))


async def test_a_template_with_a_developer_role_gets_developer_messages() -> None:
    template = "{% for m in messages %}{{ m.role }}{% if m.role == 'developer' %}!{% endif %}{% endfor %}"
    ids = await with_template(template).encode_chat([{"role": "developer", "content": ""}], MANY)
    assert tuple(ids) == token_ids("developer!")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "This model has no chat template. Use /v1/completions."),
        ("{{ raise_exception('Roles must alternate.') }}", "Roles must alternate."),
        ("{{ 1 + 'a' }}", "The model's chat template does not accept these messages."),
        ("{{ nothing.at.all }}", "The model's chat template does not accept these messages."),
    ],
)
async def test_template_errors_reach_the_user(template: str | None, message: str) -> None:
    with pytest.raises(ChatTemplateError, match=f"^{re.escape(message)}$"):
        await with_template(template).encode_chat([{"role": "user", "content": "a"}], MANY)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    pretrained().save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("config", "length"), [({"max_position_embeddings": 512}, 512), ({}, None), (None, None)])
async def test_load_from_a_directory(directory: Path, config: dict[str, Any] | None, length: int | None) -> None:
    if config is not None:
        (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tokenizer = Tokenizer.load(str(directory))
    assert tokenizer.max_model_len == length
    assert tokenizer.vocab_size == len(pretrained())
    assert await tokenizer.encode_chat([{"role": "user", "content": "a"}], MANY) == list(
        token_ids("<|im_start|>user\na<|im_end|><|im_start|>assistant\n")
    )
    assert pretrained().chat_template == TEMPLATE


def test_a_directory_without_a_tokenizer_is_refused_before_anything_is_imported_for_it(tmp_path: Path) -> None:
    for name in ("config.json", "generation_config.json", "model-00001-of-00002.safetensors"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(OSError, match="no file of a tokenizer"):
        Tokenizer.load(str(tmp_path))


def test_a_path_that_is_no_directory_of_a_model_is_refused_as_such(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(OSError, match="no file of a tokenizer"):
        Tokenizer.load(str(tmp_path))
    for path in (str(tmp_path / "none"), "./none", "models/org/none"):
        with pytest.raises(OSError, match="no such directory"):
            Tokenizer.load(path)


def test_no_torch(directory: Path) -> None:
    code = (
        "import sys; from gateway.requests.tokens.tokenizer import Tokenizer; import gateway.app;"
        f"Tokenizer.load({str(directory)!r})._render([{{'role': 'user', 'content': 'a'}}], {{}});"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
