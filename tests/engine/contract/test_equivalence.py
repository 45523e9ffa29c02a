"""No schedule changes a sequence: chunked, paused, swapped, recomputed and with shared prefixes, it gets the tokens,
log probabilities and finish reason that it gets alone."""

import random
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
from llguidance import LLMatcher

from engine.interface import NewSequence, PlanError, Preempt, PreemptionMode, Run, StepPlan, StepResult
from tests.engine.contract.checked_engine import CheckedEngine
from tests.engine.contract.conftest import MakeNew
from tests.engine.contract.engines import END, MAX_TOKEN, OTHER_END, VOCAB_SIZE
from tests.engine.contract.reported import Reported, assert_alike
from tests.engine.drive import Driven, compiled, drive, make_new, random_chunks, random_drafts, random_preemption

_salts = count()
ENDS = tuple(range(30, 60))  # tokens of which an output soon has one
NO_END = ((END, -100.0), (OTHER_END, -100.0))
OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.9, "top_p": 0.95, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
    {"temperature": 1.2, "top_k": 40, "min_p": 0.02, "presence_penalty": 0.8, "min_tokens": 6},
    {"temperature": 0.7, "logprobs": 3, "prompt_logprobs": 1},
    {"temperature": 0.0, "logprobs": 0, "frequency_penalty": 0.7, "ignore_eos": True},
    {"temperature": 0.0, "logit_bias": ((4, 2.0), *NO_END), "logprobs": 2},
    {"temperature": 1.0, "bad_words": ((10,), (22, 27)), "allowed_token_ids": tuple(range(5, 60))},
    {"temperature": 1.1, "grammar": LLMatcher.grammar_from_regex("([a-m]{3}-){2,9}"), "logprobs": 1},
    {"temperature": 0.0, "grammar": LLMatcher.grammar_from_regex("[0-9]{4,40}"), "min_tokens": 6},
]
# Options of which some need the tokens of one step before the next one is sampled.
AHEAD: list[dict[str, Any]] = [
    {"ignore_eos": True},
    {"max_tokens": 3},
    {"repetition_penalty": 1.5},
    {"frequency_penalty": 1.0, "logprobs": 2},
    {"min_tokens": 9},
    {"logit_bias": ((5, 3.0),)},
]


def family(engine: CheckedEngine) -> list[NewSequence]:
    """Return a sequence for each of `OPTIONS`, whose prompts begin with 0 to 3 blocks of a common text."""
    rng, block = random.Random(1), engine.info.block_size
    trunk = [rng.randint(1, MAX_TOKEN) for _ in range(3 * block)]
    news = []
    for i, options in enumerate(OPTIONS):
        prompt = trunk[: rng.randint(0, 3 * block)] + [rng.randint(1, MAX_TOKEN) for _ in range(rng.randint(1, 9))]
        news.append(make_new(f"s{i}", prompt if i else trunk, **{"max_tokens": 12, "seed": i, **options}))
    return news


def alone(engine: CheckedEngine, news: list[NewSequence]) -> tuple[dict[str, Driven], Reported]:
    """Run each sequence by itself, with a whole prefill and an empty cache."""
    driven, reported = {}, Reported()
    for new in news:
        driven |= drive(engine, [replace(new, cache_salt=f"alone-{next(_salts)}")], after_step=reported)
    return driven, reported


def test_suspended_steps_change_no_sequence(engine: CheckedEngine) -> None:
    """Law 9: where the engine can suspend no steps, they run one after the other."""
    news = [new for new in family(engine) if new.sampling.prompt_logprobs is None]
    expected, _ = alone(engine, news)
    modes = [PreemptionMode(mode) for mode in engine.info.preemption_modes]
    rng = random.Random(5)
    salted = [replace(new, cache_salt="suspended") for new in news]
    chunks, preempt = random_chunks(rng, 2 * engine.info.block_size), random_preemption(rng, 0.1, *modes)
    driven = drive(Suspended(engine), salted, chunks, preempt, arrivals_a_step=2)
    assert {k: (d.output, d.finish_reason) for k, d in driven.items()} == {
        k: (d.output, d.finish_reason) for k, d in expected.items()
    }
    assert (engine.num_suspended > 0) == engine.info.suspends_steps


