"""What the files of a model say of its vocabulary, the same for files that mean the same, and of its kind."""

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.requests.tokens.model_files import kind_of, vocabulary_of

BPE: dict[str, Any] = {
    "version": "1.0",
    "added_tokens": [{"id": 2, "content": "<end>", "special": True}],
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": ["a b"]},
}


def told(folder: Path, tokenizer: Any) -> str:
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    return vocabulary_of(str(folder))


def changed(**model: Any) -> dict[str, Any]:
    return BPE | {"model": BPE["model"] | model}


def test_only_tokens_and_their_ids_count(tmp_path: Path) -> None:
    known = told(tmp_path, BPE)
    assert len(known) == 12
    assert told(tmp_path, changed(merges=[["a", "b"]], byte_fallback=False)) == known, "another release wrote it"
    assert told(tmp_path, changed(vocab={"b": 1, "a": 0})) == known
    assert told(tmp_path, changed(vocab={"a": 1, "b": 0})) != known
    assert told(tmp_path, BPE | {"added_tokens": []}) != known
    assert told(tmp_path, BPE | {"added_tokens": [{"id": 3, "content": "<end>"}]}) != known


def test_the_tokens_of_a_unigram_model_are_numbered_by_their_order(tmp_path: Path) -> None:
    one = told(tmp_path, {"model": {"vocab": [["a", -1.5], ["b", -2]]}})
    assert one and told(tmp_path, {"model": {"vocab": [["a", -9], ["b", -2]]}}) == one
    assert told(tmp_path, {"model": {"vocab": [["b", -1.5], ["a", -2]]}}) != one


@pytest.mark.parametrize("tokenizer", [[], {}, {"model": {}}, {"model": {"vocab": 3}}, {"model": {"vocab": [[]]}}])
def test_what_cannot_be_read_is_unknown(tmp_path: Path, tokenizer: Any) -> None:
    assert vocabulary_of(str(tmp_path)) == "" and told(tmp_path, tokenizer) == ""


@pytest.mark.parametrize(
    ("files", "kind"),
    [
        ({}, "chat"),
        ({"config.json": {"architectures": ["LlamaForCausalLM"]}}, "chat"),
        ({"config.json": {"architectures": ["XLMRobertaForSequenceClassification"]}}, "rerank"),
        ({"config.json": {"architectures": ["BertModel"]}, "modules.json": []}, "embedding"),
        ({"modules.json": [], "config_sentence_transformers.json": {"model_type": "SentenceTransformer"}}, "embedding"),
        ({"modules.json": [], "config_sentence_transformers.json": {"model_type": "CrossEncoder"}}, "rerank"),
        ({"config.json": []}, "chat"),
        ({"config.json": {"architectures": None}}, "chat"),
    ],
)
def test_the_files_say_what_a_model_is_for(tmp_path: Path, files: dict[str, Any], kind: str) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content), encoding="utf-8")
    assert kind_of(str(tmp_path)) == kind
