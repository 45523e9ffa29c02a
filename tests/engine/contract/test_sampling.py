"""Tokens, log probabilities and ends, compared with transformers' model where that can tell what is right."""

import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from llguidance import LLMatcher

from engine.interface import FinishReason, StepPlan, TokenLogprobs
from tests.engine.contract.checked_engine import CheckedEngine
from tests.engine.contract.conftest import MakeNew
from tests.engine.contract.engines import END, LETTERS, MAX_TOKEN, OTHER_END, POISON
from tests.engine.contract.reported import Reported, assert_alike
from tests.engine.drive import Driven, drive

Model = tuple[Path, Any]
PROMPT = [*range(1, 12)]


def random_prompts(count: int, seed: int = 8) -> dict[str, list[int]]:
    rng = random.Random(seed)
    return {f"s{i}": [rng.randint(1, MAX_TOKEN) for _ in range(rng.randint(2, 20))] for i in range(count)}


def text(driven: Driven) -> str:
    return "".join(LETTERS[token_id - 1] for token_id in driven.output if token_id not in (END, OTHER_END))


# -- compared with transformers ----------------------------------------------------------------------------------------

# Ours, and those of `generate` that do the same.
PROCESSORS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "none": ({}, {}),
    "repetition": ({"repetition_penalty": 1.4}, {"repetition_penalty": 1.4}),
    "bias": ({"logit_bias": ((3, 4.0), (50, -6.0))}, {"sequence_bias": [[[3], 4.0], [[50], -6.0]]}),
    "both": (
        {"repetition_penalty": 0.8, "logit_bias": ((3, 2.0), (8, 2.0))},
        {"repetition_penalty": 0.8, "sequence_bias": [[[3], 2.0], [[8], 2.0]]},
    ),
    "minimum": (
        {"min_tokens": 9, "logit_bias": ((END, 50.0),)},
        {"min_new_tokens": 9, "sequence_bias": [[[END], 50.0]]},
    ),
}


@pytest.mark.parametrize("name", PROCESSORS)
def test_greedy_tokens_are_those_of_generate(
    transformers_engine: CheckedEngine, model: Model, new: MakeNew, name: str
) -> None:
    ours, theirs = PROCESSORS[name]
    prompts = random_prompts(5)
    driven = drive(transformers_engine, [new(k, p, max_tokens=12, **ours) for k, p in prompts.items()])
    for seq_id, prompt in prompts.items():
        ids = torch.tensor([prompt])
        settings = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, **theirs}
        expected = model[1].generate(ids, attention_mask=torch.ones_like(ids), **settings)
        assert driven[seq_id].output == expected[0, len(prompt) :].tolist()
    assert len({token for d in driven.values() for token in d.output}) > 5, "the model does not repeat one token"


@pytest.mark.parametrize("chunk", [100, 3, 1])
def test_logprobs_are_those_of_the_unaltered_logits(
    transformers_engine: CheckedEngine, model: Model, new: MakeNew, chunk: int
) -> None:
    """Sampling options do not change log probabilities, of prompts and outputs, in chunks of any size."""
    options: list[dict[str, Any]] = [
        {"temperature": 0.0, "logprobs": 4, "prompt_logprobs": 2},
        {"temperature": 0.7, "top_k": 5, "seed": 3, "logprobs": 0, "prompt_logprobs": 0},
        {"repetition_penalty": 2.0, "logit_bias": ((5, 50.0),), "seed": 1, "logprobs": 20},
        {"temperature": 0.0, "prompt_logprobs": 20},
        {"temperature": 0.0},
    ]
    prompts = random_prompts(len(options), chunk)
    news = [new(k, prompts[k], max_tokens=6, **chosen) for k, chosen in zip(prompts, options, strict=True)]
    reported = Reported()
    driven = drive(transformers_engine, news, chunk=lambda s: chunk, after_step=reported)
    for sequence in news:
        tokens = [*sequence.prompt_token_ids, *driven[sequence.seq_id].output]
        with torch.no_grad():
            logprobs = model[1](torch.tensor([tokens])).logits[0].log_softmax(-1)
        num_prompt, sampling = len(sequence.prompt_token_ids), sequence.sampling
        outputs, prompt = range(num_prompt, len(tokens)), range(1, num_prompt)
        assert_alike(reported.output[sequence.seq_id], entries_of(logprobs, tokens, outputs, sampling.logprobs))
        assert_alike(reported.prompt[sequence.seq_id], entries_of(logprobs, tokens, prompt, sampling.prompt_logprobs))


