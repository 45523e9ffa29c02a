"""What one step means for the world outside: events to send, leases to acknowledge, latencies to record.

Plain data, made by the core, taken apart by the loop; it knows neither queues nor metrics.
"""

from collections import defaultdict
from dataclasses import dataclass, field

from engine.step_time.model import StepWork
from scheduler.queue.base import Lease
from scheduler.request import TokenEvent


@dataclass(frozen=True, slots=True)
class Sample:
    """One observed latency, for metrics and the controller."""

    kind: str  # "ttft" | "itl" | "e2e" | "queue" | "service": from its first step to its first token
    tier: str
    seconds: float
    bulk_s: float = 0.0  # of it, that the engine spent on work without a promise


@dataclass(frozen=True, slots=True)
class Ended:
    tier: str
    reason: str  # "stop" | "length" | "failed" | "cancelled"
    prompt_tokens: int
    output_tokens: int
    met_slo: bool
    held_s: float = 0.0  # since it was claimed


@dataclass(frozen=True, slots=True)
class PrefixLookup:
    """A prompt met the prefix cache: so many tokens were asked for, so many of them found."""

    tier: str
    queried_tokens: int
    hit_tokens: int


@dataclass(frozen=True, slots=True)
class Reaction:
    """A request came while a step ran: in how many lengths of that step it was in one itself."""

    tier: str
    steps: float


@dataclass(slots=True)
class StepReport:
    events: dict[str, list[TokenEvent]] = field(default_factory=lambda: defaultdict(list))  # by gateway
    leases: list[Lease] = field(default_factory=list)  # done: to be acknowledged
    samples: list[Sample] = field(default_factory=list)
    ended: list[Ended] = field(default_factory=list)
    lookups: list[PrefixLookup] = field(default_factory=list)
    reactions: list[Reaction] = field(default_factory=list)
    used_s: dict[str, float] = field(default_factory=dict)  # of the step's time, by tier
    work: StepWork | None = None  # what the step did, where the time it took says something about that
    predicted_s: float = 0.0  # that time, before it was known

    def absorb(self, later: "StepReport") -> None:
        """Take a later step's events and leases in, behind this one's."""
        for reply_to, events in later.events.items():
            self.events[reply_to] += events
        self.leases += later.leases
