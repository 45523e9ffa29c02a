"""Train the demo model: `python -m demo_model.training.train` makes demo_model/weights from nothing but this package.

Training takes about 37 minutes on two idle CPU cores, and 58 minutes with one thread (estimated from tokens per
second). Rows grow during training: the model learns its skills on short rows, which are cheap, and then on long rows.
Three shorter stages improve what was weakest, and the last one teaches to call tools. Muon updates the matrices; AdamW
updates the embeddings and norms. Matrix products are in bf16, and master weights in fp32. Knows the model's shape and
the schedule; does not know what is taught (corpus.py) or how well the model works (evaluate.py).
"""

import argparse
import math
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from demo_model.location import demo_model_path
from demo_model.training import skills, smalltalk
from demo_model.training.batches import Batch, batches
from demo_model.training.corpus import FINISH, LIMITS, LONG, LONGER, MIDDLE, SHORT, TOOLS, Corpus, Course
from demo_model.training.facts import load_facts, load_words
from demo_model.training.tokenizer import END_OF_TEXT, END_OF_TURN, MAX_CONTEXT, VOCAB_SIZE, train_tokenizer
from demo_model.training.tool_corpus import ToolCorpus

TOKENS_PER_BATCH = 4096
MUON_LR = 4e-3  # peak learning rate
ADAMW_LR = 3e-3  # peak learning rate
WARMUP = 0.02  # share of the steps over which the learning rate rises to its peak
DECAY = 0.5  # share of the steps over which the learning rate falls to zero
LONGEST_SHORT_ROW = 512
SHORT_ROWS = "short_rows"  # the name of `short_rows_attention` in transformers
REPORT_EVERY_S = 20.0
# Factor on the weights of the final norm. It has the effect of dividing every sampling temperature by this factor: the
# model is taught one answer to each request, and should give this answer also at the default temperature of 1. A power
# of two is exact in bf16.
SHARPENING = 4.0


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of training with its own learning rate schedule, made of courses and each course's share of the steps.

    A stage starts from the saved model of the stage before, with new optimizers, so that it can be run alone.
    """

    tokens: int
    peak: float  # factor on the peak learning rates above
    courses: tuple[tuple[float, Course], ...]


# The stages use many small steps: with three times as many tokens per step, the model had not begun to copy text after
# 2 M tokens.
STAGES = (
    Stage(14_000_000, 1.0, ((0.65, SHORT), (0.2, MIDDLE), (0.15, LONG))),
    Stage(4_000_000, 0.4, ((1.0, LONGER),)),
    Stage(6_000_000, 0.6, ((1.0, LIMITS),)),
    Stage(3_000_000, 0.25, ((1.0, FINISH),)),
    Stage(14_000_000, 0.5, ((1.0, TOOLS),)),
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer that is trained on the facts, the wording of the skills and the list of words."""
    texts = [text for fact in load_facts() for text in (*[fact.answer] * 3, *fact.ask)]
    texts += [skills.DECLINE_SUM, skills.DECLINE_COUNT, smalltalk.INTRODUCTION, smalltalk.GREETING] * 3
    texts += ["Repeat", "repeat", "Please", "please", "Count", "count", "Say", "Echo", "exactly"] * 20
    return train_tokenizer([*texts, *load_words()])


def build_corpus(tokenizer: PreTrainedTokenizerFast) -> ToolCorpus:
    """Return the corpus. Its made-up words are built from the pieces of `tokenizer`."""
    pieces = sorted(piece for piece in tokenizer.get_vocab() if piece.isascii() and piece.isalpha() and piece.islower())
    return ToolCorpus(load_facts(), load_words(), pieces)


