"""Small GGUF files in the layout of llama.cpp's own converter, from models of transformers."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

LETTERS = [chr(code) for code in range(33, 127)]
ENDS = ["<|end|>", "<|turn|>"]  # of a text, of a turn
TEMPLATE = "{% for message in messages %}{{ message['content'] }}<|turn|>{% endfor %}"


def write_llama(file: Path, model: Any, kind: str, downs: str = "") -> dict[str, torch.Tensor]:
    """Write a Llama `model` with matrices of `kind` (Q8_0 …) and a tokenizer of letters.

    `downs` is the kind of MLPs' last matrices, if it is another one. Return the weights that the file holds, by their
    names in `model`.
    """
    import gguf

    config, writer = model.config, _begun(file, model, "llama")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    held = {}
    for name, weight in model.state_dict().items():
        numbers = weight.float().numpy()
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        rows = _interleaved(numbers, heads) if heads else numbers
        own = downs if downs and "down_proj" in name else kind
        unpacked = _add(writer, names.get_name(name, try_suffixes=(".weight",)), rows, own)
        held[name] = torch.from_numpy(_apart(unpacked, heads) if heads else unpacked)
    _end(writer)
    return held


def write_experts(
    file: Path, model: Any, architecture: str, kinds: Mapping[str, str], names_of: str = ""
) -> dict[str, torch.Tensor]:
    """Write a `model` with experts. The kind of a tensor is that of the first of `kinds` whose key is in its name.

    Routers are F32, as in llama.cpp's files. `names_of` is the architecture whose names tensors have, if it is another
    one. Return the weights that the file holds, by their names in `model`.
    """
    import gguf

    config, writer = model.config, _begun(file, model, architecture)
    writer.add_expert_count(len(model.model.layers[0].mlp.experts.down_proj))
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(model.model.layers[0].mlp.experts.down_proj.shape[2])
    if hasattr(config, "shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    writer.add_key_length(config.head_dim)
    arch = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == (names_of or architecture))
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    held = {}
    for name, weight in model.state_dict().items():
        halves = ("gate_proj", "up_proj") if name.endswith("experts.gate_up_proj") else ("gate_up_proj",)
        parts = []
        halved = np.split(weight.float().numpy(), len(halves), axis=weight.dim() // 2)
        for half, numbers in zip(halves, halved, strict=True):
            own = names.get_name(name.replace("gate_up_proj", half), try_suffixes=(".weight", ".bias"))
            own += ".weight" if name.endswith("_proj") else ""
            kind = "F32" if "ffn_gate_inp" in own else next(kind for key, kind in kinds.items() if key in own)
            parts.append(_add(writer, own, numbers.squeeze(0) if "inp_shexp" in own else numbers, kind))
        held[name] = torch.from_numpy(np.concatenate(parts, axis=1) if len(parts) > 1 else parts[0]).view_as(weight)
    _end(writer)
    return held


def _begun(file: Path, model: Any, architecture: str) -> Any:
    """Return the writer of a file that has a configuration and a tokenizer of letters, and no tensors yet."""
    import gguf

    config, writer = model.config, gguf.GGUFWriter(file, architecture)
    writer.add_name(file.stem)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    tokens = [*ENDS, *LETTERS]
    tokens += ["!!"]
    assert len(tokens) == config.vocab_size
    kinds = [gguf.TokenType.CONTROL] * 2 + [gguf.TokenType.NORMAL] * (len(tokens) - 2)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(["! !"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_eot_token_id(1)
    writer.add_chat_template(TEMPLATE)
    return writer


def _add(writer: Any, name: str, numbers: np.ndarray, kind: str) -> np.ndarray:
    """Write a tensor, a matrix as blocks of `kind`; return the numbers that it holds."""
    import gguf

    to = gguf.GGMLQuantizationType[kind if numbers.ndim > 1 else "F32"]
    is_random = kind.endswith("_K") and numbers.ndim > 1
    data = random_blocks(kind, numbers.shape) if is_random else gguf.quants.quantize(numbers, to)
    writer.add_tensor(name, data, raw_dtype=to)
    return gguf.quants.dequantize(data, to).reshape(numbers.shape)


def random_blocks(kind: str, shape: Sequence[int], largest: float = 0.002) -> np.ndarray:
    """Return random blocks (…, bytes) of a kind that gguf cannot make of numbers; their scales are below `largest`."""
    import gguf

    numbers_of_block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    random = np.random.default_rng(len(kind) + block_bytes)
    blocks = random.integers(0, 256, (int(np.prod(shape)) // numbers_of_block, block_bytes), dtype=np.uint8)
    halves_at = {"Q2_K": [80, 82], "Q3_K": [108], "Q6_K": [208]}
    for at in halves_at.get(kind, [0, 2] if kind in ("Q4_1", "Q5_1", "Q4_K", "Q5_K") else [0]):
        halves = random.uniform(largest / 1000, largest, len(blocks)).astype(np.float16)
        blocks[:, at : at + 2] = halves[:, None].view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def _end(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """Return the rows of queries or keys in llama.cpp's order, where rotated pairs are side by side."""
    return rows.reshape(heads, 2, -1, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def _apart(rows: np.ndarray, heads: int) -> np.ndarray:
    return rows.reshape(heads, -1, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)
