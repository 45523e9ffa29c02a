"""Requests for tools: the right calls, tools that cannot be confused, and nothing of the evaluation in training."""

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from demo_model.training import skills
from demo_model.training.corpus import TOOLS
from demo_model.training.facts import load_facts, load_words
from demo_model.training.tool_corpus import ToolCorpus
from demo_model.training.tool_requests import HELD_OUT_PLACES, ToolRequests, is_held_out_word, load_topics

TOPICS = load_topics()
JSON_TYPES = {"string": str, "integer": int, "number": (int, float)}
seeds = st.integers(0, 2**32).map(random.Random)


@pytest.fixture(scope="module")
def corpus() -> ToolCorpus:
    return ToolCorpus(load_facts(), load_words(), ["ti", "de", "gate", "wa", "ter"])


@pytest.fixture(scope="module")
def requests(corpus: ToolCorpus) -> ToolRequests:
    return corpus.requests


@given(rng=seeds, name=st.sampled_from(sorted(TOPICS)), held_out=st.booleans())
def test_a_call_has_the_tools_arguments_in_the_words_of_the_request(
    requests: ToolRequests, rng: random.Random, name: str, held_out: bool
) -> None:
    offer = requests.draw(rng, name, held_out=held_out)
    exchange = requests.ask(rng, offer, held_out)
    (call,) = exchange.calls
    assert call.name == offer.tool.name
    assert list(call.arguments) == [argument for argument, _ in offer.tool.arguments]
    for (_, json_type), value in zip(offer.tool.arguments, call.arguments.values(), strict=True):
        assert isinstance(value, JSON_TYPES[json_type])
        assert str(value) in exchange.prompt


@given(rng=seeds, name=st.sampled_from(sorted(TOPICS)))
def test_the_answer_contains_the_result(requests: ToolRequests, rng: random.Random, name: str) -> None:
    exchange = requests.ask(rng, requests.draw(rng, name))
    assert exchange.results[0] in exchange.answer
    assert exchange.answer.endswith(".")


@given(rng=seeds, count=st.integers(1, 5))
def test_offered_tools_have_different_names_and_subjects(
    requests: ToolRequests, rng: random.Random, count: int
) -> None:
    offers = requests.offer(rng, count, first=("weather",))
    assert len(offers) == count
    assert len({offer.tool.name for offer in offers}) == count
    asked = [requests.ask(rng, offer) for offer in offers]
    assert {exchange.calls[0].name for exchange in asked} == {offer.tool.name for offer in offers}
    assert TOPICS["weather"] in [offer.topic for offer in offers]


@given(rng=seeds)
def test_the_evaluations_subjects_and_places_are_not_in_training(requests: ToolRequests, rng: random.Random) -> None:
    for name in ("lookup", "list", "action"):
        assert not is_held_out_word(requests.draw(rng, name).words["w"])
        assert is_held_out_word(requests.draw(rng, name, held_out=True).words["w"])
    city = requests.ask(rng, requests.draw(rng, "weather"))
    held_out = requests.ask(rng, requests.draw(rng, "weather"), held_out=True)
    assert list(city.calls[0].arguments.values())[0] not in HELD_OUT_PLACES
    assert list(held_out.calls[0].arguments.values())[0] in HELD_OUT_PLACES


def test_the_evaluations_wordings_are_not_in_training() -> None:
    for name, topic in TOPICS.items():
        assert topic.held_out and not {form.lower() for form in topic.ask} & {
            form.lower() for form in topic.held_out
        }, name


@given(rng=seeds)
def test_a_request_without_a_tool_does_not_ask_for_an_offered_one(corpus: ToolCorpus, rng: random.Random) -> None:
    offers = corpus.requests.offer(rng, 3, first=("weather",))
    prompt, answer = corpus.task_without_tool(rng, offers)
    assert answer in prompt or not any(offer.is_asked_for(prompt) for offer in offers)
    assert answer != skills.DECLINE_SUM or not any(offer.topic.group == "arithmetic" for offer in offers)


def test_conversations_with_tools_learn_calls_and_answers(corpus: ToolCorpus) -> None:
    rng = random.Random(4)
    examples = [corpus.example(rng, TOOLS) for _ in range(400)]
    with_tools = [example for example in examples if "<tools>" in example[0].text]
    lengths = [sum(len(segment.text) for segment in example) for example in examples]
    lengths_with_tools = [sum(len(segment.text) for segment in example) for example in with_tools]
    assert 0.35 < sum(lengths_with_tools) / sum(lengths) < 0.7
    learned = [segment.text for example in with_tools for segment in example if segment.learn]
    calls = [text for text in learned if text.startswith("<tool_call>")]
    assert len(learned) / 4 < len(calls) < len(learned) * 3 / 4
    for text in calls:
        assert json.loads(text.split("\n")[1])["name"]
