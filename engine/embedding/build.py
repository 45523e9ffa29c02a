"""Builds the engine over sentence-transformers, which is an extra of the package.

Importing this module imports no torch; the function does. Raises `EngineStartError` for what keeps it from starting.
"""

from importlib.util import find_spec

import structlog

from engine.config import EngineConfig, EngineStartError
from engine.embedding.stepper import EmbeddingStepper
from engine.interface import EngineInfo
from engine.progress import Progress

# Nothing outlasts a step, so blocks only have to suffice for the texts of one.
BLOCK_SIZE, NUM_BLOCKS = 16, 1 << 16


def build_embedding_stepper(config: EngineConfig, progress: Progress) -> EmbeddingStepper:
    """Load the model. Raises `EngineStartError` if the engine cannot start."""
    check_config(config)
    with progress.phase("loading the model", draws_itself=True):
        import torch

        from engine.embedding.encoder import Encoder
        from engine.native.device import choose_device, choose_dtype

        device = choose_device(config.device)
        # Vectors are compared with those of other days and machines, so they are as exact as the model unless asked.
        dtype = choose_dtype("float32" if config.dtype == "auto" else config.dtype, device)
        encoder = Encoder.load(config.model, config.kind, device, dtype)
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
    max_len = min(encoder.max_len, config.max_model_len or encoder.max_len)
    info = EngineInfo(
        model_path=config.model,
        max_model_len=max_len + 1,  # with the token that stands for the vector
        vocab_size=encoder.vocab_size,
        block_size=BLOCK_SIZE,
        num_blocks=NUM_BLOCKS,
        max_step_tokens=config.max_step_tokens,
        device=device.type if device.type == "cpu" else torch.cuda.get_device_name(device),
        dtype=str(dtype).removeprefix("torch."),
        whole_prompts=True,
    )
    log = structlog.get_logger(__name__)
    log.info(
        "engine ready", engine="embedding", kind=config.kind, model=config.model, max_len=max_len, dtype=info.dtype
    )
    return EmbeddingStepper(info, encoder)


def check_config(config: EngineConfig) -> None:
    if find_spec("sentence_transformers") is None:
        raise EngineStartError("--engine embedding needs sentence-transformers: pip install 'tidegate[embedding]'")
    if config.kind == "chat":
        raise EngineStartError(
            f"the files of {config.model} are not those of an embedding model or a reranker: say --kind embedding or "
            "--kind rerank if it is one"
        )
    if config.load_format == "dummy":
        raise EngineStartError("--engine embedding has no random weights: leave --load-format out")
