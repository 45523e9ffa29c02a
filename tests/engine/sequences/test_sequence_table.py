"""The sequence table against a reference memory.

For each computed token the reference writes everything that its keys and values depend on (the salt and all tokens up
to it) into the slot that the block table names. It follows the copies of swaps, and reads the whole context back before
each chunk. A block that is shared across salts, freed too early or not copied would show.
"""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.interface import (
    EngineInfo,
    FinishReason,
    NewSequence,
    PlanError,
    Preempt,
    PreemptionMode,
    Run,
    SamplingParams,
    StepPlan,
    blocks_for,
)
from engine.sequences.chunk import Chunk, Outcome
from engine.sequences.sequence import Sequence, SequenceStatus
from engine.sequences.sequence_table import SequenceTable
from tests.engine.drive import make_new

SIZE = 4
PAUSE, SWAP, RECOMPUTE = PreemptionMode.PAUSE, PreemptionMode.SWAP, PreemptionMode.RECOMPUTE
MODES = ("pause", "swap", "recompute")
Slot = tuple[str, tuple[int, ...]] | None  # salt and tokens up to the slot's


def make_info(num_blocks: int, num_swap_blocks: int = 12) -> EngineInfo:
    return EngineInfo(
        "m",
        max_model_len=40,
        vocab_size=9,
        block_size=SIZE,
        num_blocks=num_blocks,
        max_step_tokens=60,
        preemption_modes=MODES,
        num_swap_blocks=num_swap_blocks,
        verifies_drafts=True,
    )


