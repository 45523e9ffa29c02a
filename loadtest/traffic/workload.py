"""Plan requests from a seed. All functions are pure, and the same seed always gives exactly the same requests.

Knows how arrivals, lengths and shared prefixes become planned requests; does not know HTTP, clocks or servers.

Each class draws from its own random generators, so that an arm can add or leave out a class without changing the
others. Each client of a class also has its own generators, so that half the load sends half of the same requests.
"""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from loadtest.traffic.scenario import Lengths, TrafficClass
from loadtest.traffic.scenario_arrivals import OpenLoop
from loadtest.traffic.workload_arrivals import sample_arrivals, sample_rate, whole_and_part

CLOSED_LOOP_BLOCK = 256  # number of requests that are drawn together
MAX_SEED = 2**31  # the seeds that are drawn for segments and prompts are below this


@dataclass(frozen=True, slots=True)
class Segment:
    """A sequence of tokens that can occur in several prompts, given by a seed.

    Segments with the same seed and the same length have the same tokens.
    """

    seed: int
    tokens: int


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """A request to send, and the time at which to send it.

    `at_s` counts from the start of the arm; it is 0 in a closed loop. A prompt begins with its `prefix` segments, in
    order, and goes on with its own tokens. Two prompts with the same first segments share a prefix.
    """

    traffic_class: str
    index: int
    at_s: float
    prompt_tokens: int  # including the prefix
    output_tokens: int
    prompt_seed: int
    prefix: tuple[Segment, ...] = ()

    @property
    def prefix_tokens(self) -> int:
        return sum(segment.tokens for segment in self.prefix)

    @property
    def prefix_id(self) -> int | None:
        """An id of the whole prefix: equal prefixes have equal ids. None without a prefix."""
        if not self.prefix:
            return None
        return zlib.crc32(repr([(s.seed, s.tokens) for s in self.prefix]).encode())

    @property
    def segments(self) -> tuple[Segment, ...]:
        """All segments of the prompt: those of the prefix, and the prompt's own tokens."""
        own = self.prompt_tokens - self.prefix_tokens
        return (*self.prefix, Segment(self.prompt_seed, own)) if own else self.prefix


def generator(seed: int, *stream: str | int) -> np.random.Generator:
    """Return a random generator for one named stream of a seed. The generators of different streams are independent."""
    entropy = [seed, *(zlib.crc32(s.encode()) if isinstance(s, str) else s for s in stream)]
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(entropy)))


def sample_lengths(lengths: Lengths, count: int, rng: np.random.Generator) -> np.ndarray:
    """Return `count` random integers in [min, max]."""
    if lengths.median is None:
        return rng.integers(lengths.min, lengths.max, size=count, endpoint=True)
    drawn = rng.lognormal(np.log(lengths.median), lengths.sigma, size=count)
    return np.clip(np.rint(drawn), lengths.min, lengths.max).astype(np.int64)


def plan_open_loop(traffic: TrafficClass, duration_s: float, seed: int, round_: int) -> list[PlannedRequest]:
    """Return all requests of an open-loop class in one round of an arm, in order of arrival."""
    if not isinstance(traffic.arrivals, OpenLoop):
        raise TypeError(f"class {traffic.name!r} is a closed loop: it has no arrival times")
    shared = shared_prefixes(traffic, seed)
    rate = sample_rate(traffic.arrivals, duration_s, generator(seed, traffic.name, round_, "rate"))
    planned: list[PlannedRequest] = []
    for client, share in enumerate(whole_and_part(traffic.arrivals.clients)):
        rng = generator(seed, traffic.name, round_, "client", client)
        at_s = sample_arrivals(rate, traffic.arrivals.cv, rng)
        sent = rng.random(len(at_s)) < share
        if traffic.sessions is None:
            drawn = _draw(traffic, at_s, shared, rng)
            planned += [request for request, is_sent in zip(drawn, sent, strict=True) if is_sent]
        else:
            for start_s, session_rng, is_sent in zip(at_s.tolist(), rng.spawn(len(at_s)), sent, strict=True):
                if is_sent:
                    planned += _draw_session(traffic, start_s, duration_s, shared, session_rng)
    planned.sort(key=lambda request: request.at_s)
    return [replace(request, index=i) for i, request in enumerate(planned)]


