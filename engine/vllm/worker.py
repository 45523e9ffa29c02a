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

        A step is one message to each worker and one answer, where vLLM's own calls take two of each. The second of two
        answers within a millisecond would go unnoticed, because vLLM drops its notice: the process that waits for it
        would have to look again and again.
        """
        output = self.execute_model(step)
        return self.sample_tokens(grammar) if output is None else output

    def freeze_heap(self) -> None:
        """Let garbage collections in this process leave out what the start has made: each would take 0.1 s or more."""
        gc.collect()
        gc.freeze()
