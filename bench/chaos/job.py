"""One large batch, run twice: in peace, and while parts are killed. Both outputs must be equal, line by line.

Knows lines and their texts; does not know faults. Half of the lines are greedy, and half are sampled with a seed.
"""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from time import monotonic
from typing import Any

import httpx

from bench.chaos.batches import BATCH_POLL_S, MODEL, Gateways
from loadtest.client.http import TargetError
from loadtest.running import print_progress
from loadtest.traffic.prompts import draw_nonces

LINE_TOKENS = 8  # of each answer
PROGRESS_S = 10.0  # seconds between two lines about the progress


@dataclass(frozen=True, slots=True)
class JobComparison:
    """What became of a batch that ran twice."""

    lines: int
    calm_s: float
    killed_s: float  # with the restarts of parts
    problem: str = ""  # empty: the outputs are equal


def job_lines(count: int, seed: int) -> list[dict[str, Any]]:
    """Return `count` different lines of a batch."""
    lines: list[dict[str, Any]] = []
    for number, nonce in enumerate(draw_nonces(count, seed)):
        body: dict[str, Any] = {"model": MODEL, "prompt": f"Tidegate {nonce}", "max_tokens": LINE_TOKENS}
        body |= {"temperature": 0} if number % 2 else {"temperature": 1, "seed": number}
        lines.append({"custom_id": f"line-{number}", "method": "POST", "url": "/v1/completions", "body": body})
    return lines


class Job:
    def __init__(self, gateways: Gateways, lines: list[dict[str, Any]]) -> None:
        self._gateways = gateways
        self._lines = lines

    async def run(self, name: str, limit_s: float) -> tuple[dict[str, str], float]:
        """Run the batch. Return the text of each line by `custom_id`, and the seconds that it took.

        Raises `TargetError` if it does not complete within `limit_s` seconds, or if a line is there twice.
        """
        began_s = monotonic()
        async with httpx.AsyncClient(timeout=60) as http:
            batch_id = await self._gateways.submit_lines(http, name, self._lines, "/v1/completions")
            try:
                async with asyncio.timeout(limit_s):
                    await self._until_completed(http, name, batch_id)
                    seconds = monotonic() - began_s
                    records = await self._gateways.output_of(http, batch_id)
            except TimeoutError:
                raise TargetError(f"the {name} batch has not completed within {limit_s:.0f} s") from None
        texts = {record["custom_id"]: text_of(record) for record in records}
        if len(texts) != len(records):
            raise TargetError(f"{len(records) - len(texts)} lines of the {name} batch are there twice")
        return texts, seconds

    async def _until_completed(self, http: httpx.AsyncClient, name: str, batch_id: str) -> None:
        shown_s = monotonic()
        while (batch := await self._gateways.batch(http, batch_id))["status"] != "completed":
            if batch["status"] not in ("validating", "in_progress", "finalizing"):
                raise TargetError(f"the {name} batch is {batch['status']}: {batch['errors']}")
            if monotonic() - shown_s > PROGRESS_S:
                shown_s = monotonic()
                print_progress(f"{name} batch: {batch['request_counts']}")
            await asyncio.sleep(BATCH_POLL_S)


def text_of(record: Mapping[str, Any]) -> str:
    """Return the text of a line's answer with the reason of its end, or its error."""
    body = record["response"]["body"] if record["response"] else {"error": record["error"]}
    return json.dumps(body["error"]) if "error" in body else json.dumps(body["choices"][0], sort_keys=True)


def compared(calm: Mapping[str, str], killed: Mapping[str, str], count: int) -> str:
    """Return what is wrong with the output of the second run; an empty text if it is the first run's."""
    if len(calm) != count:
        return f"{len(calm)} of {count} lines were answered even in peace"
    missing = calm.keys() - killed.keys()
    other = [name for name in calm.keys() & killed.keys() if calm[name] != killed[name]]
    if missing or other or len(killed) != count:
        shown = [f"{name}: {killed[name]} instead of {calm[name]}" for name in sorted(other)[:3]]
        return f"{len(missing)} lines are missing, {len(other)} differ: {sorted(missing)[:3]} {shown}"
    return ""
