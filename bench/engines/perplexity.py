"""The perplexity of a model on the docstrings of Python's standard library, with this engine's products.

    python -m bench.engines.perplexity DIRECTORY_OR_GGUF_FILE --quantize int8,int4

Prints a line for each kind of weights: without `--quantize` first, then each of these kinds.
"""

import argparse
import ast
import math
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from engine import gguf
from engine.config import EngineConfig
from engine.factory import build_torch_engine
from engine.interface import NewSequence, Run, SamplingParams, StepPlan

WINDOW = 512  # tokens of a sequence: a first one, and 511 of the text
SHORTEST = 400  # characters of a docstring


def texts() -> Iterator[str]:
    """Yield the longer docstrings of the standard library's modules, in the order of their names."""
    for name in sorted(sys.stdlib_module_names):
        spec = find_spec(name) if name not in ("this", "antigravity") else None
        if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
            continue
        found = ast.get_docstring(ast.parse(Path(spec.origin).read_text(encoding="utf-8")))
        if found and len(found) > SHORTEST:
            yield found


def windows(directory: Path, first: int, count: int) -> list[tuple[int, ...]]:
    """Return `count` sequences of `WINDOW` tokens, each of which begins with the token `first`."""
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    ids = [i for text in texts() for i in tokenizer.encode(text + "\n\n", add_special_tokens=False).ids]
    step = WINDOW - 1
    return [(first, *ids[i : i + step]) for i in range(0, len(ids) - step, step)][:count]


def perplexity(engine: Any, sequences: Sequence[tuple[int, ...]]) -> float:
    """Return e to the mean of -log p of all tokens that follow a first one."""
    total, number = 0.0, 0
    for step, sequence in enumerate(sequences):
        new = NewSequence(f"text-{step}", sequence, SamplingParams(max_tokens=1, prompt_logprobs=0))
        result = engine.step(StepPlan(step, start=(new,), run=(Run(new.seq_id, len(sequence)),)))
        found = [entry.logprob for entry in result.outputs[0].prompt_logprobs]
        total, number = total + sum(found), number + len(found)
    return math.exp(-total / number)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--quantize", default="", help="int8, int4 or both, with a comma")
    parser.add_argument("--first", type=int, default=2, help="the token that begins each sequence")
    parser.add_argument("--windows", type=int, default=20, help="sequences of 512 tokens")
    asked = parser.parse_args()
    directory = asked.model
    if directory.suffix == gguf.SUFFIX:
        directory = gguf.unpacked(directory, with_weights=False)
    sequences = windows(directory, asked.first, asked.windows)
    for kind in (None, *filter(None, asked.quantize.split(","))):
        config = EngineConfig(str(directory), quantize=kind, device="cpu", max_model_len=WINDOW + 8, max_num_seqs=4)
        engine = build_torch_engine(config)
        print(f"{kind or 'as it is':>9}: {perplexity(engine, sequences):.3f} on {len(sequences)} sequences", flush=True)
        engine.close()


if __name__ == "__main__":
    main()
