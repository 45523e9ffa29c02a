"""The demo of a fleet: three models behind two gateways; one is flooded, a worker is killed, the gateways restart.

Chats go to each model all the time. The official openai client has no list of gateways, so the demo tries the other one
where a gateway takes no requests, as a proxy in front of them does. All processes end with the demo.
"""

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any

from openai import APIConnectionError, APIError, AsyncOpenAI, InternalServerError

from tidegate.demo.parts import STOP_TIMEOUT_S, DemoError, Process, free_port, start, wait_until_ready
from tidegate.settings.commands import DemoSettings
from tidegate.supervision.process import end_child
from tidegate.valkey import running_valkey

MODELS = ("alpha", "beta", "gamma")
WORKERS = ("alpha", "alpha", "beta", "gamma")  # the models of the workers; the first worker is killed
LOOPS = 3  # chats with each model at the same time
PAUSE_S = 0.2  # between two chats of a loop
TOKENS = 48  # of a chat
FLOOD_LOOPS = 32  # of chats with the flooded model
FLOODED, KILLED = MODELS[2], WORKERS[0]


@dataclass
class Chats:
    """What became of the chats with one model in one phase."""

    first_token_s: list[float] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)  # why
    sent_again: int = 0  # to the other gateway, because the first one took no requests


@dataclass
class Fleet:
    settings: DemoSettings  # with the URL of the store
    gateway_flags: tuple[str, ...]
    workers: list[Process]
    gateways: dict[int, Process] = field(default_factory=dict)  # by port

    def start_gateway(self, port: int) -> None:
        """Start a gateway. Call it in the main thread: on Linux a process ends with the thread that has started it."""
        self.gateways[port] = start("gateway", self.settings, *self.gateway_flags, "--port", str(port))

    def wait_until_ready(self, port: int) -> None:
        """Wait until a gateway serves all models. Raises `DemoError`."""
        processes = [self.gateways[port], *self.workers]
        wait_until_ready(processes, f"http://127.0.0.1:{port}", lambda report: all(report["models"].values()))

    def end(self) -> None:
        """End all of them. No request is open any more, so each ends at once."""
        for process in [*self.gateways.values(), *self.workers]:
            end_child(process, STOP_TIMEOUT_S)


def show_fleet(settings: DemoSettings) -> None:
    """Show it on free ports. Raises `DemoError`, `OpenAIError` or `ValkeyError`."""
    print(f"A store, two gateways and {len(WORKERS)} workers start …", flush=True)
    with running_fleet(settings) as fleet:
        show = Show(fleet, settings.seconds / 2)
        asyncio.run(show.run())
    print(table(show.chats))


@contextmanager
def running_fleet(settings: DemoSettings) -> Iterator[Fleet]:
    """Run a store, two gateways and a worker for each of `WORKERS`, all with the same weights under several names."""
    path = settings.model_path
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tidegate-demo-")))
        store = nullcontext(settings.redis_url) if settings.redis_url else running_valkey(folder / "store")
        update = {"redis_url": stack.enter_context(store), "model": None, "log_level": "error"}
        settings = settings.model_copy(update=update)
        models = ",".join(f"{name}={path}" for name in MODELS)
        fleet = Fleet(settings, ("--model", models, "--data-dir", str(folder / "files")), [])
        stack.callback(fleet.end)
        for number, name in enumerate(WORKERS):
            flags = ("--model", f"{name}={path}", "--worker-id", f"{name}-{number}", "--threads", "1")
            fleet.workers.append(start("worker", settings, *flags))
        for port in (free_port(), free_port()):
            fleet.start_gateway(port)
        for port in fleet.gateways:
            fleet.wait_until_ready(port)
        yield fleet


