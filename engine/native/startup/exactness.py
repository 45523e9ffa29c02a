"""Make the rows of a step independent of each other, bit by bit, or say why that cannot be (`--exact`).

Our own kernels compute each row alone. Of torch's operators, only those known to do so may be left in the model: the
trial step is traced to find others. Knows operators; does not know layers.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from engine.config import EngineStartError
from engine.interface import EngineInfo
from engine.native.execution.model_runner import ModelRunner
from engine.native.model.loader import first_line
from engine.native.startup.fusion import is_same_model, trial_logits

# Operators that copy numbers, make new ones, or compute each number alone.
_COPIES = {
    *("_to_copy", "_unsafe_view", "arange", "cat", "clone", "constant_pad_nd", "copy_", "embedding", "empty", "full"),
    *("empty_like", "empty_strided", "floor_divide", "full_like", "gather", "index", "index_copy_", "index_select"),
    *("lift_fresh", "new_empty", "ones", "ones_like", "polar", "repeat", "stack", "type_as", "zeros", "zeros_like"),
}
# Operators that sum over a row alone, by an algorithm that depends on the row's length only; or take its maximum.
_OF_A_ROW = {
    "cpu": {"mean.dim", "native_layer_norm"},
    # Some of them are replaced: see `exact_operators`.
    "cuda": {"mm", "addmm", "bmm", "mean.dim", "native_layer_norm", "amax"},
}


def keep_exact(runner: ModelRunner, info: EngineInfo, device: torch.device) -> None:
    """From now on, compute the steps of `runner` so that the bits of a row depend on its own sequence only.

    Raises `EngineStartError` if that cannot be. The engine must have no sequences.
    """
    expected = checked_logits(runner, info, device)
    runner.is_exact = True
    try:
        if device.type == "cuda":
            from engine.native.cuda.exact_operators import use_exact_operators  # only CUDA builds include triton

            runner.operators = use_exact_operators()
        found = trial_logits(runner, info)
    except Exception as error:  # compiler, driver or architecture may fail in any way
        raise EngineStartError(f"the kernels of --exact do not work here: {first_line(error)}") from error
    if not is_same_model(expected, found, runner.dtype, routes=False):
        raise EngineStartError(f"{info.model_path} computes something else with --exact: drop it")


def checked_logits(runner: ModelRunner, info: EngineInfo, device: torch.device) -> Tensor:
    """Return the logits of the trial step. Raises `EngineStartError` if its operators may mix rows."""
    with _OperatorsAcrossRows(_OF_A_ROW[device.type]) as found:
        logits = trial_logits(runner, info)
    if logits is None:
        raise EngineStartError("--exact is tried on a few tokens at the start, for which the KV cache is too small")
    operators = found.names if runner.attention.in_kernels else {"torch's attention"}
    if operators:
        on_cpu = device.type == "cpu" and runner.dtype is not torch.bfloat16
        raise EngineStartError(
            f"--exact cannot be kept: {info.model_path} computes with {', '.join(sorted(operators))} here, which may "
            f"round by the number of rows; {'on a CPU use --dtype bfloat16, or drop --exact' if on_cpu else 'drop it'}"
        )
    return logits


class _OperatorsAcrossRows(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A trace that notes in `names` the operators that are not known to compute each row alone."""

    def __init__(self, of_a_row: set[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()
        self._of_a_row = of_a_row

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._is_of_a_row(func, args):
            return func(*args, **kwargs)
        with self:
            made_of_others = func.decompose(*args, **kwargs)
        if made_of_others is not NotImplemented:
            return made_of_others
        self.names.add(func.name().removeprefix("aten::"))
        return func(*args, **kwargs)

    def _is_of_a_row(self, func: Any, args: Any) -> bool:
        if func.namespace != "aten":
            return False
        if func.is_view or torch.Tag.pointwise in func.tags:
            return True
        name = func.name().removeprefix("aten::")
        is_sum_of_one = name == "bmm" and args[0].shape[2] == 1
        return is_sum_of_one or name in self._of_a_row or name.partition(".")[0] in _COPIES
