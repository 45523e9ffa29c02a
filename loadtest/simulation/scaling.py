"""The autoscaler of a simulated deployment: workers come and go as `GET /admin/scale` says.

Batches are plain requests in the simulator, so their deadlines are those of their tiers.
"""

from loadtest.simulation.deployment import Deployment, Scaling

LOOK_S = 1.0  # seconds between two looks at the signal; KEDA looks every few seconds


async def follow_signal(deployment: Deployment, fewest: int, scaling: Scaling) -> None:
    """Start workers and let them leave, for ever. The first `fewest` of them stay."""
    while True:
        signal = deployment.client.scale_signal((), has_more=False)
        wanted = max(fewest, min(scaling.most, signal.wanted))
        present = [worker for worker in deployment.workers if not worker.is_leaving]
        for worker in present[wanted:]:
            worker.leave()
        for _ in range(wanted - len(present)):
            deployment.add_worker(scaling.start_s)
        await deployment.clock.sleep(LOOK_S)