class Show:
    """What happens to the fleet, one phase after another, and what becomes of the chats meanwhile."""

    def __init__(self, fleet: Fleet, seconds: float) -> None:
        self.chats: dict[tuple[str, str], Chats] = {}  # by phase and model
        self._fleet, self._seconds = fleet, seconds
        self._clients: list[AsyncOpenAI] = []
        self._turns = count()
        self._phases: dict[str, Callable[[], Awaitable[None]]] = {
            "alone": partial(asyncio.sleep, seconds),
            f"{FLOODED} flooded by {FLOOD_LOOPS} more chats": self._flood,
            f"a worker of {KILLED} killed": self._kill,
            "both gateways restarted": self._restart,
        }

    async def run(self) -> None:
        async with AsyncExitStack() as stack:
            for port in self._fleet.gateways:
                client = AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="demo", max_retries=0)
                self._clients.append(await stack.enter_async_context(client))
            for name in MODELS:
                await _chat(self._clients[0], name)  # opens a connection; not counted
            for phase, act in self._phases.items():
                print(f"{phase} …", flush=True)
                self.chats |= {(phase, name): Chats() for name in MODELS}
                over = asyncio.Event()
                loops = [self._loop(self.chats[phase, name], name, over) for name in MODELS for _ in range(LOOPS)]
                async with _meanwhile(loops) as tasks:
                    await act()
                    over.set()
                    await asyncio.gather(*tasks)

    async def _flood(self) -> None:
        async def loop() -> None:
            while True:
                with suppress(APIError):  # a refusal is an answer, too
                    await _ask(self._clients[0], FLOODED)

        async with _meanwhile([loop() for _ in range(FLOOD_LOOPS)]):
            await asyncio.sleep(self._seconds)

    async def _kill(self) -> None:
        await asyncio.sleep(self._seconds / 2)
        killed = self._fleet.workers.pop(0)
        killed.kill()
        killed.wait()
        await asyncio.sleep(self._seconds / 2)

    async def _restart(self) -> None:
        for port, process in list(self._fleet.gateways.items()):
            await asyncio.to_thread(end_child, process, STOP_TIMEOUT_S)
            self._fleet.start_gateway(port)
            await asyncio.to_thread(self._fleet.wait_until_ready, port)
            await asyncio.sleep(self._seconds / 4)

    async def _loop(self, chats: Chats, model: str, over: asyncio.Event) -> None:
        """Chat with the model until the phase is over."""
        while not over.is_set():
            first, other = self._clients if next(self._turns) % 2 else self._clients[::-1]
            try:
                try:
                    first_token_s = await _chat(first, model)
                except (APIConnectionError, InternalServerError):
                    chats.sent_again += 1
                    first_token_s = await _chat(other, model)
                chats.first_token_s.append(first_token_s)
            except APIError as error:
                chats.failed.append(error.message)
            await asyncio.sleep(PAUSE_S)


@asynccontextmanager
async def _meanwhile(loops: Iterable[Coroutine[Any, Any, None]]) -> AsyncIterator[list[asyncio.Task[None]]]:
    """Run the loops within the block. Yield their tasks, which are cancelled at its end."""
    tasks = [asyncio.create_task(loop) for loop in loops]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _ask(client: AsyncOpenAI, model: str) -> None:
    """Ask for a whole answer, which takes this process less time than a stream. Raises `APIError`."""
    await client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "What is Tidegate?"}],
        max_tokens=TOKENS,
        extra_body={"ignore_eos": True},
    )


async def _chat(client: AsyncOpenAI, model: str) -> float:
    """Read a streamed answer to its end. Return how long its first token took, in seconds. Raises `APIError`."""
    sent_s, first_token_s, finish = monotonic(), None, None
    stream = await client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "What is Tidegate?"}],
        max_tokens=TOKENS,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    async with stream:
        async for chunk in stream:
            if chunk.choices and chunk.choices[0].delta.content and first_token_s is None:
                first_token_s = monotonic() - sent_s
            finish = chunk.choices[0].finish_reason if chunk.choices else finish
    if first_token_s is None or finish != "length":
        raise APIError("the answer is not whole", stream.response.request, body=None)
    return first_token_s


def table(measured: Mapping[tuple[str, str], Chats]) -> str:
    """Return the measurements, by phase and model, as lines of text. Raises `DemoError` if a measurement is missing."""
    lines = [f"{'':32}{'model':8}{'chats':>7}{'first token p50':>18}{'longest':>12}{'failed':>9}"]
    for (phase, model), chats in measured.items():
        if not chats.first_token_s:
            reason = chats.failed[0] if chats.failed else "none was sent"
            raise DemoError(f"no chat with {model} got an answer while {phase}: {reason}")
        text = phase if model == MODELS[0] else ""
        p50, longest = (1000 * f(chats.first_token_s) for f in (median, max))
        num = len(chats.first_token_s)
        lines.append(f"{text:32}{model:8}{num:7}{p50:15.1f} ms{longest:9.0f} ms{len(chats.failed):9}")
    again = sum(chats.sent_again for chats in measured.values())
    cores = len(os.sched_getaffinity(0))
    lines.append(f"\n{again} chats were sent to the other gateway, because theirs did not take them.")
    lines.append(f"The store, gateways, workers and clients shared {cores} cores.")
    return "\n".join(lines)
