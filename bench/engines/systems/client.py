"""The client of one system's process: starts the process in its environment, sends orders to it, and ends it.

Every failure of the process becomes a `SystemUnavailable` with the reason and the end of the log. Knows processes and
time limits; does not know what is measured.
"""

import selectors
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from bench.engines.systems.protocol import Done, Failed, Message, Order, Ready, SystemSpec, decode, encode
from bench.engines.work import Job
from loadtest.machine import ROOT, python_environment, threads_environment, usable_cores

LOAD_TIMEOUT_S = 600.0  # vLLM compiles for more than a minute the first time
END_TIMEOUT_S = 20.0  # seconds that a process has to end after its last order; then it gets SIGKILL
MIN_IDLE_S = 1.0  # seconds; less idle time in total is too short to measure CPU time
LOG_TAIL = 400  # characters of the log's end in an error message


class SystemUnavailable(Exception):
    """Raised if a system cannot take part, or has failed during the run; the report shows the message."""


class SystemClient:
    """The client of one system. As a context manager, it ends the system's process.

    `interpreter` is the Python of the environment in which the system is installed.
    """

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
        """Start the process and load the system. Raises `SystemUnavailable` if that fails."""
        command = [self._interpreter, "-m", "bench.engines.systems.process", self.name]
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
        """Run a job. Raises `SystemUnavailable` if the system fails or generates a wrong number of tokens."""
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
        """The CPU time of the process between its orders ÷ the length of these pauses; None if they were too short."""
        pauses = self._idle[1:]  # without the pause before the first order, in which the system may still be starting
        idle_s = sum(pause_s for pause_s, _ in pauses)
        return sum(cpu_s for _, cpu_s in pauses) / idle_s if idle_s >= MIN_IDLE_S else None

    def end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with suppress(OSError):
            _pipe(process.stdin).close()  # without more orders, the process ends by itself
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
    """Return the environment variables for vLLM's own Python.

    They set the same number of threads and the same cores as for our engine, and the size of the KV cache in GiB.
    PYTHONPATH is left out, since its packages may have other versions than vLLM needs.
    """
    kept = {name: value for name, value in threads_environment(num_threads).items() if name != "PYTHONPATH"}
    return (
        kept
        | {
            "KMP_BLOCKTIME": "1",  # ms that an idle thread of Intel's OpenMP spins; GNU's OpenMP does not need this
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": kv_gib,
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, usable_cores()[:num_threads])),
        }
    )


def environment_of(name: str, spec: SystemSpec) -> dict[str, str]:
    """Return the environment variables of a system's process.

    All systems get the same number of threads, and no thread spins while it waits for work.
    """
    if name != "vllm":
        return python_environment(spec.num_threads) | {"KMP_BLOCKTIME": "1"}
    kv_gib = max(1, -(-spec.kv_tokens * spec.kv_token_bytes // 2**30))
    # Of our modules, vLLM's process imports only `protocol` and those of its own system.
    own = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "PYTHONPATH": str(ROOT)}
    return vllm_environment(spec.num_threads, str(kv_gib)) | own


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None, "started with pipes"
    return pipe