def plan_closed_loop(traffic: TrafficClass, seed: int, round_: int) -> Iterator[PlannedRequest]:
    """Yield requests without end. They are drawn in blocks, which is cheaper than drawing them one by one."""
    rng = generator(seed, traffic.name, round_)
    shared = shared_prefixes(traffic, seed)
    index = 0
    while True:
        block = _draw(traffic, np.zeros(CLOSED_LOOP_BLOCK), shared, rng)
        yield from (replace(request, index=index + i) for i, request in enumerate(block))
        index += len(block)


def shared_prefixes(traffic: TrafficClass, seed: int) -> list[Segment]:
    """Return the shared prefixes of the class. They are the same in every round and every arm with this seed."""
    prefixes = traffic.prefixes
    if prefixes is None:
        return []
    rng = generator(seed, traffic.name, "prefixes")
    tokens = sample_lengths(prefixes.tokens, prefixes.count, rng).tolist()
    return [Segment(s, n) for s, n in zip(_seeds(prefixes.count, rng), tokens, strict=True)]


def _draw(
    traffic: TrafficClass, at_s: np.ndarray, shared: list[Segment], rng: np.random.Generator
) -> list[PlannedRequest]:
    """Return one request for each time in `at_s`. The caller sets the index of each request."""
    count = len(at_s)
    own = sample_lengths(traffic.prompt_tokens, count, rng).tolist()
    outputs = sample_lengths(traffic.output_tokens, count, rng).tolist()
    seeds = _seeds(count, rng)
    chosen = rng.integers(0, len(shared), size=count).tolist() if shared else [None] * count
    planned = []
    for at, tokens, output, prompt_seed, choice in zip(at_s.tolist(), own, outputs, seeds, chosen, strict=True):
        prefix = () if choice is None else (shared[choice],)
        total = tokens + sum(segment.tokens for segment in prefix)
        planned.append(PlannedRequest(traffic.name, 0, at, total, output, prompt_seed, prefix))
    return planned


def _draw_session(
    traffic: TrafficClass, start_s: float, end_s: float, shared: list[Segment], rng: np.random.Generator
) -> list[PlannedRequest]:
    """Return the turns of one session that begin before `end_s`.

    The model's answers are unknown when the requests are planned. In the history, each answer is replaced by random
    tokens of the planned output length.
    """
    sessions = traffic.sessions
    assert sessions is not None, "asked for a class with sessions"
    turns = int(rng.geometric(1 / sessions.turns_mean))
    said = (shared[int(rng.integers(len(shared)))],) if shared else ()
    opening = sessions.document_tokens if rng.random() < sessions.documents else None
    at_s, planned = start_s, list[PlannedRequest]()
    for turn in range(turns):
        lengths = opening if opening is not None and turn == 0 else traffic.prompt_tokens
        own = Segment(_seeds(1, rng)[0], int(sample_lengths(lengths, 1, rng)[0]))
        output = int(sample_lengths(traffic.output_tokens, 1, rng)[0])
        answer = Segment(_seeds(1, rng)[0], output)
        total = sum(segment.tokens for segment in said) + own.tokens
        if total + output > sessions.max_tokens or at_s >= end_s:
            break
        planned.append(PlannedRequest(traffic.name, 0, at_s, total, output, own.seed, said))
        said = (*said, own, answer)
        at_s += float(rng.exponential(sessions.think_s))
    return planned


def _seeds(count: int, rng: np.random.Generator) -> list[int]:
    return [int(s) for s in rng.integers(0, MAX_SEED, size=count)]
