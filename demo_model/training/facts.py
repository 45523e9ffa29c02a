"""Read the two data files of the corpus: the facts that the demo model learns, and the words that it sees.

Knows the format of `facts.yaml` and `words.txt`; does not know how training examples are made from them.
"""

from dataclasses import dataclass
from pathlib import Path

import yaml


@dataclass(frozen=True, slots=True)
class Fact:
    """A fact: an answer, the questions to it that training shows, and paraphrases that only the evaluation asks."""

    name: str
    answer: str
    ask: tuple[str, ...]
    held_out: tuple[str, ...]


def load_facts() -> tuple[Fact, ...]:
    """Return all facts in the order of the file. Raises `KeyError` if a fact lacks a field."""
    text = (Path(__file__).parent / "facts.yaml").read_text(encoding="utf-8")
    return tuple(
        Fact(name, fact["answer"], tuple(fact["ask"]), tuple(fact["held_out"]))
        for name, fact in yaml.safe_load(text).items()
    )


def load_words() -> tuple[str, ...]:
    """Return a list of ordinary English words without duplicates, in the order of the file."""
    text = (Path(__file__).parent / "words.txt").read_text(encoding="utf-8")
    return tuple(dict.fromkeys(text.split()))
