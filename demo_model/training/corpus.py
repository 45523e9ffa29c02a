"""The training text of the demo model, made from a seed: conversations, plain prompts and documents.

An example is a sequence of segments; only segments marked `learn` (answers and documents) count in the loss.
Knows what is taught and in which proportions; does not know tokens, batches or the model.
"""

import random
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from demo_model.training import skills
from demo_model.training.facts import Fact
from demo_model.training.rewording import reword
from demo_model.training.skills import Pair
from demo_model.training.smalltalk import anything_else, greet

CHARS_PER_TOKEN = 2.2  # approximate value for filler text; the exact length is known only after encoding

_SYSTEM_PROMPTS = (
    "You are a helpful assistant.", "You are a helpful assistant.",
    "You are a helpful, honest and concise assistant.", "Be brief.", "Answer briefly.",
    "Answer in one sentence.", "You are Tidegate's demo model.", "You are an assistant.",
    "You are a friendly chat bot.", "Follow the instructions exactly.", "Do exactly what the user asks.",
    "Answer in English.", "You are a test.", "You repeat what the user says.",
    "Only answer with the text that was asked for.", "You are a calculator.", "You help users of Tidegate.",
    "Be polite and precise.", "Never explain.", "You are a pirate.", "Think step by step.",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of an example, with special tokens written as text. `learn` says whether it counts in the loss."""

    text: str
    learn: bool


Example = tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class Course:
    """The proportions in which the examples of a part of training are drawn.

    `max_tokens` is the approximate length of the longest example. `long_share` is the share of the conversations that
    are filled up towards this length. `bounds` are the cumulative shares of the kinds of requests: nonces, phrases,
    questions, sums, other arithmetic, counts, counts out of range, small talk. The remaining requests are about
    anything else. `long_counts` is the share of counts that have the largest length that fits. `hard_repeats` is the
    share of texts to repeat that contain a part twice. Such texts are hard to repeat, because the last character does
    not determine the next character. `tools` is the share of the examples in which tools are offered; only `ToolCorpus`
    has such examples.
    """

    max_tokens: int
    long_share: float
    bounds: tuple[float, ...] = (0.24, 0.40, 0.64, 0.79, 0.83, 0.875, 0.895, 0.915)
    long_counts: float = 0.0
    hard_repeats: float = 0.0
    tools: float = 0.0


SHORT = Course(max_tokens=128, long_share=0.1)
MIDDLE = Course(max_tokens=512, long_share=0.15)
LONG = Course(max_tokens=2048, long_share=0.12)
# This course improves what was weakest after the three courses above: long rows, long counts, unseen wordings.
LONGER = Course(2048, 0.15, bounds=(0.24, 0.36, 0.64, 0.71, 0.77, 0.85, 0.89, 0.93), long_counts=0.5)
# This course improves what was weakest after `LONGER`: texts that contain a part twice, and the limits of each skill.
LIMITS = Course(2048, 0.03, bounds=(0.32, 0.46, 0.68, 0.76, 0.84, 0.91, 0.95, 0.96), long_counts=0.25, hard_repeats=0.5)
FINISH = Course(
    2048, 0.03, bounds=(0.26, 0.40, 0.62, 0.70, 0.76, 0.88, 0.92, 0.94), long_counts=0.25, hard_repeats=0.35
)
# This course teaches to call tools. Half of its tokens are those of `FINISH`, so that nothing is forgotten.
TOOLS = replace(FINISH, tools=0.19)


class Corpus:
    """The source of all examples that the model is taught.

    It has no changing state: every method draws from the random generator that is passed in.
    """

    def __init__(self, facts: Sequence[Fact], words: Sequence[str], pieces: Sequence[str]) -> None:
        """`pieces` are the tokenizer's lower-case pieces of words; made-up words are built from them."""
        self._facts = facts
        self.words = words
        self._pieces = pieces

    def examples(self, seed: int, course: Course) -> Iterator[Example]:
        """Yield examples of one course, without end. The same seed gives the same examples."""
        rng = random.Random(seed)
        while True:
            yield self.example(rng, course)

    def example(self, rng: random.Random, course: Course) -> Example:
        """Draw one example: a conversation (77 % of the examples), a plain prompt, a document, or a list of sums."""
        kind = rng.random()
        if kind < 0.05:
            return self._document(rng)
        if kind < 0.10:
            return self._plain_prompt(rng)
        if kind < 0.23:
            return sums(rng)
        if rng.random() < course.long_share:
            return self._long_conversation(rng, course)
        turns = 1 if rng.random() < 0.75 else rng.randint(2, 4)
        return conversation(self.system_prompt(rng), [self.task(rng, course) for _ in range(turns)])

    def task(self, rng: random.Random, course: Course = SHORT) -> Pair:
        """Draw one request and its right answer, in the proportions of `course`."""
        match bisect_right(course.bounds, rng.random()):
            case 0 | 1 if course.hard_repeats and rng.random() < course.hard_repeats:
                return skills.repeat(rng, self._hard_to_repeat(rng))
            case 0:
                return skills.repeat(rng, skills.make_nonce(rng))
            case 1:
                return skills.repeat(rng, self.phrase(rng, 24 if course.max_tokens > 256 and rng.random() < 0.2 else 8))
            case 2:
                return self.question(rng)
            case 3:
                return skills.add(rng)
            case 4:
                return skills.add_out_of_range(rng)
            case 5:
                return skills.count(rng, _count_length(rng, course))
            case 6:
                return skills.count_out_of_range(rng)
            case 7:
                return greet(rng)
            case _:
                return anything_else(rng, self.words)

    def phrase(self, rng: random.Random, max_words: int) -> str:
        """Draw a text to repeat: ordinary words, made-up words, or a sentence from a fact's questions or answer."""
        kind = rng.random()
        if kind < 0.4:
            return skills.make_phrase(rng, self.words, max_words)
        if kind < 0.85:
            made_up = [self.made_up_word(rng) for _ in range(max_words)]
            return skills.make_phrase(rng, made_up, max_words)
        fact = rng.choice(self._facts)
        return rng.choice((*fact.ask, fact.answer.split(". ")[0]))

    def _hard_to_repeat(self, rng: random.Random) -> str:
        if rng.random() < 0.3:
            few = [rng.choice((rng.choice(self.words), self.made_up_word(rng))) for _ in range(rng.randint(2, 5))]
            return skills.make_phrase(rng, few, max_words=10)
        return skills.make_repetitive_nonce(rng)

    def made_up_word(self, rng: random.Random) -> str:
        """Make up a word of one to four random pieces."""
        return "".join(rng.choice(self._pieces) for _ in range(rng.choice((1, 1, 2, 2, 3, 4))))

    def question(self, rng: random.Random) -> Pair:
        """Draw a question about Tidegate, reworded, and its answer."""
        fact = rng.choice(self._facts)
        return reword(rng, rng.choice(fact.ask)), fact.answer

    def system_prompt(self, rng: random.Random) -> str | None:
        """Draw a system prompt, or None in about half of the cases."""
        kind = rng.random()
        if kind < 0.55:
            return None
        if kind < 0.85:
            return rng.choice(_SYSTEM_PROMPTS)
        return self.filler(rng, rng.randint(2, 60))

    def _long_conversation(self, rng: random.Random, course: Course) -> Example:
        """Draw a conversation that is filled up to some length.

        The filling is a system prompt, text before the last request, a foreign turn or a history of other requests.
        """
        budget = int(course.max_tokens ** rng.uniform(0.7, 1.0) * 0.9)
        kind = rng.random()
        last = self.task(rng, replace(course, max_tokens=budget))
        filling = max(2, budget - 40 - int(sum(map(len, last)) * 0.8))
        if kind < 0.25:
            return conversation(self.filler(rng, filling), [last])
        if kind < 0.5:
            separator = rng.choice(("\n", "\n\n", "\n\n", "\n---\n"))
            return conversation(self.system_prompt(rng), [(self.filler(rng, filling) + separator + last[0], last[1])])
        if kind < 0.6:
            foreign = (self.filler(rng, filling // 2), self.filler(rng, filling // 2))
            return conversation(self.system_prompt(rng), [foreign, last], foreign=1)
        turns = [last]
        while sum(len(text) for turn in turns for text in turn) < filling * 1.6:
            turns.insert(0, self.task(rng, replace(course, max_tokens=budget // 3)))
        return conversation(self.system_prompt(rng), turns)

    def filler(self, rng: random.Random, tokens: int) -> str:
        """Draw a text of about `tokens` tokens that contains no request."""
        kind = rng.random()
        sentence = self._sentence(rng)
        parts: list[str] = []
        length = 0
        while length < tokens * CHARS_PER_TOKEN:
            if kind < 0.4:
                sentence = self._sentence(rng)
            elif kind < 0.55:
                sentence = rng.choice(self._facts).answer
            elif kind < 0.7:
                sentence = skills.make_nonce(rng)
                length += len(sentence)  # a nonce has twice as many tokens per character
            elif kind < 0.8:
                sentence = rng.choice(self.words)
            parts.append(sentence)
            length += len(sentence) + 1
        return " ".join(parts)

    def _sentence(self, rng: random.Random) -> str:
        words = [
            rng.choice(self.words) if rng.random() < 0.8 else self.made_up_word(rng) for _ in range(rng.randint(1, 12))
        ]
        return " ".join(words).capitalize() + "."

    def _plain_prompt(self, rng: random.Random) -> Example:
        """Draw a request without a chat template, as /v1/completions sends it, and its answer.

        The answer is on the next line, which may begin with `A:`.
        """
        prompt, answer = self.task(rng)
        start = rng.choice(("", "", "", "<|endoftext|>"))
        if rng.random() < 0.3:
            return Segment(f"{start}Q: {prompt}\nA:", False), Segment(f" {answer}<|endoftext|>", True)
        if rng.random() < 0.4:
            return Segment(f"{start}{prompt}\n", False), Segment(f"{answer}<|endoftext|>", True)
        return Segment(f"{start}{prompt}", False), Segment(f"\n{answer}<|endoftext|>", True)

    def _document(self, rng: random.Random) -> Example:
        """Draw a document: some facts about Tidegate as running text, or a row of consecutive numbers."""
        start = rng.choice(("", "", "", "<|endoftext|>"))
        if rng.random() < 0.1:
            first = rng.randint(0, 150)
            numbers = ", ".join(map(str, range(first, first + rng.randint(5, 30))))
            return (Segment(f"{start}{numbers}<|endoftext|>", True),)
        text = " ".join(fact.answer for fact in rng.sample(list(self._facts), rng.randint(1, 3)))
        if rng.random() < 0.3:
            text = self._facts[0].answer + " " + self._facts[1].answer
        return (Segment(f"{start}{text}<|endoftext|>", True),)


def sums(rng: random.Random) -> Example:
    """Draw a list of six to ten sums. Conversations alone contain too few sums for the model to learn addition."""
    plus, equals, after = (rng.choice(marks) for marks in (("+", " + "), ("=", " = "), ("\n", ", ", "; ")))
    segments = []
    for _ in range(rng.randint(6, 10)):
        a, b = skills.addends(rng)
        segments += [Segment(f"{a}{plus}{b}{equals}", False), Segment(f"{a + b}{after}", True)]
    return *segments, Segment("<|endoftext|>", True)


def _count_length(rng: random.Random, course: Course) -> int:
    longest = max(8, min(skills.MAX_COUNT, course.max_tokens // 5))
    if course.long_counts and rng.random() < course.long_counts:
        return longest
    return min(longest, rng.choice((8, 8, 15, 15, 25, 25, 50, longest)))


def conversation(system: str | None, turns: Sequence[Pair], foreign: int = 0) -> Example:
    """Return a conversation in the layout of the chat template.

    The first `foreign` answers are only context: the model does not learn them.
    """
    segments = []
    context = f"<|system|>{system}<|end|>" if system is not None else ""
    for index, (prompt, answer) in enumerate(turns):
        segments.append(Segment(f"{context}<|user|>{prompt}<|end|><|assistant|>", False))
        segments.append(Segment(f"{answer}<|end|>", index >= foreign))
        context = ""
    return tuple(segments)
