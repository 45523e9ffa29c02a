"""Write what a GGUF file contains as a directory of transformers. A process of its own: `engine.gguf` starts it.

    python -m engine.native.model.gguf [--weights] FILE DIRECTORY

Prints one line of JSON about the weights. On a failure, the last line of stderr is the reason.
"""

import argparse
import json
import sys
from collections import Counter
from functools import lru_cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS

from engine.config import EngineStartError
from engine.gguf import ROUTER, TENSORS
from engine.native.model.weights import check_report

_WIDE = {"F32", "F16", "F64"}  # kinds of tensors whose numbers bfloat16 would round much


class _QuickReader(gguf.GGUFReader):  # type: ignore[misc]
    """Reads the lists of a file, such as a vocabulary, in a quarter of the time: slices of a `memmap` are slow."""

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> np.ndarray[Any, Any]:
        ordered = np.dtype(dtype).newbyteorder(self.byte_order if override_order is None else override_order)
        return np.ndarray(int(count), ordered, self.data, int(offset))


@lru_cache(1)
def read(file: str) -> gguf.GGUFReader:
    """Return the reader of `file`. transformers reads it twice more, each time from its beginning."""
    try:
        return _QuickReader(file)
    except (TypeError, ValueError, IndexError, KeyError, OverflowError) as error:
        raise EngineStartError(f"it is cut short or damaged, so get it again ({error})") from error


def unpack(file: Path, directory: Path, with_weights: bool) -> dict[str, Any]:
    """Write the configuration and the tokenizer, and the weights if wanted. Return what was written of weights."""
    place = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    reader = read(str(file))
    _check_experts(reader)
    config = AutoConfig.from_pretrained(**place)
    _add_sizes_of_experts(reader, config)
    config.save_pretrained(directory)
    _write_tokenizer(reader, directory, place)
    _write_ends(reader, config, directory)
    write_tensors(reader, directory)
    kinds = Counter(tensor.tensor_type.name for tensor in reader.tensors if len(tensor.shape) > 1)
    about: dict[str, Any] = {"tensors": dict(kinds), "weights": "not needed here"}
    if with_weights:
        is_wide = any(t.tensor_type.name in _WIDE and len(t.shape) > 1 and ROUTER not in t.name for t in reader.tensors)
        dtype = torch.float32 if is_wide else torch.bfloat16
        _write_weights(file, directory, place, config, dtype)
        about["weights"] = f"unpacked to {str(dtype).removeprefix('torch.')}"
    return about


def _check_experts(reader: gguf.GGUFReader) -> None:
    """Raises `EngineStartError` if transformers would leave out the experts of this architecture."""
    architecture = _value(reader, "general.architecture")
    known = getattr(TENSOR_PROCESSORS.get(architecture), "GGUF_MOE_WEIGHTS_PATTERN", None)
    for tensor in reader.tensors:
        if "_exps." in tensor.name and not tensor.name.endswith("bias") and not (known and known.match(tensor.name)):
            raise EngineStartError(
                f"transformers reads no experts such as {tensor.name} from files of the architecture {architecture}: "
                "use the model's own checkpoint, with --quantize int8 or int4"
            )


def _add_sizes_of_experts(reader: gguf.GGUFReader, config: Any) -> None:
    """Set the numbers of activations of experts, which transformers does not read."""
    sizes = {"moe_intermediate_size": "expert", "shared_expert_intermediate_size": "expert_shared"}
    architecture = _value(reader, "general.architecture")
    for name, kind in sizes.items():
        size = _value(reader, f"{architecture}.{kind}_feed_forward_length")
        if size is not None and hasattr(config, name):
            setattr(config, name, int(size))


def _write_tokenizer(reader: gguf.GGUFReader, directory: Path, place: dict[str, str]) -> None:
    if reader.get_field("tokenizer.ggml.tokens") is None:
        raise EngineStartError("it has no tokenizer; make it again with its model's vocabulary")
    tokenizer = AutoTokenizer.from_pretrained(**place)
    tokenizer.chat_template = tokenizer.chat_template or _value(reader, "tokenizer.chat_template")
    tokenizer.save_pretrained(directory)


def _write_ends(reader: gguf.GGUFReader, config: Any, directory: Path) -> None:
    """Write generation_config.json with all tokens that end an answer: of a text, of a turn, of a message."""
    ends = [_value(reader, f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    known = list(dict.fromkeys(int(end) for end in (config.eos_token_id, *ends) if isinstance(end, int)))
    GenerationConfig(bos_token_id=config.bos_token_id, eos_token_id=known or None).save_pretrained(directory)


def write_tensors(reader: gguf.GGUFReader, directory: Path) -> None:
    """Write the architecture, and of each tensor its name, kind, shape (inputs first), first byte and size in bytes."""
    tensors = [
        (t.name, t.tensor_type.name, [int(n) for n in t.shape], int(t.data_offset), int(t.n_bytes))
        for t in reader.tensors
    ]
    found = {"architecture": _value(reader, "general.architecture"), "tensors": tensors}
    (directory / TENSORS).write_text(json.dumps(found), encoding="utf-8")


def _write_weights(file: Path, directory: Path, place: dict[str, str], config: Any, dtype: torch.dtype) -> None:
    """Write the weights to one file, in `dtype`. Raises `EngineStartError` if some are missing."""
    options: dict[str, Any] = {"config": config, "dtype": dtype, "output_loading_info": True}
    if hasattr(transformers, "GgufConfig"):  # versions without it always unpack
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model, report = AutoModelForCausalLM.from_pretrained(**place, **options)
    check_report(str(file), report)
    partial = directory / "unpacking"
    model.save_pretrained(partial, max_shard_size="10TB")
    for name in ("config.json", "model.safetensors"):  # the config with the dtype and the architecture
        (partial / name).replace(directory / name)
    for left in partial.iterdir():
        left.unlink()
    partial.rmdir()


def _value(reader: gguf.GGUFReader, name: str) -> Any:
    field = reader.get_field(name)
    return None if field is None else field.contents()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--weights", action="store_true")
    parser.add_argument("file", type=Path)
    parser.add_argument("directory", type=Path)
    asked = parser.parse_args()
    gguf.GGUFReader = read  # transformers looks it up at each call
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        about = unpack(asked.file, asked.directory, asked.weights)
    except EngineStartError as error:
        sys.exit(str(error))
    except Exception as error:  # transformers tells of unknown files and architectures in many ways
        sys.exit(f"{type(error).__name__}: {' '.join(str(error).split())}")
    print(json.dumps(about))


if __name__ == "__main__":
    main()
