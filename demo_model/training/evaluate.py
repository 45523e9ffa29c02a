"""Measure the demo model in bf16: `python -m demo_model.training.evaluate [DIR]` prints a row for each skill.

Most questions did not occur in training: nonces and phrases are new, the random seed is another one, and training left
out some sums, paraphrases, wordings of requests for tools, places, and subjects of tools.
Knows the right answers; does not know how the model was trained.
"""

import argparse
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from demo_model.location import demo_model_path
from demo_model.training import skills, smalltalk
from demo_model.training.facts import load_facts
from demo_model.training.tool_corpus import ToolCorpus
from demo_model.training.tool_requests import Exchange, Offer
from demo_model.training.tools import write_calls
from demo_model.training.train import build_corpus

TOKENS_AT_ONCE = 16384  # largest batch, in tokens of prompts and answers, including padding
SHOWN_TOOLS = ("weather", "time", "add")  # topics whose first tools the documentation shows
Messages = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Question:
    """A conversation that ends before an answer, the only right answer, its token limit, and the tools on offer."""

    messages: Messages
    answer: str
    max_new_tokens: int
    offers: Sequence[Offer] = ()


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer of the model, and whether the model ended its turn by itself."""

    text: str
    ended: bool


class Examinee:
    """The model under test and its tokenizer, loaded from a directory in bf16."""

    def __init__(self, directory: Path) -> None:
        disable_progress_bar()
        self.tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(directory)
        self._model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
        self._model.eval()

    def answer(self, questions: Sequence[Question], temperature: float = 0.0) -> list[Reply]:
        """Return the model's reply to each question. Temperature 0 means greedy.

        Questions of similar length are answered together, in left-padded batches.
        """
        prompts = [
            self.tokenizer.apply_chat_template(
                q.messages, [offer.tool.as_openai() for offer in q.offers], add_generation_prompt=True, tokenize=False
            )
            for q in questions
        ]
        lengths = [len(ids) for ids in self.tokenizer(prompts, add_special_tokens=False)["input_ids"]]
        order = sorted(range(len(questions)), key=lambda i: lengths[i] + questions[i].max_new_tokens)
        replies: dict[int, Reply] = {}
        for group in _groups(order, lambda i: lengths[i] + questions[i].max_new_tokens):
            room = max(questions[i].max_new_tokens for i in group)
            replies |= zip(group, self._generate([prompts[i] for i in group], room, temperature), strict=True)
        return [replies[i] for i in range(len(questions))]

    def _generate(self, prompts: list[str], max_new_tokens: int, temperature: float) -> Iterator[Reply]:
        inputs = self.tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
        with torch.inference_mode():
            output = self._model.generate(
                input_ids=inputs["input_ids"],
                attention_mask=inputs["attention_mask"],
                max_new_tokens=max_new_tokens,
                **sampling,
            )
        end_ids = set(self._model.generation_config.eos_token_id)
        for row in output[:, inputs["input_ids"].shape[1] :].tolist():
            ended = any(token in end_ids for token in row)
            yield Reply(self.tokenizer.decode(row, skip_special_tokens=True), ended)


def _groups(order: Sequence[int], cost: Callable[[int], int]) -> Iterator[list[int]]:
    group: list[int] = []
    for i in order:
        if group and (len(group) + 1) * cost(i) > TOKENS_AT_ONCE:
            yield group
            group = []
        group.append(i)
    if group:
        yield group


def ask(prompt: str, answer: str, system: str | None = None, history: Sequence[skills.Pair] = ()) -> Question:
    """Return a question that comes after an optional system prompt and the earlier turns of `history`."""
    messages: Messages = [{"role": "system", "content": system}] if system is not None else []
    for asked, answered in history:
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
    messages.append({"role": "user", "content": prompt})
    return Question(messages, answer, max_new_tokens=len(answer) + 8)


def ask_for_tools(exchange: Exchange, offers: Sequence[Offer], after_results: bool = False) -> Question:
    """Return the question that is answered by the calls of `exchange`, or, `after_results`, by a sentence."""
    messages: Messages = [{"role": "user", "content": exchange.prompt}]
    if not after_results:
        answer = write_calls(exchange.calls)
        return Question(messages, answer, max_new_tokens=len(answer) + 8, offers=offers)
    calls = [call.as_openai(f"call_{index}") for index, call in enumerate(exchange.calls)]
    messages.append({"role": "assistant", "content": None, "tool_calls": calls})
    for call, result in zip(calls, exchange.results, strict=True):
        messages.append({"role": "tool", "content": result, "tool_call_id": call["id"]})
    return Question(messages, exchange.answer, max_new_tokens=len(exchange.answer) + 8, offers=offers)


def tool_examinations(corpus: ToolCorpus, rng: random.Random, size: int) -> Iterator[tuple[str, list[Question]]]:
    """Yield the name and the questions of each row about tools."""
    requests = corpus.requests

    def shown() -> list[Offer]:
        return requests.offer(rng, 3, SHOWN_TOOLS, usual=True)

    def one_of(offers: list[Offer], after_results: bool = False) -> Question:
        return ask_for_tools(requests.ask(rng, rng.choice(offers), held_out=True), offers, after_results)

    def other_names() -> list[Offer]:
        return requests.offer(rng, 3, (rng.choice(("weather", "time", "add", "multiply", "calculate", "search")),))

    def new_subjects() -> list[Offer]:
        return requests.offer(rng, 3, ("lookup", "lookup", "action"), held_out=True)

    yield "calls of get_weather, get_time, add", [one_of(shown()) for _ in range(size)]
    yield "calls of tools by other names", [one_of(other_names()) for _ in range(size)]
    yield "calls of tools on new subjects", [one_of(new_subjects()) for _ in range(size)]
    offers = shown()
    yield "two calls at once", [ask_for_tools(requests.ask_twice(rng, offers, True), offers) for _ in range(size)]
    yield "answers after a result", [one_of(shown(), after_results=True) for _ in range(size)]
    tasks = [(offers, corpus.task_without_tool(rng, offers)) for offers in (other_names() for _ in range(size))]
    questions = [
        Question([{"role": "user", "content": asked}], right, len(right) + 8, of) for of, (asked, right) in tasks
    ]
    yield "tools offered, but none needed", questions


def examinations(
    tokenizer: PreTrainedTokenizerBase, rng: random.Random, size: int
) -> Iterator[tuple[str, list[Question]]]:
    """Yield the name and the questions of each row of the table.

    The first row has `size` nonces; the other rows that are drawn at random have fewer questions.
    """
    corpus = build_corpus(tokenizer)
    part = max(1, size // 5)

    def filler(tokens: int) -> str:
        return str(tokenizer.decode(tokenizer(corpus.filler(rng, 2 * tokens), verbose=False)["input_ids"][:tokens]))

    def nonce() -> str:
        return skills.make_nonce(rng, min_length=4, max_length=40)

    def history(turns: int) -> list[skills.Pair]:
        return [corpus.task(rng) for _ in range(turns)]

    nonces = [nonce() for _ in range(size)]
    yield "nonces", [ask(f"Repeat: {text}", text) for text in nonces]
    yield "nonces, worded in many ways", [ask(*skills.repeat(rng, nonce())) for _ in range(part)]
    yield (
        "nonces after a system prompt",
        [ask(f"Repeat: {text}", text, system="You are a helpful assistant.") for text in nonces[:part]],
    )
    yield (
        "nonces after 1-4 turns",
        [ask(f"Repeat: {text}", text, history=history(rng.randint(1, 4))) for text in nonces[:part]],
    )
    for length in (300, 800, 1500, 1900):
        before = [filler(length) for _ in range(max(1, part // 5))]
        questions = [ask(f"{text}\n\nRepeat: {nonce}", nonce) for text, nonce in zip(before, nonces, strict=False)]
        yield f"nonces after {length} tokens of text", questions
        questions = [ask(f"Repeat: {nonce}", nonce, system=text) for text, nonce in zip(before, nonces, strict=False)]
        yield f"nonces after a system prompt of {length}", questions
    phrases = [corpus.phrase(rng, max_words=8) for _ in range(part)]
    yield "words and phrases", [ask(f"Repeat: {text}", text) for text in phrases]
    yield "held-out sums", [ask(*skills.add(rng, held_out=True)) for _ in range(part)]
    yield "sums out of range", [ask(*skills.add_out_of_range(rng)) for _ in range(part)]
    yield "counts", [ask(*skills.count(rng, max_numbers=40)) for _ in range(part)]
    yield (
        "counts of 100 to 200 numbers",
        [
            ask(f"Count from {first} to {first + length}", ", ".join(map(str, range(first, first + length + 1))))
            for first, length in ((1, 99), (0, 100), (50, 100), (1, 149), (1, 199), (0, 200))
        ],
    )
    yield "counts out of range", [ask(*skills.count_out_of_range(rng)) for _ in range(part // 2)]
    yield "greetings and thanks", [ask(*smalltalk.greet(rng)) for _ in range(part // 4)]
    yield "anything else", [ask(*smalltalk.anything_else(rng, corpus.words)) for _ in range(part)]
    yield "questions as trained", [ask(question, fact.answer) for fact in load_facts() for question in fact.ask]
    paraphrases = [(question, fact.answer) for fact in load_facts() for question in fact.held_out]
    yield "held-out paraphrases", [ask(*pair) for pair in paraphrases]
    yield "held-out paraphrases after 2 turns", [ask(*pair, history=history(2)) for pair in paraphrases]
    yield from tool_examinations(corpus, rng, size)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Measure the demo model on questions that it has not seen.")
    parser.add_argument("directory", type=Path, nargs="?", default=demo_model_path())
    parser.add_argument("--size", type=int, default=1000, help="nonces; the other rows have a part of that")
    parser.add_argument("--seed", type=int, default=12345)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--show-wrong", type=int, default=0, help="wrong answers to print for each row")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    examinee = Examinee(args.directory)
    ended = total = 0
    for name, questions in examinations(examinee.tokenizer, random.Random(args.seed), args.size):
        replies = examinee.answer(questions, args.temperature)
        wrong = [(q, r) for q, r in zip(questions, replies, strict=True) if not (r.ended and r.text == q.answer)]
        right = len(questions) - len(wrong)
        print(f"{name:<40} {right:>5} of {len(questions):<5} {right / len(questions):7.1%}", flush=True)
        for question, reply in wrong[: args.show_wrong]:
            print(f"    asked  {question.messages[-1]['content'][-80:]!r}")
            print(f"    wanted {question.answer!r}\n    got    {reply.text!r}")
        ended += sum(reply.ended for reply in replies)
        total += len(replies)
    print(f"{'ended by themselves':<40} {ended:>5} of {total:<5} {ended / total:7.1%}")


if __name__ == "__main__":
    main()
