"""A model whose matrices stay the blocks of a GGUF file; what cannot stay is unpacked when it is loaded.

Knows names of tensors, and what transformers does to them on loading; does not know layouts of blocks. A narrow matrix
of row numbers shows what transformers would do to a matrix: rows may move; all else needs unpacked numbers.
"""

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import structlog
import torch
from gguf import GGMLQuantizationType, dequantize
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, modeling_gguf_pytorch_utils

from engine.gguf import TENSORS
from engine.native.model.gguf_blocks import KEPT, weight_of
from engine.native.model.grouped_weight import GroupedWeight
from engine.native.model.quantization import called_modules
from engine.native.model.quantized import QuantizedLinear
from engine.native.model.weights import CannotKeepError, check_report, without_transformers_log
from engine.progress import NO_PHASE, Phase

_WIDE = {"F32", "F16", "F64"}  # kinds of matrices that bfloat16 would round much


@dataclass(frozen=True, slots=True)
class _Tensor:
    name: str
    kind: str
    shape: tuple[int, ...]  # inputs last
    data: np.ndarray  # the bytes of the file: (…, bytes of a row)


class _File:
    """The tensors of a file by the names of the model's parameters, and what transformers does to them."""

    def __init__(self, file: Path, directory: Path, hf_config: Any) -> None:
        """Raises `CannotKeepError` if transformers loads this architecture in another way."""
        found = json.loads((directory / TENSORS).read_text(encoding="utf-8"))
        content = np.memmap(file, mode="r")
        tensors = [
            _Tensor(name, kind, shape, content[first : first + size].reshape(*shape[:-1], -1))
            for name, kind, inputs_first, first, size in found["tensors"]
            for shape in [tuple(reversed(inputs_first))]
        ]
        kinds = {tensor.kind for tensor in tensors if len(tensor.shape) > 1}
        if not kinds & KEPT.keys() or kinds & _WIDE:
            raise CannotKeepError(f"its matrices are {', '.join(sorted(kinds))}")
        try:
            make = modeling_gguf_pytorch_utils.TENSOR_PROCESSORS.get(
                found["architecture"], modeling_gguf_pytorch_utils.TensorProcessor
            )
            self._processor = make(config=hf_config.to_dict())
            with torch.device("meta"):
                self.skeleton = AutoModelForCausalLM.from_config(hf_config)
            names = modeling_gguf_pytorch_utils.get_gguf_hf_weights_map(self.skeleton, self._processor)
        except Exception as error:  # versions of transformers name and find these in their own ways
            raise CannotKeepError(f"transformers has other names for {found['architecture']}: {error}") from error
        self._names: dict[str, str] = names
        self.tensors = {names[tensor.name]: tensor for tensor in tensors if tensor.name in names}

    def kept(self, name: str) -> GroupedWeight | None:
        """Return the matrix of the parameter `name` as it is in the file; None if it must be unpacked."""
        tensor = self.tensors[name]
        if tensor.kind not in KEPT or len(tensor.shape) != 2:
            return None
        order = self._row_order(tensor.name, tensor.shape[0])
        if order is None:
            return None
        weight = weight_of(torch.from_numpy(np.array(tensor.data)), tensor.kind, tensor.shape[1])
        return weight if np.array_equal(order, np.arange(len(order))) else weight.rows(torch.from_numpy(order))

    def _row_order(self, name: str, num_rows: int) -> np.ndarray | None:
        """Return which row of the file each row of the parameter is; None if more happens than rows that move."""
        numbers = np.arange(num_rows)
        probe = np.stack([numbers, numbers + num_rows], axis=1)
        try:
            result = self._processor.process(weights=probe, name=name, tensor_key_mapping={}, parsed_parameters={})
        except Exception:  # it needs other numbers than these, or the names of other tensors
            return None
        moved = result.weights
        if result.name != name or moved.shape != probe.shape or not np.array_equal(moved[:, 0] + num_rows, moved[:, 1]):
            return None
        return moved[:, 0] if np.array_equal(np.sort(moved[:, 0]), numbers) else None

    def unpacked(self, name: str, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return what transformers makes of a tensor of the file: some parameters, or a part of one."""
        tensor = self.tensors[name]
        made: dict[str, Tensor] = {}
        numbers = dequantize(tensor.data, GGMLQuantizationType[tensor.kind])
        result = self._processor.process(
            weights=numbers,
            name=tensor.name,
            tensor_key_mapping=self._names,
            parsed_parameters={"tensors": made},
        )
        if result.name is not None:
            made[name] = torch.from_numpy(np.array(result.weights))
        return {key: value.to(dtype) for key, value in made.items()}


def load_kept(
    file: Path, directory: Path, hf_config: Any, options: dict[str, Any], phase: Phase = NO_PHASE
) -> nn.Module:
    """Return the model with the weights of `file`, on the CPU. Matrices of linear layers stay quantised.

    `directory` is what `engine.gguf` has made of the file. `options` are passed to `from_pretrained`; `phase` is told
    how many tensors are read. Raises `CannotKeepError` if no matrix can stay, and `EngineStartError` if weights are
    missing.
    """
    content = _File(file, directory, hf_config)
    kept, state = _read(content, hf_config, options["dtype"], phase)
    with without_transformers_log():
        model, report = type(content.skeleton).from_pretrained(
            None, config=hf_config, state_dict=state, output_loading_info=True, **options
        )
    check_report(str(file), report)
    module: nn.Module = model
    called = called_modules(module)
    for path, weight in kept.items():
        linear: Any = module.get_submodule(path)
        if linear not in called:
            raise CannotKeepError(f"{path} is not called as a layer")
        bias = None if linear.bias is None else linear.bias.detach()
        module.set_submodule(path, QuantizedLinear([weight], bias, options["dtype"]))
    unpacked = Counter(
        tensor.kind
        for name, tensor in content.tensors.items()
        if len(tensor.shape) > 1 and name.removesuffix(".weight") not in kept
    )
    structlog.get_logger(__name__).info(
        "weights stay as the blocks of the GGUF file", file=str(file), linears=len(kept), unpacked=dict(unpacked)
    )
    return module


def _read(
    content: _File, hf_config: Any, dtype: torch.dtype, phase: Phase
) -> tuple[dict[str, GroupedWeight], dict[str, Tensor]]:
    """Return the matrices of linear layers that stay, by the layers' names, and all parameters by theirs.

    Parameters whose matrices stay have a shape and take no memory.
    """
    names = {module: name for name, module in content.skeleton.named_modules()}
    linears = {name for module, name in names.items() if isinstance(module, nn.Linear)}
    output, table = (
        names[m] for m in (content.skeleton.get_output_embeddings(), content.skeleton.get_input_embeddings())
    )
    kept: dict[str, GroupedWeight] = {}
    state: dict[str, Tensor] = {}
    for number, name in enumerate(content.tensors):
        phase.show(number, len(content.tensors))
        weight, path = content.kept(name), name.removesuffix(".weight")
        if weight is None:
            state.update(content.unpacked(name, dtype))
        elif path in linears:
            kept[path] = weight
            state[name] = torch.zeros((), dtype=dtype).expand(weight.out_features, weight.in_features)
        else:
            state[name] = weight.unpacked(dtype)
            if path == table and hf_config.tie_word_embeddings:
                kept[output] = weight  # quantised for products, and unpacked for looking up
    return kept, state
