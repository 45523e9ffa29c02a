"""GET /admin/scale: how many workers the load needs, for an autoscaler such as KEDA's trigger `metrics-api`."""

from typing import Any

from fastapi import APIRouter, Request

from gateway.state import Gateway, gateway_of
from scheduler.client.scale import ScaleSignal

router = APIRouter()  # for administrators


@router.get("/admin/scale")
async def show_scale(request: Request) -> dict[str, Any]:
    """Show how many workers are wanted, how many there are, and why.

    `needed` has the parts of the need, in workers: what interactive traffic takes, what waits for a first token, and
    what must be done all the time so that bulk ends when it is due. Answers 503 if the store does not answer: then an
    autoscaler should change nothing.
    """
    signal = await read_scale(gateway_of(request))
    return {
        "workers_wanted": signal.wanted,
        "workers_serving": signal.serving,
        "needed": {
            "interactive": round(signal.interactive, 3),
            "waiting": round(signal.waiting, 3),
            "bulk": round(signal.bulk, 3),
        },
        "reason": signal.reason,
    }


async def read_scale(gateway: Gateway) -> ScaleSignal:
    """Return how many workers are wanted. Raises the errors of the store."""
    due, num_batches = await gateway.batches.forecasts.due_work()
    return gateway.client.scale_signal(due, has_more=num_batches > 0)
