"""The bytes of single tokens, in byte-level vocabularies and in those of SentencePiece."""

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from gateway.requests.tokens.token_text import TokenTexts, shown
from tests.gateway.tiny_model import pretrained

TEXTS = ["Hello there!", " the tide\n", "é😀 ü", "\u00a0\u00ad", "日本"]


@pytest.mark.parametrize("text", TEXTS)
def test_the_bytes_of_tokens_add_up_to_the_text(text: str) -> None:
    backend = pretrained().backend_tokenizer
    texts = TokenTexts(backend)
    ids = backend.encode(text, add_special_tokens=False).ids
    assert b"".join(texts.bytes_of(token_id) for token_id in ids) == text.encode()


def test_special_tokens_and_ids_that_do_not_exist() -> None:
    texts = TokenTexts(pretrained().backend_tokenizer)
    assert texts.bytes_of(1) == b"<|im_end|>"
    assert texts.bytes_of(10**6) == b""


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.Metaspace(),
        decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
    ],
)
def test_a_vocabulary_of_sentencepiece(decoder: decoders.Decoder) -> None:
    names = ["<unk>", "▁", "▁the", "tide", "<0xE2>", "é"]
    backend = Backend(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[], unk_token="<unk>"))
    backend.decoder = decoder
    texts = TokenTexts(backend)
    found = [texts.bytes_of(token_id) for token_id in range(1, len(names))]
    assert found == [b" ", b" the", b"tide", b"\xe2", "é".encode()]


def test_bytes_that_are_no_text_are_escaped() -> None:
    assert shown("é".encode()) == "é"
    assert shown(b"\xf0\x9f") == "\\xf0\\x9f"
    assert shown(b"\xf0\x9f", "bytes:") == "bytes:\\xf0\\x9f"
