"""Replace decoder layers of known parts by faster layers, if a trial shows that both compute the same result.

A trial on a small packed step tests what the layer computes with these modules: a replacement whose output differs by
more than rounding is not used.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor, nn

from engine.interface import EngineInfo, NewSequence, Run, SamplingParams, StepPlan, blocks_for
from engine.native.batch.packing import StepBatch, pack_step
from engine.native.execution.model_runner import ModelRunner
from engine.native.model.layer_parts import LayerParts, parts_of
from engine.native.model.mlp_parts import Mlp, is_plain_linear
from engine.sequences.chunk import Chunk
from engine.sequences.sequence_table import SequenceTable

Replacement = Callable[[LayerParts], nn.Module]  # from the parts of a layer to the layer that replaces it

# Allowed rounding error (norm) of a layer's output, by dtype. It is the sum of two parts: the first factor times the
# norm of (output - input), and the second factor times the norm of the output.
_TOLERANCES = {torch.float32: (1e-4, 1e-5), torch.bfloat16: (0.02, 0.006), torch.float16: (0.005, 0.002)}
# Allowed relative error (norm) of the model's logits, by dtype. This check finds gross errors only.
_MODEL_TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.05}
_TRIAL_LENGTHS = (7, 1, 1)  # tokens per sequence of the trial step: one prefill, two decodes


@dataclass(frozen=True, slots=True)
class LayerTrial:
    """The input and output of a layer, recorded in the model's own forward pass."""

    hidden: Tensor  # (1, T, hidden): the input
    options: dict[str, Any]  # keyword arguments of the layer's forward
    output: Tensor  # (1, T, hidden)


@dataclass(frozen=True, slots=True)
class TrialRecord:
    """A record of the trial step: its layers that may be fused, and the linear layers that it called.

    A linear layer that is not called must not be replaced: some models read its weight and multiply by it themselves.
    """

    layers: dict[nn.Module, LayerTrial] = field(default_factory=dict)
    linears: WeakSet[nn.Module] = field(default_factory=WeakSet)  # weak, so that replaced layers are freed


def record_trial_step(model: nn.Module, runner: ModelRunner, info: EngineInfo) -> TrialRecord:
    """Run the trial step and record its layers with hooks. Return an empty record if there are too few KV blocks.

    The engine must have no sequences: the step writes to the first KV blocks.
    """
    record = TrialRecord()
    if not has_room(info):
        return record

    def note_layer(layer: nn.Module, args: tuple[Any, ...], options: dict[str, Any], output: Any) -> None:
        if len(args) == 1 and isinstance(output, Tensor) and "position_embeddings" in options:
            record.layers[layer] = LayerTrial(args[0], options, output)

    def note_linear(linear: nn.Module, *_: Any) -> None:
        record.linears.add(linear)

    handles = [m.register_forward_hook(note_linear) for m in model.modules() if is_plain_linear(m)]
    layers = [module for module in model.modules() if parts_of(module) is not None]
    handles += [layer.register_forward_hook(note_layer, with_kwargs=True) for layer in layers]
    try:
        runner.run(_trial_batch(info))
    finally:
        for handle in handles:
            handle.remove()
    return record


def trial_logits(runner: ModelRunner, info: EngineInfo) -> Tensor | None:
    """Return the logits (trial sequences, vocab), float32, of the trial step; None if there are too few KV blocks.

    The engine must have no sequences: the step writes to the first KV blocks.
    """
    logits = runner.run(_trial_batch(info)) if has_room(info) else None
    return None if logits is None else logits.float().clone()


def has_router(model: nn.Module) -> bool:
    """Return whether a layer that may be fused sends rows to different experts."""
    return any(parts is not None and not isinstance(parts.mlp, Mlp) for parts in map(parts_of, model.modules()))


