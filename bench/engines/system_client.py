"""The client of one system's process: starts it with its environment, gives it orders, and ends it.

Knows processes and time limits; not what is measured. Every failure of the process becomes a `SystemUnavailable` with
the reason and the end of its log.
"""

import selectors
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from bench.engines.protocol import Done, Failed, Message, Order, Ready, SystemSpec, decode, encode
from bench.engines.work import Job
from loadtest.child_environment import ROOT, python_environment, threads_environment
from loadtest.machine import usable_cores

LOAD_TIMEOUT_S = 600.0  # vLLM compiles for more than a minute the first time
END_TIMEOUT_S = 20.0  # after its orders have ended; then SIGKILL
MIN_IDLE_S = 1.0  # shorter pauses say nothing about idle CPU time
LOG_TAIL = 400  # characters


class SystemUnavailable(Exception):
    """The system cannot take part, or no longer; the message is for the report."""


class SystemClient:
    """A context manager. `interpreter` is the Python of the environment that has the system."""

    def __init__(
        self, name: str, spec: SystemSpec, log_file: Path, interpreter: str = sys.executable, timeout_s: float = 600.0
    ) -> None:
        self.name = name
        self.settings = ""
        self._idle: list[tuple[float, float]] = []
        self._spec = spec
        self._log_file = log_file
        self._interpreter = interpreter
        self._timeout_s = timeout_s
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.end()

    def start(self) -> None:
        """Load the system. Raises `SystemUnavailable`."""
        command = [self._interpreter, "-m", "bench.engines.system_process", self.name]
        environment = environment_of(self.name, self._spec)
        try:
            with self._log_file.open("w", encoding="utf-8") as log:
                self._process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environment, text=True
                )
        except OSError as error:
            raise SystemUnavailable(f"{self._interpreter} does not start: {error.strerror}") from error
        reply = self._ask(self._spec, LOAD_TIMEOUT_S)
        if not isinstance(reply, Ready):
            raise SystemUnavailable(f"an answer that was not asked for: {reply}")
        self.settings = reply.settings

    def run(self, job: Job) -> Done:
        """Run a job. Raises `SystemUnavailable`, also where the numbers of generated tokens are wrong."""
        reply = self._ask(Order([list(p) for p in job.prompts], list(job.new_tokens)), self._timeout_s)
        if not isinstance(reply, Done):
            raise SystemUnavailable(f"an answer that was not asked for: {reply}")
        counts = [len(tokens) for tokens in reply.tokens]
        if counts != list(job.new_tokens):
            raise SystemUnavailable(f"generated {counts[:8]} … tokens, asked for {list(job.new_tokens)[:8]} …")
        self._idle.append((reply.idle_s, reply.idle_cpu_s))
        return reply

    @property
    def idle_cpu_share(self) -> float | None:
        """The share of a core that the process took between its orders; None where its pauses were too short."""
        pauses = self._idle[1:]  # without the pause before the first order, when it still settles
        idle_s = sum(pause_s for pause_s, _ in pauses)
        return sum(cpu_s for _, cpu_s in pauses) / idle_s if idle_s >= MIN_IDLE_S else None

    def end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with suppress(OSError):
            _pipe(process.stdin).close()  # the end of its orders: the process ends by itself
        try:
            process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        _pipe(process.stdout).close()

    def _ask(self, message: Message, timeout_s: float) -> Message:
        if self._process is None:
            raise SystemUnavailable("it has ended")
        try:
            print(encode(message), file=_pipe(self._process.stdin), flush=True)
            line = self._read_line(timeout_s)
            reply = decode(line)
        except (OSError, ValueError) as error:
            raise SystemUnavailable(f"{self._why_gone()} ({error})") from error
        if isinstance(reply, Failed):
            raise SystemUnavailable(reply.reason)
        return reply

    def _read_line(self, timeout_s: float) -> str:
        output = _pipe(self._process.stdout if self._process else None)
        with selectors.DefaultSelector() as selector:
            selector.register(output, selectors.EVENT_READ)
            if not selector.select(timeout_s):
                raise TimeoutError(f"no answer within {timeout_s:.0f} s")
        return output.readline()

    def _why_gone(self) -> str:
        tail = self._log_file.read_text(encoding="utf-8", errors="replace")[-LOG_TAIL:].strip()
        return f"its process failed; its log ends: {tail}" if tail else "its process failed"


def vllm_environment(num_threads: int, kv_gib: str) -> dict[str, str]:
    """Return the environment for vLLM's own Python: as many threads as ours, on the same cores, and a KV cache for the
    load.

    Leaves out this process's PYTHONPATH, whose packages have other versions.
    """
    kept = {name: value for name, value in threads_environment(num_threads).items() if name != "PYTHONPATH"}
    return (
        kept
        | {
            "KMP_BLOCKTIME": "1",  # ms that a thread of Intel's OpenMP spins; GNU's threads stop by themselves
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": kv_gib,
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, usable_cores()[:num_threads])),
        }
    )


def environment_of(name: str, spec: SystemSpec) -> dict[str, str]:
    """Return the environment of a system: the same threads for all, and none that spin while they wait for work."""
    if name != "vllm":
        return python_environment(spec.num_threads) | {"KMP_BLOCKTIME": "1"}
    kv_gib = max(1, -(-spec.kv_tokens * spec.kv_token_bytes // 2**30))
    own = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "PYTHONPATH": str(ROOT)}  # it imports only the protocol of ours
    return vllm_environment(spec.num_threads, str(kv_gib)) | own


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None, "started with pipes"
    return pipe
