"""Tiny random models in temporary directories.

`CONFIGS` has one model for each kind of attention; they are run under every kind of schedule. `ARCHITECTURES` has one
model for each other architecture that could go wrong in its own way, with a comment that says what is special about it.
"""

import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

Prompts = dict[str, tuple[int, ...]]

VOCAB_SIZE = 97
POISON = 90  # the token whose embedding is NaN, where a test wants one
# Of the tiny Llama: 2 layers × keys and values × 2 heads × 4 tokens × 8 numbers of 4 bytes.
BLOCK_BYTES = 2 * 2 * 2 * 4 * 8 * 4
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    # None: random models then never end before the length that the test gives. No pad token either: Gemma zeroes its
    # embedding.
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
    # Large enough for logits to differ clearly, so that equal argmaxes mean equal results.
    "initializer_range": 0.4,
}
# A random model with tied embeddings repeats its last token for ever, whatever its attention computes.
_UNTIED = {"tie_word_embeddings": False}

_SMALL_WINDOW = {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]}


def tiny(name: str, **changes: Any) -> Callable[[], Any]:
    """Return a function that makes a small transformers.<name>Config."""
    settings = {**_COMMON, **_UNTIED, "num_key_value_heads": 2, "head_dim": 8, **changes}
    return lambda: getattr(transformers, f"{name}Config")(**settings)


CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": tiny("Llama"),
    "llama-mqa-tied": tiny("Llama", num_key_value_heads=1, tie_word_embeddings=True, attention_bias=True),
    "qwen3": tiny("Qwen3", head_dim=16),
    "gemma2": tiny("Gemma2", sliding_window=7, query_pre_attn_scalar=8, attn_logit_softcapping=1.0),
    "gemma3": tiny("Gemma3Text", **_SMALL_WINDOW),
    "mistral": tiny("Mistral", sliding_window=9),
    "phi": tiny("Phi", num_key_value_heads=4, partial_rotary_factor=0.5),
    # Its window is in the mask only, not in the arguments of its attention.
    "phimoe": tiny("Phimoe", num_local_experts=4, num_experts_per_tok=2, sliding_window=7),
    "gpt2": tiny("GPT2"),
    "gpt-oss": tiny(
        "GptOss",
        **_SMALL_WINDOW,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
}

