"""What one simulated run saw, as plain records: requests at the client, steps at the engines, knobs second by second.

Filled by the clients, the engines and the workers' metrics while the run goes on; read by `summary` and `report`.
Knows no clock: times are seconds since the load began.
"""

from array import array
from collections import Counter
from dataclasses import dataclass, field, fields

from scheduler.control.knobs import Decision


@dataclass(slots=True)
class RequestRecord:
    """One request as its client saw it. Owner: the client."""

    id: str
    traffic_class: str
    tier: str  # that was asked for
    arrived_s: float
    prompt_tokens: int
    deadline_s: float | None
    served_tier: str = ""  # another one than `tier`: demoted; empty: not admitted
    rejected: str = ""  # why admission refused it
    first_token_s: float | None = None
    last_token_s: float | None = None
    ended_s: float | None = None
    output_tokens: int = 0
    first_tokens: int = 0  # that came at first
    gaps: int = 0  # between two messages with tokens
    gaps_missed: int = 0  # longer than the tier's promise
    failed: str = ""  # why it ended without an answer

    @property
    def is_done(self) -> bool:
        return self.ended_s is not None and not self.failed

    @property
    def gap_s(self) -> float | None:
        """Mean time to a token behind those that came first; None without two messages."""
        if self.gaps == 0 or self.first_token_s is None or self.last_token_s is None:
            return None
        return (self.last_token_s - self.first_token_s) / (self.output_tokens - self.first_tokens)

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_s is None else self.first_token_s - self.arrived_s


@dataclass(slots=True)
class EngineRecord:
    """What one engine did."""

    steps: int = 0
    busy_s: float = 0.0
    rows: int = 0
    planned_tokens: int = 0
    lost_tokens: int = 0  # computed, and lost with their KV blocks: to be computed again
    shed_rows: int = 0
    shed_steps: int = 0  # that somebody left
    wasted_s: float = 0.0  # of engine time, spent on rows that left their step

    def clear(self) -> None:
        """Forget what came before the load."""
        for entry in fields(self):
            setattr(self, entry.name, entry.default)


@dataclass(frozen=True, slots=True)
class MovedKnob:
    at_s: float
    worker: int
    decision: Decision


@dataclass(frozen=True, slots=True)
class TierMoment:
    """One tier at one instant; the knobs are the first worker's."""

    queued: int
    held: int
    batch_size: float
    max_wait_s: float
    margin: float


@dataclass(frozen=True, slots=True)
class Moment:
    """The deployment at the end of one second of the run."""

    at_s: float
    busy_share: float  # of the engines, in the second before
    kv_usage: float  # of the fullest
    predictor_error: float  # mean |measured ÷ predicted − 1| over the last steps
    tiers: dict[str, TierMoment]


@dataclass(slots=True)
class Observation:
    """Everything of one run. Owner: `Simulation`; each part is written by one collaborator."""

    duration_s: float
    classes: dict[str, str]
    requests: list[RequestRecord] = field(default_factory=list)
    gaps_s: dict[str, "array[float]"] = field(default_factory=dict)  # by class: a run has millions
    queue_s: dict[str, "array[float]"] = field(default_factory=dict)  # by tier: arrival to first step
    engines: list[EngineRecord] = field(default_factory=list)
    moves: list[MovedKnob] = field(default_factory=list)
    moments: list[Moment] = field(default_factory=list)
    preemptions: Counter[tuple[str, str]] = field(default_factory=Counter)  # (tier, mode)
    tokens: Counter[str] = field(default_factory=Counter)  # by class: received while the load went on
