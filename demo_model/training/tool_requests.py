"""Requests that need tools: which tools are offered, how a user asks for them, the right calls, and their results.

Reads `tools.yaml`. Knows topics and wordings; does not know conversations, tokens or training. All randomness comes
from the generator that is passed in.
"""

import random
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from demo_model.training import skills
from demo_model.training.tools import Call, Tool

MADE_UP_SHARE = 0.35  # share of places that are made-up names, so that the model copies what it does not know
_PLACES = (
    "Paris", "London", "Berlin", "Rome", "Madrid", "Tokyo", "New York", "Vienna", "Prague", "Dublin", "Athens",
    "Moscow", "Cairo", "Sydney", "Toronto", "Chicago", "Boston", "San Francisco", "Los Angeles", "Mexico City",
    "Buenos Aires", "Rio de Janeiro", "Mumbai", "Delhi", "Beijing", "Shanghai", "Seoul", "Singapore", "Bangkok",
    "Jakarta", "Nairobi", "Cape Town", "Amsterdam", "Brussels", "Hamburg", "Munich", "Cologne", "Milan", "Naples",
    "Barcelona", "Lisbon", "Warsaw", "Budapest", "Copenhagen", "Stockholm", "Helsinki", "Zurich", "Geneva", "Kyiv",
    "Istanbul", "Tel Aviv", "Dubai", "Hong Kong", "Kyoto", "Las Vegas", "Miami", "Dallas", "Denver", "Montreal",
    "Saint Petersburg", "Santiago", "Lima", "Bogota", "Accra", "Lagos", "Karachi", "Dhaka", "Hanoi", "Perth",
    "France", "Germany", "Japan", "India", "Brazil", "Canada", "Paris, France", "London, UK", "Boston, MA",
    "San Francisco, CA", "Europe/Berlin", "Asia/Tokyo", "São Paulo", "Zürich", "Köln",
)  # fmt: skip
HELD_OUT_PLACES = (
    "Oslo", "Manila", "Seattle", "Krakow", "Lyon", "Porto", "Quito", "Tunis", "Bern", "Riga", "Salzburg", "Bristol",
    "Houston", "Osaka", "Melbourne", "Caracas", "Marrakesh", "San Diego", "Kuala Lumpur", "New Delhi", "Santa Cruz",
    "Austin, TX", "Tallinn", "Valencia", "Edinburgh", "Reykjavik", "Glasgow", "Antwerp", "Portland", "Havana",
)  # fmt: skip
_WEATHER = ("sunny", "rain", "cloudy", "snow", "windy", "light rain", "clear", "fog", "hot and dry", "storm", "cold")
_KINDS = ("city", "user", "order", "product", "country", "customer", "item", "place", "file", "person", "account")
_VERBS = (
    "open", "close", "play", "delete", "create", "start", "stop", "send", "print", "book", "buy", "call", "read",
    "move", "clean", "fix", "paint", "cook", "lock", "remove", "sell", "build", "wash", "cancel", "order", "update",
)  # fmt: skip
_OPENERS = (
    "Hi, ",
    "Hello! ",
    "Please: ",
    "Quick question: ",
    "Hey, ",
    "OK. ",
    "Now: ",
    "Thanks! ",
    "I have a question. ",
)
_CLOSERS = (" Please.", " Thanks!", " Thank you.", " Use the tool.", " Use your tools.", " Answer briefly.")
_SUFFIXES = (" now", " please", " for me", " today", " then", " quickly")
ARITHMETIC = "arithmetic"


@dataclass(frozen=True, slots=True)
class Topic:
    """One thing that tools do. The fields are those of `tools.yaml`."""

    names: tuple[str, ...]
    descriptions: tuple[str, ...]
    arguments: tuple[tuple[str, ...], ...]
    values: tuple[str, ...]
    about: tuple[str, ...]
    ask: tuple[str, ...]
    held_out: tuple[str, ...]
    results: tuple[str, ...]
    group: str = ""  # topics of one group that understand the same requests are not offered together
    alone: bool = False  # it is not offered beside any other topic of its group


@dataclass(frozen=True, slots=True)
class Offer:
    """A tool that is offered in a conversation, and the words with which its topic's wordings are filled."""

    topic: Topic
    tool: Tool
    words: Mapping[str, str]

    def is_asked_for(self, text: str) -> bool:
        """Return whether `text` has a word that requests for this tool have."""
        return any(word.format(**self.words) in text.lower() for word in self.topic.about)


