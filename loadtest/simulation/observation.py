"""The records of one simulated run: requests at the client, steps at the engines, and knobs for each second.

Clients, engines and metrics fill the records during the run; `summary` and `report` read them. Times are seconds since
the load began.
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
    served_tier: str = ""  # the tier that it was submitted to; differs from `tier` if it was demoted
    rejected: str = ""  # why the request was rejected; empty: it was admitted
    first_token_s: float | None = None
    last_token_s: float | None = None
    ended_s: float | None = None
    output_tokens: int = 0
    cached_tokens: int = 0  # of the prompt, found in the prefix cache
    first_tokens: int = 0  # tokens of the first message
    gaps: int = 0  # number of gaps between two messages with tokens
    gaps_missed: int = 0  # number of gaps longer than the tier's SLO
    failed: str = ""  # why the request ended without an answer; empty: it did not fail

    @property
    def is_done(self) -> bool:
        return self.ended_s is not None and not self.failed

    @property
    def gap_s(self) -> float | None:
        """Mean time per token after the first message, in seconds; None if there were fewer than two messages."""
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
    lost_tokens: int = 0  # tokens that must be computed again because their KV was dropped
    suspensions: int = 0  # how often a step was suspended
    dropped_steps: int = 0  # steps that were suspended and never continued

    def clear(self) -> None:
        """Set all totals to zero when the load begins."""
        for entry in fields(self):
            setattr(self, entry.name, entry.default)


@dataclass(frozen=True, slots=True)
class MovedKnob:
    at_s: float
    worker: int
    decision: Decision


@dataclass(frozen=True, slots=True)
class TierMoment:
    """The state of one tier at one moment. The knobs are those of the first worker."""

    queued: int
    held: int
    batch_size: float
    max_wait_s: float
    margin: float


@dataclass(frozen=True, slots=True)
class Moment:
    """The state of the deployment at the end of one second of the run."""

    at_s: float
    busy_share: float  # busy share of the engines' time in this second
    kv_usage: float  # largest share of KV blocks in use on any engine
    predictor_error: float  # mean |measured ÷ predicted − 1| over the last steps
    tiers: dict[str, TierMoment]
    workers: int = 1  # that served or started in this second, and those that had still something to end


@dataclass(slots=True)
class Observation:
    """All data that are recorded during one simulated run. Each field has one writer."""

    duration_s: float
    classes: dict[str, str]
    requests: list[RequestRecord] = field(default_factory=list)
    # By class: the gaps between messages. They are kept in arrays, since a run has millions of them.
    gaps_s: dict[str, "array[float]"] = field(default_factory=dict)
    queue_s: dict[str, "array[float]"] = field(default_factory=dict)  # by tier: seconds from arrival to the first step
    engines: list[EngineRecord] = field(default_factory=list)
    moves: list[MovedKnob] = field(default_factory=list)
    moments: list[Moment] = field(default_factory=list)
    preemptions: Counter[tuple[str, str]] = field(default_factory=Counter)  # by (tier, mode)
    tokens: Counter[str] = field(default_factory=Counter)  # by class: tokens received during the load
