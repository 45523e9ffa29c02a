"""`RequestState`: the worker's record of one claimed request, and the statuses that the request goes through.

`StepCore` owns the states. Code outside the core only reads them. Times are monotonic seconds of the worker's
clock; None means that the event has not happened.
"""

from dataclasses import dataclass, field
from enum import Enum

from engine.interface import TokenLogprobs, blocks_for
from scheduler.config import Tier
from scheduler.request import Lease, Request, is_sampled


@dataclass(slots=True)
class Sample:
    """One observed latency, for metrics and the controller. Nothing in it changes."""

    # "ttft" | "itl" | "e2e" (arrival to end) | "queue" (arrival to first step) | "service" (first step to first token)
    kind: str
    tier: str
    seconds: float
    bulk_s: float = 0.0  # the part of `seconds` that the engine spent on bulk
    own_s: float = 0.0  # the part of `seconds` that the request's own work takes without bulk, as far as it is known
    yielded: bool = False  # of a request that yields: nothing for the controller to learn from


class Status(Enum):
    WAITING = "waiting"  # claimed; not yet known to the engine
    RUNNING = "running"  # its KV is on the device, and it may be in any step
    PAUSED = "paused"  # its KV is on the device, but it is in no step until it is resumed
    SWAPPED = "swapped"  # its KV is in host memory, and is copied back when it runs again
    PREEMPTED = "preempted"  # known to the engine, but its KV is lost and must be recomputed
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


_ENDS = frozenset({Status.FINISHED, Status.FAILED, Status.CANCELLED})
TRANSITIONS: dict[Status, frozenset[Status]] = {
    Status.WAITING: frozenset({Status.RUNNING, Status.FAILED, Status.CANCELLED}),
    Status.RUNNING: frozenset({Status.PAUSED, Status.SWAPPED, Status.PREEMPTED}) | _ENDS,
    # A step that was running when the pause or preemption was decided may still end the sequence.
    Status.PAUSED: frozenset({Status.RUNNING, Status.SWAPPED, Status.PREEMPTED}) | _ENDS,
    Status.SWAPPED: frozenset({Status.RUNNING}) | _ENDS,
    Status.PREEMPTED: frozenset({Status.RUNNING}) | _ENDS,
    Status.FINISHED: frozenset(),
    Status.FAILED: frozenset(),
    Status.CANCELLED: frozenset(),
}


# How much lower the priority of a request is while it yields: above all lower tiers.
YIELDED = 0.25


class IllegalTransition(Exception):
    """The error for a change of status that `TRANSITIONS` does not allow. It shows a bug in the scheduler."""


@dataclass(slots=True, eq=False)
class TraceMarks:
    """What a trace says beyond the times of a `RequestState`, in seconds of the worker's clock."""

    pauses: list[tuple[float, float, str]] = field(default_factory=list)  # begin, end, mode of the preemption
    suspensions_s: list[float] = field(default_factory=list)
    stop_mode: str = ""  # of the present preemption


