"""What the encoder computes is what sentence-transformers computes, whatever else is in the batch."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sentence_transformers import CrossEncoder, SentenceTransformer
from transformers import RobertaConfig, RobertaModel

from engine.config import EngineStartError
from engine.embedding.encoder import Encoder, _of_similar_length
from engine.embedding.stepper import Text
from gateway.requests.tokens.encoded_texts import encode_texts
from gateway.requests.tokens.tokenizer import Tokenizer
from tests.encoders import CLS, CONTEXT, DIMENSIONS, SEP, WORDS, pretrained, save_reranker

CPU = torch.device("cpu")
CLOSE = 1e-5  # of float32, after two layers
Vector = npt.NDArray[np.float32]


@pytest.fixture(scope="module")
def encoder(encoder_path: Path) -> Encoder:
    return Encoder.load(str(encoder_path), "embedding", CPU, torch.float32)


@pytest.fixture(scope="module")
def reranker(reranker_path: Path) -> Encoder:
    return Encoder.load(str(reranker_path), "rerank", CPU, torch.float32)


def numbers(vectors: Sequence[bytes]) -> list[Vector]:
    return [np.frombuffer(vector, "<f4") for vector in vectors]


def text(written: str) -> Text:
    return Text(pretrained().backend_tokenizer.encode(written).ids)


async def pair(query: str, document: str) -> Text:
    """Return a pair as a gateway tokenises it."""
    [encoded] = await encode_texts(Tokenizer(pretrained()), [(query, document)], CONTEXT)
    return Text(*encoded)


def test_embeddings_are_those_of_sentence_transformers(encoder: Encoder, encoder_path: Path) -> None:
    texts = ["high tide", "low", "the tide rises and the tide falls " * 3]
    found = numbers(encoder.encode([text(written) for written in texts]))
    wanted = SentenceTransformer(str(encoder_path), device="cpu").encode(texts)
    assert found[0].shape == (DIMENSIONS,)
    assert np.abs(np.stack(found) - wanted).max() < CLOSE
    assert np.abs(wanted[0] - wanted[1]).max() > 0.1, "other texts have other vectors"


async def test_scores_are_those_of_a_cross_encoder(reranker: Encoder, reranker_path: Path) -> None:
    pairs = [("tide", "the sea rises"), ("tide", "bread"), ("sea", "b"), ("sea", "")]
    found = numbers(reranker.encode([await pair(*one) for one in pairs]))
    wanted = CrossEncoder(str(reranker_path), device="cpu").predict(pairs)
    assert np.abs(np.concatenate(found) - wanted).max() < CLOSE
    assert len({round(float(score), 4) for score in wanted}) == 4


async def test_a_pair_is_told_from_the_same_tokens_as_one_text(reranker: Encoder) -> None:
    told = await pair("tide", "sea")
    as_pair, as_text = numbers(reranker.encode([told, Text(told.token_ids)]))
    assert abs(as_pair[0] - as_text[0]) > 1e-4


@given(
    st.lists(st.lists(st.integers(len(WORDS) // 2, len(WORDS) - 1), max_size=CONTEXT - 2), min_size=2, max_size=12),
    st.data(),
)
def test_a_vector_does_not_depend_on_the_batch(encoder: Encoder, lists: list[list[int]], data: st.DataObject) -> None:
    """Law: no other text, no order and no padding changes the embedding of a text."""
    texts = [Text([CLS, *ids, SEP]) for ids in lists]
    together = numbers(encoder.encode(texts))
    chosen = data.draw(st.integers(0, len(texts) - 1))
    [alone] = numbers(encoder.encode([texts[chosen]]))
    assert np.abs(together[chosen] - alone).max() < CLOSE


def test_texts_of_half_the_length_are_computed_apart() -> None:
    lengths = [4, 10, 5, 9, 2]
    groups = _of_similar_length([Text([5] * length) for length in lengths])
    assert [[lengths[i] for i in group] for group in groups] == [[10, 9, 5], [4, 2]]


def test_limits_are_those_of_the_model(encoder: Encoder) -> None:
    assert (encoder.max_len, encoder.vocab_size) == (CONTEXT, len(WORDS))


def test_a_model_whose_positions_begin_behind_that_of_padding_reads_fewer_tokens(tmp_path: Path) -> None:
    sizes = {"hidden_size": DIMENSIONS, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = RobertaConfig(vocab_size=len(WORDS), max_position_embeddings=66, pad_token_id=1, **sizes)
    RobertaModel(config).save_pretrained(tmp_path)
    tokenizer = pretrained()
    tokenizer.model_max_length = 10**9  # as of tokenizers that know no limit
    tokenizer.save_pretrained(tmp_path)
    encoder = Encoder.load(str(tmp_path), "embedding", CPU, torch.float32)
    assert encoder.max_len == 64
    [vector] = numbers(encoder.encode([Text([5] * encoder.max_len)]))
    assert vector.shape == (DIMENSIONS,)


def test_a_classifier_with_several_labels_ranks_nothing(tmp_path: Path) -> None:
    path = save_reranker(tmp_path, num_labels=3)
    with pytest.raises(EngineStartError, match="3 labels"):
        Encoder.load(str(path), "rerank", CPU, torch.float32)


def test_a_directory_without_a_model_is_refused_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(EngineStartError, match=str(tmp_path)):
        Encoder.load(str(tmp_path), "embedding", CPU, torch.float32)