class Reference:
    """A table that executes random plans, and the contents of its blocks."""

    def __init__(self, rng: random.Random, num_blocks: int) -> None:
        self.rng = rng
        self.info = make_info(num_blocks)
        self.table = SequenceTable(self.info, prefix_cache=True)
        self.device: list[list[Slot]] = [[None] * SIZE for _ in range(num_blocks)]
        self.host: list[list[Slot]] = [[None] * SIZE for _ in range(self.info.num_swap_blocks)]
        self.salts: dict[str, str] = {}
        self.shared: dict[str, int] = {}  # shared blocks by sequence, as reported
        self.num_hits = 0
        self.num_refused = 0
        self.num_dropped = 0
        self.num_drafted = self.num_accepted = 0
        self._count = 0

    @property
    def alive(self) -> list[str]:
        return [seq_id for seq_id in self.salts if seq_id in self.table]

    def step(self) -> None:
        rng, plan = self.rng, self._random_plan()
        before = self._snapshot()
        try:
            self.table.check(plan)
        except PlanError:
            assert self._snapshot() == before
            self.num_refused += 1
            return
        self.salts.update({new.seq_id: new.cache_salt for new in plan.start})
        chunks = self.table.begin(plan)
        for source, target in self.table.copies.out:
            self.host[target] = list(self.device[source])
        for source, target in self.table.copies.back:
            self.device[target] = list(self.host[source])
        assert [c.sequence.seq_id for c in chunks] == [r.seq_id for r in plan.run]
        for chunk, run in zip(chunks, plan.run, strict=True):
            assert 1 <= chunk.num_tokens <= run.num_tokens
        is_dropped = rng.random() < 0.15
        for chunk in chunks:
            self._compute(chunk, is_dropped=is_dropped)
        if is_dropped:
            self._drop(chunks)
        else:
            for chunk in chunks:
                self._advance(chunk)
        self._check_blocks()

    def _random_plan(self) -> StepPlan:
        rng, alive = self.rng, self.alive
        aborted = [s for s in alive if rng.random() < 0.05]
        rest = [s for s in alive if s not in aborted]
        active = [s for s in rest if self.table[s].status is SequenceStatus.ACTIVE]
        preempted = {s: rng.choice((PAUSE, SWAP, RECOMPUTE)) for s in active if rng.random() < 0.2}
        resumed = [s for s in rest if s not in active and rng.random() < 0.4]
        started = [self._new() for _ in range(rng.choice((0, 0, 1, 2)))]
        runnable = [s for s in active if s not in preempted] + resumed + [new.seq_id for new in started]
        lengths = {new.seq_id: len(new.prompt_token_ids) for new in started}
        runs = []
        for seq_id in runnable:
            left = lengths.get(seq_id) or self.table[seq_id].num_uncomputed_tokens
            if rng.random() < 0.8:
                draft = self._draft(seq_id) if seq_id not in lengths and rng.random() < 0.5 else ()
                runs.append(Run(seq_id, rng.choice((left, rng.randint(1, left))), draft))
        preempts = tuple(Preempt(s, mode) for s, mode in preempted.items())
        return StepPlan(0, tuple(aborted), preempts, tuple(resumed), tuple(started), tuple(runs))

    def _draft(self, seq_id: str) -> tuple[int, ...]:
        """Return tokens that the sequence may sample next, if it decodes."""
        sequence, rng = self.table[seq_id], self.rng
        if sequence.num_uncomputed_tokens != 1 or not sequence.num_computed_tokens:
            return ()
        return tuple(rng.choice((4, 4, 5)) for _ in range(rng.randint(0, sequence.num_tokens_left - 1)))

    def _new(self) -> NewSequence:
        """Make a sequence whose prompt begins like others. One in four asks for log probabilities of the prompt, for
        which nothing may be taken from the cache."""
        self._count += 1
        rng = self.rng
        head = [1] * rng.randint(0, 20)
        tail = [rng.randint(2, 3) for _ in range(rng.randint(1, 10))]
        stop = (5,) if rng.random() < 0.3 else ()
        scored = rng.choice((None, None, None, 0))
        sampling = SamplingParams(max_tokens=rng.randint(1, 19), prompt_logprobs=scored, stop_token_ids=stop)
        return NewSequence(str(self._count), (*head, *tail), sampling, rng.choice("xy"), rng.randint(0, 2))

    def _compute(self, chunk: Chunk, is_dropped: bool) -> None:
        sequence = chunk.sequence
        salt = self.salts[sequence.seq_id]
        self.num_hits += chunk.num_cached > 0
        assert not (chunk.num_cached and sequence.sampling.prompt_logprobs is not None)
        tokens = (*sequence.token_ids[: chunk.end], *chunk.draft)
        for position in range(len(tokens)):
            block, slot = divmod(position, SIZE)
            contents = (salt, tokens[: position + 1])
            if position < chunk.start:
                assert self.device[sequence.block_table[block]][slot] == contents
            else:
                self.device[sequence.block_table[block]][slot] = None if is_dropped else contents

    def _advance(self, chunk: Chunk) -> None:
        if self.rng.random() < 0.03:
            self._fail(chunk)
            return
        sampled = self.rng.choices((4, 4, 5), k=1 + len(chunk.draft)) if chunk.samples else []
        outcome = chunk.verified([Outcome((token_id,)) for token_id in sampled] or [Outcome()])
        before = list(chunk.sequence.token_ids)
        reason = self.table.advance(chunk, outcome.token_ids)
        self._check_accepted(chunk, sampled, list(chunk.sequence.token_ids[len(before) :]), reason)

    def _check_accepted(self, chunk: Chunk, sampled: list[int], new: list[int], reason: FinishReason | None) -> None:
        """What a sequence gets is what it would have sampled one by one."""
        one_by_one: list[int] = []
        for token_id, drafted in zip(sampled, (*chunk.draft, None), strict=True) if sampled else ():
            one_by_one.append(token_id)
            if token_id in chunk.sequence.stop_ids or token_id != drafted:
                break
        assert new == one_by_one
        assert (reason is FinishReason.STOP) == any(token_id in chunk.sequence.stop_ids for token_id in new)
        self.num_drafted += len(chunk.draft)
        self.num_accepted += max(0, len(new) - 1)

    def _drop(self, chunks: list[Chunk]) -> None:
        """The dropped step may have written some keys and values: nothing may read them."""
        self.num_dropped += len(chunks)
        known = [len(chunk.sequence.token_ids) for chunk in chunks]
        self.table.suspended = chunks
        for chunk in chunks[:1]:
            with pytest.raises(PlanError, match="suspended step"):
                self.table.check(StepPlan(0, abort=(chunk.sequence.seq_id,)))
        outputs = self.table.drop_suspended()
        assert [(o.seq_id, o.num_computed_tokens) for o in outputs] == [(c.sequence.seq_id, c.start) for c in chunks]
        assert [len(chunk.sequence.token_ids) for chunk in chunks] == known
        assert all(chunk.sequence.num_computed_tokens == chunk.start for chunk in chunks)

    def _fail(self, chunk: Chunk) -> None:
        """The KV is broken: no sequence may find it any more; sequences that share it may go on."""
        blocks = list(chunk.sequence.block_table)
        self.table.free_broken(chunk.sequence.seq_id)
        assert not any(block in self.table.pool.cache for block in blocks)

    def _check_blocks(self) -> None:
        """Check that both pools conserve blocks, and that the reported numbers of shared blocks are right."""
        sequences = [self.table[s] for s in self.alive]
        for pool, tables in (
            (self.table.pool, [list(s.block_table) for s in sequences]),
            (self.table.swap_pool, [s.swap_table for s in sequences]),
        ):
            held = {block for table in tables for block in table}
            assert pool.num_used == len(held)
            assert pool.num_free + pool.num_used == pool.num_blocks
        self.shared.update(self.table.pool.take_changes())
        for s in sequences:
            others = {block for o in sequences if o is not s for block in o.block_table}
            assert self.shared.get(s.seq_id, 0) == len(others.intersection(s.block_table))
            on_device = s.status in (SequenceStatus.ACTIVE, SequenceStatus.PAUSED)
            assert len(s.block_table) == (blocks_for(s.num_computed_tokens, SIZE) if on_device else 0)

    def _snapshot(self) -> object:
        states = [(s, self.table[s].status, list(self.table[s].block_table)) for s in self.alive]
        return states, self.table.pool.num_free, self.table.swap_pool.num_free, len(self.table.pool.cache)


