"""Test at start, on the final model, whether single sequences can be evicted from a running step.

Knows which layers can continue with fewer rows. The trial tests whether the modeling code around these layers can
continue, too: the logits of the remaining rows must be the same with and without evictions.
"""

import structlog
from torch import nn

from engine.interface import EngineInfo, StepEviction
from engine.native.batch.eviction import RunningChunks
from engine.native.cpu.native_layer import NativeDecoderLayer
from engine.native.execution.model_runner import ModelRunner
from engine.native.model.fused_layer import FusedDecoderLayer
from engine.native.model.loader import first_line
from engine.native.startup.fusion import has_room, is_same_model, trial_chunks
from engine.sequences.chunk import Chunk


def can_evict_rows(model: nn.Module, runner: ModelRunner, info: EngineInfo) -> bool:
    """Return whether evicting rows leaves the other rows' logits unchanged; if the trial fails, log the reason.

    Return False without a trial if some layers of the model are not fused, or if there are too few KV blocks. The
    engine must have no sequences: the trial writes to its first KV blocks.
    """
    layers = [m for m in model.modules() if isinstance(m, FusedDecoderLayer | NativeDecoderLayer)]
    if len(layers) != runner.num_layers or not has_room(info):
        return False
    try:
        if _remaining_rows_agree(runner, info, trial_chunks(info)):
            return True
        reason = "evictions change the logits of the remaining rows"
    except Exception as error:  # modeling code may fail in any way if rows are missing
        reason = first_line(error)
    structlog.get_logger(__name__).warning("single sequences cannot be evicted from a running step", reason=reason)
    return False


def _remaining_rows_agree(runner: ModelRunner, info: EngineInfo, chunks: list[Chunk]) -> bool:
    """Return whether the logits of the third trial sequence are the same with and without evictions.

    The first sequence, a prefill, is evicted before the second layer. The second, a decode, is evicted before the last
    layer.
    """
    undisturbed = RunningChunks(chunks, info.block_size, StepEviction.ROWS, frozenset)
    expected = runner.run(undisturbed.batch)
    assert expected is not None
    names = [chunk.sequence.seq_id for chunk in undisturbed.batch.sampled_chunks]
    expected = expected.float().clone()
    first, second, last = (chunk.sequence.seq_id for chunk in chunks)
    early = [frozenset(), *[frozenset({first})] * runner.num_layers]
    requests = [*early[: runner.num_layers - 1], frozenset({first, second})]  # at each layer
    running = RunningChunks(chunks, info.block_size, StepEviction.ROWS, lambda: requests.pop(0))
    found = runner.run(running.batch, running=running)
    if found is None or requests or len(found) != 1:
        return False
    wanted = expected[names.index(last)][None]
    return is_same_model(wanted, found.float(), runner.dtype)
