"""Builds the loop of a worker in front of a server, from the same parts as `scheduler.worker.assembly`."""

from engine.streaming import Upstream
from scheduler.clock import Clock
from scheduler.dispatch.core import DispatchCore
from scheduler.dispatch.driver import StreamDriver
from scheduler.events.base import EventChannel
from scheduler.queue.base import Queue
from scheduler.registry.base import WorkerRegistry
from scheduler.worker.checkpoints import Checkpointer
from scheduler.worker.claimer import Claimer
from scheduler.worker.heartbeat import Heartbeat, WorkerIdentity
from scheduler.worker.held_requests import HeldRequests
from scheduler.worker.leases import LeaseKeeper
from scheduler.worker.loop import SchedulerLoop
from scheduler.worker.maintenance import Maintenance
from scheduler.worker.metrics import SchedulerMetrics
from scheduler.worker.peers import Peers
from scheduler.worker.publisher import Publisher
from scheduler.worker.refusals import Refusals
from scheduler.worker.step_log import NoStepLog
from scheduler.worker.step_reporter import StepReporter
from scheduler.worker.tracing import RequestTracer


def build_dispatch_loop(
    core: DispatchCore,
    upstream: Upstream,
    queue: Queue,
    events: EventChannel,
    registry: WorkerRegistry,
    metrics: SchedulerMetrics,
    clock: Clock,
    identity: WorkerIdentity,
    tracer: RequestTracer | None = None,
) -> SchedulerLoop:
    """Return a loop that is ready to run. It closes `queue` at its end; all other parts outlive it."""
    held = HeldRequests(core, metrics, clock, tracer=tracer)
    heartbeat = Heartbeat(registry, metrics, core, upstream.info, identity, clock, upstream.unsupported)
    refusals = Refusals()
    checkpointer = Checkpointer(core, queue, refusals, clock)
    publisher = Publisher(queue, events, held, checkpointer, refusals, clock)
    peers = Peers(core, queue, events, registry, held, checkpointer, refusals, clock, identity.worker_id)
    claimer = Claimer(core, queue, held, peers, refusals, clock)
    reporter = StepReporter(publisher, metrics, heartbeat, NoStepLog(), clock, tracer)
    driver = StreamDriver(core, upstream, queue, held, claimer, reporter, refusals, clock)
    leases = LeaseKeeper(core, queue, held, refusals, clock, identity.worker_id)
    maintenance = Maintenance(core, queue, metrics, heartbeat, held, driver, refusals, clock)
    return SchedulerLoop(driver, claimer, publisher, checkpointer, leases, peers, maintenance, heartbeat, queue)
