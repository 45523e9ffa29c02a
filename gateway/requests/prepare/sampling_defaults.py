"""Sampling parameters for requests that do not set them. The model recommends these in generation_config.json.

Knows only that file. As in vLLM, only sampling parameters are taken from the file. Its limits of the output length are
ignored.
"""

import json
from pathlib import Path
from typing import Annotated, Any

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError
from pydantic import BaseModel, ConfigDict, Field, ValidationError

_FILE = "generation_config.json"


class SamplingDefaults(BaseModel):
    """The sampling parameters of a request that does not set its own.

    The default values in this class are those of OpenAI's API. They do not change the model's distribution.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    top_p: Annotated[float, Field(ge=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = 0  # 0 and -1 mean all tokens
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0


def read_sampling_defaults(model: str) -> SamplingDefaults:
    """Return the sampling parameters that a model recommends, or OpenAI's defaults if it recommends none.

    `model` is a transformers directory or a hub id. Raises `ValueError` if generation_config.json cannot be read, or if
    a value is not a number in its range.
    """
    path = _find(model)
    if path is None:
        return SamplingDefaults()
    try:
        declared: Any = json.loads(path.read_text(encoding="utf-8"))
        return SamplingDefaults(**{name: value for name, value in dict(declared).items() if value is not None})
    except ValidationError as error:
        fault = error.errors()[0]
        raise ValueError(f"{path}: {fault['loc'][0]}: {fault['msg']}") from error
    except (OSError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error


def _find(model: str) -> Path | None:
    if Path(model).is_dir():
        path = Path(model) / _FILE
        return path if path.is_file() else None
    try:
        return Path(hf_hub_download(model, _FILE))
    except (EntryNotFoundError, OSError):
        return None
