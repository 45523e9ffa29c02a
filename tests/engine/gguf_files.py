"""Small GGUF files in the layout of llama.cpp's own converter, from models of transformers."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

LETTERS = [chr(code) for code in range(33, 127)]
ENDS = ["<|end|>", "<|turn|>"]  # of a text, of a turn
TEMPLATE = "{% for message in messages %}{{ message['content'] }}<|turn|>{% endfor %}"


def write_llama(file: Path, model: Any, kind: str) -> dict[str, torch.Tensor]:
    """Write a Llama `model` with matrices of `kind` (Q8_0 …) and a tokenizer of letters.

    Return the weights that the file holds, by their names in `model`.
    """
    import gguf

    config, writer = model.config, gguf.GGUFWriter(file, "llama")
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
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    held = {}
    for name, weight in model.state_dict().items():
        numbers = weight.float().numpy()
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        rows = _interleaved(numbers, heads) if heads else numbers
        to = gguf.GGMLQuantizationType[kind if rows.ndim > 1 else "F32"]
        data = gguf.quants.quantize(rows, to)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), data, raw_dtype=to)
        unpacked = gguf.quants.dequantize(data, to).reshape(rows.shape)
        held[name] = torch.from_numpy(_apart(unpacked, heads) if heads else unpacked)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held


def _interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """Return the rows of queries or keys in llama.cpp's order, where rotated pairs are side by side."""
    return rows.reshape(heads, 2, -1, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def _apart(rows: np.ndarray, heads: int) -> np.ndarray:
    return rows.reshape(heads, -1, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)
