"""Make random weights in the shape of a config.json: `python -m loadtest.random_weights --model DIR`.

This module imports torch, so it always runs in a separate process.
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, set_seed

from engine.native.device import choose_device

SHARD_SIZE = "4GB"  # largest size of one file of weights


def write_weights(directory: Path, dtype: torch.dtype, device: torch.device, seed: int) -> None:
    """Write random weights for `directory/config.json` into the same directory.

    The weights are made on `device`, since a GPU is faster for a large model.
    """
    set_seed(seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory), dtype=dtype)
    model.save_pretrained(directory, max_shard_size=SHARD_SIZE)


def main() -> None:
    parser = argparse.ArgumentParser(prog="random_weights", description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    write_weights(asked.model, getattr(torch, asked.dtype), choose_device(asked.device), asked.seed)


if __name__ == "__main__":
    main()
