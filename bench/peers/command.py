"""`python -m bench closed-loops`: its flags, and the servers that it starts.

Our server and vLLM's server get the same weights. Knows flags and command lines; the load is in `closed_loops`.
"""

import re
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from pydantic import Field

from bench.isolation.servers import ServerFlags, write_word_tokenizer
from bench.peers.arms import ARMS, VLLM, Servers, ours_of, parse_arms
from bench.peers.closed_loops import Loops, run_closed_loops
from bench.peers.closed_loops_report import loops_record
from loadtest.client.http import TargetError
from loadtest.client.runner import MAX_IN_FLIGHT
from loadtest.commands import ModelCommand
from loadtest.model_shapes import ShapeError, read_config
from loadtest.running import (
    PROCESSES,
    ends_on_sigterm,
    one_sentence,
    print_progress,
    require,
    run_to_end,
)
from loadtest.serving import Server

MAX_MODEL_LEN = 2048  # context of vLLM's server in tokens; its KV memory must hold one request of this length


class ClosedLoops(ServerFlags, ModelCommand):
    """Closed loops of some numbers of streams, on our server in two service tiers and on vLLM's server.

    The arms take turns on the same weights. Reports tokens per second, first tokens, gaps and ratios to vLLM, judged by
    goals.
    """

    arms: str = Field(",".join(ARMS), description="Arms to compare: default and flex are our service tiers.")
    streams: str = Field("8,32,64,128", pattern=r"^[1-9]\d*(,[1-9]\d*)*$", description="Numbers of streams.")
    requests_per_stream: int = Field(3, ge=1, le=1000, description="Requests that a stream sends one after another.")
    prompt_tokens: str = Field("32-256", description="Lowest and highest length of a prompt, in tokens.")
    new_tokens: int = Field(64, ge=1, le=100_000, description="New tokens of a request.")
    rounds: int = Field(2, ge=1, le=100, description="Times that every arm gets every number of streams.")

    def cli_cmd(self) -> None:
        with ends_on_sigterm(), one_sentence(ShapeError):
            require(PROCESSES, "a comparison with other servers")
            run_to_end(self.measure())

    async def measure(self) -> None:
        """Measure and report. Raises `TargetError` or `ShapeError` for errors that the user can correct."""
        arms, loops = parse_arms(self.arms), self._loops()
        async with self.servers(arms) as servers:
            parts = await run_closed_loops(servers, arms, loops, print_progress)
            model = servers.all[0].target.model
        self.conclude(loops_record(parts, loops, arms), model)

    def _loops(self) -> Loops:
        streams = tuple(int(number) for number in self.streams.split(","))
        if max(streams) > MAX_IN_FLIGHT:
            raise TargetError(f"--streams: at most {MAX_IN_FLIGHT}, since each stream is an open connection")
        return Loops(
            streams[:1] if self.quick else streams,
            self.requests_per_stream,
            parse_range(self.prompt_tokens),
            self.new_tokens,
            1 if self.quick else self.rounds,
            self.settle,
            self.seed,
        )

    @asynccontextmanager
    async def servers(self, arms: Sequence[str]) -> AsyncIterator[Servers]:
        """Run the servers that the arms need until the block ends.

        All of them run all the time; the report shows what those cost that are not measured.
        """
        async with AsyncExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tidegate-peers-")))
            ours = await self._ours(stack, folder) if ours_of(arms) else None
            vllm = await self._vllm(stack, folder) if VLLM in arms else None
            yield Servers(ours, vllm)

    async def _ours(self, stack: AsyncExitStack, folder: Path) -> Server:
        flags = ["--dtype", self.dtype, "--device", self.device]
        if self.engine == "vllm":
            flags += ["--max-model-len", str(MAX_MODEL_LEN)]  # as in vLLM's own server
        served = None if self.url else (self._served_model(folder), "auto")
        return await self.start_ours(stack, folder, served, self.threads, *flags)

    async def _vllm(self, stack: AsyncExitStack, folder: Path) -> Server:
        flags = ["--dtype", self.dtype, "--max-model-len", str(MAX_MODEL_LEN), "--scheduling-policy", "fcfs"]
        served = (self._served_model(folder), "auto") if self.vllm_python and not self.peer_url else None
        vllm = await self.start_peer(stack, folder, served, self.num_threads, *flags)
        if vllm is None:
            raise TargetError("the arm vllm needs --vllm-python or --peer-url; --arms can leave it out")
        return vllm

    def _served_model(self, folder: Path) -> Path:
        """Return a directory with the weights and a tokenizer, which both servers load. Raises `ShapeError`."""
        model_dir = self.model_dir().resolve()
        if (model_dir / "tokenizer.json").exists():
            return model_dir
        served = folder / model_dir.name
        if not served.exists():
            served.mkdir()
            for file in model_dir.iterdir():
                (served / file.name).symlink_to(file)
            write_word_tokenizer(served, read_config(model_dir)["vocab_size"])
        return served


def parse_range(text: str) -> tuple[int, int]:
    """Return the bounds of a range such as `32-256`, or of a single number. Raises `TargetError`."""
    found = re.fullmatch(r"([1-9]\d*)(?:-([1-9]\d*))?", text.strip())
    if found is None:
        raise TargetError(f"--prompt-tokens: {text!r} is not a range such as 32-256")
    low = int(found[1])
    high = int(found[2] or low)
    if low > high:
        raise TargetError(f"--prompt-tokens: {text!r} must begin with the lower bound")
    return low, high
