"""The flags that the comparisons over HTTP have in common, and the servers that they start.

Our server and vLLM's server get the same weights. Knows flags and command lines; does not know what is measured.
"""

import shlex
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Literal

from pydantic import Field

from bench.isolation.servers import (
    engine_python,
    serving_tidegate,
    vllm_command,
    vllm_server_environment,
    write_word_tokenizer,
)
from bench.peers.arms import VLLM, Servers, ours_of
from loadtest.client.http import TargetError
from loadtest.commands import ModelCommand
from loadtest.model_shapes import ShapeError, read_config
from loadtest.running import (
    PROCESSES,
    ends_on_sigterm,
    one_sentence,
    print_progress,
    require,
    run_to_end,
    running_server,
)
from loadtest.serving import Server, serving

MAX_MODEL_LEN = 2048  # context of vLLM's server in tokens; its KV memory must hold one request of this length


class PeerCommand(ModelCommand):
    """The flags of a comparison over HTTP. A subclass measures and reports in `measure`."""

    url: str = Field("", description="A running Tidegate; empty: one is started with the shipped tiers.")
    server_flags: str = Field("", description="More flags for `tidegate serve`, in one string.")
    peer_url: str = Field("", description="A running vLLM server with the same model, in place of --vllm-python.")
    vllm_python: Path | None = Field(None, description="The Python of an environment with vLLM, to be started.")
    engine: Literal["native", "vllm"] = Field(
        "native", description="Engine of our server; vllm: vLLM's executor, in the environment of --vllm-python."
    )
    vllm_flags: str = Field("", description="More flags for vLLM's server, in one string.")
    settle: float = Field(1.0, ge=0, le=60, description="Seconds of rest before each part.")
    allow_remote: bool = Field(False, description="Accept a URL that is not this machine.")

    def cli_cmd(self) -> None:
        with ends_on_sigterm(), one_sentence(ShapeError):
            require(PROCESSES, "a comparison with other servers")
            run_to_end(self.measure())

    async def measure(self) -> None:
        """Measure and report. Raises `TargetError` or `ShapeError` for errors that the user can correct."""
        raise NotImplementedError

    @asynccontextmanager
    async def servers(self, arms: Sequence[str], policy: str = "fcfs") -> AsyncIterator[Servers]:
        """Run the servers that the arms need until the block ends. `policy` is vLLM's scheduling policy.

        All of them run all the time; the report shows what those cost that are not measured.
        """
        async with AsyncExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tidegate-peers-")))
            ours = await self._ours(stack, folder) if ours_of(arms) else None
            vllm = await self._vllm(stack, folder, policy) if VLLM in arms else None
            yield Servers(ours, vllm)

    async def _ours(self, stack: AsyncExitStack, folder: Path) -> Server:
        if self.url:
            return Server(await running_server(self.url, self.allow_remote))
        print_progress("starting tidegate serve")
        flags = ["--dtype", self.dtype, "--device", self.device, *shlex.split(self.server_flags)]
        if self.engine == "vllm":
            flags += ["--max-model-len", str(MAX_MODEL_LEN)]  # as in vLLM's own server
        vllm_python = engine_python(self.engine, self.vllm_python)
        model_dir = self._served_model(folder)
        ours = serving_tidegate(model_dir, "auto", folder, self.threads, flags, vllm_python)
        return await stack.enter_async_context(ours)

    async def _vllm(self, stack: AsyncExitStack, folder: Path, policy: str) -> Server:
        if self.peer_url:
            return Server(await running_server(self.peer_url, self.allow_remote))
        if self.vllm_python is None:
            raise TargetError("the arm vllm needs --vllm-python or --peer-url; --arms can leave it out")
        print_progress("starting vLLM; it may compile for minutes")
        flags = ["--dtype", self.dtype, "--max-model-len", str(MAX_MODEL_LEN), "--scheduling-policy", policy]
        command = vllm_command(
            self.vllm_python, self._served_model(folder), "auto", [*flags, *shlex.split(self.vllm_flags)]
        )
        environment = vllm_server_environment(self.num_threads)
        return await stack.enter_async_context(serving(command, folder / "vllm.log", "/health", environment))

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