_NEVER = VOCAB_SIZE + 1  # for models that need an end-of-sequence id; no model generates it
_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_ROUTED = {**_EXPERTS, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
_LATENT = {  # keys of 8 + 8 numbers a head, values of 12
    "num_key_value_heads": 4,
    "head_dim": 8,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}

ARCHITECTURES: dict[str, Callable[[], Any]] = {
    "apertus": tiny("Apertus"),  # one projection less in its MLP
    "bert-decoder": tiny("Bert", is_decoder=True),  # an encoder, configured as causal
    "bitnet": tiny("BitNet"),  # norms within attention and MLP
    "cohere": tiny("Cohere", logit_scale=0.5),  # attention beside the MLP, scaled logits
    "cohere2": tiny("Cohere2", **_SMALL_WINDOW),  # full layers without positions
    "dbrx": tiny(  # clipped projections
        "Dbrx",
        d_model=32,
        n_heads=4,
        n_layers=2,
        max_seq_len=128,
        attn_config={"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0},
        ffn_config={"hidden_size": 32, "ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2},
    ),
    "deepseek-v2": tiny("DeepseekV2", **_ROUTED, **_LATENT),  # latent attention: keys wider than values
    "deepseek-v3": tiny("DeepseekV3", **_ROUTED, **_LATENT),
    "ernie4.5-moe": tiny("Ernie4_5_Moe", moe_num_experts=4, moe_k=2, moe_intermediate_size=16),
    "exaone4": tiny("Exaone4", **_SMALL_WINDOW),  # norms after attention, full layers without positions
    "gemma": tiny("Gemma"),  # norms around 1, scaled embeddings
    "gemma3-multimodal": tiny(  # the text part of a multimodal model
        "Gemma3",
        text_config={**_COMMON, **_UNTIED, "num_key_value_heads": 2, "head_dim": 8, **_SMALL_WINDOW},
        vision_config={"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
    ),
    "gemma3n": tiny(  # layers that read the keys of other layers, several residual streams
        "Gemma3nText",
        num_hidden_layers=3,
        num_kv_shared_layers=1,
        layer_types=["sliding_attention", "full_attention", "full_attention"],
        sliding_window=7,
        intermediate_size=[48, 48, 48],
        activation_sparsity_pattern=[0.5, 0.0, 0.0],
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCAB_SIZE,
        laurel_rank=4,
    ),
    "gemma4": tiny(  # heads of two sizes, keys that are values
        "Gemma4Text",
        pad_token_id=0,
        attention_k_eq_v=True,
        global_head_dim=16,
        num_global_key_value_heads=1,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCAB_SIZE,
        **_SMALL_WINDOW,
    ),
    "glm4": tiny("Glm4"),  # rotary positions for half of each head, four norms
    "gpt-bigcode": tiny(
        "GPTBigCode", activation_function="gelu"
    ),  # one KV head, one matrix for queries, keys and values
    "gpt-neox": tiny("GPTNeoX", rotary_pct=0.5),
    "granite": tiny("Granite", attention_multiplier=0.3, logits_scaling=0.5, residual_multiplier=0.7),
    "granite-hybrid": tiny(  # a family with recurrent layers, configured without them
        "GraniteMoeHybrid",
        layer_types=["full_attention", "full_attention"],
        shared_intermediate_size=48,
        num_local_experts=0,
        num_experts_per_tok=0,
        position_embedding_type="rope",
        mamba_n_heads=4,
        mamba_d_head=16,
    ),
    "granite-moe": tiny("GraniteMoe", **_EXPERTS),
    "helium": tiny("Helium"),  # rotates pairs of neighbouring numbers
    "hunyuan": tiny("HunYuanDenseV1"),  # norms after the rotary positions
    "hunyuan-moe": tiny("HunYuanMoEV1", num_experts=4, moe_topk=2),  # reads its router's weight directly
    "jetmoe": tiny("JetMoe", kv_channels=8, num_local_experts=4, num_experts_per_tok=2),  # experts of attention
    "llama4": tiny(  # chunked attention: within the first chunk it is ordinary attention
        "Llama4Text",
        **_EXPERTS,
        intermediate_size_mlp=48,
        attention_chunk_size=64,
        no_rope_layers=[1, 0],
        layer_types=["chunked_attention", "full_attention"],
    ),
    "longcat": tiny("LongcatFlash", **_LATENT, num_layers=1, expert_ffn_hidden_size=16, n_routed_experts=4, moe_topk=2),
    "mimo-v2": tiny("MiMoV2Flash", **_ROUTED, v_head_dim=6, **_SMALL_WINDOW),  # keys wider than values, sinks
    "minicpm3": tiny("MiniCPM3", **_LATENT),
    "ministral3": tiny(  # scales queries at positions beyond the length of training
        "Ministral3",
        sliding_window=None,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "max_position_embeddings": 16,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 2.0,
        },
    ),
    "mixtral": tiny("Mixtral", **_EXPERTS, sliding_window=7),
    "modernbert-decoder": tiny(  # windows on both sides, of which a decoder uses one
        "ModernBertDecoder", pad_token_id=0, bos_token_id=1, eos_token_id=_NEVER, local_attention=7
    ),
    "nanochat": tiny("NanoChat"),  # soft-capped logits, norms without weights
    "nemotron": tiny("Nemotron", partial_rotary_factor=0.5),
    "olmo2": tiny("Olmo2"),  # norms over all heads at once
    "olmoe": tiny("Olmoe", **_EXPERTS),
    "opt": tiny("OPT", word_embed_proj_dim=32, ffn_dim=48),  # learned positions with an offset of two
    "persimmon": tiny("Persimmon", partial_rotary_factor=0.5),
    "phi3": tiny("Phi3", sliding_window=7),  # one matrix for queries, keys and values
    "qwen2": tiny("Qwen2", use_sliding_window=True, sliding_window=7, max_window_layers=1),
    "qwen2-moe": tiny("Qwen2Moe", **_EXPERTS, shared_expert_intermediate_size=16),
    "qwen3-moe": tiny("Qwen3Moe", **_EXPERTS),
    "smollm3": tiny("SmolLM3", no_rope_layers=[1, 0]),  # layers without positions
    "starcoder2": tiny("Starcoder2", sliding_window=7),
    "vaultgemma": tiny("VaultGemma", attn_logit_softcapping=1.0, **_SMALL_WINDOW),
}


def save_model(directory: Path, config: Any, poisoned_token: int | None = None) -> Any:
    """Write a random model and return it. The embedding of `poisoned_token` is NaN, and so are logits after it."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(7)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
        for name, parameter in model.named_parameters():
            # Norms, biases and sinks, which would otherwise be all ones or zeros.
            if parameter.dim() == 1 or name.endswith("bias"):
                parameter += 0.1 * torch.randn_like(parameter)
        if poisoned_token is not None:
            model.get_input_embeddings().weight[poisoned_token] = float("nan")
    model.save_pretrained(directory)
    return model.eval()


def generate(model: Any, prompt: tuple[int, ...], max_tokens: int) -> tuple[int, ...]:
    """Return what transformers itself generates greedily: the specification of the engine."""
    ids = torch.tensor([prompt])
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False, pad_token_id=0
    )
    return tuple(output[0, len(prompt) :].tolist())


def make_prompts(rng: random.Random, count: int = 5, lengths: Iterable[int] | None = None) -> Prompts:
    """Return prompts of these lengths, or `count` prompts of 1 to 30 tokens."""
    lengths = (rng.randint(1, 30) for _ in range(count)) if lengths is None else lengths
    return {f"s{i}": tuple(rng.randrange(1, VOCAB_SIZE) for _ in range(length)) for i, length in enumerate(lengths)}


def family(seed: int, count: int = 7) -> Prompts:
    """Return prompts that begin with 0 to 24 tokens of a common one, and the common one twice."""
    rng = random.Random(seed)
    trunk = tuple(rng.randrange(1, VOCAB_SIZE) for _ in range(24))
    prompts = {"trunk": trunk, "again": trunk}
    for i in range(count - 2):
        tail = tuple(rng.randrange(1, VOCAB_SIZE) for _ in range(rng.randint(1, 9)))
        prompts[f"s{i}"] = trunk[: rng.randint(0, 24)] + tail
    return prompts