class Suspended:
    """A stepper that suspends the steps of `engine`."""

    def __init__(self, engine: CheckedEngine) -> None:
        self.info, self.compile_grammar, self.step = engine.info, engine.compile_grammar, engine.suspended_step


@pytest.mark.parametrize("suspends", [False, True])
def test_no_draft_changes_a_sequence(engine: CheckedEngine, suspends: bool) -> None:
    """Right or wrong, of any length, with any preemption or suspension: only the steps become fewer."""
    if not engine.info.verifies_drafts:
        pytest.skip("this engine verifies no drafts")
    news = family(engine) + [
        make_new(f"long-{i}", range(1, 9 + i), max_tokens=30, seed=i, ignore_eos=True, **options)
        for i, options in enumerate(
            ({"temperature": 1.0}, {"temperature": 0.0, "logprobs": 1}, {"stop_token_ids": ENDS})
        )
    ]
    expected, expected_reported = alone(engine, news)
    modes = [PreemptionMode(mode) for mode in engine.info.preemption_modes]
    num_steps = {True: 0, False: 0}
    for seed in range(4):
        for drafts in (True, False):
            rng, reported = random.Random(seed), Reported()
            salted = [replace(new, cache_salt=f"drafts-{next(_salts)}") for new in news]
            chunks, preempt = random_chunks(rng, 2 * engine.info.block_size), random_preemption(rng, 0.1, *modes)
            longest = 2 * engine.info.block_size + 1 if drafts else 0
            draft = random_drafts(random.Random(seed), expected, longest)

            def count(result: StepResult, is_drafted: bool = drafts, reported: Reported = reported) -> None:
                num_steps[is_drafted] += 1
                reported(result)

            stepper = Suspended(engine) if suspends else engine
            driven = drive(stepper, salted, chunks, preempt, 2, count, draft)
            for new in news:
                own, other = driven[new.seq_id], expected[new.seq_id]
                assert (own.output, own.finish_reason, own.failure) == (other.output, other.finish_reason, None)
                assert_alike(reported.output[new.seq_id], expected_reported.output[new.seq_id])
                assert_alike(reported.prompt[new.seq_id], expected_reported.prompt[new.seq_id])
    assert num_steps[True] < 0.8 * num_steps[False]


@pytest.mark.trap(14)
def test_no_schedule_changes_a_sequence(engine: CheckedEngine) -> None:
    """Trap 14: a resume that loses RNG, penalties, log probabilities or the state of a grammar."""
    news = family(engine)
    expected, expected_reported = alone(engine, news)
    assert {k: d.failure for k, d in expected.items() if d.failure} == {}
    modes = [PreemptionMode(mode) for mode in engine.info.preemption_modes]
    num_cached = 0
    for seed in range(4):
        rng, reported = random.Random(seed), Reported()
        salted = [replace(new, cache_salt=f"seed-{seed}") for new in news]
        rng.shuffle(salted)
        chunks, preempt = random_chunks(rng, 2 * engine.info.block_size), random_preemption(rng, 0.25, *modes)
        driven = drive(engine, salted, chunks, preempt, arrivals_a_step=2, after_step=reported)
        num_cached += sum(d.num_cached for d in driven.values())
        for new in news:
            own, other = driven[new.seq_id], expected[new.seq_id]
            assert (own.output, own.finish_reason, own.failure) == (other.output, other.finish_reason, None)
            assert_alike(reported.output[new.seq_id], expected_reported.output[new.seq_id])
            assert_alike(reported.prompt[new.seq_id], expected_reported.prompt[new.seq_id])
    assert num_cached > 0, "the schedules do share prefixes"


