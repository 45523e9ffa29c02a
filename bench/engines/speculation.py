"""What speculative decoding is worth: the same answers with and without drafts, in turn, through the scheduler's loop.

    python -m bench.engines.speculation DIRECTORY --rounds 3

The texts are those of Python's standard library: functions with one name to change (edit), docstrings to summarise
(summary), and beginnings of docstrings to continue at random (prose), which repeats little. Both arms must give the
same tokens. Prints a line for each load: how many times as fast answers come with drafts, in the median of the rounds
(and in the slowest and the fastest one). A model without a tokenizer gets the bytes of the texts as tokens.
"""

import argparse
import ast
import inspect
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import median

from tokenizers import Tokenizer

from bench.engines.perplexity import texts
from bench.engines.systems.scheduled import LoopOverEngine, one_tier
from engine.config import EngineConfig, Quantization
from engine.factory import build_engine
from engine.interface import SamplingParams

MODULES = ("textwrap", "shlex", "fnmatch", "bisect", "heapq", "colorsys", "statistics", "calendar")  # of functions
NEW_NAME = "value_of_the_caller"
NUM_TEXTS = 4  # of each load
LONGEST = 1500  # characters of a function or docstring
STREAMS = (1, 4)
TEMPERATURES = (0.0, 1.0)
SLO = {"ttft_p99_ms": 2000, "itl_p99_ms": 400}  # ms; wide, so that the model's steps fit


@dataclass(frozen=True, slots=True)
class Load:
    """Prompts with the numbers of tokens to answer."""

    name: str
    prompts: Sequence[str]
    new_tokens: Sequence[int]
    temperatures: Sequence[float] = TEMPERATURES


def functions() -> list[str]:
    """Return the sources of functions with arguments, from short to long."""
    found = []
    for name in MODULES:
        tree = ast.parse(Path(inspect.getsourcefile(__import__(name)) or "").read_text(encoding="utf-8"))
        nodes = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.args.args]
        found += [source for node in nodes if 400 < len(source := _plain(node)) < LONGEST]
    return sorted(found, key=len)


def _plain(node: ast.FunctionDef) -> str:
    """Return the source of a function without comments and docstring."""
    if ast.get_docstring(node):
        node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(node)


def renamed(source: str) -> tuple[str, str]:
    """Return the function with its first argument renamed, and that argument."""
    name = ast.parse(source).body[0].args.args[0].arg  # type: ignore[attr-defined]
    return re.sub(rf"\b{name}\b", NEW_NAME, source), name


def loads(count: Callable[[str], int]) -> list[Load]:
    """Return all loads. `count` returns the number of tokens of a text."""
    example, *sources = functions()
    edits, lengths = [], []
    for source in sources[:: len(sources) // NUM_TEXTS][:NUM_TEXTS]:
        shown = "".join(
            f"# Before:\n{text}\n\n# After renaming {renamed(text)[1]} to {NEW_NAME}:\n{answer}\n\n\n"
            for text, answer in ((example, renamed(example)[0]), (source, ""))
        )
        edits.append(shown.rstrip("\n") + "\n")
        lengths.append(count(renamed(source)[0]))
    longer = [text[:LONGEST] for text in texts() if len(text) > LONGEST][:NUM_TEXTS]
    summaries = [f"{text}\n\nThe above in a few sentences:\n" for text in longer]
    prose = [text[:100] for text in longer]
    return [
        Load("edit", edits, lengths),
        Load("summary", summaries, [120] * len(longer)),
        Load("prose", prose, [200] * len(prose), temperatures=(1.0,)),
    ]


class Arms:
    """One engine with two loops over it: with drafts, and without."""

    def __init__(self, directory: Path, quantize: Quantization | None, num_streams: int) -> None:
        config = EngineConfig(
            str(directory),
            quantize=quantize,
            device="cpu",
            max_num_seqs=num_streams,
            prefix_cache=False,
        )
        engine = build_engine(config)
        tiers, info = one_tier(num_streams, **SLO), engine.info
        infos = {True: info, False: replace(info, verifies_drafts=False)}
        self.loops = {drafts: LoopOverEngine(engine, infos[drafts], tiers) for drafts in (True, False)}

    def seconds(
        self, prompts: Sequence[Sequence[int]], samplings: Sequence[SamplingParams], streams: int, round_: int
    ) -> dict[bool, float]:
        """Return the time of all answers, `streams` at once, with drafts and without. The arms take turns.

        Raises `SystemExit` if they give different tokens.
        """
        seconds = {True: 0.0, False: 0.0}
        for first in range(0, len(prompts), streams):
            some, tokens = slice(first, first + streams), []
            for drafts in (True, False) if (round_ + first // streams) % 2 else (False, True):
                begun_s = time.perf_counter()
                tokens.append(self.loops[drafts].sample(prompts[some], samplings[some]))
                seconds[drafts] += time.perf_counter() - begun_s
            if tokens[0] != tokens[1]:
                raise SystemExit("the arms give different tokens")
        return seconds

    def close(self) -> None:
        for loop in self.loops.values():
            loop.close()


def measure(arms: Arms, load: Load, encode: Callable[[str], list[int]], rounds: int, first: list[int]) -> None:
    """Print a line for each number of streams and temperature."""
    prompts = [[*first, *encode(text)] for text in load.prompts]
    for temperature, streams in product(load.temperatures, STREAMS):
        samplings = [
            SamplingParams(max_tokens=count, temperature=temperature, seed=i, ignore_eos=True)
            for i, count in enumerate(load.new_tokens)
        ]
        found = [arms.seconds(prompts, samplings, streams, round_) for round_ in range(rounds)]
        ratios = [seconds[False] / seconds[True] for seconds in found]
        rates = [sum(load.new_tokens) / seconds[False] for seconds in found]
        spread = f"{min(ratios):.2f}–{max(ratios):.2f}"
        print(
            f"{load.name:>8}, temperature {temperature:.0f}, {streams} streams: {median(ratios):.2f} ({spread})"
            f" times as fast; {median(rates):.0f} tokens/s without drafts",
            flush=True,
        )


def encoder(file: Path) -> Callable[[str], list[int]]:
    """Return what makes tokens of a text: the tokenizer of `file`; without one, its bytes are the tokens."""
    if not file.exists():
        return lambda text: list(text.encode())
    tokenizer = Tokenizer.from_file(str(file))
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--quantize", choices=("int8", "int4"), default=None)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--loads", default="edit,summary,prose")
    parser.add_argument("--first", type=int, default=2, help="the token that begins each prompt")
    asked = parser.parse_args()
    encode = encoder(asked.model / "tokenizer.json")
    arms = Arms(asked.model, asked.quantize, max(STREAMS))
    for load in loads(lambda text: len(encode(text))):
        if load.name in asked.loads.split(","):
            measure(arms, load, encode, asked.rounds, [asked.first])
    arms.close()


if __name__ == "__main__":
    main()
