"""Load a transformers model, or make one with random weights, and let it use the engine's attention.

Knows transformers' configurations and which of them this engine does not support; does not know steps or KV memory.
Every problem with a model is raised as an `EngineStartError`, whose message names the problem.
"""

import inspect
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM
from transformers.modeling_utils import AttentionInterface
from transformers.utils import logging as transformers_logging

from engine.config import EngineConfig, EngineStartError, Quantization
from engine.native.attention.paged import ATTENTION_NAME, attention_forward
from engine.native.device import choose_device, free_bytes
from engine.native.model.grouped_weight import quantised_bytes
from engine.native.model.weights import quantization_method, read_weights, stored_bytes
from engine.progress import NO_PHASE, Phase

# Values of a configuration's `layer_types` that this engine supports.
_LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}
MATRICES = ("gate_up_proj", "down_proj")  # transformers' parameters with a matrix of each expert
_GIB = 1 << 30
_WAY_OUT = "--engine vllm may run it, or --engine openai before another server that does"
# Makes a model of its configuration and options of transformers, and tells the phase how far it is.
ReadWeights = Callable[[Any, dict[str, Any], Phase], Any]


def load_config(config: EngineConfig) -> Any:
    """Return the model's transformers configuration.

    Raises `EngineStartError` if the configuration cannot be read, or if this engine cannot run the architecture.
    """
    path = Path(config.model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise EngineStartError(f"model directory {path} has no config.json")
    elif path.is_absolute() or config.model.startswith((".", "~")) or config.model.count("/") != 1:
        raise EngineStartError(f"model directory {path} does not exist")
    try:
        hf_config = AutoConfig.from_pretrained(str(path) if path.is_dir() else config.model)
    except (OSError, ValueError) as error:
        raise EngineStartError(f"model {config.model}: {first_line(error)}") from error
    except Exception as error:  # transformers checks the fields of some configurations, with errors of several kinds
        said = " ".join(str(error).split())
        raise EngineStartError(f"model {config.model}: its configuration is not valid: {said}") from error
    if getattr(hf_config.get_text_config(decoder=True), "num_hidden_layers", None) == 0:
        raise EngineStartError(f"model {config.model}: its configuration is not valid: it has no layers")
    if reason := _unsupported_reason(hf_config):
        raise unsupported(hf_config, reason)
    return hf_config


def load_model(
    config: EngineConfig,
    hf_config: Any,
    dtype: torch.dtype,
    device: torch.device,
    phase: Phase = NO_PHASE,
    read: ReadWeights | None = None,
) -> nn.Module:
    """Return the model with weights in `dtype` on `device`, in evaluation mode. `bind` sets its attention later.

    `read` replaces the files of the model's directory. `phase` is told how many tensors are loaded. Raises
    `EngineStartError` if the weights are wrong, or if they do not fit into the free memory.
    """
    # No mask function is registered under this name, so modeling code makes no masks. The engine's attention needs no
    # masks: it knows contexts and windows.
    AttentionInterface.register(ATTENTION_NAME, attention_forward)
    options = {"dtype": dtype, "attn_implementation": ATTENTION_NAME}
    try:
        check_fits(None if read else weight_bytes(config, hf_config, dtype, is_loading=True), device)
        if read is not None:
            model = read(hf_config, options, phase)
        elif config.load_format == "dummy":
            model = _random_model(hf_config, config.seed, device, options)
        else:
            with _telling(phase, config):
                model = read_weights(str(Path(config.model).expanduser()), hf_config, device, options)
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise EngineStartError(f"not enough memory for the weights of {config.model}") from error
    except EngineStartError:
        raise
    except KeyError as error:
        raise EngineStartError(f"model {config.model}: its config.json has {error}, which is not known") from error
    except Exception as error:  # a config.json can break modeling code in any way
        raise EngineStartError(f"model {config.model}: {first_line(error)}") from error
    module: nn.Module = model.eval().requires_grad_(False)
    return module


def is_on_hub(config: EngineConfig) -> bool:
    """Return whether the model's name is a hub id and no directory."""
    return not Path(config.model).expanduser().is_dir()


@contextmanager
def _telling(phase: Phase, config: EngineConfig) -> Iterator[None]:
    """Tell `phase` how far transformers has loaded the weights. For a model of the hub, it shows this itself."""

    def bar(make_bar: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        parts = args[0] if args else options.get("iterable")
        return _counted(parts, phase) if isinstance(parts, Collection) else make_bar(*args, **options)

    if is_on_hub(config):
        yield
        return
    before = transformers_logging.set_tqdm_hook(bar)
    try:
        yield
    finally:
        transformers_logging.set_tqdm_hook(before)


def _counted(parts: Collection[Any], phase: Phase) -> Iterator[Any]:
    for number, part in enumerate(parts):
        phase.show(number, len(parts))
        yield part


def weight_bytes(config: EngineConfig, hf_config: Any, dtype: torch.dtype, is_loading: bool = False) -> int | None:
    """Return the size of the weights in memory, in bytes; None if it is not known before they are loaded.

    While a model is loading, no experts are quantised yet: transformers copies them from the file to stack them.
    """
    if config.load_format == "dummy" or quantization_method(hf_config) is None:
        with_experts = not is_loading and choose_device(config.device).type == "cpu"
        return _plain_bytes(hf_config, dtype, config.quantize, with_experts)
    return stored_bytes(str(Path(config.model).expanduser()))


def forward(model: nn.Module, token_ids: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
    """Run `model` on a packed step; return the logits (len(rows), vocab) of the given rows.

    `token_ids` and `positions` are (1, T); `rows` has any length; all are int64.
    """
    output = model(input_ids=token_ids, position_ids=positions, use_cache=False, logits_to_keep=rows)
    logits: Tensor = output.logits[0]
    return logits


def expert_modules(model: nn.Module) -> list[Any]:
    """Return the modules of transformers that hold the matrices of experts, plain, in one parameter each."""
    return [
        module
        for module in model.modules()
        if hasattr(module, "_apply_gate")
        and all(isinstance(p := getattr(module, name, None), nn.Parameter) and p.dim() == 3 for name in MATRICES)
    ]


def is_transposed(experts: Any) -> bool:
    """Return whether the parameters of transformers' `experts` are (experts, in, out)."""
    return bool(getattr(experts, "is_transposed", False))


def matrices_of(experts: Any, name: str) -> Tensor:
    """Return a parameter of transformers' `experts` as (experts, out, in)."""
    matrices: Tensor = getattr(experts, name).detach()
    return matrices.transpose(1, 2) if is_transposed(experts) else matrices


def context_limit(hf_config: Any) -> int | None:
    """Return the number of tokens that the model can attend to, or None if the configuration does not say."""
    text = hf_config.get_text_config(decoder=True)
    limits = [getattr(text, "max_position_embeddings", None)]
    if "chunked_attention" in (getattr(text, "layer_types", None) or ()):
        limits.append(text.attention_chunk_size)  # within the first chunk, attention is like that of other models
    rope = getattr(text, "rope_parameters", None) or {}
    for parameters in [rope, *(value for value in rope.values() if isinstance(value, dict))]:
        # If a step holds a sequence above this limit, a model of these types changes the rotation of all positions.
        # Tokens of shorter sequences would then depend on the other sequences of the step.
        if parameters.get("rope_type") in ("longrope", "dynamic"):
            limits.append(parameters.get("original_max_position_embeddings"))
    known = [int(limit) for limit in limits if limit]
    return min(known, default=None)


def is_quantised(model: Any) -> bool:
    """Return whether the weights are quantised, so that only the quantisation package's operators can use them."""
    return getattr(model, "hf_quantizer", None) is not None


def eos_token_ids(model: Any, hf_config: Any) -> tuple[int, ...]:
    """Return all token ids that end a sequence: none, one or several."""
    declared = getattr(model.generation_config, "eos_token_id", None)
    if declared is None:
        declared = getattr(hf_config.get_text_config(decoder=True), "eos_token_id", None)
    if declared is None:
        return ()
    return (declared,) if isinstance(declared, int) else tuple(declared)


def _unsupported_reason(hf_config: Any) -> str | None:
    """Return why this engine cannot run the architecture, or None if it can."""
    if type(hf_config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return "transformers knows no causal language model of this kind"
    if getattr(hf_config, "is_encoder_decoder", False):
        return "it has an encoder"
    text = hf_config.get_text_config(decoder=True)
    if other := set(getattr(text, "layer_types", None) or ()) - _LAYER_TYPES:
        return f"it has layers of the kind {', '.join(sorted(other))}"
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING[type(hf_config)]
    if not architecture.is_backend_compatible():
        return "its attention does not go through transformers' AttentionInterface"
    if missing := {"position_ids", "logits_to_keep"} - inspect.signature(architecture.forward).parameters.keys():
        return f"its forward takes no {' and no '.join(sorted(missing))}"
    return None


def _plain_bytes(hf_config: Any, dtype: torch.dtype, quantize: Quantization | None, with_experts: bool) -> int:
    """Return the size in bytes that all weights have in `dtype`, or after `quantize`, which may leave experts out."""
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(hf_config, dtype=dtype)
    if quantize is None:
        return sum(p.numel() * p.element_size() for p in skeleton.parameters())
    output = skeleton.get_output_embeddings().weight
    linears = [m.weight for m in skeleton.modules() if isinstance(m, nn.Linear)]
    experts = [(module, name) for module in expert_modules(skeleton) for name in MATRICES if with_experts]
    found = sum(quantised_bytes(weight, quantize, weight is output) for weight in linears)
    found += sum(quantised_bytes(matrices_of(*matrices), quantize, False) for matrices in experts)
    replaced = {*linears, *(getattr(*matrices) for matrices in experts)} - {skeleton.get_input_embeddings().weight}
    return int(found + sum(p.numel() * p.element_size() for p in skeleton.parameters() if p not in replaced))


def check_fits(needed: int | None, device: torch.device) -> None:
    """Raises `EngineStartError` if `needed` bytes exceed the free memory of `device`. Without `needed`, do nothing."""
    free = free_bytes(device)
    if needed is not None and needed > free:
        raise EngineStartError(
            f"not enough memory: the weights take {needed / _GIB:.1f} GiB and {device} has {free / _GIB:.1f} GiB free"
        )


def _random_model(hf_config: Any, seed: int, device: torch.device, options: dict[str, Any]) -> Any:
    """Return a model with random weights that depend on `seed`.

    The model is created directly on its device and in its dtype, so that no larger copy ever exists.
    """
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.device(device):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(hf_config, **options)


def unsupported(hf_config: Any, reason: str) -> EngineStartError:
    """Return the error for an architecture that this engine does not support."""
    names = getattr(hf_config, "architectures", None) or [type(hf_config).__name__]
    return EngineStartError(f"architecture {names[0]} is not supported: {reason} ({_WAY_OUT})")


def first_line(error: Exception) -> str:
    """Return the first non-empty line of an exception's message, or the exception's type if it has none."""
    return next(filter(None, map(str.strip, str(error).splitlines())), type(error).__name__)
