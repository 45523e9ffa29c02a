"""What a worker sends in its heartbeat: its status, for admission and `/ready`, and its beat, for all. Plain data."""

from dataclasses import dataclass, field

LEFT_STRETCHES_S = (60, 300, 900, 3600)  # stretches of time for which `WorkerStatus.left_shares` tells a share


@dataclass(frozen=True, slots=True)
class Beat:
    """The part of a worker's status that tells whether it is alive. An encoded status can be decoded as its beat."""

    at_ms: int  # time of the heartbeat, by the worker's wall clock
    batch_items: int = 0  # items per call of a worker with a static endpoint; 0: a worker with an engine


@dataclass(frozen=True, slots=True)
class TierCapacity:
    """A cautious estimate of a worker's capacity for one tier, and the work ahead of new requests of this tier.

    Tiers of higher priority are served first, so their work and their decodes are included. A rate of 0 means that the
    rate is not known yet.
    """

    prompt_tokens: int = 0  # prompt tokens that are claimed and not computed yet
    output_tokens: int = 0  # maximum number of tokens that the claimed requests may still generate
    step_s: float = 0.0  # time of a step with the present decodes
    slots_free: int = 0  # free slots of the tier's batch size; if negative, the number of requests that wait for a slot
    drain_per_s: float = 0.0  # requests that end per second while all slots are taken
    prefill_tokens_per_s: float = 0.0
    output_tokens_per_s: float = 0.0  # of all slots together
    # The same two rates if the tier had the whole engine and its largest batch size. They are not cautious.
    whole_prefill_tokens_per_s: float = 0.0
    whole_output_tokens_per_s: float = 0.0
    num_ended: int = 0  # requests of the tier that have ended since the worker's start
    used_share: float = 0.0  # of the engine's time, lately


@dataclass(frozen=True, slots=True)
class TierStatus:
    """A worker's view of one tier, for admission and `/ready`."""

    queued: int = 0  # requests that are claimed and not started yet
    running: int = 0
    batch_size: int = 0
    max_wait_ms: float = 0.0
    finished_per_s: float = 0.0
    capacity: TierCapacity | None = None


@dataclass(frozen=True, slots=True)
class GpuStatus:
    """What the driver says of one GPU. It includes what other processes do there."""

    name: str
    memory_used_mb: int
    memory_total_mb: int
    busy: float | None = None  # share of the last moments in which a kernel ran; None: the driver does not say it


@dataclass(frozen=True, slots=True)
class WorkerStart:
    """What a worker does that starts and does not serve yet. The store keeps it for a few seconds only."""

    worker_id: str
    phase: str  # such as "loading the model"
    seconds: float  # since the phase began
    share: float | None = None  # of the phase that is done; None: unknown


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """A worker's heartbeat. The store keeps it for a few seconds only."""

    worker_id: str
    model_names: tuple[str, ...]
    max_model_len: int
    vocab_size: int
    started_ms: int
    eos_token_ids: tuple[int, ...] = ()
    device: str = ""
    tiers: dict[str, TierStatus] = field(default_factory=dict)
    at_ms: int = 0  # time of the heartbeat, by the worker's wall clock
    unsupported: tuple[str, ...] = ()  # options that its engine cannot honour, as `Upstream.unsupported` names them
    busy: float = 0.0  # share of the time since the last heartbeat in which the engine computed
    kv_usage: float = 0.0  # share of KV blocks in use
    gpus: tuple[GpuStatus, ...] = ()
    # Share of the engine that interactive tiers leave to urgent bulk, in the busiest stretch of the last hour: one for
    # each of LEFT_STRETCHES_S, smallest first. Empty: not known yet.
    left_shares: tuple[float, ...] = ()
    # Share of the engine that interactive tiers took lately from what it could do in long steps: a few chats keep it
    # busy, but take little. None: not known, as the steps are a server's own, or the worker is an older one.
    interactive_share: float | None = None
    batch_items: int = 0  # items per call of a worker with a static endpoint; 0: a worker with an engine
    incarnation: str = ""  # of its process; a later one with the same id has a greater text
    page: str = ""  # URL of its metrics
    caches_prefixes: bool = False  # its engine keeps the KV of prompts for those that begin alike

    @property
    def beat(self) -> Beat:
        return Beat(self.at_ms, self.batch_items)