def entries_of(logprobs: torch.Tensor, tokens: list[int], positions: range, top: int | None) -> list[TokenLogprobs]:
    """Return the expected report by definition, from the log probabilities after each of `tokens`."""
    entries = []
    for at in positions if top is not None else ():
        values, token_ids = logprobs[at - 1].topk(top or 0)
        likeliest = tuple(zip(token_ids.tolist(), values.tolist(), strict=True))
        entries.append(TokenLogprobs(tokens[at], logprobs[at - 1, tokens[at]].item(), likeliest))
    return entries


def test_the_distribution_of_samples_is_the_models(computing_engine: CheckedEngine, model: Model, new: MakeNew) -> None:
    """With 400 seeds, each likely token comes about as often as its probability says; within 5 standard deviations."""
    count, temperature = 400, 0.7
    with torch.no_grad():
        expected = (model[1](torch.tensor([PROMPT])).logits[0, -1] / temperature).softmax(-1)
    news = [new(f"s{i}", PROMPT, max_tokens=1, temperature=temperature, seed=i) for i in range(count)]
    drawn = [d.output[0] for d in drive(computing_engine, news, arrivals_a_step=20).values()]
    for token_id, probability in enumerate(expected.tolist()):
        deviation = (count * probability * (1 - probability)) ** 0.5
        assert abs(drawn.count(token_id) - count * probability) <= 5 * deviation + 1


# -- grammars ----------------------------------------------------------------------------------------------------------


def regex(pattern: str) -> str:
    return LLMatcher.grammar_from_regex(pattern)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("options", [{}, {"ignore_eos": True}, {"min_tokens": 15}], ids=["plain", "eos ignored", "min"])
def test_the_end_of_a_grammar_ends_the_sequence(
    computing_engine: CheckedEngine, new: MakeNew, options: dict[str, Any], temperature: float
) -> None:
    more: dict[str, Any] = {"max_tokens": 20, "temperature": temperature, "grammar": regex("yes|no"), **options}
    driven = drive(computing_engine, [new("a", PROMPT, **more), new("other", PROMPT, ignore_eos=True)])
    assert text(driven["a"]) in ("yes", "no") and driven["a"].finish_reason is FinishReason.STOP
    assert len(driven["other"].output) == 8


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_output_that_the_model_would_not_end_ends_at_its_limit(
    computing_engine: CheckedEngine, new: MakeNew, temperature: float
) -> None:
    grammar = regex('"[a-m]*","[n-z]*"')
    news = [new(f"s{i}", PROMPT, max_tokens=12, temperature=temperature, seed=i, grammar=grammar) for i in range(4)]
    for driven in drive(computing_engine, news).values():
        assert driven.finish_reason is FinishReason.STOP
        assert re.fullmatch('"[a-m]*","[n-z]*"', text(driven))


def test_a_bad_grammar_fails_only_its_sequence(computing_engine: CheckedEngine, new: MakeNew) -> None:
    good = [
        new(f"s{i}", PROMPT, max_tokens=10, seed=i, temperature=1.0, grammar=grammar)
        for i, grammar in enumerate([None, regex("[ab]+")])
    ]
    expected = {k: d.output for k, d in drive(computing_engine, good).items()}
    bad = [new(f"bad{i}", PROMPT, grammar=grammar) for i, grammar in enumerate(["start: /[/", "{}"])]
    driven = drive(computing_engine, [bad[0], *good, bad[1]])
    assert {k: d.output for k, d in driven.items() if k.startswith("s")} == expected
    assert all("does not compile" in str(driven[sequence.seq_id].failure) for sequence in bad)


# -- failures ----------------------------------------------------------------------------------------------------------


