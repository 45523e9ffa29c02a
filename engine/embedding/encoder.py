"""A loaded model of sentence-transformers: from token ids to embeddings, or from pairs of texts to scores.

Knows padding and the model's modules; does not know plans or sequences. Texts of similar lengths are computed together,
and padding is masked: so what comes out for a text does not depend on the others, beyond the rounding of floats.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from sentence_transformers import CrossEncoder, SentenceTransformer
from torch import Tensor

from engine.config import EngineStartError
from engine.embedding.stepper import Text
from engine.interface import ModelKind


class Encoder:
    """One model. `encode` may be called from one thread only."""

    def __init__(self, model: Any, output: str, finish: Callable[[Tensor], Tensor]) -> None:
        """`output` is the name of what the model computes for each text, and `finish` is applied to it."""
        self._model = model.eval()
        self._output = output
        self._finish = finish
        config = model.transformers_model.config.get_text_config()
        self.vocab_size = int(config.vocab_size)
        self._tells_texts_apart = "token_type_ids" in model.tokenizer.model_input_names
        lengths = [model.max_seq_length, getattr(config, "max_position_embeddings", None), _num_positions(model)]
        self.max_len = int(min(length for length in lengths if length))  # tokens of a text, or of a pair

    @classmethod
    def load(cls, path: str, kind: ModelKind, device: torch.device, dtype: torch.dtype) -> "Encoder":
        """Load the model at `path`, a directory or a hub id. Raises `EngineStartError` if that fails."""
        given: dict[str, Any] = {"device": str(device), "model_kwargs": {"dtype": dtype}}
        try:
            if kind == "embedding":
                return cls(SentenceTransformer(path, **given), "sentence_embedding", lambda vectors: vectors)
            scorer = CrossEncoder(path, **given)
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise EngineStartError(f"model {path}: {str(error).splitlines()[0]}") from error
        if scorer.num_labels != 1:
            raise EngineStartError(f"model {path} has {scorer.num_labels} labels: a reranker has one, the score")
        return cls(scorer, "scores", scorer.activation_fn)

    @torch.inference_mode()
    def encode(self, texts: Sequence[Text]) -> list[bytes]:
        """Return a vector of each text, in order, as float32 in little-endian order."""
        vectors = [b""] * len(texts)
        for group in _of_similar_length(texts):
            computed = self._model(self._features([texts[i] for i in group]))[self._output].float()
            rows = self._finish(computed).reshape(len(group), -1).cpu().numpy().astype("<f4")
            for i, row in zip(group, rows, strict=True):
                vectors[i] = row.tobytes()
        return vectors

    def _features(self, texts: Sequence[Text]) -> dict[str, Tensor]:
        shape = len(texts), max(len(text.token_ids) for text in texts)
        ids, mask, types = np.zeros(shape, np.int64), np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        for row, text in enumerate(texts):
            length = len(text.token_ids)
            ids[row, :length] = text.token_ids
            mask[row, :length] = 1
            if text.second_from:
                types[row, text.second_from : length] = 1
        features = {"input_ids": ids, "attention_mask": mask}
        if self._tells_texts_apart:
            features["token_type_ids"] = types
        return {name: torch.from_numpy(value).to(self._model.device) for name, value in features.items()}


def _num_positions(model: Any) -> int | None:
    """Return how many tokens have a position, in models such as RoBERTa, whose first one is behind that of padding.

    None for other models.
    """
    tables = [m for name, m in model.transformers_model.named_modules() if name.endswith("position_embeddings")]
    return min((m.num_embeddings - m.padding_idx - 1 for m in tables if getattr(m, "padding_idx", None)), default=None)


def _of_similar_length(texts: Sequence[Text]) -> Iterator[list[int]]:
    """Yield the indexes of texts to be computed together: no text has less than half of the tokens of another one."""
    group: list[int] = []
    for i in sorted(range(len(texts)), key=lambda i: -len(texts[i].token_ids)):
        if group and 2 * len(texts[i].token_ids) < len(texts[group[0]].token_ids):
            yield group
            group = []
        group.append(i)
    if group:
        yield group
