import random
from collections.abc import Callable

import pytest

from engine.step_time.cost import StepCost, StepWork
from engine.step_time.model import StepTimeModel
from scheduler.drivers.streams.step_times import SeenStep, UpstreamStepTimes
from scheduler.request_state import RequestState
from tests.scheduler.builders import make_decode

COST = StepCost(step_s=0.02, prefill_token_s=0.001, attend_s=0.0, context_token_s=0.0, decode_s=0.0005)
SEEDS = range(4)


class Server:
    """A server's steps, as far as a worker sees them: the tokens of its streams arrive in bursts, in any order."""

    def __init__(self, step_times: UpstreamStepTimes, seed: int, noise: float = 0.0, spread_s: float = 1e-4) -> None:
        self._step_times = step_times
        self._random = random.Random(seed)
        self._noise = noise
        self._spread_s = spread_s  # between two tokens of a burst
        self._running: dict[RequestState, int] = {}  # stream → tokens until its end
        self._now = 0.0
        self._num_begun = 0

    def run(self, steps: int, begins: Callable[[int], bool], tokens: tuple[int, int]) -> list[SeenStep]:
        """Play steps. `begins` says whether a stream begins beside a number of others, `tokens` how long it may be."""
        return [seen for _ in range(steps) for seen in self.step(begins(len(self._running)), tokens)]

    def step(self, num_new: int, tokens: tuple[int, int]) -> list[SeenStep]:
        """Play one step in which `num_new` streams begin."""
        new = {self._begin(): self._random.randint(*tokens) for _ in range(num_new)}
        if not new and not self._running:
            return []
        work = StepWork()
        for state in self._running:
            work.add(1, state.num_tokens)
        for state in new:
            work.add(state.num_tokens, 0)
        self._now += COST.of(work) * self._random.lognormvariate(0.0, self._noise)
        burst = [(state, 0) for state in self._running] + [(state, state.num_tokens) for state in new]
        self._random.shuffle(burst)
        found = []
        for i, (state, prefilled) in enumerate(burst):
            found.append(self._step_times.note_tokens(state, 1, prefilled, self._now + self._spread_s * i))
        self._running |= new
        for state in list(self._running):
            self._running[state] -= 1
            if not self._running[state]:
                del self._running[state]
        return [seen for seen in found if seen is not None]

    def _begin(self) -> RequestState:
        self._num_begun += 1
        return make_decode(f"s{self._num_begun}", prompt=self._random.randint(20, 200))


@pytest.mark.parametrize("seed", SEEDS)
def test_the_cost_of_a_stream_is_known_after_many_steps_of_as_many_streams(seed: int) -> None:
    """While the number of streams hardly changes, nothing tells the cost of a stream from that of a step."""
    pace = UpstreamStepTimes(StepTimeModel(remembers_sizes=True))
    server, rng = Server(pace, seed, noise=0.1), random.Random(seed)
    server.run(400, lambda count: count < 4 and rng.random() < 0.1, tokens=(5, 60))  # some chats
    server.run(3000, lambda count: count < 32, tokens=(100, 156))  # then bulk
    cost = pace.cost()
    slowed = cost.step(36 * cost.decode(150)) / cost.step(4 * cost.decode(150))
    assert slowed == pytest.approx(COST.step(36 * COST.decode(150)) / COST.step(4 * COST.decode(150)), rel=0.2)


def test_the_cost_of_a_prompt_is_known_when_many_begin_and_end_in_the_same_step() -> None:
    """Their tokens take a while to arrive, and no stream lasts from one group to the next but one."""
    pace = UpstreamStepTimes(StepTimeModel(remembers_sizes=True))
    server = Server(pace, seed=1, noise=0.1, spread_s=3e-4)
    for _ in range(80):
        server.step(12, (8, 10))
        for _ in range(4):
            server.step(0, (8, 10))
    assert pace.cost().prefill(100, 0) == pytest.approx(COST.prefill(100, 0), rel=0.15)


