"""What this project adds to vLLM's workers: one call that computes a whole step.

vLLM loads the class by its name and makes it a base class of its worker.
"""

from typing import Any

WORKER_EXTENSION = "engine.vllm.worker.StepWorker"
COMPUTE_STEP = "compute_step"


class StepWorker:
    """One message to a worker and one answer for each step, where vLLM's own calls take two of each.

    So the process that waits for answers is woken once a step. vLLM drops the notice of an answer that comes within a
    millisecond after another, and with two of them each waiting thread would have to look by itself.
    """

    def compute_step(self: Any, step: Any, grammar: Any) -> Any:
        """Run `step`, a `SchedulerOutput`, and sample under `grammar`, a `GrammarOutput` or None."""
        output = self.execute_model(step)
        return self.sample_tokens(grammar) if output is None else output
