"""Whether an engine's tokens depend on their schedule: the law of `--exact`, on an engine of any size.

Each sequence runs alone, with its prompt in one step, and once more beside all others, in chunks and recomputed twice.
Log probabilities show a difference of a single bit in the logits.
"""

from dataclasses import replace
from itertools import count

from engine.interface import NewSequence, Preempt, PreemptionMode, Run, SamplingParams, StepPlan, TokenLogprobs
from engine.native.execution.torch_engine import TorchEngine

LENGTHS = (1, 30, 100, 257, 700, 701)  # tokens of the prompts
OUTPUT = 20  # tokens
CHUNK = 150  # tokens of a prompt's longest chunk beside others
RECOMPUTED_AT = (5, 12)  # a sequence loses its KV when it has so many tokens of output

Reported = dict[str, list[TokenLogprobs]]


def sequences(engine: TorchEngine) -> list[NewSequence]:
    """Return sequences that fit the engine, with prompts of all `LENGTHS`."""
    sampling = SamplingParams(max_tokens=OUTPUT, temperature=0.0, ignore_eos=True, logprobs=1)
    vocab = engine.info.vocab_size
    lengths = [n for n in LENGTHS if n + OUTPUT < engine.info.max_model_len]
    return [
        NewSequence(f"bits-{n}", tuple((7 * n + i * i + 3 * i) % vocab for i in range(n)), sampling) for n in lengths
    ]


def has_same_bits(engine: TorchEngine) -> bool:
    """Return whether all log probabilities are the same alone and together. The engine must have no sequences."""
    news, step_ids = sequences(engine), count()
    alone: Reported = {}
    for new in news:
        alone |= _run(engine, [new], step_ids, engine.info.max_step_tokens, ())
    return _run(engine, news, step_ids, CHUNK, RECOMPUTED_AT) == alone


def _run(
    engine: TorchEngine, news: list[NewSequence], step_ids: "count[int]", longest: int, recomputed_at: tuple[int, ...]
) -> Reported:
    """Run `news` to their end, in chunks of at most `longest` tokens; return the log probabilities of their tokens."""
    reported: Reported = {new.seq_id: [] for new in news}
    lengths = {new.seq_id: len(new.prompt_token_ids) for new in news}
    computed = dict.fromkeys(reported, 0)  # tokens, of the sequences that have not ended
    plan = StepPlan(next(step_ids), start=tuple(news))
    while computed:
        budget, runs, lost = engine.info.max_step_tokens, list[Run](), list[str]()
        for seq_id, done in computed.items():
            if size := min(longest, budget, lengths[seq_id] + len(reported[seq_id]) - done):
                runs.append(Run(seq_id, size))
                budget -= size
        for output in engine.step(replace(plan, run=tuple(runs))).outputs:
            seq_id, computed[output.seq_id] = output.seq_id, output.num_computed_tokens
            reported[seq_id] += output.logprobs
            if output.finish_reason is not None:
                del computed[seq_id]
            elif output.logprobs and len(reported[seq_id]) in recomputed_at:
                lost.append(seq_id)
        computed |= dict.fromkeys(lost, 0)
        preempted = tuple(Preempt(seq_id, PreemptionMode.RECOMPUTE) for seq_id in lost)
        plan = StepPlan(next(step_ids), preempt=preempted, resume=tuple(lost))
    return reported
