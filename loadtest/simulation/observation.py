"""The records of one simulated run: requests at the client, steps at the engines, knobs second by second.

Filled by clients, engines and metrics during the run; read by `summary` and `report`. Times are seconds since the load
began.
"""

from array import array
from collections import Counter
from dataclasses import dataclass, field, fields

from scheduler.control.knobs import Decision


@dataclass(slots=True)
class RequestRecord:
    """One request as its client saw it. Written by the client."""

    id: str
    traffic_class: str
    tier: str  # the requested tier
    arrived_s: float
    prompt_tokens: int
    deadline_s: float | None
    served_tier: str = ""  # differs from `tier` where the request was demoted; empty: not admitted
    rejected: str = ""  # why admission refused it
    first_token_s: float | None = None
    last_token_s: float | None = None
    ended_s: float | None = None
    output_tokens: int = 0
    first_tokens: int = 0  # tokens of the first message
    gaps: int = 0  # between two messages with tokens
    gaps_missed: int = 0  # gaps longer than the tier's SLO
    failed: str = ""  # why it ended without an answer

    @property
    def is_done(self) -> bool:
        return self.ended_s is not None and not self.failed

    @property
    def gap_s(self) -> float | None:
        """Mean time per token after the first message; None with fewer than two messages."""
        if self.gaps == 0 or self.first_token_s is None or self.last_token_s is None:
            return None
        return (self.last_token_s - self.first_token_s) / (self.output_tokens - self.first_tokens)

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_s is None else self.first_token_s - self.arrived_s


@dataclass(slots=True)
class EngineRecord:
    """The totals of one engine."""

    steps: int = 0
    busy_s: float = 0.0
    rows: int = 0
    planned_tokens: int = 0
    lost_tokens: int = 0  # tokens to compute again because their KV was dropped
    shed_rows: int = 0
    shed_steps: int = 0  # steps from which a row was evicted
    wasted_s: float = 0.0  # engine seconds for rows that were evicted from their step

    def clear(self) -> None:
        """Forget everything before the load."""
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
    busy_share: float  # share of engine time in the second before
    kv_usage: float  # of the engine with the fullest KV memory
    predictor_error: float  # mean |measured ÷ predicted − 1| over the last steps
    tiers: dict[str, TierMoment]


@dataclass(slots=True)
class Observation:
    """Everything of one run. Owned by `Simulation`; each part has one writer."""

    duration_s: float
    classes: dict[str, str]
    requests: list[RequestRecord] = field(default_factory=list)
    gaps_s: dict[str, "array[float]"] = field(default_factory=dict)  # by class; arrays, since a run has millions
    queue_s: dict[str, "array[float]"] = field(default_factory=dict)  # by tier: arrival to first step
    engines: list[EngineRecord] = field(default_factory=list)
    moves: list[MovedKnob] = field(default_factory=list)
    moments: list[Moment] = field(default_factory=list)
    preemptions: Counter[tuple[str, str]] = field(default_factory=Counter)  # (tier, mode)
    tokens: Counter[str] = field(default_factory=Counter)  # by class, received during the load
