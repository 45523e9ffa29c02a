"""Translate batches into vLLM's `SchedulerOutput`, and vLLM's `ModelRunnerOutput` into what was sampled.

Knows which sequences vLLM's workers know, and how many of their blocks; does not know plans, processes or sampling.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from itertools import islice
from typing import Any

import numpy as np
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams as VllmSamplingParams
from vllm.v1.core.sched.output import CachedRequestData, GrammarOutput, NewRequestData, SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput

from engine.grammar import Bits
from engine.interface import TokenLogprobs
from engine.sampling.sequence_state import BROKEN_LOGITS
from engine.sequences.chunk import Chunk, Outcome
from engine.sequences.sequence import Sequence
from engine.vllm.batch import Batch
from engine.vllm.logits_processor import EXTRA_ARGS_KEY

_IMPOSSIBLE = -9999.0  # OpenAI's value for a probability of 0: JSON has no infinity
_LOST = -1  # the workers know the sequence, and none of its blocks


class Messages:
    """The messages to vLLM's workers, in the order of the steps.

    A worker is told a sequence's prompt once, and then only what is new. `num_told` of a sequence is the number of its
    blocks that the workers know.
    """

    def __init__(self, vocab_size: int, adapters: Seq[tuple[str, str]] = (), *, sends_tokens: bool = False) -> None:
        self._num_told: dict[str, int] = {}
        self._num_mask_words = -(-vocab_size // 32)
        self._adapters = {name: LoRARequest(name, i, path) for i, (name, path) in enumerate(adapters, start=1)}
        self._sends_tokens = sends_tokens  # with pipeline parallelism, the first stage does not see what was sampled

    def encode(self, batch: Batch) -> tuple[SchedulerOutput, GrammarOutput | None]:
        """Return the messages for `execute_model` and for `sample_tokens`."""
        ended = {seq_id for seq_id in batch.ended if self._num_told.pop(seq_id, None) is not None}
        self._num_told.update((seq_id, _LOST) for seq_id in batch.lost if seq_id in self._num_told)
        new: list[NewRequestData] = []
        cached = CachedRequestData.make_empty()
        for chunk in batch.chunks:
            if chunk.sequence.seq_id in self._num_told:
                self._add_known(cached, chunk)
            else:
                new.append(self._new_request(chunk))
            self._num_told[chunk.sequence.seq_id] = len(chunk.sequence.block_table)
        counts = {chunk.sequence.seq_id: chunk.num_tokens for chunk in batch.chunks}
        step = SchedulerOutput(
            scheduled_new_reqs=new,
            scheduled_cached_reqs=cached,
            num_scheduled_tokens=counts,
            total_num_scheduled_tokens=sum(counts.values()),
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            finished_req_ids=ended,
            free_encoder_mm_hashes=[],
            # vLLM's kernels for CPUs read a block to its end, and a NaN that another sequence left there would spread.
            new_block_ids_to_zero=[c.unfilled_block + 1 for c in batch.chunks if c.unfilled_block is not None] or None,
        )
        return step, self._grammar(batch)

    def _add_known(self, cached: CachedRequestData, chunk: Chunk) -> None:
        sequence, seq_id = chunk.sequence, chunk.sequence.seq_id
        num_told = self._num_told[seq_id]
        cached.req_ids.append(seq_id)
        cached.num_computed_tokens.append(chunk.start)
        cached.num_output_tokens.append(sequence.num_tokens - sequence.num_given_tokens)
        if self._sends_tokens:
            cached.new_token_ids.append(sequence.token_ids[chunk.start : chunk.end].tolist())
        if num_told == _LOST:
            cached.resumed_req_ids.add(seq_id)
            cached.all_token_ids[seq_id] = sequence.token_ids.tolist()
            cached.new_block_ids.append((_block_ids(sequence),))
        else:
            added = _block_ids(sequence, num_told)
            cached.new_block_ids.append((added,) if added else None)

    def _new_request(self, chunk: Chunk) -> NewRequestData:
        sequence = chunk.sequence
        adapter = sequence.sampling.adapter
        return NewRequestData(
            req_id=sequence.seq_id,
            # vLLM takes what another engine has sampled for a part of the prompt; `PositionalSampling` knows better.
            prompt_token_ids=sequence.token_ids[: sequence.num_given_tokens].tolist(),
            mm_features=[],
            sampling_params=_sampling_params(sequence),
            pooling_params=None,
            block_ids=(_block_ids(sequence),),
            num_computed_tokens=chunk.start,
            lora_request=None if adapter is None else self._adapters[adapter],
        )

    def _grammar(self, batch: Batch) -> GrammarOutput | None:
        if not batch.masks:
            return None
        masks: Bits = np.zeros((len(batch.masks), self._num_mask_words), dtype=np.int32)
        for row, mask in zip(masks, batch.masks.values(), strict=True):
            row[: len(mask)] = mask[: len(row)]  # tokens that the tokenizer does not have are forbidden
        return GrammarOutput(list(batch.masks), masks)


def decode(output: ModelRunnerOutput, chunks: Iterable[Chunk]) -> dict[str, Outcome]:
    """Return what was sampled for each chunk, by sequence id. `samples` of the chunks is as it was before the step."""
    return {chunk.sequence.seq_id: _sampled(output, chunk) for chunk in chunks}


def _sampled(output: ModelRunnerOutput, chunk: Chunk) -> Outcome:
    seq_id, params = chunk.sequence.seq_id, chunk.sequence.sampling
    row = output.req_id_to_index[seq_id]
    token_ids = output.sampled_token_ids[row]
    token_id = int(token_ids[0]) if token_ids else None
    logprobs: tuple[TokenLogprobs, ...] = ()
    if token_id is not None and params.logprobs is not None and output.logprobs is not None:
        ids, values = output.logprobs.logprob_token_ids[row], output.logprobs.logprobs[row]
        logprobs = (_token_logprobs(ids, values, params.logprobs),)
    prompt = output.prompt_logprobs_dict.get(seq_id)
    num_top = params.prompt_logprobs or 0
    scored = () if prompt is None else zip(prompt.logprob_token_ids.numpy(), prompt.logprobs.numpy(), strict=True)
    own = islice(scored, chunk.sequence.num_prompt_tokens - 1)  # the rest is output that another engine has sampled
    return Outcome(
        () if token_id is None else (token_id,),
        logprobs,
        tuple(_token_logprobs(ids, values, num_top) for ids, values in own),
        BROKEN_LOGITS if (output.num_nans_in_logits or {}).get(seq_id) else None,
    )


def _token_logprobs(ids: Any, values: Any, num_top: int) -> TokenLogprobs:
    """Return one position. vLLM gives the token itself first, and then the likeliest tokens."""
    found = np.maximum(np.nan_to_num(values, nan=_IMPOSSIBLE), _IMPOSSIBLE).tolist()
    top = tuple(zip(ids.tolist()[1 : num_top + 1], found[1 : num_top + 1], strict=True))
    return TokenLogprobs(int(ids[0]), found[0], top)


def _sampling_params(sequence: Sequence) -> VllmSamplingParams:
    """Return parameters with which vLLM takes the likeliest token; `PositionalSampling` does the rest."""
    params, num_given_output = sequence.sampling, sequence.num_given_tokens - sequence.num_prompt_tokens
    return VllmSamplingParams(
        temperature=0.0,
        max_tokens=None,
        ignore_eos=True,
        detokenize=False,
        logprobs=params.logprobs,
        prompt_logprobs=params.prompt_logprobs,
        extra_args={EXTRA_ARGS_KEY: (params, tuple(sequence.stop_ids), num_given_output)},
    )


def _block_ids(sequence: Sequence, first: int = 0) -> list[int]:
    """Return vLLM's ids of the sequence's blocks from the block number `first`. Its block 0 is the null block."""
    return [block + 1 for block in sequence.block_table[first:]]
