"""A tiny model's text for tests: its name, its context, and a tokenizer for any text."""

from collections.abc import Sequence
from functools import cache

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from gateway.requests.tokens.tokenizer import Tokenizer

MODEL = "tide/tiny"
CONTEXT = 256
TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role not in ['system', 'user', 'assistant', 'tool'] %}{{ raise_exception('odd role') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@cache
def pretrained() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer for any text: about one token per byte, and four for an emoji."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["the tide rises and the tide falls, user assistant system"] * 3, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", chat_template=TEMPLATE)


@cache
def tiny_tokenizer() -> Tokenizer:
    return Tokenizer(pretrained(), max_model_len=CONTEXT)


def token_ids(text: str) -> tuple[int, ...]:
    return tuple(pretrained().backend_tokenizer.encode(text, add_special_tokens=False).ids)


def text_of(ids: Sequence[int]) -> str:
    text: str = pretrained().backend_tokenizer.decode(list(ids), skip_special_tokens=False)
    return text
