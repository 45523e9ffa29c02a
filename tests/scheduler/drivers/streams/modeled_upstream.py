"""A server with continuous batching in modeled time: it plans its own steps, and only streams tell about them.

Requests wait in its own queue for a place, higher priorities first; nothing is preempted. Each step computes one token
of each running sequence, and whole prompts of those that start. So a test sees what vLLM's own scheduler would do.
"""

import asyncio
import random
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass, field

from engine.interface import EngineInfo, FinishReason, SamplingParams, SequenceOutput
from engine.step_time.cost import StepCost, StepWork
from engine.streaming import (
    StreamRequest,
    UpstreamBusy,
    UpstreamError,
    UpstreamLoad,
    UpstreamLost,
    UpstreamUnreachable,
)
from engine.upstream.bodies import can_continue
from scheduler.clock import Clock
from tests.scheduler.builders import FAST, VOCAB, make_info

BLOCK = 16  # tokens


def _digests(tokens: Sequence[int], salt: str) -> Iterator[tuple[int, int]]:
    """Return the ends of the whole blocks of `tokens`, each with a digest of all tokens up to there."""
    digest = hash(salt)
    for end in range(BLOCK, len(tokens) + 1, BLOCK):
        digest = hash((digest, *tokens[end - BLOCK : end]))
        yield end, digest


def token_at(prompt: tuple[int, ...], position: int) -> int:
    return (prompt[0] * 31 + len(prompt) + position * 7) % VOCAB


@dataclass(eq=False)
class _Sequence:
    request: StreamRequest
    outputs: asyncio.Queue[SequenceOutput | None] = field(default_factory=asyncio.Queue)
    num_done: int = 0
    num_cached: int = 0
    is_started: bool = False
    known: list[int] = field(default_factory=list)  # the tokens that it was sent, and those it has generated

    def __post_init__(self) -> None:
        self.known = [*self.request.prompt_token_ids, *self.request.output_token_ids]