def test_a_sequence_that_is_continued_from_its_tokens_gets_the_same_tokens(engine: CheckedEngine) -> None:
    """As after the death of another worker: wherever it is cut, the rest is that of an uninterrupted run."""
    news = family(engine)
    expected, expected_reported = alone(engine, news)
    for seed in range(3):
        rng, reported = random.Random(seed), Reported()
        cut = {new.seq_id: rng.randrange(len(expected[new.seq_id].output)) for new in news}
        continued = [
            replace(
                new,
                cache_salt=f"continued-{seed}",
                output_token_ids=tuple(expected[new.seq_id].output[: cut[new.seq_id]]),
            )
            for new in news
        ]
        chunks = random_chunks(rng, 2 * engine.info.block_size)
        preempt = random_preemption(rng, 0.1, PreemptionMode.PAUSE, PreemptionMode.RECOMPUTE)
        driven = drive(engine, continued, chunks, preempt, arrivals_a_step=3, after_step=reported)
        for new in news:
            own, other, begin = driven[new.seq_id], expected[new.seq_id], cut[new.seq_id]
            assert (own.output, own.finish_reason, own.failure) == (other.output, other.finish_reason, None)
            assert_alike(reported.output[new.seq_id], expected_reported.output[new.seq_id][begin:])
            assert_alike(reported.prompt[new.seq_id], expected_reported.prompt[new.seq_id])


def test_an_output_that_leaves_no_room_is_no_sequence_to_start(engine: CheckedEngine, new: MakeNew) -> None:
    whole = new("whole", range(1, 9), max_tokens=3)
    for output in ((5, 5, 5), (1,) * engine.info.max_model_len, (VOCAB_SIZE,)):
        with pytest.raises(PlanError):
            engine.run(("whole", 1), start=(replace(whole, output_token_ids=output),))


def test_the_seed_decides_the_tokens(engine: CheckedEngine, new: MakeNew) -> None:
    options = {"temperature": 1.0, "max_tokens": 10, "ignore_eos": True}
    news = [new(f"s{i}", range(1, 12), seed=seed, **options) for i, seed in enumerate((7, 7, 8, 2**62 + 7, -7))]
    outputs = [d.output for d in drive(engine, news).values()]
    assert outputs[0] == outputs[1]
    assert len({tuple(output) for output in outputs}) == 4, "of other seeds come other tokens"


def test_sequences_that_do_not_fit_together_take_turns(engine: CheckedEngine, new: MakeNew) -> None:
    """Each is recomputed in blocks that hold the other's tokens."""
    size = 2 * engine.info.block_size + 1
    news = [new(name, [1 + i] * size, max_tokens=4, temperature=1.0, ignore_eos=True) for i, name in enumerate("ab")]
    expected, _ = alone(engine, news)
    engine.occupy(engine.info.num_blocks - 4)
    outputs: dict[str, list[int]] = {"a": [], "b": []}
    engine.step(StepPlan(0, start=tuple(news)))
    for turn in range(8):
        active = "ab"[turn % 2]
        (output,) = engine.run((active, size + len(outputs[active]))).outputs
        outputs[active] += output.token_ids
        if output.finish_reason is None:
            engine.step(StepPlan(0, preempt=(Preempt(active, PreemptionMode.RECOMPUTE),)))
            engine.step(StepPlan(0, resume=(active,)))
    assert outputs == {k: d.output for k, d in expected.items()}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_steps_planned_ahead_give_the_same_tokens(engine: CheckedEngine, new: MakeNew, temperature: float) -> None:
    """Every step is submitted before the result of the one before it is known, also after the end of a sequence."""
    if not engine.info.steps_ahead:
        pytest.skip("this engine takes one step at a time")
    news = [
        new(f"s{i}", range(1, 6 + i), seed=i, temperature=temperature, **{"max_tokens": 6 + i, **options})
        for i, options in enumerate(AHEAD)
    ]
    stop = alone(engine, news[:1])[0]["s0"].output[3]
    stopped = {"max_tokens": 20, "ignore_eos": True, "temperature": temperature, "stop_token_ids": (stop,)}
    news.append(new("stopped", range(1, 6), seed=0, **stopped))
    expected, expected_reported = alone(engine, news)
    reported, outputs = Reported(), {n.seq_id: list[int]() for n in news}
    ended: set[str] = set()
    engine.submit(StepPlan(0, start=tuple(news), run=tuple(Run(n.seq_id, len(n.prompt_token_ids)) for n in news)))
    while len(ended) < len(news):
        engine.submit(StepPlan(0, run=tuple(Run(n.seq_id, 1) for n in news if n.seq_id not in ended), ahead=True))
        result = engine.collect()
        reported(result)
        for output in result.outputs:
            outputs[output.seq_id] += output.token_ids
            ended |= {output.seq_id} if output.finish_reason else set()
    engine.collect()
    assert outputs == {k: d.output for k, d in expected.items()}
    for n in news:
        assert_alike(reported.output[n.seq_id], expected_reported.output[n.seq_id])


