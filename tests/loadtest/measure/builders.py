"""Measurements without a server: runs whose requests are given."""

from loadtest.client.answer import Outcome
from loadtest.client.runner import UNFINISHED, ArmRun
from loadtest.measure.rounds import Comparison, Measurement, arms_of
from loadtest.traffic.scenario import Lengths, TrafficClass
from loadtest.traffic.scenario_arrivals import ClosedLoop

LENGTHS = Lengths(min=4, max=4)
CHAT = TrafficClass(
    name="interactive",
    role="interactive",
    arrivals=ClosedLoop(streams=2),
    prompt_tokens=LENGTHS,
    output_tokens=LENGTHS,
    endpoint="chat",
)
BULK = CHAT.model_copy(update={"name": "bulk", "role": "bulk", "service_tier": "flex"})


def answered(
    due_s: float, ttft_s: float = 0.1, gap_s: float = 0.02, tokens: int = 4, class_name: str = "interactive"
) -> Outcome:
    """Return a complete answer, with one token in each event."""
    outcome = Outcome(class_name, 0, due_s, sent_s=due_s + 0.001, status=200)
    outcome.progress = [(due_s + ttft_s + gap_s * i, i + 1) for i in range(tokens)]
    outcome.finished_s = outcome.progress[-1][0]
    outcome.prompt_tokens, outcome.completion_tokens, outcome.finish_reason = 10, tokens, "length"
    return outcome


def failed(due_s: float, status: int, error: str) -> Outcome:
    return Outcome("interactive", 0, due_s, sent_s=due_s, status=status, error=error)


def cut_off(due_s: float) -> Outcome:
    return Outcome("interactive", 0, due_s, sent_s=due_s, error=UNFINISHED)


def measured(
    comparison: Comparison | None,
    *parts: list[Outcome],
    classes: tuple[TrafficClass, ...] = (CHAT,),
) -> Measurement:
    """Return a measurement whose parts have these requests. Arms take turns; part i takes 2 s from 10 · i s on."""
    arms = arms_of(comparison, classes)
    measurement = Measurement(arms, {arm.name: [] for arm in arms})
    for i, outcomes in enumerate(parts):
        by_class = {c.name: [o for o in outcomes if o.traffic_class == c.name] for c in classes}
        measurement.runs[arms[i % len(arms)].name].append(ArmRun(10.0 * i, 2.0, by_class))
    return measurement
