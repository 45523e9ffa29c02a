"""The loads of the bench of speculative decoding, and its two arms on a small model."""

import ast
from pathlib import Path

import pytest

from bench.engines import speculation
from tests.engine.models import CONFIGS, save_model


def encode(text: str) -> list[int]:
    return [ord(character) % 90 for character in text]


def test_edits_change_one_name_of_a_function_and_nothing_else() -> None:
    sources = speculation.functions()
    assert len(sources) > speculation.NUM_TEXTS
    for source in sources:
        changed, name = speculation.renamed(source)
        ast.parse(changed)
        assert changed != source and changed.replace(speculation.NEW_NAME, name) == source


def test_each_load_has_its_texts() -> None:
    loads = speculation.loads(len)
    assert [load.name for load in loads] == ["edit", "summary", "prose"]
    for load in loads:
        assert len(load.prompts) == len(load.new_tokens) == speculation.NUM_TEXTS
        assert min(load.new_tokens) > 50
    assert all(f"to {speculation.NEW_NAME}:\n" in prompt for prompt in loads[0].prompts)


def test_both_arms_are_measured_and_give_the_same_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_model(tmp_path, CONFIGS["qwen3"]())
    monkeypatch.setattr(speculation, "STREAMS", (2,))
    arms = speculation.Arms(tmp_path, None, 2)
    load = speculation.Load("tiny", ["a b a b a b", "c d"], [20, 30], temperatures=(0.0,))
    speculation.measure(arms, load, encode, 2, [1])
    arms.close()
    line = capsys.readouterr().out
    assert "tiny, temperature 0, 2 streams:" in line and "times as fast" in line
