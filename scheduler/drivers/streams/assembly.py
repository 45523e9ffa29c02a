"""Builds the loop of a worker in front of a server, from the same parts as `scheduler.drivers.steps.assembly`."""

from engine.streaming import Upstream
from scheduler.clock import Clock
from scheduler.drivers.streams.core import StreamCore
from scheduler.drivers.streams.driver import StreamDriver
from scheduler.events.base import EventChannel
from scheduler.queue.base import Queue
from scheduler.registry.base import WorkerRegistry
from scheduler.worker.checkpoints import Checkpointer
from scheduler.worker.claimer import Claimer
from scheduler.worker.heartbeat import Heartbeat, WorkerIdentity
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


def build_stream_loop(
    core: StreamCore,
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
    intake = RequestIntake(core, metrics, clock, tracer=tracer)
    heartbeat = Heartbeat(registry, metrics, core, upstream.info, identity, clock, upstream.unsupported)
    outage = StoreOutage()
    checkpointer = Checkpointer(core, queue, outage, clock)
    publisher = Publisher(queue, events, intake, checkpointer, outage, clock)
    peers = Peers(core, queue, events, registry, intake, checkpointer, outage, clock, identity.worker_id)
    claimer = Claimer(core, queue, intake, peers, outage, clock)
    reporter = Reporter(publisher, metrics, heartbeat, clock, tracer)
    driver = StreamDriver(core, upstream, queue, intake, claimer, reporter, outage, clock)
    leases = LeaseKeeper(core, queue, intake, outage, clock, identity.worker_id)
    maintenance = Maintenance(core, queue, metrics, heartbeat, intake, driver, outage, clock)
    return SchedulerLoop(driver, claimer, publisher, checkpointer, leases, peers, maintenance, heartbeat, queue)