@given(seed=st.integers(0, 2**32), num_blocks=st.integers(10, 40))
def test_every_sequence_reads_what_was_computed_for_its_own_tokens(seed: int, num_blocks: int) -> None:
    reference = Reference(random.Random(seed), num_blocks)
    for _ in range(60):
        reference.step()


def test_the_reference_sees_hits_and_refusals() -> None:
    """Guards the test above: its random plans hit the cache, are refused, drop steps, and verify drafts."""
    reference = Reference(random.Random(1), 16)
    for _ in range(200):
        reference.step()
    assert reference.num_hits > 20
    assert reference.num_refused > 5
    assert reference.num_dropped > 20
    assert reference.num_drafted - 20 > reference.num_accepted > 20


# -- the prefix cache, step by step ------------------------------------------------------------------------------------


class Driver:
    def __init__(self, num_blocks: int = 20) -> None:
        self.table = SequenceTable(make_info(num_blocks), prefix_cache=True)

    def run(self, seq_id: str, num_tokens: int, **plan: object) -> Chunk:
        step = StepPlan(0, run=(Run(seq_id, num_tokens),), **plan)  # type: ignore[arg-type]
        self.table.check(step)
        (chunk,) = self.table.begin(step)
        self.table.advance(chunk, (5,) if chunk.samples else ())
        return chunk

    def start(self, seq_id: str, prompt: int, num_tokens: int | None = None, **new: object) -> Chunk:
        params = SamplingParams(max_tokens=20)
        sequence = NewSequence(seq_id, (1,) * prompt, params, **new)  # type: ignore[arg-type]
        return self.run(seq_id, num_tokens or prompt, start=(sequence,))


@pytest.mark.parametrize(("prompt", "cached"), [(3, 0), (4, 0), (5, 4), (12, 8), (13, 12), (20, 12)])
def test_full_blocks_are_found_and_one_token_at_least_is_computed(prompt: int, cached: int) -> None:
    driver = Driver()
    driver.start("first", 15)
    chunk = driver.start("second", prompt)
    assert (chunk.num_cached, chunk.start, chunk.num_tokens) == (cached, cached, prompt - cached)


def test_a_recomputed_sequence_takes_blocks_that_are_still_cached() -> None:
    driver = Driver()
    driver.start("s", 10)
    for _ in range(3):
        driver.run("s", 1)
    driver.table.begin(StepPlan(0, preempt=(Preempt("s", RECOMPUTE),)))
    chunk = driver.run("s", 14, resume=("s",))
    assert (chunk.num_cached, chunk.num_tokens) == (12, 2), "blocks of the output are cached, too"


def test_a_first_chunk_takes_cached_blocks_only_if_the_plan_keeps_its_own() -> None:
    """The pool has 10 blocks: 8 are cached and idle, and the other run of the plan needs 8."""
    driver = Driver(num_blocks=10)
    driver.start("gone", 33)
    driver.table.begin(StepPlan(0, abort=("gone",)))
    long = NewSequence("long", (1,) * 39, SamplingParams(max_tokens=1))
    other = NewSequence("other", (2,) * 30, SamplingParams(max_tokens=1))
    plan = StepPlan(0, start=(long, other), run=(Run("long", 8), Run("other", 30)))
    driver.table.check(plan)
    first, second = driver.table.begin(plan)
    assert (first.num_cached, second.num_tokens) == (0, 30)
    assert driver.table.pool.num_free == 0


def test_blocks_of_higher_retention_stay_cached_longer() -> None:
    driver = Driver(num_blocks=8)
    for seq_id, salt, retention in (("high", "h", 9), ("low", "l", 0)):
        driver.start(seq_id, 15, cache_salt=salt, retention=retention)
        driver.table.begin(StepPlan(0, abort=(seq_id,)))
    driver.start(
        "newer", 19, cache_salt="n"
    )  # takes two blocks that were never cached, and three of the lower retention
    driver.table.begin(StepPlan(0, abort=("newer",)))
    assert driver.start("low again", 9, cache_salt="l").num_cached == 0
    assert driver.start("high again", 15, cache_salt="h").num_cached == 12


def test_sequences_of_different_adapters_share_no_blocks() -> None:
    digests = [
        Sequence(make_new("a", range(8), adapter=adapter), 64, ()).digests(2, 4) for adapter in (None, "one", "two")
    ]
    assert len({digest for pair in digests for digest in pair}) == 6
