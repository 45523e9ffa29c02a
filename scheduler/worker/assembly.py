"""Builds a worker's loop from its parts; used by the worker process, the simulator, benches and tests."""

from collections.abc import Sequence

from engine.interface import Engine
from scheduler.clock import Clock
from scheduler.events.base import EventChannel
from scheduler.planning.core import SchedulerCore
from scheduler.queue.base import Queue
from scheduler.registry.base import WorkerRegistry
from scheduler.worker.checkpoints import Checkpointer
from scheduler.worker.claimer import Claimer
from scheduler.worker.grammar_compiler import GrammarCompiler
from scheduler.worker.heartbeat import Heartbeat, ReadGpus, WorkerIdentity
from scheduler.worker.held_requests import HeldRequests
from scheduler.worker.leases import LeaseKeeper
from scheduler.worker.loop import SchedulerLoop
from scheduler.worker.maintenance import Maintenance
from scheduler.worker.metrics import SchedulerMetrics
from scheduler.worker.peers import Peers
from scheduler.worker.publisher import Publisher
from scheduler.worker.refusals import Refusals
from scheduler.worker.step_log import NoStepLog, StepLog
from scheduler.worker.step_loop import StepLoop
from scheduler.worker.step_marks import StepMarks
from scheduler.worker.step_reporter import StepReporter
from scheduler.worker.tracing import RequestTracer


def build_loop(
    core: SchedulerCore,
    engine: Engine,
    queue: Queue,
    events: EventChannel,
    registry: WorkerRegistry,
    metrics: SchedulerMetrics,
    clock: Clock,
    identity: WorkerIdentity,
    step_log: StepLog | None = None,
    read_gpus: ReadGpus | None = None,
    tracer: RequestTracer | None = None,
) -> SchedulerLoop:
    """Return a loop that is ready to run.

    The loop closes `queue` at its end. All other parts outlive the loop, so that a later loop can continue with the
    same core and engine.
    """

    def make_room(request_ids: Sequence[str], now: float) -> None:
        """Evict bulk from the step in flight, if a request then starts sooner and this is worth the lost work."""
        evictees = core.evictees_for(request_ids, now)
        if evictees:
            engine.evict(evictees)

    held = HeldRequests(core, metrics, clock, make_room, tracer)
    heartbeat = Heartbeat(registry, metrics, core, engine.info, identity, clock, read_gpus=read_gpus)
    refusals = Refusals()
    checkpointer = Checkpointer(core, queue, refusals, clock)
    publisher = Publisher(queue, events, held, checkpointer, refusals, clock)
    peers = Peers(core, queue, events, registry, held, checkpointer, refusals, clock, identity.worker_id)
    claimer = Claimer(core, queue, held, peers, refusals, clock)
    reporter = StepReporter(publisher, metrics, heartbeat, step_log or NoStepLog(), clock, tracer)
    marks = StepMarks(core, queue, refusals)
    steps = StepLoop(core, engine, held, claimer, reporter, marks, clock)
    leases = LeaseKeeper(core, queue, held, refusals, clock, identity.worker_id)
    maintenance = Maintenance(core, queue, metrics, heartbeat, held, steps, refusals, clock)
    grammars = GrammarCompiler(core, engine, held, marks)
    return SchedulerLoop(
        steps, claimer, publisher, checkpointer, leases, peers, maintenance, heartbeat, queue, grammars
    )
