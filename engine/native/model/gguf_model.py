"""A model whose matrices stay the blocks of a GGUF file; what cannot stay is rounded or unpacked when it is loaded.

Knows names of tensors, and what transformers does to them on loading; does not know layouts of blocks. A narrow matrix
of row numbers shows what transformers would do to a matrix: rows may move; all else needs unpacked numbers.
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import structlog
import torch
from gguf import GGMLQuantizationType, dequantize
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, modeling_gguf_pytorch_utils

from engine.gguf import ROUTER, TENSORS
from engine.native.model.gguf_blocks import KEPT, weight_of
from engine.native.model.grouped_weight import GroupedWeight, rounded
from engine.native.model.loader import MATRICES, expert_modules
from engine.native.model.quantization import called_modules, replace
from engine.native.model.quantized import QuantizedLinear, QuantizedStack
from engine.native.model.weights import CannotKeepError, check_report, without_transformers_log
from engine.progress import NO_PHASE, Phase

_WIDE = {"F32", "F16", "F64"}  # kinds of matrices that bfloat16 would round much
_NO_BLOCKS = {*_WIDE, "BF16"}


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
        kinds = {tensor.kind for tensor in tensors if len(tensor.shape) > 1 and ROUTER not in tensor.name}
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
        self.tensors: dict[str, list[_Tensor]] = {}  # by parameter; the gates and the ups of experts are one parameter
        for tensor in tensors:
            name = names.get(tensor.name) or names.get(tensor.name.removesuffix(".weight"))
            if name is not None:
                self.tensors.setdefault(name, []).append(tensor)
        for found_together in self.tensors.values():
            found_together.sort(key=lambda tensor: tensor.name)  # gates before ups

    def kept(self, name: str) -> list[GroupedWeight]:
        """Return the parts of the parameter `name`; none if it must be unpacked.

        Blocks that are not `KEPT` are rounded to 8 bits, so that layers with some of them are computed as others are. A
        part of experts has some outputs of each, one expert's after another's.
        """
        tensors = self.tensors[name]
        if any(tensor.kind in _NO_BLOCKS or len(tensor.shape) not in (2, 3) for tensor in tensors):
            return []
        order = self._row_order(name)
        if order is None:
            return []
        parts = [_grouped(tensor) for tensor in tensors]
        if len(tensors) > 1 or np.array_equal(order, np.arange(len(order))):
            return parts
        return [parts[0].rows(torch.from_numpy(order))]

    def _row_order(self, name: str) -> np.ndarray | None:
        """Return which row of the file each row of the parameter is; None if more happens than rows that move.

        Rows of several tensors, such as gates and ups, may only lie beside each other, expert by expert.
        """
        probes, count = _numbered(self.tensors[name])
        try:
            found = self._processed(name, probes)
        except Exception:  # it needs other numbers than these, or the names of other tensors
            return None
        if found.keys() != {name} or not np.array_equal(found[name][..., 0] + count, found[name][..., 1]):
            return None
        moved, beside = found[name][..., 0], np.concatenate([probe[..., 0] for probe in probes], axis=-1)
        is_whole = np.array_equal(np.sort(moved, axis=None), np.arange(count)) and moved.shape == beside.shape
        is_moved = not np.array_equal(moved, beside)
        return None if not is_whole or (is_moved and len(probes) > 1) else moved.flatten()

    def unpacked(self, name: str, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return what transformers makes of the tensors of a parameter."""
        numbers = [dequantize(tensor.data, GGMLQuantizationType[tensor.kind]) for tensor in self.tensors[name]]
        return {key: torch.as_tensor(value).to(dtype) for key, value in self._processed(name, numbers).items()}

    def _processed(self, name: str, numbers: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
        """Return what transformers makes of these numbers instead of those of the parameter's tensors."""
        made: dict[str, Any] = {}
        for tensor, own in zip(self.tensors[name], numbers, strict=True):
            result = self._processor.process(
                weights=own,
                name=tensor.name,
                tensor_key_mapping=self._names,
                parsed_parameters={"tensors": made},
            )
            if result.name is not None:
                made[self._names.get(result.name, name)] = result.weights
        return {key: value.numpy() if isinstance(value, Tensor) else np.array(value) for key, value in made.items()}


def _grouped(tensor: _Tensor) -> GroupedWeight:
    rows = _rows(np.array(tensor.data))
    if tensor.kind in KEPT:
        return weight_of(torch.from_numpy(rows), tensor.kind, tensor.shape[-1])
    return rounded(torch.from_numpy(dequantize(rows, GGMLQuantizationType[tensor.kind])), bits=8)


def _numbered(tensors: Sequence[_Tensor]) -> tuple[list[np.ndarray], int]:
    """Return tensors (…, 2) of row numbers, with the number of all rows added in the second column, and this number."""
    count, first, probes = sum(int(np.prod(tensor.shape[:-1])) for tensor in tensors), 0, []
    for tensor in tensors:
        numbers = first + np.arange(np.prod(tensor.shape[:-1])).reshape(tensor.shape[:-1])
        probes.append(np.stack([numbers, numbers + count], axis=-1))
        first += numbers.size
    return probes, count


def _shape_of(tensors: Sequence[_Tensor]) -> tuple[int, ...]:
    """Return the shape of one parameter: matrices, or matrices of each expert, whose outputs follow each other."""
    return (*tensors[0].shape[:-2], sum(tensor.shape[-2] for tensor in tensors), tensors[0].shape[-1])


def _rows(data: np.ndarray) -> np.ndarray:
    """Return the bytes of the rows of a matrix, or of a matrix of each expert, below each other."""
    return data.reshape(-1, data.shape[-1])


def load_kept(
    file: Path, directory: Path, hf_config: Any, options: dict[str, Any], phase: Phase = NO_PHASE
) -> nn.Module:
    """Return the model with the weights of `file`, on the CPU. Matrices of linear layers and experts stay quantised.

    `directory` is what `engine.gguf` has made of the file. `options` are passed to `from_pretrained`; `phase` is told
    how many tensors are read. Raises `CannotKeepError` if no matrix can stay, and `EngineStartError` if weights are
    missing.
    """
    content = _File(file, directory, hf_config)
    kept, state = _read(content, hf_config, options["dtype"], phase)
    with without_transformers_log():
        model, report = type(content.skeleton).from_pretrained(
            None, config=hf_config, state_dict=state, output_loading_info=True, ignore_mismatched_sizes=True, **options
        )
    check_report(str(file), report)
    module: nn.Module = model
    experts = kept.keys() & _matrices(module)
    if experts:
        model.set_experts_implementation("eager")  # a loop over experts
    called = called_modules(module)
    for path, parts in kept.items():
        parent, name = path.rpartition(".")[::2]
        found: Any = module.get_submodule(parent if path in experts else path)
        if found not in called:
            raise CannotKeepError(f"{path} is not called as a layer")
        if path in experts:
            replace(found, name, QuantizedStack(parts, found))
        else:
            bias = None if found.bias is None else found.bias.detach()
            module.set_submodule(path, QuantizedLinear(parts, bias, options["dtype"]))
    unpacked, narrowed = Counter[str](), Counter[str]()
    for name, tensors in content.tensors.items():
        is_kept = name.removesuffix(".weight") in kept
        unpacked.update(tensor.kind for tensor in tensors if len(tensor.shape) > 1 and not is_kept)
        narrowed.update(tensor.kind for tensor in tensors if tensor.kind not in KEPT and is_kept)
    structlog.get_logger(__name__).info(
        "weights stay as the blocks of the GGUF file",
        file=str(file),
        linears=len(kept) - len(experts),
        matrices_of_experts=len(experts),
        unpacked=dict(unpacked),
        rounded_to_8_bits=dict(narrowed),
    )
    return module


def _matrices(model: nn.Module) -> set[str]:
    """Return the names of the parameters with matrices of experts."""
    names = {module: name for name, module in model.named_modules()}
    return {f"{names[module]}.{name}" for module in expert_modules(model) for name in MATRICES}


def _read(
    content: _File, hf_config: Any, dtype: torch.dtype, phase: Phase
) -> tuple[dict[str, list[GroupedWeight]], dict[str, Tensor]]:
    """Return the parts of the matrices that stay, by the names of layers or of experts' parameters, and all parameters.

    Parameters whose matrices stay have the file's shape, which is compared with the model's, and take no memory.
    """
    skeleton = content.skeleton
    names = {module: name for name, module in skeleton.named_modules()}
    places = {name for module, name in names.items() if isinstance(module, nn.Linear)}
    places |= _matrices(skeleton)
    output, table = (names[m] for m in (skeleton.get_output_embeddings(), skeleton.get_input_embeddings()))
    kept: dict[str, list[GroupedWeight]] = {}
    state: dict[str, Tensor] = {}
    for number, name in enumerate(content.tensors):
        phase.show(number, len(content.tensors))
        parts, path = content.kept(name), name.removesuffix(".weight")
        if not parts:
            state.update(content.unpacked(name, dtype))
        elif path in places:
            kept[path] = parts
            state[name] = torch.zeros((), dtype=dtype).expand(_shape_of(content.tensors[name]))
        else:
            state[name] = torch.cat([part.unpacked(dtype) for part in parts])
            if path == table and hf_config.tie_word_embeddings:
                kept[output] = parts  # quantised for products, and unpacked for looking up
    return kept, state