def build_model(tokenizer: PreTrainedTokenizerFast, layers: int = 4, hidden: int = 128) -> LlamaForCausalLM:
    """Return a plain Llama with new fp32 weights; two query heads share a KV head."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 64,
        head_dim=32,
        max_position_embeddings=MAX_CONTEXT,
        initializer_range=0.06,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def short_rows_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    **_: Any,
) -> tuple[Tensor, None]:
    """Return the causal attention (rows, T, heads, d) for training on short rows on a CPU, and None for its weights.

    It uses plain batched matrix products, with the query heads of a KV head packed as rows, and a softmax in bf16.
    Forward and backward pass of 4,096 tokens in rows of 64 took 5.6 ms for each layer, against 12 ms for transformers'
    eager attention and 38 ms for torch's flash kernel (one core, avx512_bf16). The flash kernel is faster for rows of
    about 1,024 tokens and more. Rows are padded on the right, and there is no KV cache.

    `query` is (rows, heads, T, d); `key` and `value` are (rows, kv heads, T, d). Raises `ValueError` if a mask is
    given.
    """
    if attention_mask is not None:
        raise ValueError("short_rows attention is causal only and takes no mask")
    rows, heads, length, dim = query.shape
    kv_heads = key.shape[1]
    packed = query.reshape(rows * kv_heads, heads // kv_heads * length, dim)
    future = torch.full((length, length), float("-inf"), dtype=query.dtype).triu(1).repeat(heads // kv_heads, 1)
    keys, values = (kv.reshape(rows * kv_heads, length, dim) for kv in (key, value))
    scores = torch.baddbmm(future, packed, keys.transpose(1, 2), alpha=scaling)
    mixed = torch.bmm(scores.softmax(-1), values)
    return mixed.view(rows, heads, length, dim).transpose(1, 2).contiguous(), None


class Trainer:
    """A trainer that owns the model's weights and both optimizers. One `step` is one update."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        AttentionInterface.register(SHORT_ROWS, short_rows_attention)
        self.model = model
        matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed_tokens" not in n]
        others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed_tokens" in n]
        self._optimizers: tuple[torch.optim.Optimizer, ...] = (
            torch.optim.Muon(matrices, lr=MUON_LR, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr=ADAMW_LR, betas=(0.9, 0.95), weight_decay=0.0),
        )
        self._peak_lrs = (MUON_LR, ADAMW_LR)

    def step(self, batch: Batch, lr_scale: float) -> float:
        """Update the weights on one batch. Return the mean loss before the update, in nats per learned token."""
        loss = self.loss(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer, peak_lr in zip(self._optimizers, self._peak_lrs, strict=True):
            for parameters in optimizer.param_groups:
                parameters["lr"] = peak_lr * lr_scale
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return loss.item()

    def loss(self, batch: Batch) -> torch.Tensor:
        """Return the mean loss over the tokens to be learned. Logits are computed only for these tokens."""
        rows_are_short = batch.input_ids.shape[1] <= LONGEST_SHORT_ROW
        self.model.set_attn_implementation(SHORT_ROWS if rows_are_short else "sdpa")
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = self.model.model(input_ids=batch.input_ids, use_cache=False).last_hidden_state
            learned = batch.labels >= 0
            logits = self.model.lm_head(hidden[learned])
        return nn.functional.cross_entropy(logits.float(), batch.labels[learned])


def lr_scale(progress: float) -> float:
    """Return the share of the peak learning rate at `progress`, which is in [0, 1].

    The share rises during warm-up, stays at 1, and then falls linearly to zero.
    """
    return min(1.0, (progress + 1e-3) / WARMUP, (1.0 - progress) / DECAY)


def training_steps(
    corpus: Corpus, tokenizer: PreTrainedTokenizerFast, stage: Stage, seed: int
) -> Iterator[tuple[float, Batch]]:
    """Yield the progress in [0, 1) and one batch for each step of a stage."""
    steps = max(1, stage.tokens // TOKENS_PER_BATCH)
    done = 0
    for index, (share, course) in enumerate(stage.courses):
        examples = corpus.examples(seed + index, course)
        stream = batches(examples, tokenizer, TOKENS_PER_BATCH, course.max_tokens)
        until = steps if index + 1 == len(stage.courses) else min(steps, done + math.ceil(steps * share))
        for step in range(done, until):
            yield step / steps, next(stream)
        done = until


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    """Write the weights (bf16, with `SHARPENING`) and the tokenizer to `directory`.

    Both are written to a new directory first, which then replaces `directory`.
    """
    served = LlamaForCausalLM(model.config)
    served.load_state_dict(model.state_dict())
    with torch.no_grad():
        served.model.norm.weight *= SHARPENING
    served.to(torch.bfloat16)
    end_ids = tokenizer.convert_tokens_to_ids([END_OF_TURN, END_OF_TEXT])
    served.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=end_ids, pad_token_id=tokenizer.pad_token_id, do_sample=False
    )
    new, old = directory.with_name(directory.name + ".new"), directory.with_name(directory.name + ".old")
    for leftover in (new, old):
        shutil.rmtree(leftover, ignore_errors=True)
    served.save_pretrained(new)
    tokenizer.save_pretrained(new, save_jinja_files=False)
    for file in new.iterdir():
        file.chmod(0o644)  # safetensors makes files that only their owner can read, and the wheel keeps this mode
    if directory.exists():
        directory.rename(old)
    new.rename(directory)
    shutil.rmtree(old, ignore_errors=True)


def load(directory: Path) -> LlamaForCausalLM:
    """Return a saved model with fp32 master weights, without `SHARPENING`."""
    model: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        model.model.norm.weight /= SHARPENING
    return model


def train(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, stage: Stage, seed: int) -> None:
    """Run one stage on `model`, and print the loss every `REPORT_EVERY_S` seconds."""
    trainer = Trainer(model)
    started = reported = time.monotonic()
    losses: list[float] = []
    for progress, batch in training_steps(build_corpus(tokenizer), tokenizer, stage, seed):
        losses.append(trainer.step(batch, stage.peak * lr_scale(progress)))
        now = time.monotonic()
        if now - reported >= REPORT_EVERY_S:
            print(f"{now - started:6.0f} s  {progress:6.1%}  loss {sum(losses) / len(losses):.4f}", flush=True)
            reported = now
            losses.clear()


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Train Tidegate's demo model from scratch.")
    parser.add_argument("--out", type=Path, default=demo_model_path(), help="directory that receives the model")
    parser.add_argument("--from-stage", type=int, default=0, help="1 to 4: go on from the model in --out")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the tokens of every stage")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2, help="the shipped weights were made with one")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    tokenizer = build_tokenizer()
    for number, stage in list(enumerate(STAGES))[args.from_stage :]:
        torch.manual_seed(args.seed)
        model = load(args.out) if number else build_model(tokenizer)
        scaled = replace(stage, tokens=int(stage.tokens * args.scale))
        train(model, tokenizer, scaled, seed=1000 * args.seed + 100 * number)
        save(model, tokenizer, args.out)
        print(f"stage {number} saved in {args.out}", flush=True)


if __name__ == "__main__":
    main()
