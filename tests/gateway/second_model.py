"""A second model for a gateway of tests, with a worker of its own."""

from dataclasses import dataclass
from pathlib import Path

from redis.asyncio import Redis

from gateway.requests.tokens.model_files import SamplingDefaults
from scheduler.clock import SystemClock
from scheduler.config import TierSet
from scheduler.events.memory import MemoryEventChannel
from scheduler.queue.memory import MemoryQueue
from tests.gateway.scripted_worker import EverAlive, ScriptedWorker, answer_with
from tests.gateway.tiny_model import tiny_tokenizer
from tidegate.gateway.models import ModelSource, Queues

OTHER = "other"


@dataclass
class Second:
    """A second model, with a worker of its own that answers "From the second."."""

    source: ModelSource
    worker: ScriptedWorker


def second_model(redis: Redis, tiers: TierSet, fallback: str | None = None) -> Second:
    clock = SystemClock()
    queue, events, registry = MemoryQueue(clock), MemoryEventChannel(), EverAlive(clock)
    source = ModelSource(
        names=(OTHER, "o"),
        queues=Queues(redis, queue, events, registry),
        tokenizer=tiny_tokenizer(),
        defaults=SamplingDefaults(),
        revision="2",
        vocabulary="v2",
        tiers=tiers,
        tiers_path=Path("tiers.yaml"),
        fallback=fallback,
    )
    return Second(source, ScriptedWorker(queue.for_worker("w2"), events, registry, answer_with("From the second.")))
