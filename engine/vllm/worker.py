"""What this project adds to vLLM's workers: a call that computes a whole step, and one for the end of the start.

vLLM loads the class by its name and makes it a base class of its worker.
"""

import gc
from typing import Any

WORKER_EXTENSION = "engine.vllm.worker.StepWorker"
COMPUTE_STEP = "compute_step"
FREEZE_HEAP = "freeze_heap"


class StepWorker:
    """The methods that each worker has beside vLLM's own."""

    def compute_step(self: Any, step: Any, grammar: Any) -> Any:
        """Run `step`, a `SchedulerOutput`, and sample under `grammar`, a `GrammarOutput` or None.

        This is one message to a worker and one answer for each step, where vLLM's own calls take two of each. So the
        process that waits for answers is woken once a step. vLLM drops the notice of an answer that comes within a
        millisecond after another, and with two of them each waiting thread would have to look by itself.
        """
        output = self.execute_model(step)
        return self.sample_tokens(grammar) if output is None else output

    def freeze_heap(self) -> None:
        """Let garbage collections in this process leave out what the start has made: each would take 0.1 s or more."""
        gc.collect()
        gc.freeze()
