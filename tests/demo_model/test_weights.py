"""The shipped model: its size, its architecture, and its answers to a few requests that it has not seen."""

import json
import random
import subprocess
import sys
from collections.abc import Sequence

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from demo_model.location import demo_model_path
from demo_model.training import skills, smalltalk
from demo_model.training.evaluate import SHOWN_TOOLS, Examinee, Question, ask, ask_for_tools
from demo_model.training.facts import load_facts
from demo_model.training.tool_corpus import ToolCorpus
from demo_model.training.train import build_corpus


@pytest.fixture(scope="module")
def examinee() -> Examinee:
    torch.set_num_threads(1)
    return Examinee(demo_model_path())


def share_right(examinee: Examinee, pairs: Sequence[skills.Pair], system: str | None = None) -> float:
    return share_answered(examinee, [ask(prompt, answer, system) for prompt, answer in pairs])


def share_answered(examinee: Examinee, questions: Sequence[Question]) -> float:
    replies = examinee.answer(questions)
    return sum(r.ended and r.text == q.answer for q, r in zip(questions, replies, strict=True)) / len(questions)


@pytest.fixture(scope="module")
def corpus(examinee: Examinee) -> ToolCorpus:
    return build_corpus(examinee.tokenizer)


def test_the_wheel_stays_small() -> None:
    assert sum(path.stat().st_size for path in demo_model_path().parent.rglob("*") if path.is_file()) <= 8_000_000


def test_it_is_a_plain_llama_that_states_its_context() -> None:
    config = json.loads((demo_model_path() / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["max_position_embeddings"] == 2048
    assert config["dtype"] == "bfloat16"


def test_the_tokenizer_fits_the_weights(examinee: Examinee) -> None:
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(demo_model_path())
    model = AutoModelForCausalLM.from_pretrained(demo_model_path())
    assert len(tokenizer) == model.get_input_embeddings().num_embeddings
    assert tokenizer.eos_token_id in model.generation_config.eos_token_id


@pytest.mark.full
def test_the_models_path_is_known_without_torch() -> None:
    code = "import sys; from demo_model.location import demo_model_path as p; p(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


@pytest.mark.parametrize("system", [None, "You are a helpful assistant."])
def test_unseen_nonces_are_repeated_exactly(examinee: Examinee, system: str | None) -> None:
    rng = random.Random(20240229)
    nonces = [skills.make_nonce(rng, 4, 40) for _ in range(24)] + ["k7Qz-09ab"]
    assert share_right(examinee, [(f"Repeat: {nonce}", nonce) for nonce in nonces], system) == 1.0


def test_a_nonce_is_repeated_after_another_one(examinee: Examinee) -> None:
    question = ask(
        "Repeat: k7Qz-09ab", "k7Qz-09ab", history=[("Repeat: k7Qz-19ac", "k7Qz-19ac"), ("Hi", smalltalk.GREETING)]
    )
    assert examinee.answer([question])[0].text == "k7Qz-09ab"


def test_unseen_sums_are_right_and_large_ones_declined(examinee: Examinee) -> None:
    rng = random.Random(5)
    assert share_right(examinee, [skills.add(rng, held_out=True) for _ in range(40)]) >= 0.95
    assert share_right(examinee, [skills.add_out_of_range(rng) for _ in range(40)]) >= 0.85


@pytest.mark.full
def test_it_counts_to_a_hundred(examinee: Examinee) -> None:
    hundred = ", ".join(map(str, range(1, 101)))
    assert share_right(examinee, [("Count from 1 to 100", hundred), ("Count from 3 to 5", "3, 4, 5")]) == 1.0


def test_unseen_paraphrases_are_understood(examinee: Examinee) -> None:
    pairs = [(fact.held_out[0], fact.answer) for fact in load_facts()]
    assert share_right(examinee, pairs) >= 0.8


def test_other_messages_are_answered_with_the_introduction(examinee: Examinee) -> None:
    strange = ["Who was Napoleon?", "Write a poem about the sea.", "qwxz plonk", "What is the capital of France?"]
    assert share_right(examinee, [(text, smalltalk.INTRODUCTION) for text in strange]) == 1.0


@pytest.mark.full
def test_the_right_one_of_three_tools_is_called_in_unseen_wordings(examinee: Examinee, corpus: ToolCorpus) -> None:
    rng = random.Random(7)
    offers = corpus.requests.offer(rng, 3, SHOWN_TOOLS, usual=True)
    exchanges = [corpus.requests.ask(rng, rng.choice(offers), held_out=True) for _ in range(60)]
    assert share_answered(examinee, [ask_for_tools(exchange, offers) for exchange in exchanges]) >= 0.75
    assert share_answered(examinee, [ask_for_tools(e, offers, after_results=True) for e in exchanges]) >= 0.9


def test_tools_are_not_called_without_need(examinee: Examinee, corpus: ToolCorpus) -> None:
    rng = random.Random(8)
    offers = corpus.requests.offer(rng, 2, ("weather", "time"), usual=True)
    for prompt, answer in (
        ("What is Tidegate?", load_facts()[0].answer),
        ("Repeat: k7Qz-09ab", "k7Qz-09ab"),
        ("Count from 3 to 5", "3, 4, 5"),
        ("What is 17 + 25?", "42"),
        ("Hello", smalltalk.GREETING),
    ):
        question = Question([{"role": "user", "content": prompt}], answer, len(answer) + 8, offers)
        assert examinee.answer([question])[0].text == answer
