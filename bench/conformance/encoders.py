"""An embedding model and a reranker with random weights, for clients that ask for vectors.

Their vocabulary is `w0`, `w1`, …, each with its number as the token id. Knows files of models; does not know servers.
"""

import json
from pathlib import Path
from typing import Any

from bench.isolation.servers import write_word_tokenizer

NUM_WORDS = 64
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.5,
}


def write_encoders(folder: Path) -> Path:
    """Write the models `vectors` and `ranker` into `folder`. Return the file for `--models` that names them."""
    from transformers import BertConfig, BertForSequenceClassification, BertModel

    models = {}
    for name, kind, of in (("vectors", "embedding", BertModel), ("ranker", "rerank", BertForSequenceClassification)):
        of(BertConfig(vocab_size=NUM_WORDS, num_labels=1, **SIZES)).save_pretrained(folder / name)
        write_word_tokenizer(folder / name, NUM_WORDS)
        models[name] = {"path": str(folder / name), "kind": kind}
    file = folder / "models.yaml"
    file.write_text(json.dumps({"models": models}), encoding="utf-8")
    return file
