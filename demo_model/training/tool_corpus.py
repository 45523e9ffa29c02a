"""The training text with tools: conversations in which tools are offered, called, and answer.

Knows how requests with and without tools follow each other in a conversation; does not know their wordings or the
layout of tools.
"""

import random
from collections.abc import Sequence

from demo_model.training import skills
from demo_model.training.corpus import Corpus, Course, Example, Segment, conversation
from demo_model.training.facts import Fact
from demo_model.training.skills import Pair
from demo_model.training.smalltalk import INTRODUCTION
from demo_model.training.tool_requests import ARITHMETIC, Exchange, Offer, ToolRequests
from demo_model.training.tools import write_calls, write_result, write_tools


class ToolCorpus(Corpus):
    """The source of all examples, with and without tools."""

    def __init__(self, facts: Sequence[Fact], words: Sequence[str], pieces: Sequence[str]) -> None:
        super().__init__(facts, words, pieces)
        self.requests = ToolRequests(words, self.made_up_word)

    def example(self, rng: random.Random, course: Course) -> Example:
        """Draw one example. Its share of conversations with tools is `course.tools`."""
        if course.tools and rng.random() < course.tools:
            return self._tool_conversation(rng)
        return super().example(rng, course)

    def _tool_conversation(self, rng: random.Random) -> Example:
        offers = self.requests.offer(rng, rng.choice((0, 1, 1, 2, 2, 2, 3, 3, 3, 4)))
        segments: list[Segment] = []
        for _ in range(rng.choice((1, 3, 5, 7))):
            kind = rng.random() if offers else 1.0
            if kind < 0.07:
                segments += self._tool_turn(rng, self.requests.ask_twice(rng, offers))
            elif kind < 0.67:
                segments += self._tool_turn(rng, self.requests.ask(rng, rng.choice(offers)))
            else:
                segments += conversation(None, [self.task_without_tool(rng, offers)])
        system = self.system_prompt(rng)
        start = f"<|system|>{system}<|end|>" if system is not None else ""
        return Segment(tools_turn(offers) + start, False), *segments

    def _tool_turn(self, rng: random.Random, exchange: Exchange) -> tuple[Segment, ...]:
        """Return the exchange; mostly without its results, because calls are harder to learn than answers."""
        return tool_turn(exchange)[: 4 if rng.random() < 1 / 3 else 2]

    def task_without_tool(self, rng: random.Random, offers: Sequence[Offer]) -> Pair:
        """Draw a request that needs none of the tools in `offers`, and its answer."""
        while True:
            kind = rng.random()
            if kind < 0.1:
                return skills.repeat(rng, skills.make_nonce(rng))
            prompt, answer = self.task(rng) if kind < 0.55 else self._task_of_absent_tool(rng)
            calculates = any(offer.topic.group == ARITHMETIC for offer in offers)
            if not any(o.is_asked_for(prompt) for o in offers) and not (calculates and answer == skills.DECLINE_SUM):
                return prompt, answer

    def _task_of_absent_tool(self, rng: random.Random) -> Pair:
        """Draw a request that some tool could answer. Without that tool, the answer is the introduction."""
        names = [name for name, topic in self.requests.topics.items() if topic.group != ARITHMETIC]
        absent = self.requests.draw(rng, rng.choice(names))
        return self.requests.ask(rng, absent).prompt, INTRODUCTION


def tools_turn(offers: Sequence[Offer]) -> str:
    """Return the turn that lists the tools in `offers`; without tools, an empty string."""
    return f"<|system|>{write_tools([offer.tool for offer in offers])}<|end|>" if offers else ""


def tool_turn(exchange: Exchange) -> tuple[Segment, ...]:
    """Return a request, its calls, their results and the answer, in the layout of the chat template."""
    results = "".join(f"<|user|>{write_result(result)}<|end|>" for result in exchange.results)
    return (
        Segment(f"<|user|>{exchange.prompt}<|end|><|assistant|>", False),
        Segment(f"{write_calls(exchange.calls)}<|end|>", True),
        Segment(f"{results}<|assistant|>", False),
        Segment(f"{exchange.answer}<|end|>", True),
    )
