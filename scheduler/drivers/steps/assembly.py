"""Builds a worker's loop from its parts; used by the worker process, the simulator, benches and tests."""

from collections.abc import Sequence

from engine.interface import Engine
from scheduler.clock import Clock
from scheduler.drivers.steps.core import SchedulerCore
from scheduler.drivers.steps.grammar_compiler import GrammarCompiler
from scheduler.drivers.steps.loop import StepLoop
from scheduler.drivers.steps.step_log import NoStepLog, StepLog
from scheduler.drivers.steps.step_marks import StepMarks
from scheduler.events.base import EventChannel
from scheduler.queue.base import Queue
from scheduler.registry.base import WorkerRegistry
from scheduler.worker.checkpoints import Checkpointer
from scheduler.worker.claimer import Claimer
from scheduler.worker.heartbeat import Heartbeat, ReadGpus, WorkerIdentity
from scheduler.worker.leases import LeaseKeeper
from scheduler.worker.loop import SchedulerLoop
from scheduler.worker.maintenance import Maintenance
from scheduler.worker.metrics import SchedulerMetrics
from scheduler.worker.peers import Peers
from scheduler.worker.publisher import Publisher
from scheduler.worker.reporter import Reporter
from scheduler.worker.request_intake import RequestIntake
from scheduler.worker.store_outage import StoreOutage
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

    intake = RequestIntake(core, metrics, clock, make_room, tracer)
    heartbeat = Heartbeat(registry, metrics, core, engine.info, identity, clock, read_gpus=read_gpus)
    outage = StoreOutage()
    checkpointer = Checkpointer(core, queue, outage, clock)
    publisher = Publisher(queue, events, intake, checkpointer, outage, clock)
    peers = Peers(core, queue, events, registry, intake, checkpointer, outage, clock, identity.worker_id)
    claimer = Claimer(core, queue, intake, peers, outage, clock)
    reporter = Reporter(publisher, metrics, heartbeat, clock, tracer)
    marks = StepMarks(core, queue, outage)
    steps = StepLoop(core, engine, intake, claimer, reporter, metrics, step_log or NoStepLog(), marks, clock)
    leases = LeaseKeeper(core, queue, intake, outage, clock, identity.worker_id)
    maintenance = Maintenance(core, queue, metrics, heartbeat, intake, steps, outage, clock)
    grammars = GrammarCompiler(core, engine, intake, marks)
    return SchedulerLoop(
        steps, claimer, publisher, checkpointer, leases, peers, maintenance, heartbeat, queue, [grammars.run]
    )
