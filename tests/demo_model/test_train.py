"""Training: labels of batches, the attention for short rows, and that a few steps lower the loss."""

from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from demo_model.training.batches import batches
from demo_model.training.corpus import Corpus, Course, Segment
from demo_model.training.train import (
    SHORT_ROWS,
    STAGES,
    Trainer,
    build_corpus,
    build_model,
    build_tokenizer,
    load,
    lr_scale,
    save,
    short_rows_attention,
    training_steps,
)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer()


@pytest.fixture(scope="module")
def corpus(tokenizer: PreTrainedTokenizerFast) -> Corpus:
    return build_corpus(tokenizer)


def test_only_learned_segments_are_labelled(tokenizer: PreTrainedTokenizerFast) -> None:
    example = (Segment("<|user|>Hi<|end|><|assistant|>", False), Segment("ab<|end|>", True))
    batch = next(batches(iter([example] * 512), tokenizer, tokens_per_batch=48, max_tokens=64))
    ids, labels = batch.input_ids[0], batch.labels[0]
    answer = tokenizer("ab<|end|>")["input_ids"]
    assert labels[labels >= 0].tolist() == answer
    assert ids[1:][(labels >= 0)[:-1]].tolist()[: len(answer) - 1] == answer[:-1]
    assert (ids[len(tokenizer("".join(s.text for s in example))["input_ids"]) - 1 :] == tokenizer.pad_token_id).all()


def test_examples_that_are_too_long_are_left_out(tokenizer: PreTrainedTokenizerFast, corpus: Corpus) -> None:
    stream = batches(corpus.examples(1, Course(128, long_share=0.5)), tokenizer, tokens_per_batch=1024, max_tokens=100)
    assert all(batch.input_ids.shape[1] <= 128 for batch in islice(stream, 10))
    assert all((batch.input_ids != tokenizer.pad_token_id).sum(1).max() <= 100 for batch in islice(stream, 10))


def test_short_attention_equals_sdpa(tokenizer: PreTrainedTokenizerFast) -> None:
    torch.manual_seed(0)
    AttentionInterface.register(SHORT_ROWS, short_rows_attention)
    model = build_model(tokenizer, layers=2).eval()
    ids = torch.randint(10, 1000, (3, 20))
    logits = {}
    for name in (SHORT_ROWS, "sdpa"):
        model.set_attn_implementation(name)
        with torch.inference_mode():
            logits[name] = model(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(logits[SHORT_ROWS], logits["sdpa"], rtol=1e-4, atol=1e-4)


def test_a_few_steps_lower_the_loss(tokenizer: PreTrainedTokenizerFast, corpus: Corpus) -> None:
    torch.manual_seed(0)
    trainer = Trainer(build_model(tokenizer, layers=1, hidden=64))
    stream = batches(corpus.examples(3, Course(128, long_share=0.0)), tokenizer, tokens_per_batch=1024, max_tokens=128)
    losses = [trainer.step(batch, lr_scale=1.0) for batch in islice(stream, 24)]
    assert sum(losses[-4:]) < 0.8 * sum(losses[:4])


def test_the_schedule_uses_every_row_length_and_ends_at_zero(
    tokenizer: PreTrainedTokenizerFast, corpus: Corpus
) -> None:
    steps = list(training_steps(corpus, tokenizer, replace(STAGES[0], tokens=4096 * 20), seed=0))
    assert [progress for progress, _ in steps] == [step / 20 for step in range(20)]
    assert steps[0][1].input_ids.shape[1] <= 128
    assert max(batch.input_ids.shape[1] for _, batch in steps) > 512
    assert lr_scale(0.3) == 1.0 and lr_scale(1.0) == 0.0


def test_saved_models_load_and_replace_each_other(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    directory = tmp_path / "model"
    for seed in (1, 2):
        torch.manual_seed(seed)
        save(build_model(tokenizer, layers=1, hidden=64), tokenizer, directory)
    loaded = AutoModelForCausalLM.from_pretrained(directory)
    assert loaded.dtype == torch.bfloat16
    assert loaded.generation_config.eos_token_id == AutoTokenizer.from_pretrained(directory).convert_tokens_to_ids(
        ["<|end|>", "<|endoftext|>"]
    )
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_training_goes_on_from_a_saved_model(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = build_model(tokenizer, layers=1, hidden=64)
    save(model, tokenizer, tmp_path / "model")
    again = load(tmp_path / "model")
    for (name, before), after in zip(model.named_parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(after, before.to(torch.bfloat16).float(), msg=name)
