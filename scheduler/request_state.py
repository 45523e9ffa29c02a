"""`RequestState`: what the worker knows about one claimed request. Owner: `SchedulerCore`; policy only reads.

Times are monotonic seconds of the worker's clock; `None` means: has not happened.
"""

from dataclasses import dataclass, field
from enum import Enum

from engine.interface import blocks_for
from scheduler.config import Tier
from scheduler.request import Lease, Request


@dataclass(frozen=True, slots=True)
class Sample:
    """One observed latency, for metrics and the controller."""

    kind: str  # "ttft" | "itl" | "e2e" | "queue" | "service": from its first step to its first token
    tier: str
    seconds: float
    bulk_s: float = 0.0  # of it, that the engine spent on work without a promise


class Status(Enum):
    WAITING = "waiting"  # claimed, unknown to the engine
    RUNNING = "running"  # KV on the device; may be in any step
    PAUSED = "paused"  # KV on the device; sits steps out
    SWAPPED = "swapped"  # KV in host memory: is copied back when it runs again
    PREEMPTED = "preempted"  # the engine knows it, but its KV is gone: must be computed again
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


class IllegalTransition(Exception):
    """A bug: the scheduler tried to move a request along an edge that does not exist."""


@dataclass(slots=True, eq=False)
class RequestState:
    request: Request
    tier: Tier
    fence: int
    arrived_s: float
    claimed_s: float
    num_computed_tokens: int = 0
    num_shared_blocks: int = 0  # of those it holds, others hold as well: its leaving frees the rest only
    num_cached_tokens: int | None = None  # of the prompt, found in the prefix cache when it first ran
    output_token_ids: list[int] = field(default_factory=list)
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    ended_s: float | None = None
    num_reported: int = 0  # output tokens already sent to the gateway
    reported_s: float | None = None
    last_step: int = -1  # the newest step it ran in
    num_preemptions: int = 0  # losses of its place on the device; pauses lose nothing and do not count
    gaps: int = 0  # inter-token gaps, and how many broke the tier's promise
    gaps_missed: int = 0
    boosted_to: float | None = None  # the priority that its nearing deadline, or its long wait, gives it
    bulk_seen_s: float = 0.0  # engine time that had gone into bulk when it came, or got its last token
    found_step_s: float = 0.0  # predicted length of the step that it found running when it came; 0: none
    _status: Status = Status.WAITING

    @property
    def id(self) -> str:
        return self.request.id

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
    def priority(self) -> float:
        return self.tier.priority if self.boosted_to is None else max(self.boosted_to, self.tier.priority)

    @property
    def deadline_s(self) -> float:
        """On the worker's clock."""
        return self.arrived_s + (self.request.deadline_ms - self.request.arrival_ms) / 1000

    @property
    def num_tokens(self) -> int:
        """Prompt and output so far."""
        return len(self.request.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_uncomputed(self) -> int:
        return self.num_tokens - self.num_computed_tokens

    @property
    def reaction_steps(self) -> float | None:
        """From arrival to the step that holds it, in lengths of the step that it found running; None: it found none, or
        runs in none yet."""
        if self.first_scheduled_s is None or not self.found_step_s:
            return None
        return (self.first_scheduled_s - self.arrived_s) / self.found_step_s

    @property
    def is_resident(self) -> bool:
        """Holds KV blocks on the device."""
        return self._status in (Status.RUNNING, Status.PAUSED)

    @property
    def is_decode(self) -> bool:
        """Its next run is a single token behind its own output."""
        return self.is_resident and self.num_uncomputed == 1 and bool(self.output_token_ids)

    def ends_with(self, num_tokens: int) -> bool:
        """A run of so many tokens gives it the last one that was asked for."""
        is_last = len(self.output_token_ids) + 1 >= self.request.sampling.max_tokens
        return is_last and self.num_uncomputed <= num_tokens

    @property
    def awaits_first_token(self) -> bool:
        return self.first_token_s is None

    @property
    def edf_key(self) -> tuple[int, int, str]:
        """Order inside a tier: earliest deadline first, total."""
        return (self.request.deadline_ms, self.request.arrival_ms, self.request.id)

    def blocks_held(self, block_size: int) -> int:
        return blocks_for(self.num_computed_tokens, block_size) if self.is_resident else 0

    def own_blocks(self, block_size: int) -> int:
        """Those that become free when it alone leaves."""
        return self.blocks_held(block_size) - self.num_shared_blocks

    def lose_blocks(self, to: Status) -> None:
        """Leave the device, for host memory (`SWAPPED`) or to be computed again (`PREEMPTED`)."""
        self.move(to)
        self.num_preemptions += 1
        self.num_shared_blocks = 0
        if to is Status.PREEMPTED:
            self.num_computed_tokens = 0

    def time_token(self, now: float, bulk_total_s: float = 0.0) -> list[Sample]:
        """A token came at `now`, when `bulk_total_s` of engine time had gone into bulk; the latencies that it
        completes."""
        tier, last_s = self.tier.name, self.last_token_s
        bulk_s, self.bulk_seen_s = bulk_total_s - self.bulk_seen_s, bulk_total_s
        self.last_token_s = now
        if last_s is None:
            assert self.first_scheduled_s is not None
            self.first_token_s = now
            return [
                Sample("queue", tier, self.first_scheduled_s - self.arrived_s),
                Sample("ttft", tier, now - self.arrived_s, bulk_s),
                Sample("service", tier, now - self.first_scheduled_s),
            ]
        target_ms = self.tier.slo.itl_p99_ms
        self.gaps += 1
        self.gaps_missed += target_ms is not None and (now - last_s) * 1000 > target_ms
        return [Sample("itl", tier, now - last_s, bulk_s)]

    def report_tokens(self, now: float) -> tuple[int, ...]:
        """The output tokens not sent yet; from now on they count as sent."""
        tokens = tuple(self.output_token_ids[self.num_reported :])
        self.num_reported, self.reported_s = len(self.output_token_ids), now
        return tokens

    def met_slo(self) -> bool:
        """TTFT in time, and at most one gap in a hundred too long."""
        target = self.tier.slo.ttft_p99_ms
        if self.first_token_s is None:
            return False
        in_time = target is None or (self.first_token_s - self.arrived_s) * 1000 <= target
        return in_time and self.gaps_missed * 100 <= self.gaps
