"""Outcomes and parts with known times, for the tests of what is computed from them."""

from bench.isolation.arms import Arm
from bench.isolation.rounds import Part
from loadtest.client.answer import Outcome
from loadtest.client.runner import ArmRun
from loadtest.client.server_metrics import Reading, Timeline
from loadtest.traffic.scenario import Scenario

START_S, DURATION_S = 100.0, 10.0
SCENARIO = Scenario.model_validate(
    {
        "classes": {
            "chat": {
                "role": "interactive",
                "service_tier": "default",
                "arrivals": {"rate_per_s": 4},
                "prompt_tokens": 4,
                "output_tokens": 3,
            },
            "backlog": {
                "role": "bulk",
                "service_tier": "flex",
                "arrivals": {"streams": 2},
                "prompt_tokens": 4,
                "output_tokens": 3,
            },
        }
    }
)


def answered(name: str, at_s: float, ttft_s: float, gaps_s: tuple[float, ...] = (), tokens: int = 1) -> Outcome:
    """A complete answer whose first event brings `tokens`, and each gap one more."""
    outcome = Outcome(name, 0, due_s=START_S + at_s, sent_s=START_S + at_s, service_tier="default")
    now_s, count = outcome.due_s + ttft_s, tokens
    outcome.progress.append((now_s, count))
    for gap_s in gaps_s:
        now_s, count = now_s + gap_s, count + 1
        outcome.progress.append((now_s, count))
    outcome.finished_s, outcome.completion_tokens, outcome.status = now_s, count, 200
    return outcome


def make_part(
    arm: Arm, chat: list[Outcome], backlog: list[Outcome], scrapes: list[str] | None = None, round_: int = 0
) -> Part:
    outcomes = {"chat": chat} if "interactive" in arm.roles else {}
    outcomes |= {"backlog": backlog} if "bulk" in arm.roles else {}
    run = ArmRun(START_S, DURATION_S, outcomes, client_cpu_share=0.1, lag_s=[0.001] * len(chat))
    readings = [Reading(START_S + 5.0 * i, tuple(text.splitlines())) for i, text in enumerate(scrapes or [])]
    part = Part(arm, round_, run, Timeline(readings))
    run.busy_s = part.timeline.delta("tidegate_step_seconds_sum")
    return part
