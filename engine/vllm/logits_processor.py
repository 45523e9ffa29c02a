"""The sampling of a sequence with a temperature or altered logits, as a logits processor inside vLLM's workers.

vLLM's own random numbers depend on how many steps a sequence took part in, so a preempted or recomputed sequence would
get other tokens. Here a token depends only on logits, seed and position (`engine.sampling`). vLLM samples every request
greedily, and this processor raises the logit of the token that it has sampled above all others.

Knows vLLM's batch of requests; does not know plans, blocks or grammars (their masks are applied before).
"""

from typing import Any

import torch
from torch import Tensor
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, process_dict_updates

from engine.interface import NewSequence
from engine.sampling.penalties import Penalties, add_bias, apply_penalties, forbid
from engine.sampling.sampler import SamplingRow, sample_ids
from engine.sequences.sequence import Sequence

# In `extra_args` of vLLM's sampling parameters: `SamplingParams`, the stop tokens, and how many of the last tokens of
# what vLLM takes for the prompt are output that another engine has sampled.
EXTRA_ARGS_KEY = "tidegate"
_NO_LIMIT = 1 << 62


class SampledRow:
    """The sequence in one row of vLLM's batch. Its new tokens are read from vLLM's own list, which grows by itself."""

    def __init__(self, sequence: Sequence, output: list[int], vocab_size: int) -> None:
        self._sequence = sequence
        self._output = output
        self._num_given = sequence.num_output_tokens
        self.penalties = Penalties(sequence, vocab_size) if sequence.alters_logits else None
        self.is_sampled = not SamplingRow(sequence.sampling, 0).is_greedy

    @property
    def row(self) -> SamplingRow:
        return SamplingRow(self._sequence.sampling, self._num_given + len(self._output))

    def update_penalties(self) -> Penalties:
        """Return the penalties after the tokens of the output so far."""
        assert self.penalties is not None
        self._sequence.token_ids.extend(self._output[self._sequence.num_output_tokens - self._num_given :])
        self.penalties.update(self._sequence)
        return self.penalties


class PositionalSampling(LogitsProcessor):  # type: ignore[misc]
    """The processor that vLLM loads by its name."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._vocab_size: int = vllm_config.model_config.get_vocab_size()
        self._rows: dict[int, SampledRow] = {}
        _replace_nan_count()

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self._rows, batch_update, self._new_row)

    def apply(self, logits: Tensor) -> Tensor:
        """Alter `logits` (rows, vocab), float32, in place: the sampled token of each row becomes the likeliest."""
        altered = [index for index, row in self._rows.items() if row.penalties is not None]
        if altered:
            self._alter(logits, altered)
        if sampled := sorted(index for index, row in self._rows.items() if row.is_sampled):
            index = torch.tensor(sampled, device=logits.device)
            rows = logits if len(sampled) == len(logits) else logits[index]
            token_ids = sample_ids(rows, [self._rows[i].row for i in sampled])
            logits[index, token_ids.clamp(min=0)] = float("inf")
        return logits

    def _alter(self, logits: Tensor, altered: list[int]) -> None:
        index = torch.tensor(altered, device=logits.device)
        rows = logits[index]
        penalties = [self._rows[i].update_penalties() for i in altered]
        add_bias(rows, penalties)
        apply_penalties(rows, penalties)
        forbid(rows, penalties)
        logits[index] = rows

    def _new_row(self, params: Any, prompt: list[int] | None, output: list[int]) -> SampledRow | None:
        """Return the row of a request that joins the batch; None if its likeliest token is to be taken."""
        extra = (params.extra_args or {}).get(EXTRA_ARGS_KEY)
        if extra is None:
            return None
        sampling, stop_ids, num_given = extra
        given = tuple(prompt or ())
        own = given[: len(given) - num_given]
        new = NewSequence("", own, sampling, output_token_ids=given[len(own) :])
        sequence = Sequence(new, _NO_LIMIT, stop_ids)
        row = SampledRow(sequence, output, self._vocab_size)
        return row if row.is_sampled or row.penalties is not None else None


def has_nan(logits: Tensor) -> Tensor:
    """Return 1 for each row of `logits` (rows, vocab) with a NaN, and 0 for the others, as int32 of shape (rows)."""
    return logits.amax(dim=-1).isnan().to(torch.int32)


def _replace_nan_count() -> None:
    """Let vLLM look for a NaN in each row. It would count all of them: 1 ms for 32 rows of 49,000 on two cores."""
    from vllm.v1.worker import gpu_model_runner  # a slow import, which vLLM's workers have done before

    gpu_model_runner.count_nans_per_row = has_nan
