"""GET /admin/overview: the state of the whole deployment in one object, for people, scripts and `tidegate top`."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import structlog
from fastapi import APIRouter, Request

from gateway.routes.ops import Queues, read_queues
from gateway.state import STORE_TIMEOUT_S, Gateway, OfModel, gateway_of
from scheduler.client.client import SchedulerClient
from scheduler.config import Tier
from scheduler.registry.worker_status import WorkerStatus

log = structlog.get_logger(__name__)

OBSERVED = ("ttft_p99_s", "itl_p99_s", "attainment")  # signals of a worker's controller that are shown for a tier

router = APIRouter()  # for administrators


@router.get("/admin/overview")
async def show_overview(request: Request, served: OfModel) -> dict[str, Any]:
    """Show the queues, tiers and workers of a model, the batches and the store as they are now.

    If the store does not answer, `store.answers` is false, what only it knows is null, and the workers are those that
    were alive before.
    """
    gateway = gateway_of(request)
    client, now_ms = served.client, gateway.clock.wall_ms()
    queues, signals, batches = await _read_store(gateway, client)
    workers = [*client.live.engines, *client.live.endpoints]
    predicted = client.predicted_ttfts_s(queues.backlogs) if queues is not None else {}
    return {
        "at_ms": now_ms,
        "model": served.name,
        "models": [other.name for other in gateway.models],
        "draining": client.is_draining,
        "open_requests": client.num_open,
        "store": {
            "answers": queues is not None,
            "latency_ms": None if queues is None else round(1000 * queues.latency_s, 3),
            "refusal": client.refusal,
        },
        "tiers": {
            tier.name: _tier(tier, queues, client.live.engines, signals)
            | {"predicted_ttft_s": predicted.get(tier.name)}
            for tier in served.tiers.by_priority
        },
        "workers": [_worker(status, now_ms) for status in workers],
        "batches": batches,
    }


async def _read_store(
    gateway: Gateway, client: SchedulerClient
) -> tuple[Queues | None, list[dict[str, Any]], dict[str, int] | None]:
    """Return the queues, each worker's explanation, and the batches by status; nothing if the store does not answer."""
    try:
        async with asyncio.timeout(STORE_TIMEOUT_S):
            queues = await read_queues(client, gateway.clock)
            texts = await client.registry.sla()
            batches = await gateway.batches.counts_by_status()
    except Exception as error:  # each store adapter has its own errors
        log.warning("overview_without_store", error=str(error) or type(error).__name__)
        return None, [], None
    return queues, [json.loads(text) for text in texts.values()], batches


def _tier(
    tier: Tier, queues: Queues | None, workers: Sequence[WorkerStatus], explanations: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return what waits and runs in a tier, and how its latencies are: the worst worker's."""
    held = [status.tiers[tier.name] for status in workers if tier.name in status.tiers]
    backlog = None if queues is None else queues.backlogs.get(tier.name)
    found = [e["tiers"][tier.name].get("signals", {}) for e in explanations if tier.name in e.get("tiers", {})]
    observed = {name: [s[name] for s in found if s.get(name) is not None] for name in OBSERVED}
    return {
        "interactive": tier.is_interactive,
        "waiting": None if backlog is None else backlog.requests,
        "waiting_prompt_tokens": None if backlog is None else backlog.prompt_tokens,
        "waiting_output_tokens": None if backlog is None else backlog.output_tokens,
        "head_waited_s": None if queues is None else queues.ages_s.get(tier.name),
        "claimed": sum(status.queued for status in held),
        "running": sum(status.running for status in held),
        "finished_per_s": round(sum(status.finished_per_s for status in held), 3),
        "slo": {"ttft_p99_s": _seconds(tier.slo.ttft_p99_ms), "itl_p99_s": _seconds(tier.slo.itl_p99_ms)},
        "ttft_p99_s": max(observed["ttft_p99_s"], default=None),
        "itl_p99_s": max(observed["itl_p99_s"], default=None),
        "attainment": min(observed["attainment"], default=None),
        "overloaded": any(tier.name in e.get("overloaded", ()) for e in explanations),
    }


def _seconds(ms: float | None) -> float | None:
    return None if ms is None else ms / 1000


def _worker(status: WorkerStatus, now_ms: int) -> dict[str, Any]:
    """Return what a worker has announced. Its age is by the clocks of two machines."""
    is_static = bool(status.batch_items)
    return {
        "id": status.worker_id,
        "device": status.device,
        "models": list(status.model_names),
        "started_at": status.started_ms // 1000,
        "heartbeat_age_s": max(0, now_ms - status.at_ms) / 1000,
        "busy": None if is_static else round(status.busy, 4),
        "kv_usage": None if is_static else round(status.kv_usage, 4),
        "gpus": [asdict(gpu) for gpu in status.gpus],
        "tiers": {
            name: {"claimed": tier.queued, "running": tier.running, "batch_size": tier.batch_size}
            for name, tier in status.tiers.items()
        },
    }
