"""GET /admin/scale: how many workers the load needs, for an autoscaler such as KEDA's trigger `metrics-api`."""

from typing import Any

from fastapi import APIRouter, Request

from gateway.models import ServedModel
from gateway.state import Gateway, OfModel, gateway_of
from scheduler.client.scale import ScaleSignal

router = APIRouter()  # for administrators


@router.get("/admin/scale")
async def show_scale(request: Request, served: OfModel) -> dict[str, Any]:
    """Show how many workers of a model are wanted, how many there are, and why. Without `model`: of the main one.

    `needed` has the parts of the need, in workers: what interactive traffic takes, what waits for a first token, and
    what must be done all the time so that bulk ends when it is due. Answers 503 if the store does not answer: then an
    autoscaler should change nothing.
    """
    signal = await read_scale(gateway_of(request), served)
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


async def read_scale(gateway: Gateway, served: ServedModel) -> ScaleSignal:
    """Return how many workers of a model are wanted. Raises the errors of the store."""
    due, num_batches = await gateway.batches.forecasts.due_work(served.name)
    signal = served.client.scale_signal(due, has_more=num_batches > 0)
    if signal.serving:
        return signal
    await served.client.refresh()  # a worker may have come since the last time
    return served.client.scale_signal(due, has_more=num_batches > 0)
