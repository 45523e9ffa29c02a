"""Tiny encoders with random weights, as sentence-transformers saves them: one for embeddings, and one that ranks.

Their vocabulary is the letters, so that texts have about as many tokens as letters.
"""

from pathlib import Path
from string import ascii_lowercase
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

CONTEXT = 128  # tokens of a text
DIMENSIONS = 32
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
CLS, SEP = 2, 3
WORDS = (*SPECIAL, *ascii_lowercase, *(f"##{letter}" for letter in ascii_lowercase))


def pretrained() -> PreTrainedTokenizerFast:
    backend = Backend(models.WordPiece({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)],
    )
    inputs = ["input_ids", "token_type_ids", "attention_mask"]  # as the tokenizers of BERT say
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token"), SPECIAL, strict=True))
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, model_max_length=CONTEXT, model_input_names=inputs, **names
    )


def save_encoder(directory: Path) -> Path:
    """Write an embedding model. Its weights are the same each time."""
    from sentence_transformers import SentenceTransformer
    from transformers import BertModel

    _save(directory / "bare", BertModel)
    SentenceTransformer(str(directory / "bare"), device="cpu").save(str(directory / "encoder"))
    return directory / "encoder"


def save_reranker(directory: Path, num_labels: int = 1) -> Path:
    """Write a classifier as transformers saves it, which has no file of sentence-transformers."""
    from transformers import BertForSequenceClassification

    return _save(directory / f"reranker-{num_labels}", BertForSequenceClassification, num_labels=num_labels)


def _save(directory: Path, kind: Any, **config: Any) -> Path:
    import torch
    from transformers import BertConfig

    with torch.random.fork_rng():
        torch.manual_seed(0)
        sizes = {"hidden_size": DIMENSIONS, "intermediate_size": 64, "max_position_embeddings": CONTEXT}
        heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "initializer_range": 0.5}
        kind(BertConfig(vocab_size=len(WORDS), **sizes, **heads, **config)).save_pretrained(directory)
    pretrained().save_pretrained(directory)
    return directory
