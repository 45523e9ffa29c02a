"""The tokenizer: text survives encoding, nonces are split into characters, the chat template refuses other roles."""

import random
from pathlib import Path

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from demo_model.location import demo_model_path
from demo_model.training.corpus import conversation
from demo_model.training.skills import make_nonce
from demo_model.training.tokenizer import SPECIAL_TOKENS, train_tokenizer

Tokenizer = PreTrainedTokenizerBase


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return AutoTokenizer.from_pretrained(demo_model_path())


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=True)["input_ids"])


@given(text=st.text(max_size=200).filter(lambda text: not any(token in text for token in SPECIAL_TOKENS)))
def test_text_survives_encoding(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(encode(tokenizer, text)) == text


@given(rng=st.integers(0, 2**32).map(random.Random))
def test_a_nonce_with_digits_is_encoded_character_by_character(tokenizer: Tokenizer, rng: random.Random) -> None:
    nonce = make_nonce(rng, min_length=4, max_length=40) + "0"
    assert len(encode(tokenizer, nonce)) == len(nonce)


def test_merges_stay_inside_plain_words(tokenizer: Tokenizer) -> None:
    assert tokenizer.tokenize("the tier42 Tidegate, real-time") == [
        *("the", "Ġ", "t", "i", "e", "r", "4", "2", "Ġ", "Tidegate", ",", "Ġ"),
        *"real-time",
    ]


def test_training_is_deterministic() -> None:
    texts = ["the tide rises", "the tide falls", "a gate"] * 3
    first, second = (train_tokenizer(texts, vocab_size=300).get_vocab() for _ in range(2))
    assert first == second


def render(tokenizer: Tokenizer, *messages: tuple[str, object], generate: bool = False) -> str:
    as_dicts = [{"role": role, "content": content} for role, content in messages]
    return str(tokenizer.apply_chat_template(as_dicts, add_generation_prompt=generate, tokenize=False))


def test_template_lays_out_a_conversation(tokenizer: Tokenizer) -> None:
    messages = (("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello!"), ("user", " 1 + 1 \n"))
    assert render(tokenizer, *messages, generate=True) == (
        "<|system|>Be brief.<|end|><|user|>Hi<|end|><|assistant|>Hello!<|end|><|user|> 1 + 1 \n<|end|><|assistant|>"
    )


def test_developer_is_system(tokenizer: Tokenizer) -> None:
    assert render(tokenizer, ("developer", "x")) == render(tokenizer, ("system", "x"))


def test_an_assistant_message_may_have_no_content(tokenizer: Tokenizer) -> None:
    assert render(tokenizer, ("user", "Hi"), ("assistant", None)) == "<|user|>Hi<|end|><|assistant|><|end|>"


@pytest.mark.parametrize("role", ["function", "narrator"])
def test_other_roles_are_refused_by_name(tokenizer: Tokenizer, role: str) -> None:
    with pytest.raises(jinja2.exceptions.TemplateError, match=f"not '{role}'"):
        render(tokenizer, ("user", "Hi"), (role, "x"))


def test_content_that_is_no_text_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(jinja2.exceptions.TemplateError, match="only text"):
        render(tokenizer, ("user", [{"type": "text", "text": "Hi"}]))


def test_training_and_serving_lay_out_the_same_text(tokenizer: Tokenizer) -> None:
    example = conversation("Be brief.", [("Hi", "Hello!"), ("2 + 2", "4")])
    served = render(
        tokenizer,
        ("system", "Be brief."),
        ("user", "Hi"),
        ("assistant", "Hello!"),
        ("user", "2 + 2"),
        ("assistant", "4"),
    )
    assert "".join(segment.text for segment in example) == served
    pieces = [token for segment in example for token in encode(tokenizer, segment.text)]
    assert pieces == encode(tokenizer, served)


def test_the_template_is_in_the_tokenizer_config() -> None:
    assert '"chat_template"' in (Path(demo_model_path()) / "tokenizer_config.json").read_text()