@dataclass(slots=True, eq=False, weakref_slot=True)
class RequestState:
    """The worker's record of one claimed request and of its sequence in the engine."""

    request: Request
    tier: Tier
    fence: int
    arrived_s: float
    claimed_s: float
    num_computed_tokens: int = 0
    num_shared_blocks: int = 0  # KV blocks that other sequences hold too: preempting this one does not free them
    num_cached_tokens: int | None = None  # prompt tokens found in the prefix cache when it first ran
    num_prompt_tokens: int = 0  # as `SequenceOutput.num_prompt_tokens`, once it is known
    output_token_ids: list[int] = field(default_factory=list)
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    ended_s: float | None = None
    num_reported: int = 0  # output tokens already sent to the gateway
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # of output tokens that were not sent yet, if requested
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # of the prompt, until they are sent
    vector: bytes = b""  # of a model that is no chat, once it is computed
    reported_s: float | None = None
    last_step: int = -1  # id of the newest step that the sequence ran in
    num_preemptions: int = 0  # number of times that the KV blocks on the device were lost; pauses do not count
    gaps: int = 0  # number of gaps between output tokens
    gaps_missed: int = 0  # number of gaps that were longer than the ITL SLO
    stopped_s: float | None = None  # the time at which it was preempted; None while it is not preempted
    paused_s: float = 0.0  # total time of earlier preemptions, until the sequence could run again
    num_stops: int = 0  # number of preemptions of any kind, also of pauses
    num_suspensions: int = 0  # how often a step with it was suspended
    engine_s: float = 0.0  # its part of the steps' engine time, if it wants a receipt
    boosted_to: float | None = None  # the higher priority that the request has while it is urgent
    yields: bool = False  # an interactive request that runs as bulk does for now (scheduler/planning/yielding.py)
    # Engine time that bulk had used in total when the newest token came, or at the arrival if there is no token yet.
    bulk_seen_s: float = 0.0
    # What the delay accounts had counted at the arrival, and the engine time that the request's own runs took.
    fixed_seen_s: float = 0.0
    delay_seen_s: float = 0.0
    own_s: float = 0.0
    in_slot: bool | None = None  # whether it arrived in a slot without bulk (`SlowdownMeter`); None: it does not count
    found_step_s: float = 0.0  # predicted length of the step that ran when the request arrived; 0: no step ran
    attempt: int = 1  # number of the claim, counted from 1
    num_lost_streams: int = 0  # attempts of this worker that failed, in front of a server that plans its own steps
    num_restored: int = 0  # output tokens that earlier workers have checkpointed
    awaits_grammar: bool = False  # its grammar is not compiled yet, so that it cannot start
    compiled_grammar: object | None = None  # what the engine has made of its grammar
    marks: TraceMarks | None = None  # None: the request is not traced
    prompt_digests: tuple[int, ...] | None = None  # see `PromptPrefixes`, which computes them when it needs them
    _status: Status = Status.WAITING
    id: str = field(init=False)

    def __post_init__(self) -> None:
        self.id = self.request.id
        if is_sampled(self.request.traceparent):
            self.marks = TraceMarks()

    @property
    def lease(self) -> Lease:
        return Lease(self.id, self.fence)

    @property
    def status(self) -> Status:
        return self._status

    def move(self, to: Status) -> None:
        if to not in TRANSITIONS[self._status]:
            raise IllegalTransition(f"{self.id}: {self._status.value} → {to.value}")
        self._status = to

    @property
    def num_new_tokens(self) -> int:
        """The number of output tokens that this worker has generated."""
        return len(self.output_token_ids) - self.num_restored

    @property
    def is_isolated(self) -> bool:
        """Whether this is the last attempt after others that ended with their workers, so that it must run alone."""
        return self.attempt >= max(2, self.tier.retry.max_attempts)

    @property
    def is_suspect(self) -> bool:
        """Whether the request may have killed its workers: this is the last attempt, or the last but one."""
        return self.attempt >= max(2, self.tier.retry.max_attempts - 1)

    @property
    def is_preemption_exhausted(self) -> bool:
        """Whether the sequence has lost its blocks as often as its tier allows."""
        return self.num_preemptions >= self.tier.retry.max_preemptions

    @property
    def can_continue(self) -> bool:
        """Whether another worker can continue from the output tokens. Log probabilities would be lost."""
        sampling = self.request.sampling
        return sampling.logprobs is None and sampling.prompt_logprobs is None

    @property
    def priority(self) -> float:
        if self.boosted_to is not None:
            return max(self.boosted_to, self.tier.priority)
        return self.tier.priority - YIELDED * self.yields

    @property
    def is_protected(self) -> bool:
        """Whether steps are planned for the request's SLO: it is interactive, and yields to nobody."""
        return self.tier.is_interactive and not self.yields

    @property
    def share(self) -> tuple[str, str]:
        """The tier and the key among whose requests the tier is shared (scheduler/planning/yielding.py)."""
        return self.tier.name, self.request.owner

    @property
    def deadline_s(self) -> float:
        """The request's completion deadline, in seconds of the worker's clock."""
        return self.arrived_s + (self.request.deadline_ms - self.request.arrival_ms) / 1000

    @property
    def num_tokens(self) -> int:
        """The number of prompt tokens and of output tokens so far, together."""
        return len(self.request.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_uncomputed(self) -> int:
        return self.num_tokens - self.num_computed_tokens

    @property
    def reaction_steps(self) -> float | None:
        """The time from the arrival to the first step, as a multiple of the step that ran when the request arrived.

        None if no step ran at the arrival, or if the request has not run yet.
        """
        if self.first_scheduled_s is None or not self.found_step_s:
            return None
        return (self.first_scheduled_s - self.arrived_s) / self.found_step_s

    @property
    def is_resident(self) -> bool:
        """Whether the sequence holds KV blocks on the device."""
        return self._status in (Status.RUNNING, Status.PAUSED)

    @property
    def is_decode(self) -> bool:
        """Whether the next run of the sequence is a decode: only its newest output token is not computed yet."""
        return self.is_resident and self.num_uncomputed == 1 and bool(self.output_token_ids)

    def ends_with(self, num_tokens: int, max_model_len: int) -> bool:
        """Return whether a run of `num_tokens` is certain to end the sequence.

        It is certain if the run gives the last output token that `max_tokens` or the model's context allows. Other
        sequences may end too, with a stop token.
        """
        is_last = len(self.output_token_ids) + 1 >= self.request.sampling.max_tokens
        fills_context = self.num_tokens + 1 >= max_model_len
        return (is_last or fills_context) and self.num_uncomputed <= num_tokens

    @property
    def awaits_first_token(self) -> bool:
        return self.first_token_s is None

    @property
    def edf_key(self) -> tuple[int, int, str]:
        """The sort key inside a tier: the same order as in the queue. No two requests have the same key."""
        return (self.request.score_ms, self.request.arrival_ms, self.request.id)

    def blocks_held(self, block_size: int) -> int:
        return blocks_for(self.num_computed_tokens, block_size) if self.is_resident else 0

    def own_blocks(self, block_size: int) -> int:
        """Return the number of KV blocks that only this sequence holds. Preempting the sequence frees these blocks.

        A step in flight may have shared blocks that are not known to be held yet.
        """
        return max(0, self.blocks_held(block_size) - self.num_shared_blocks)

    def lose_blocks(self, to: Status) -> None:
        """Record that the sequence loses its KV blocks on the device.

        With `SWAPPED`, the blocks are copied to host memory. With `PREEMPTED`, they must be recomputed later.
        """
        self.move(to)
        self.num_preemptions += 1
        self.num_shared_blocks = 0
        if to is Status.PREEMPTED:
            self.num_computed_tokens = 0

    def stop(self, now: float, mode: str = "recompute") -> None:
        """Record that the sequence is preempted at `now`. If it is preempted already, it stays so."""
        if self.marks is not None:
            self.marks.stop_mode = mode
        if self.stopped_s is None:
            self.stopped_s = now
            self.num_stops += 1

    def resume(self, now: float) -> None:
        """Record that the sequence may run again at `now`."""
        if self.stopped_s is not None:
            self.paused_s += now - self.stopped_s
            if self.marks is not None:
                self.marks.pauses.append((self.stopped_s, now, self.marks.stop_mode))
            self.stopped_s = None

    def note_suspended(self, now: float) -> None:
        """Record that the sequence's step was suspended."""
        self.num_suspensions += 1
        if self.marks is not None:
            self.marks.suspensions_s.append(now)

    def time_token(self, now: float, bulk_total_s: float = 0.0) -> list[Sample]:
        """Record that a token came at `now`, and return the latencies that end with this token.

        `bulk_total_s` is the engine time that bulk has used in total so far.
        """
        tier, last_s = self.tier.name, self.last_token_s
        bulk_s, self.bulk_seen_s = bulk_total_s - self.bulk_seen_s, bulk_total_s
        self.last_token_s = now
        if last_s is None:
            assert self.first_scheduled_s is not None
            self.first_token_s = now
            return [
                Sample("queue", tier, self.first_scheduled_s - self.arrived_s),
                Sample("ttft", tier, now - self.arrived_s, bulk_s, self.yields),
                Sample("service", tier, now - self.first_scheduled_s, own_s=self.own_s, yielded=self.yields),
            ]
        target_ms = self.tier.slo.itl_p99_ms
        self.gaps += 1
        self.gaps_missed += target_ms is not None and (now - last_s) * 1000 > target_ms
        return [Sample("itl", tier, now - last_s, bulk_s, self.yields)]

    def report_tokens(self, now: float) -> tuple[int, ...]:
        """Return the output tokens that have not been sent yet, and mark them as sent at `now`."""
        tokens = tuple(self.output_token_ids[self.num_reported :])
        self.num_reported, self.reported_s = len(self.output_token_ids), now
        return tokens

    @property
    def num_unsent_logprobs(self) -> int:
        """The number of log probabilities of output tokens that have not been sent yet."""
        return len(self.logprobs) * (1 + (self.request.sampling.logprobs or 0))

    def report_logprobs(self) -> tuple[tuple[TokenLogprobs, ...], tuple[TokenLogprobs, ...]]:
        """Return the log probabilities of output and prompt that have not been sent yet, and forget them."""
        found = tuple(self.logprobs), tuple(self.prompt_logprobs)
        self.logprobs.clear()
        self.prompt_logprobs.clear()
        return found

    def met_slo(self) -> bool:
        """Return whether the first token was in time and at most 1 % of the gaps between tokens were too long."""
        target = self.tier.slo.ttft_p99_ms
        if self.first_token_s is None:
            return False
        in_time = target is None or (self.first_token_s - self.arrived_s) * 1000 <= target
        return in_time and self.gaps_missed * 100 <= self.gaps