class DriverAhead:
    """Plans each step before the result of the one before it: newcomers, chunks of prompts, decodes and pauses."""

    def __init__(self, engine: CheckedEngine, news: list[NewSequence], rng: random.Random) -> None:
        self.driven = {new.seq_id: Driven(new) for new in news}  # by what results have said
        self._engine, self._rng = engine, rng
        self._waiting = list(news)
        self._paused: set[str] = set()
        self._in_flight: StepPlan | None = None

    def run(self, after_step: Reported) -> dict[str, Driven]:
        while not all(s.is_over for s in self.driven.values()):
            plan = self._plan()
            if not plan.is_empty:
                self._engine.submit(plan)
            if self._in_flight is not None:
                result = self._engine.collect()
                after_step(result)
                self._in_flight = None
                for output in result.outputs:
                    s = self.driven[output.seq_id]
                    s.num_computed, s.finish_reason = output.num_computed_tokens, output.finish_reason
                    s.output += output.token_ids
            self._in_flight = None if plan.is_empty else plan
        if self._in_flight is not None:
            assert not self._engine.collect().outputs
        return self.driven

    def _plan(self) -> StepPlan:
        arrived = [self._waiting.pop() for _ in range(min(len(self._waiting), self._rng.randint(0, 2)))]
        live = {i for i, s in self.driven.items() if not s.is_over} - {new.seq_id for new in self._waiting}
        resume = [i for i in sorted(self._paused & live) if self._rng.random() < 0.5]
        pause = [i for i in sorted(live - self._paused) if self._rng.random() < 0.15]
        pause = [i for i in pause if i not in {new.seq_id for new in arrived}]
        self._paused = (self._paused - set(resume) | set(pause)) & live
        budget, runs = self._engine.info.max_step_tokens, []
        for seq_id in sorted(live - self._paused):
            num_tokens = min(self._uncomputed(seq_id), self._rng.randint(1, 9), budget)
            if num_tokens:
                runs.append(Run(seq_id, num_tokens))
                budget -= num_tokens
        preempt = tuple(Preempt(seq_id, PreemptionMode.PAUSE) for seq_id in pause)
        is_ahead = self._in_flight is not None
        return StepPlan(0, preempt=preempt, resume=tuple(resume), start=tuple(arrived), run=tuple(runs), ahead=is_ahead)

    def _uncomputed(self, seq_id: str) -> int:
        """Return how many tokens are left after the step in flight; none if it is certain to end the sequence."""
        s = self.driven[seq_id]
        in_flight = (
            0 if self._in_flight is None else sum(r.num_tokens for r in self._in_flight.run if r.seq_id == seq_id)
        )
        left = s.num_uncomputed - min(in_flight, s.num_uncomputed)
        if left or not in_flight:
            return left
        return int(len(s.output) + 1 < s.new.sampling.max_tokens)


@pytest.mark.parametrize("seed", range(3))
def test_plans_of_all_kinds_made_ahead_give_the_same_tokens(engine: CheckedEngine, seed: int) -> None:
    if not engine.info.steps_ahead:
        pytest.skip("this engine takes one step at a time")
    news = [compiled(engine, new) for new in family(engine)]
    expected, expected_reported = alone(engine, news)
    reported = Reported()
    salted = [replace(new, cache_salt=f"ahead-{next(_salts)}") for new in news[:3]]
    shared = [replace(new, cache_salt=f"ahead of all {seed}") for new in news[3:]]
    driven = DriverAhead(engine, salted + shared, random.Random(seed)).run(reported)
    for seq_id, one in expected.items():
        assert driven[seq_id].output == one.output
        assert_alike(reported.output[seq_id], expected_reported.output[seq_id])
