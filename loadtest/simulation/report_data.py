"""A simulated run as data for JSON: the summary, every move of a knob with its reason, and the state at each second."""

import math
from dataclasses import asdict
from typing import Any

import numpy as np

from loadtest.simulation.observation import Observation, RequestRecord
from loadtest.simulation.summary import Summary, quantile


def simulation_data(summary: Summary, observation: Observation) -> dict[str, Any]:
    found: dict[str, Any] = _finite(
        {"summary": _summary(summary), "moves": _moves(observation), "seconds": _seconds(observation)}
    )
    return found


def _summary(summary: Summary) -> dict[str, Any]:
    moves = [
        {"tier": t, "knob": k, "signal": s, "up": up, "down": down} for (t, k, s), (up, down) in summary.moves.items()
    ]
    preemptions = [{"tier": tier, "mode": mode, "count": n} for (tier, mode), n in summary.preemptions.items()]
    return {
        "duration_s": summary.duration_s,
        "keeps_promises": summary.keeps_slos,
        "promises": [asdict(slo) for slo in summary.slos],
        "classes": {c.name: asdict(c) for c in summary.classes},
        "queue_s": {tier: asdict(waited) for tier, waited in summary.queue.items()},
        "engines": asdict(summary.engines),
        "preemptions": preemptions,
        "moves": moves,
        "knobs_at_the_end": {tier: asdict(moment) for tier, moment in summary.knobs.items()},
    }


def _moves(observation: Observation) -> list[dict[str, Any]]:
    return [{"at_s": m.at_s, "worker": m.worker, **asdict(m.decision)} for m in observation.moves]


def _seconds(observation: Observation) -> list[dict[str, Any]]:
    """Return one entry for each second: the state at its end, and the requests that arrived during it."""
    arrived: dict[tuple[int, str], list[RequestRecord]] = {}
    for record in observation.requests:
        arrived.setdefault((int(record.arrived_s), record.traffic_class), []).append(record)
    return [
        asdict(moment)
        | {
            "classes": {
                name: _arrivals(arrived.get((round(moment.at_s) - 1, name), [])) for name in observation.classes
            }
        }
        for moment in observation.moments
    ]


def _arrivals(records: list[RequestRecord]) -> dict[str, Any]:
    waits = np.sort(np.array([r.ttft_s for r in records if r.ttft_s is not None], dtype=np.float64))
    return {
        "offered": len(records),
        "rejected": sum(bool(r.rejected) for r in records),
        "ttft_p50_s": quantile(waits, 0.5),
        "ttft_max_s": quantile(waits, 1.0),
    }


def _finite(value: Any) -> Any:
    """Return the value as JSON can hold it.

    Infinities, which JSON does not have, become None. Floats are rounded to 9 decimals.
    """
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float):
        return None if math.isinf(value) else round(value, 9)
    return value