def test_only_steps_without_prompts_show_what_decodes_take() -> None:
    server = Server(UpstreamStepTimes(StepTimeModel()), seed=1)
    server.step(4, (9, 9))
    seen = [found for num_new in (0, 2, 0, 0) for found in server.step(num_new, (9, 9))]
    assert [step.num_decodes for step in seen] == [4, 0, 6], "the last one is not over yet"


def test_what_any_step_with_a_prompt_takes_counts_to_the_prompt() -> None:
    """Whatever its length, a prompt adds 60 ms here. Prompts that are much alike do not tell that from their tokens."""
    pace, rng, now = UpstreamStepTimes(StepTimeModel(remembers_sizes=True)), random.Random(1), 0.0
    chats = [make_decode(f"chat{i}") for i in range(3)]
    for step in range(600):
        prompt = rng.randint(90, 110) * (step % 3 == 0)
        now += (0.04 + (0.06 + 0.001 * prompt if prompt else 0.0)) * rng.lognormvariate(0.0, 0.1)
        for chat in chats:
            pace.note_tokens(chat, 1, 0, now)
        if prompt:
            pace.note_tokens(make_decode(f"bulk{step}", prompt=prompt), 1, prompt, now)
    assert pace.cost().prefill(100, 0) == pytest.approx(0.16, rel=0.15)


def test_tokens_of_several_steps_that_arrive_together_say_nothing_about_a_step() -> None:
    pace, states = UpstreamStepTimes(StepTimeModel(remembers_sizes=True)), [make_decode("a"), make_decode("b")]
    times = [0.0, 0.1, 0.2, 0.399, 0.4, 0.5, 0.6, 0.7]  # one step's tokens come late, with those of the next
    found = [pace.note_tokens(state, 1, 0, now + 1e-4 * i) for now in times for i, state in enumerate(states)]
    lengths = [seen.elapsed_s for seen in found if seen is not None]
    assert lengths == pytest.approx([0.1, 0.1, 0.1])


def test_a_burst_lasts_as_long_as_tokens_come_without_a_pause() -> None:
    pace, states = UpstreamStepTimes(StepTimeModel(remembers_sizes=True)), [make_decode(f"r{i}") for i in range(4)]
    found = [pace.note_tokens(s, 1, 0, 0.04 * step + 0.006 * i) for step in range(5) for i, s in enumerate(states)]
    steps = [seen for seen in found if seen is not None]
    assert [seen.sequences for seen in steps] == [{"bulk": 4}] * 3, "the first tokens end no step, the last one lasts"
    assert [seen.elapsed_s for seen in steps] == pytest.approx([0.04] * 3)


def test_a_pause_of_the_server_is_no_step() -> None:
    pace, found = UpstreamStepTimes(StepTimeModel(remembers_sizes=True)), []
    for request in range(3):
        state = make_decode(f"r{request}")
        found += [pace.note_tokens(state, 1, 32 * (i == 0), 10.0 * request + 0.1 * i) for i in range(4)]
    assert [seen.elapsed_s for seen in found if seen] == pytest.approx([0.1] * 8), "the last one is not over yet"


def test_the_time_of_a_step_is_shared_by_the_tiers() -> None:
    pace = UpstreamStepTimes(StepTimeModel(remembers_sizes=True))
    chat, bulk = make_decode("chat", "realtime"), [make_decode(f"b{i}") for i in range(3)]
    for step in range(4):
        for position, state in enumerate([chat, *bulk]):
            seen = pace.note_tokens(state, 1, 0, 0.1 * step + 1e-4 * position)
            if seen is not None:
                assert seen.sequences == {"realtime": 1, "bulk": 3}
                assert sum(seen.used_s.values()) == pytest.approx(seen.elapsed_s)
                assert seen.used_s["bulk"] == pytest.approx(3 * seen.used_s["realtime"])