def is_same_model(before: Tensor | None, after: Tensor | None, dtype: torch.dtype, *, routes: bool) -> bool:
    """Return whether the `trial_logits` before and after a change agree.

    Return True if they cannot be compared, because one of them is None or the logits before are not finite. The
    model's logits may change although each replaced layer computes the same as before: the model may read a layer's
    input again, after the replacement has overwritten this input. If a router `routes` the rows, one of the three may
    differ: see `_agrees`.
    """
    if before is None or after is None or not before.isfinite().all():
        return True
    if routes:
        error = ((after - before).norm(dim=1) / before.norm(dim=1)).median()
    else:
        error = (after - before).norm() / before.norm()
    return bool(error <= _MODEL_TOLERANCES[dtype])


def fuse_layers(model: nn.Module, runner: ModelRunner, fuse: Replacement, trials: dict[nn.Module, LayerTrial]) -> int:
    """Replace each layer in `trials` by what `fuse` makes of its parts if both agree; return how many were replaced.

    Layers are replaced one by one and removed from `trials`, so that the weights of at most one layer exist twice. If
    the first replacement does not agree, no layer of this model is replaced.
    """
    places = [
        (layers, i)
        for layers in model.modules()
        if isinstance(layers, nn.ModuleList)
        for i, layer in enumerate(layers)
        if layer in trials
    ]
    num_fused = 0
    for layers, i in places:
        trial = trials.pop(layers[i])
        parts = parts_of(layers[i])
        assert parts is not None, "only layers with these parts are tried"
        fused = fuse(parts)
        if _agrees(fused, trial, routes=not isinstance(parts.mlp, Mlp)):
            layers[i] = fused
            num_fused += 1
            runner.release_memory()  # frees the weights of the replaced layer
        elif num_fused == 0:
            return 0
    return num_fused


def has_room(info: EngineInfo) -> bool:
    """Return whether the engine has enough KV blocks for the trial step."""
    return info.num_blocks >= len(_TRIAL_LENGTHS) * blocks_for(max(_TRIAL_LENGTHS), info.block_size)


def trial_chunks(info: EngineInfo) -> list[Chunk]:
    """Return the chunks of the trial step, which use the engine's first KV blocks. `has_room` must be true."""
    num_tokens = sum(_TRIAL_LENGTHS)
    tokens = [(7919 * i + 1) % info.vocab_size for i in range(num_tokens)]
    news, runs = [], []
    for i, length in enumerate(_TRIAL_LENGTHS):
        prompt, tokens = tuple(tokens[:length]), tokens[length:]
        news.append(NewSequence(f"trial-{i}", prompt, SamplingParams(max_tokens=1)))
        runs.append(Run(f"trial-{i}", length))
    return SequenceTable(info).begin(StepPlan(0, start=tuple(news), run=tuple(runs)))


def _trial_batch(info: EngineInfo) -> StepBatch:
    """Return the packed trial step.

    Its positions are spread over the whole context, since a layer's result may depend on positions.
    """
    batch = pack_step(trial_chunks(info), info.block_size)
    positions = np.linspace(0, info.max_model_len - 1, batch.num_rows).astype(np.int64)
    return replace(batch, positions=positions)


@torch.inference_mode()
def _agrees(fused: nn.Module, trial: LayerTrial, routes: bool) -> bool:
    """Return whether `fused` computes the same output as the trial, apart from rounding.

    Rounding may decide a router's near tie otherwise, and send a row to another expert. With a router, a third of the
    rows may differ. Attention uses the runner's latest step, which must still be the trial step.
    """
    result = fused(trial.hidden.clone(), **trial.options)
    error, expected, given = (t[0].float() for t in (result - trial.output, trial.output, trial.hidden))
    if routes:
        kept = error.norm(dim=1).argsort()[: len(error) - len(error) // 3]
        error, expected, given = error[kept], expected[kept], given[kept]
    of_added, of_stream = _TOLERANCES[trial.hidden.dtype]
    allowed = of_added * (expected - given).norm() + of_stream * expected.norm()
    return bool(error.norm() <= allowed)
