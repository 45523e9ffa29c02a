import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from demo_model.location import demo_model_path
from engine.upstream.texts import Texts

DEMO = Tokenizer.from_file(str(demo_model_path() / "tokenizer.json"))
PIECES = st.lists(st.text(min_size=1, max_size=12), max_size=6)


@given(PIECES)
def test_the_ids_of_pieces_have_the_text_of_the_pieces(pieces: list[str]) -> None:
    texts = Texts(DEMO)
    ids = [token_id for piece in pieces for token_id in texts.ids(piece)]
    assert DEMO.decode(ids, skip_special_tokens=False) == "".join(pieces)


def test_a_tokenizer_that_begins_texts_with_a_space_adds_none_inside() -> None:
    vocabulary = {"▁": 0, "a": 1, "b": 2, "▁a": 3, "▁b": 4, "<unk>": 5}
    backend = Tokenizer(models.BPE(vocabulary, [("▁", "a"), ("▁", "b")], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.decoder = decoders.Metaspace(prepend_scheme="always")
    texts = Texts(backend)
    assert backend.decode([3, *texts.ids("b"), *texts.ids(" a")]) == "ab a"


@pytest.mark.parametrize("bos", ["", "<s>"])
def test_the_prompt_is_sent_without_the_token_that_the_server_adds(bos: str) -> None:
    ids = DEMO.encode("some text", add_special_tokens=False).ids
    text = Texts(DEMO, bos).prompt(ids)
    assert text == "some text"
    assert Texts(DEMO, "some").prompt(ids) == " text"
