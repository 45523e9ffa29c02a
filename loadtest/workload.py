"""Arrivals, lengths and prompts from a seed: pure, and the same to the byte for the same seed.

Knows distributions; it does not know HTTP, clocks or servers. Each class draws from a generator of its own,
so that adding a class, or leaving one out in another arm, changes nothing for the others.
"""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from loadtest.scenario import Lengths, OpenLoop, TrafficClass

# Prompt ids stay clear of special tokens below and of small vocabularies above.
FIRST_PROMPT_TOKEN_ID, END_PROMPT_TOKEN_ID = 16, 1000

# Words that any English tokenizer holds whole; one is about one token with the space before it.
WORDS = (
    "the of and to in is that it for as with on be at by this have from or one had not but what all were "
    "when we there can an your which their said if do will each about how up out them then she many some so "
    "these would other into has more her two like him see time could no make than first been its who now "
    "people my made over did down only way find use may water long little very after words called just where "
    "most know get through back much before go good new write our used me man too any day same right look"
)


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """What will be sent, and when. `at_s` counts from the arm's start (0 in a closed loop)."""

    traffic_class: str
    index: int
    at_s: float
    prompt_tokens: int
    output_tokens: int
    prompt_seed: int


def generator(seed: int, *stream: str | int) -> np.random.Generator:
    """An independent generator for each named stream of a seed."""
    entropy = [seed, *(zlib.crc32(s.encode()) if isinstance(s, str) else s for s in stream)]
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(entropy)))


def sample_arrivals(arrivals: OpenLoop, duration_s: float, rng: np.random.Generator) -> np.ndarray:
    """Times in [0, duration_s), ascending. Gaps are gamma with mean 1/rate and coefficient of variation cv;
    the process starts at a random point of its first gap, so that short runs have the right rate too."""
    shape = arrivals.cv**-2
    scale = arrivals.cv**2 / arrivals.rate_per_s
    # The gap that covers the origin is length-biased: gamma with one more unit of shape.
    first = rng.gamma(shape + 1.0, scale) * rng.random()
    times = [np.array([first])]
    while times[-1][-1] < duration_s:
        gaps = rng.gamma(shape, scale, size=max(16, int(duration_s * arrivals.rate_per_s)))
        times.append(times[-1][-1] + np.cumsum(gaps))
    arrived = np.concatenate(times)
    return arrived[arrived < duration_s]


def sample_lengths(lengths: Lengths, count: int, rng: np.random.Generator) -> np.ndarray:
    """`count` integers in [min, max]."""
    if lengths.median is None:
        return rng.integers(lengths.min, lengths.max, size=count, endpoint=True)
    drawn = rng.lognormal(np.log(lengths.median), lengths.sigma, size=count)
    return np.clip(np.rint(drawn), lengths.min, lengths.max).astype(np.int64)


def plan_open_loop(traffic: TrafficClass, duration_s: float, seed: int, round_: int) -> list[PlannedRequest]:
    """All requests of an open-loop class in one arm, by arrival."""
    if not isinstance(traffic.arrivals, OpenLoop):
        raise TypeError(f"class {traffic.name!r} is a closed loop: it has no arrival times")
    rng = generator(seed, traffic.name, round_)
    return _plan(traffic, sample_arrivals(traffic.arrivals, duration_s, rng), 0, rng)


def plan_closed_loop(traffic: TrafficClass, seed: int, round_: int) -> Iterator[PlannedRequest]:
    """Endless; drawn in blocks, so that sending one costs little."""
    rng = generator(seed, traffic.name, round_)
    index = 0
    while True:
        block = _plan(traffic, np.zeros(256), index, rng)
        yield from block
        index += len(block)


def _plan(traffic: TrafficClass, at_s: np.ndarray, first_index: int, rng: np.random.Generator) -> list[PlannedRequest]:
    count = len(at_s)
    prompts = sample_lengths(traffic.prompt_tokens, count, rng).tolist()
    outputs = sample_lengths(traffic.output_tokens, count, rng).tolist()
    seeds = rng.integers(0, 2**31, size=count).tolist()
    return [
        PlannedRequest(traffic.name, first_index + i, at, prompt, output, seed)
        for i, (at, prompt, output, seed) in enumerate(zip(at_s.tolist(), prompts, outputs, seeds, strict=True))
    ]


def token_prompt(planned: PlannedRequest) -> list[int]:
    """Exactly `prompt_tokens` ids, all below 1000: any model's vocabulary has them."""
    rng = generator(planned.prompt_seed)
    ids = rng.integers(FIRST_PROMPT_TOKEN_ID, END_PROMPT_TOKEN_ID, size=planned.prompt_tokens)
    return [int(i) for i in ids]


def word_prompt(planned: PlannedRequest) -> str:
    """About `prompt_tokens` tokens of words; the answer's `usage` says how many they were."""
    rng = generator(planned.prompt_seed)
    words = WORDS.split()
    return " ".join(words[i] for i in rng.integers(0, len(words), size=planned.prompt_tokens))


def draw_nonces(count: int, seed: int) -> list[str]:
    """`count` different nonces such as `k7Qz-09ab`."""
    rng = generator(seed, "nonce")
    letters = np.array(list("abcdefghijkmnpqrstuvwxyzABCDEFGHJKLMNPQRSTUVWXYZ0123456789"))
    nonces: dict[str, None] = {}
    while len(nonces) < count:
        drawn = "".join(letters[rng.integers(0, len(letters), size=8)])
        nonces[f"{drawn[:4]}-{drawn[4:]}"] = None
    return list(nonces)
