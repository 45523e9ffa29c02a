"""`python -m bench fairness`: one key's chat, one a second, alone and beside what another key sends.

Runs `tidegate serve` with the demo model and two API keys of the same tier. Knows requests and times.
"""

import asyncio
import multiprocessing
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter

import numpy as np
from pydantic import BaseModel, Field

from bench.isolation.servers import serving_tidegate
from loadtest.client.answer import Outcome
from loadtest.client.http import Target, TargetError, completion_body, send
from loadtest.reporting.record import Provenance, Record, Section, Table
from loadtest.reporting.writers import publish
from loadtest.running import ends_on_sigterm, one_sentence, print_progress, run_to_end

QUESTION, NEW_TOKENS = "How much is 17 + 25?", 30
FLOODED_S = 3.0  # seconds from the flood's begin to the first chat; its process takes one to start
KEY_A, KEY_B = "key-of-a-0123456789", "key-of-b-0123456789"
KEYS = f"keys: [{{name: a, key: {KEY_A}}}, {{name: b, key: {KEY_B}}}]\n"


@dataclass(frozen=True, slots=True)
class Flood:
    """What the other key sends: `count` requests at once, again and again if it is a `loop`."""

    name: str
    count: int
    new_tokens: int
    loop: bool = False


FLOODS = (
    Flood("alone", 0, 0),
    Flood("400 chats at once", 400, 30),
    Flood("200 loops", 200, 30, loop=True),
    Flood("260 streams of 1,500 tokens", 260, 1500),
    Flood("900 chats of 300 tokens", 900, 300),
)


class Fairness(BaseModel):
    """First tokens of one key's chats, one a second, alone and beside another key's floods of the same tier."""

    chats: int = Field(12, ge=1, le=600, description="Chats beside each flood.")
    json_file: Path | None = Field(None, alias="json", description="Write the results to this file as JSON.")

    def cli_cmd(self) -> None:
        with ends_on_sigterm(), one_sentence(TargetError, said_by="fairness"):
            run_to_end(self._run())

    async def _run(self) -> None:
        found = {}
        for flood in FLOODS:  # each with a server of its own, which nothing of the one before has warmed or filled
            async with AsyncExitStack() as stack:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tidegate-fairness-")))
                (folder / "keys.yaml").write_text(KEYS)
                flags = ("--api-keys", str(folder / "keys.yaml"))
                serving = serving_tidegate(None, "auto", folder, 0, flags, api_key=KEY_B)
                b = (await stack.enter_async_context(serving)).target
                found[flood.name] = await _beside(flood, replace(b, api_key=KEY_A), b, self.chats)
                print_progress(f"{flood.name}: {_row(flood.name, found[flood.name])}")
        publish(fairness_record(found), self.json_file)


async def _beside(flood: Flood, a: Target, b: Target, chats: int) -> list[Outcome]:
    """Return the chats of key b beside the flood of key a."""
    await asyncio.gather(*(_chat(b, n, 0.0) for n in range(3)))  # so that the server knows how long answers are
    # In a process of its own, since hundreds of streams would delay the times that are read here.
    flooding = multiprocessing.get_context("spawn").Process(target=_flood_all, args=(a, flood), daemon=True)
    flooding.start()
    try:
        await asyncio.sleep(FLOODED_S)
        return await asyncio.gather(*(_chat(b, n, float(n)) for n in range(chats)))
    finally:
        flooding.kill()
        flooding.join()


async def _chat(target: Target, number: int, delay_s: float) -> Outcome:
    await asyncio.sleep(delay_s)
    return await _send(target, number, NEW_TOKENS)


def _flood_all(target: Target, flood: Flood) -> None:
    async def send_all() -> None:
        await asyncio.gather(*(_flood(target, flood, n) for n in range(flood.count)))

    asyncio.run(send_all())


async def _flood(target: Target, flood: Flood, number: int) -> None:
    await _send(target, number, flood.new_tokens)
    while flood.loop:
        await _send(target, number, flood.new_tokens)


async def _send(target: Target, number: int, new_tokens: int) -> Outcome:
    path, body = completion_body(target, f"{number}: {QUESTION}", new_tokens)
    outcome = Outcome("chat", number, due_s=perf_counter())
    await send(target, path, body, outcome, streamed=True)
    return outcome


def fairness_record(found: dict[str, list[Outcome]]) -> Record:
    header = ("beside", "chats", "answered", "first token p50 ms", "max ms", "answer p50 ms", "errors")
    table = Table.of(header, [_row(name, outcomes) for name, outcomes in found.items()])
    data = {name: [o.ttft_s for o in outcomes] for name, outcomes in found.items()}
    return Record("Fairness", [Section("One key's chats", table)], data, Provenance.of_this_run("demo", seed=0))


def _row(name: str, outcomes: Sequence[Outcome]) -> tuple[str, ...]:
    answered = [o for o in outcomes if o.is_complete]
    ttfts_s = [o.ttft_s for o in answered if o.ttft_s is not None]
    ends_s = [o.e2e_s for o in answered if o.e2e_s is not None]
    times_s = [np.median(ttfts_s), max(ttfts_s), np.median(ends_s)] if ttfts_s else []
    shown = [f"{1000 * seconds:.0f}" for seconds in times_s] or ["–"] * 3
    errors = {o.error for o in outcomes if o.error is not None}
    return (name, str(len(outcomes)), str(len(answered)), *shown, "; ".join(sorted(errors))[:80])
