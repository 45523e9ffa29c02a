"""The corpus: reproducible from its seed, with right answers, and without the questions of the evaluation."""

import random
import re
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from demo_model.training import skills
from demo_model.training.corpus import Corpus, Course
from demo_model.training.facts import load_facts, load_words

COURSE = Course(max_tokens=512, long_share=0.3, long_counts=0.2, hard_repeats=0.3)
seeds = st.integers(0, 2**32).map(random.Random)


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return Corpus(load_facts(), load_words(), ["ti", "de", "gate", "wa", "ter"])


def test_the_same_seed_makes_the_same_examples(corpus: Corpus) -> None:
    first, second = (list(islice(corpus.examples(7, COURSE), 200)) for _ in range(2))
    assert first == second
    assert first != list(islice(corpus.examples(8, COURSE), 200))


@given(rng=seeds)
def test_every_example_has_something_to_learn_and_ends(corpus: Corpus, rng: random.Random) -> None:
    example = corpus.example(rng, COURSE)
    assert example[-1].learn
    assert example[-1].text.endswith(("<|end|>", "<|endoftext|>"))


@given(rng=seeds, text=st.text("abcXYZ019-_", min_size=1))
def test_a_repeat_contains_its_answer(rng: random.Random, text: str) -> None:
    prompt, answer = skills.repeat(rng, text)
    assert answer == text
    assert text in prompt


@given(rng=seeds)
def test_nonces_hold_letters_digits_hyphens_and_underscores_only(rng: random.Random) -> None:
    assert re.fullmatch(r"[A-Za-z0-9_-]{2,48}", skills.make_nonce(rng))
    assert re.fullmatch(r"[A-Za-z0-9_-]{2,48}", skills.make_repetitive_nonce(rng))


@given(rng=seeds, held_out=st.booleans())
def test_sums_are_right_and_split(rng: random.Random, held_out: bool) -> None:
    prompt, answer = skills.add(rng, held_out)
    a, b = (int(word) for word in "".join(c if c.isdigit() else " " for c in prompt).split())
    assert answer == str(a + b)
    assert max(a, b) <= skills.MAX_ADDEND
    assert skills.is_held_out_sum(a, b) == held_out


@given(rng=seeds, most=st.integers(1, skills.MAX_COUNT))
def test_counts_go_up_by_one_inside_the_range(rng: random.Random, most: int) -> None:
    prompt, answer = skills.count(rng, most)
    numbers = [int(number) for number in answer.split(", ")]
    assert numbers == list(range(numbers[0], numbers[-1] + 1))
    assert 0 <= numbers[0] <= numbers[-1] <= skills.MAX_COUNT
    assert str(numbers[-1]) in prompt


def test_questions_are_asked_once_and_held_out_ones_are_never_trained() -> None:
    facts = load_facts()
    asked = [question for fact in facts for question in fact.ask]
    held_out = [question for fact in facts for question in fact.held_out]
    assert len(facts) >= 40
    assert len(set(asked + held_out)) == len(asked) + len(held_out)
    assert all(len(fact.ask) >= 5 and fact.held_out for fact in facts)


def test_answers_name_the_flags_and_paths_as_they_are() -> None:
    answers = {fact.name: fact.answer for fact in load_facts()}
    assert "8000" in answers["port"] and "make serve" in answers["start"]
    assert "tiers.yaml" in answers["tier_config"] and "/metrics" in answers["metrics"]