def test_a_poisoned_sequence_fails_alone_and_leaves_clean_blocks(computing_engine: CheckedEngine, new: MakeNew) -> None:
    engine, block = computing_engine, computing_engine.info.block_size
    healthy = [new(f"h{i}", range(1 + i, 12 + i), max_tokens=6, ignore_eos=True) for i in range(3)]
    expected = {k: d.output for k, d in drive(engine, healthy).items()}
    engine.occupy(engine.info.num_blocks - 24)
    for i in range(3):  # the second and third time in blocks that held NaN
        poisoned = [new(f"p{k}", [5, 6, POISON, 7, 8], max_tokens=6) for k in range(3)]
        driven = drive(engine, [*poisoned[:2], *healthy, poisoned[2]])
        assert {k: d.output for k, d in driven.items() if k.startswith("h")} == expected
        assert all("not finite" in str(driven[sequence.seq_id].failure) for sequence in poisoned)
        if not engine.run(("q", 3 * block), start=(new("q", [1 + i, *[POISON] * (3 * block)]),)).failures:
            engine.step(StepPlan(0, abort=("q",)))  # before its logits were checked


# -- ends --------------------------------------------------------------------------------------------------------------


def test_a_sequence_ends_at_its_length_or_at_the_end_of_the_context(engine: CheckedEngine, new: MakeNew) -> None:
    num_prompt = engine.info.max_model_len - 3
    news = [new("short", PROMPT, max_tokens=5, ignore_eos=True)]
    news += [new("full", [3] * num_prompt, max_tokens=50, ignore_eos=True)]
    short, full = drive(engine, news).values()
    assert (len(short.output), short.finish_reason) == (5, FinishReason.LENGTH)
    assert (len(full.output), full.finish_reason) == (3, FinishReason.LENGTH)


def test_a_sequence_ends_with_its_stop_token(engine: CheckedEngine, new: MakeNew) -> None:
    free = drive(engine, [new("free", PROMPT, max_tokens=8, ignore_eos=True, seed=4)])["free"].output
    stop = free[3]
    where = free.index(stop) + 1
    news = [
        new("stopped", PROMPT, max_tokens=8, stop_token_ids=(stop, 10**6), ignore_eos=True, seed=4),
        new("at its length", PROMPT, max_tokens=where, stop_token_ids=(stop,), ignore_eos=True, seed=4),
    ]
    for driven in drive(engine, news).values():
        assert (driven.output, driven.finish_reason) == (free[:where], FinishReason.STOP)


@pytest.mark.parametrize("end", [END, OTHER_END])
def test_the_models_end_tokens_end_a_sequence(computing_engine: CheckedEngine, new: MakeNew, end: int) -> None:
    assert set(computing_engine.info.eos_token_ids) == {END, OTHER_END}
    options = {"max_tokens": 6, "logit_bias": ((end, 1000.0),)}
    ended, ignoring = drive(
        computing_engine, [new("ended", PROMPT, **options), new("ignoring", PROMPT, ignore_eos=True, **options)]
    ).values()
    assert (ended.output, ended.finish_reason) == ([end], FinishReason.STOP)
    assert (ignoring.output, ignoring.finish_reason) == ([end] * 6, FinishReason.LENGTH)


def test_no_end_comes_before_min_tokens(computing_engine: CheckedEngine, new: MakeNew) -> None:
    stop = 7
    options = {"max_tokens": 20, "temperature": 1.0, "stop_token_ids": (stop,)}
    bias = tuple((token_id, 1000.0) for token_id in (END, OTHER_END, stop))
    news = [new(str(n), PROMPT, min_tokens=n, seed=n, logit_bias=bias, **options) for n in (0, 1, 6, 20)]
    driven = drive(computing_engine, news)
    assert {k: len(d.output) for k, d in driven.items()} == {"0": 1, "1": 2, "6": 7, "20": 20}
    assert {k: d.finish_reason for k, d in driven.items()} == {
        "0": FinishReason.STOP,
        "1": FinishReason.STOP,
        "6": FinishReason.STOP,
        "20": FinishReason.LENGTH,
    }
    for sequence in driven.values():
        assert not {END, OTHER_END, stop} & set(sequence.output[: sequence.new.sampling.min_tokens])