class ModeledUpstream:
    """Implements `engine.streaming.Upstream`."""

    def __init__(
        self,
        clock: Clock,
        cost: StepCost = FAST,
        places: int = 64,
        info: EngineInfo | None = None,
        *,
        noise: float = 0.0,
        seed: int = 1,
        caches_prefixes: bool = False,
        tells_places: bool = False,
    ) -> None:
        """The time of a step is the one of `cost`, times a random factor with the standard deviation `noise`."""
        self.info = info or make_info(num_blocks=1 << 16, takes_images=True)
        self.unsupported: frozenset[str] = frozenset({"bad_words"})
        self._clock = clock
        self._cost = cost
        self._noise = noise
        self._random = random.Random(seed)
        self.places = places
        self.caches_prefixes = caches_prefixes
        self._tells_places = tells_places
        self._cached: set[int] = set()  # digests of what whole blocks were computed for: all tokens up to their ends
        self.forgets = False  # whether what is computed is cached no longer
        self.keeps_answers = True  # whether what it generates is cached, and not only the prompts
        self.loses = ""  # id of the request whose streams are never begun
        self.repeats_cached = False  # whether each output says how many tokens were cached, as SGLang's do
        self.cuts_characters = False  # whether the last token of each stream begins a character, and is not sent
        self.repeats = True  # whether an answer that begins again is the same
        self.refuses = False  # answer 503 instead of letting requests wait
        self.is_up = True
        self.refusals: dict[str, UpstreamError] = {}  # what the streams of these requests get; "": all, and trials
        self.is_frozen = False  # takes requests and sends nothing
        self.waiting: list[_Sequence] = []
        self.running: list[_Sequence] = []
        self.opened: list[StreamRequest] = []
        self.refused: list[str] = []  # ids of streams that got an error at once
        self.num_computed = 0
        self._wake = asyncio.Event()

    def can_continue(self, sampling: SamplingParams, is_seeded: bool) -> bool:
        return can_continue(sampling, is_seeded)

    def keeps_prefixes(self, cache_salt: str) -> bool:
        return self.caches_prefixes

    def can_repeat(self, sampling: SamplingParams) -> bool:
        return self.repeats

    async def load(self) -> UpstreamLoad | None:
        if not self.is_up:
            raise UpstreamUnreachable("nobody listens")
        num_places = self.places if self._tells_places else None
        return UpstreamLoad(len(self.running), len(self.waiting), 0.1, num_places)

    async def try_out(self) -> bool:
        if "" in self.refusals:
            raise self.refusals[""]
        return True

    async def stream(self, request: StreamRequest) -> AsyncGenerator[SequenceOutput, None]:
        if not self.is_up:
            raise UpstreamUnreachable("nobody listens")
        if error := self.refusals.get(request.seq_id, self.refusals.get("")):
            self.refused.append(request.seq_id)
            raise error
        if self.refuses and len(self.running) + len(self.waiting) >= self.places:
            raise UpstreamBusy("no place", 1.0)
        self.opened.append(request)
        sequence = _Sequence(request)
        if request.seq_id != self.loses:
            self.waiting.append(sequence)
        self._wake.set()
        try:
            while (output := await sequence.outputs.get()) is not None:
                yield output
                if output.finish_reason is not None:
                    return
            raise UpstreamLost("the connection broke off")
        finally:
            for sequences in (self.waiting, self.running):
                if sequence in sequences:
                    sequences.remove(sequence)

    def die(self) -> None:
        """End all streams, and take no connections until `is_up` is set again."""
        self.is_up = False
        for sequence in (*self.waiting, *self.running):
            sequence.outputs.put_nowait(None)
        self.waiting.clear()
        self.running.clear()

    async def run(self) -> None:
        while True:
            while self.is_frozen or not (self.waiting or self.running):
                self._wake.clear()
                await self._wake.wait()
            await self._step()

    def thaw(self) -> None:
        self.is_frozen = False
        self._wake.set()

    async def _step(self) -> None:
        self.waiting.sort(key=lambda s: -s.request.priority)
        while self.waiting and len(self.running) < self.places:
            self.running.append(self.waiting.pop(0))
        work, batch = StepWork(), list(self.running)
        for sequence in batch:
            tokens = sequence.request.num_tokens + sequence.num_done
            if not sequence.is_started and self.caches_prefixes:
                sequence.num_cached = self._find(sequence)
            computed = 1 if sequence.is_started else tokens - sequence.num_cached
            work.add(computed, tokens - computed if sequence.is_started or sequence.num_cached else 0)
            self.num_computed += computed
            if self.caches_prefixes and not self.forgets:
                self._keep(sequence)
            sequence.is_started = True
        await self._clock.sleep(self._cost.of(work) * self._random.lognormvariate(0.0, self._noise))
        for sequence in batch:
            if sequence in self.running:
                self._emit(sequence)

    def _find(self, sequence: _Sequence) -> int:
        """Return how many of the known tokens are cached; the last one is computed in any case."""
        num_cached = 0
        for end, digest in _digests(sequence.known, sequence.request.cache_salt):
            if digest not in self._cached or end >= len(sequence.known):
                break
            num_cached = end
        return num_cached

    def _keep(self, sequence: _Sequence) -> None:
        """Cache the whole blocks of the tokens that were computed."""
        if not sequence.is_started or (self.keeps_answers and len(sequence.known) % BLOCK == 0):
            self._cached.update(digest for _, digest in _digests(sequence.known, sequence.request.cache_salt))

    def _emit(self, sequence: _Sequence) -> None:
        request = sequence.request
        position = len(request.output_token_ids) + sequence.num_done
        sequence.num_done += 1
        sequence.known.append(token_at(request.prompt_token_ids, position))
        is_last = position + 1 >= request.sampling.max_tokens
        output = SequenceOutput(
            request.seq_id,
            num_computed_tokens=len(request.prompt_token_ids) + position,
            token_ids=() if is_last and self.cuts_characters else (token_at(request.prompt_token_ids, position),),
            finish_reason=FinishReason.LENGTH if is_last else None,
            num_cached_tokens=sequence.num_cached if is_last or self.repeats_cached else 0,
        )
        sequence.outputs.put_nowait(output)
        if is_last:
            self.running.remove(sequence)