@dataclass(frozen=True, slots=True)
class Exchange:
    """A user's request, the calls that it needs, and a result of each call."""

    prompt: str
    calls: tuple[Call, ...]
    results: tuple[str, ...]

    @property
    def answer(self) -> str:
        """The answer after the results."""
        text = " and ".join(self.results)
        return f"The result{'s are' if len(self.results) > 1 else ' is'} {text}{'' if text.endswith('.') else '.'}"


def load_topics() -> dict[str, Topic]:
    """Return all topics by name, in the order of the file. Raises `TypeError` if a topic lacks a field."""
    text = (Path(__file__).parent / "tools.yaml").read_text(encoding="utf-8")
    return {name: Topic(**_as_tuples(fields)) for name, fields in yaml.safe_load(text).items()}


def _as_tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _as_tuples(field) for key, field in value.items()}
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value


def is_held_out_word(word: str) -> bool:
    """Return whether no tool in training is about `word`, which is so for about 1 of 8 words."""
    return sum(word.encode()) % 8 == 3


class ToolRequests:
    """The source of offered tools and of requests for them."""

    def __init__(self, words: Sequence[str], make_up_word: Callable[[random.Random], str]) -> None:
        self.topics = load_topics()
        fixed = {word for topic in self.topics.values() for word in topic.about}
        usable = [word for word in words if len(word) > 2 and word not in fixed and word not in _VERBS]
        self._words = [word for word in usable if not is_held_out_word(word)]
        self._held_out_words = [word for word in usable if is_held_out_word(word)]
        self._all_words = words
        self._make_up_word = make_up_word

    def offer(
        self, rng: random.Random, count: int, first: Sequence[str] = (), usual: bool = False, held_out: bool = False
    ) -> list[Offer]:
        """Draw `count` tools that no request confuses, in random order. The topics named in `first` are among them.

        `draw` explains `usual` and `held_out`.
        """
        chosen: list[str] = list(first)
        while len(chosen) < count:
            name = rng.choice((*self.topics, "weather", "time", "add", "lookup", "lookup"))
            if all(self._may_be_beside(name, other) for other in chosen):
                chosen.append(name)
        offers: list[Offer] = []
        for name in chosen:
            offer = self.draw(rng, name, usual, held_out)
            while {offer.words["w"], offer.words["v"]} & {w for o in offers for w in (o.words["w"], o.words["v"])}:
                offer = self.draw(rng, name, usual, held_out)
            offers.append(offer)
        return rng.sample(offers, len(offers))

    def _may_be_beside(self, name: str, other: str) -> bool:
        a, b = self.topics[name], self.topics[other]
        if a.group and a.group == b.group:
            return name != other and not a.alone and not b.alone and a.group == ARITHMETIC
        return name != other or "{w}" in a.about

    def draw(self, rng: random.Random, name: str, usual: bool = False, held_out: bool = False) -> Offer:
        """Draw a tool of the topic `name`. If `usual`, it has the first of the topic's names and descriptions.

        If `held_out`, it is about a word that no tool in training is about.
        """
        topic = self.topics[name]
        verb = rng.choice(_VERBS)
        word = rng.choice(self._held_out_words if held_out else self._words)
        words = {"w": word, "x": rng.choice(_KINDS), "v": verb, "V": verb.capitalize()}

        usual = usual or rng.random() < 0.25

        def pick(texts: Sequence[str]) -> str:
            return (texts[0] if usual else rng.choice(texts)).format(**words)

        column = 0 if usual else rng.randrange(100)  # `a` goes with `b`, and `x` with `y`
        names = [choices[column % len(choices)].format(**words) for choices in topic.arguments]
        kinds = [self._json_type(rng, kind) for kind in topic.values]
        types = tuple(zip(dict.fromkeys(names), kinds, strict=True))
        return Offer(topic, Tool(pick(topic.names), pick(topic.descriptions), types), words)

    def _json_type(self, rng: random.Random, kind: str) -> str:
        if kind == "number":
            return rng.choice(("integer", "number"))
        return "integer" if kind == "thing" and rng.random() < 0.15 else "string"

    def ask(self, rng: random.Random, offer: Offer, held_out: bool = False) -> Exchange:
        """Draw a request for one call of the tool in `offer`. If `held_out`, wording and places are not in training."""
        form = rng.choice(offer.topic.held_out if held_out else offer.topic.ask)
        if not held_out:
            form = _reword(rng, form)
        pairs = zip(offer.topic.values, offer.tool.arguments, strict=True)
        values = [self._value(rng, kind, json_type, held_out) for kind, (_, json_type) in pairs]
        texts = [str(value) for value in values]
        arguments = {name: value for (name, _), value in zip(offer.tool.arguments, values, strict=True)}
        prompt = form.format(*texts, **offer.words)
        return Exchange(prompt, (Call(offer.tool.name, arguments),), (self._result(rng, offer, texts),))

    def ask_twice(self, rng: random.Random, offers: Sequence[Offer], held_out: bool = False) -> Exchange:
        """Draw a request for two calls, of one tool or of two."""
        first, second = (self.ask(rng, rng.choice(offers), held_out) for _ in range(2))
        joint = rng.choice((" And ", " ", "\n", " Then: ", " And then: ", " Also: "))
        prompt = first.prompt + (joint if first.prompt.endswith((".", "?", "!")) else "." + joint) + second.prompt
        return Exchange(prompt, first.calls + second.calls, first.results + second.results)

    def _value(self, rng: random.Random, kind: str, json_type: str, held_out: bool) -> str | int | float:
        if json_type in ("integer", "number"):
            number = rng.randint(0, 10 ** rng.choice((1, 2, 2, 2, 3, 3, 4, 6)) - 1)
            return round(number + rng.random(), 2) if json_type == "number" and rng.random() < 0.1 else number
        match kind:
            case "place":
                return self._place(rng, held_out)
            case "expression":
                return _expression(rng)
            case "text":
                return " ".join(self._word(rng) for _ in range(rng.randint(1, 4)))
            case _:
                return self._thing(rng)

    def _place(self, rng: random.Random, held_out: bool) -> str:
        if held_out:
            return rng.choice(HELD_OUT_PLACES)
        if rng.random() < MADE_UP_SHARE:
            name = " ".join(self._make_up_word(rng).capitalize() for _ in range(rng.choice((1, 1, 2))))
        else:
            name = rng.choice(_PLACES)
        return name.lower() if rng.random() < 0.12 else name

    def _word(self, rng: random.Random) -> str:
        return rng.choice(self._all_words) if rng.random() < 0.75 else self._make_up_word(rng)

    def _thing(self, rng: random.Random) -> str:
        """Draw the name or the id of something: a nonce, a number, a place, or a word in upper or lower case."""
        kind = rng.random()
        if kind < 0.3:
            return skills.make_nonce(rng, max_length=14)
        if kind < 0.4:
            return str(rng.randint(1, 99999))
        if kind < 0.55:
            return self._place(rng, held_out=False)
        return self._word(rng).capitalize() if kind < 0.85 else self._word(rng)

    def _result(self, rng: random.Random, offer: Offer, values: Sequence[str]) -> str:
        fields = {
            "weather": rng.choice(_WEATHER),
            "clock": f"{rng.randint(0, 23)}:{rng.randint(0, 59):02d}",
            "n": str(rng.randint(-9, 40)),
            "nn": str(rng.randint(0, 10 ** rng.randint(1, 7))),
            "phrase": " ".join(self._word(rng) for _ in range(rng.randint(1, 6))),
            "thing": self._thing(rng),
        }
        return rng.choice(offer.topic.results).format(*values, **fields, **offer.words)


def _reword(rng: random.Random, form: str) -> str:
    kind = rng.random()
    if kind < 0.08:
        form = rng.choice(_OPENERS) + form
    elif kind < 0.14 and form[-1] in ".?":
        form += rng.choice(_CLOSERS)
    elif kind < 0.25:
        form = form.rstrip(".?")
    elif kind < 0.35 and form[0] in string.ascii_uppercase:
        form = form[0].lower() + form[1:]
    elif kind < 0.42 and form[-2:] in ("}.", "}?"):
        form = form[:-1] + rng.choice(_SUFFIXES) + form[-1]
    return form


def _expression(rng: random.Random) -> str:
    space = rng.choice((" ", " ", ""))
    parts = [str(rng.randint(0, 10 ** rng.choice((1, 2, 2, 3, 4)) - 1))]
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        parts += [rng.choice("+-*/"), str(rng.randint(0, 10 ** rng.choice((1, 2, 2, 3)) - 1))]
    if len(parts) > 3 and rng.random() < 0.5:
        parts[0], parts[2] = "(" + parts[0], parts[2] + ")"
    return space.join(parts)
