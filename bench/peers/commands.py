"""The commands that compare our server with vLLM's over HTTP, and the flags of each."""

import re

from pydantic import Field

from bench.peers.arms import ARMS, parse_arms
from bench.peers.closed_loops import Loops, run_closed_loops
from bench.peers.closed_loops_report import loops_record
from bench.peers.command import PeerCommand
from loadtest.client.http import TargetError
from loadtest.client.runner import MAX_IN_FLIGHT
from loadtest.running import print_progress

ARMS_HELP = "Arms to compare: default and flex are our service tiers."


class ClosedLoops(PeerCommand):
    """Closed loops of some numbers of streams, on our server in two service tiers and on vLLM's server.

    The arms take turns on the same weights. Reports tokens per second, first tokens, gaps and ratios to vLLM, judged by
    goals.
    """

    arms: str = Field(",".join(ARMS), description=ARMS_HELP)
    streams: str = Field("8,32,64,128", pattern=r"^[1-9]\d*(,[1-9]\d*)*$", description="Numbers of streams.")
    requests_per_stream: int = Field(3, ge=1, le=1000, description="Requests that a stream sends one after another.")
    prompt_tokens: str = Field("32-256", description="Lowest and highest length of a prompt, in tokens.")
    new_tokens: int = Field(64, ge=1, le=100_000, description="New tokens of a request.")
    rounds: int = Field(2, ge=1, le=100, description="Times that every arm gets every number of streams.")

    async def measure(self) -> None:
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
