"""What a worker says of itself in its heartbeat: for admission, and for `/ready`. Plain data."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class TierCapacity:
    """What a worker can do for one tier, said with caution, and what it has to do before. A tier is served behind those
    above it: what is held, and the step, are theirs as well. A rate of 0: not known yet."""

    prompt_tokens: int = 0  # claimed, not computed; those above included
    output_tokens: int = 0  # claimed, may still come at most; those above included
    step_s: float = 0.0  # a step of the decodes there are, those above included
    slots_free: int = 0  # of its batch size; negative: so many wait for one
    drain_per_s: float = 0.0  # requests that end while all slots are taken
    prefill_tokens_per_s: float = 0.0
    output_tokens_per_s: float = 0.0  # all slots together


@dataclass(frozen=True, slots=True)
class TierStatus:
    """A worker's view of one tier, for admission and `/ready`."""

    queued: int = 0  # claimed, not yet started
    running: int = 0
    batch_size: int = 0
    max_wait_ms: float = 0.0
    finished_per_s: float = 0.0
    capacity: TierCapacity | None = None


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """A worker's heartbeat; it lives in the store for a few seconds only."""

    worker_id: str
    model_names: tuple[str, ...]
    max_model_len: int
    vocab_size: int
    started_ms: int
    eos_token_ids: tuple[int, ...] = ()
    device: str = ""
    tiers: dict[str, TierStatus] = field(default_factory=dict)
    at_ms: int = 0  # when this was said, by the worker's wall clock
