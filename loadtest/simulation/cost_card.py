"""The cost card: the model of one engine on one machine, validated from JSON.

A card holds the coefficients of a step, the capacity of the engine, and the price of an hour. `loadtest calibrate`
writes cards from the step log of a real run; the shipped cards are in `cards/`. Knows numbers; does not know how they
are used (see `deployment`).
"""

import json
from importlib.resources import files
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from engine.interface import EngineInfo
from engine.step_time.cost import StepCost

VOCAB_SIZE = 1 << 32  # larger than all ids in simulated prompts; no tokenizer decodes them


class CostCardError(Exception):
    """The card cannot be used. The message names the file and the key."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Coefficients(_Strict):
    """The coefficients of the time of a step, in seconds.

    `step_s` counts once for each step, `prefill_token_s` for each prefill token, and `decode_s` for each decode.
    `attend_s` counts for each pair of a prefill token and a token that it attends to. `context_token_s` counts for each
    cached token of a decode.
    """

    step_s: float = Field(ge=0)
    prefill_token_s: float = Field(ge=0)
    attend_s: float = Field(ge=0)
    context_token_s: float = Field(ge=0)
    decode_s: float = Field(ge=0)


class CostCard(_Strict):
    name: str
    measured_on: str = Field(description="machine, model and date, in words")
    decode: Coefficients = Field(description="steps of decodes only")
    mixed: Coefficients = Field(description="steps with a prefill in them")
    floor_s: float = Field(default=0.0, ge=0, description="no step is shorter")
    noise: float = Field(ge=0, le=0.5, description="standard deviation of measured ÷ modeled step times")
    num_blocks: int = Field(ge=1)
    block_size: int = Field(ge=1)
    max_step_tokens: int = Field(ge=1)
    max_model_len: int = Field(ge=2)
    suspends_steps: bool = Field(default=False, description="a running step can be suspended after each layer")
    num_layers: int = Field(default=30, ge=1, description="of the model")
    host_overhead_s: float = Field(default=0.0, ge=0, description="between two steps, with the engine idle")
    steps_ahead: int = Field(default=0, ge=0, le=1, description="planned while one runs, so that no engine is idle")
    num_swap_blocks: int = Field(default=0, ge=0)
    swap_block_s: float = Field(default=0.0, ge=0)
    price_per_hour: float = Field(default=0.0, ge=0, description="of one worker, in whatever currency")

    def step_cost(self, mixed: bool) -> StepCost:
        """Return the cost of a step with a prefill (`mixed`), or of a step with decodes only."""
        coefficients = self.mixed if mixed else self.decode
        return StepCost(**coefficients.model_dump(), min_step_s=self.floor_s)

    def engine_info(self) -> EngineInfo:
        modes = ("pause", "swap", "recompute") if self.num_swap_blocks else ("pause", "recompute")
        return EngineInfo(
            model_path=self.name,
            max_model_len=self.max_model_len,
            vocab_size=VOCAB_SIZE,
            block_size=self.block_size,
            num_blocks=self.num_blocks,
            max_step_tokens=self.max_step_tokens,
            device="modeled",
            preemption_modes=modes,
            num_swap_blocks=self.num_swap_blocks,
            swap_block_s=self.swap_block_s,
            steps_ahead=self.steps_ahead,
            suspends_steps=self.suspends_steps,
            num_layers=self.num_layers,
        )


def shipped_cards() -> list[str]:
    folder = files("loadtest") / "simulation" / "cards"
    return sorted(f.name.removesuffix(".json") for f in folder.iterdir() if f.name.endswith(".json"))


def load_cost_card(name_or_path: str) -> CostCard:
    """Return the shipped card of this name, or the card in the file at this path. Raises `CostCardError`."""
    try:
        if name_or_path in shipped_cards():
            text = (files("loadtest") / "simulation" / "cards" / f"{name_or_path}.json").read_text(encoding="utf-8")
        else:
            text = Path(name_or_path).read_text(encoding="utf-8")
        return CostCard.model_validate(json.loads(text))
    except OSError as error:
        known = ", ".join(shipped_cards())
        raise CostCardError(f"{name_or_path}: {error.strerror} (shipped cards: {known})") from error
    except json.JSONDecodeError as error:
        raise CostCardError(f"{name_or_path}: not JSON: {error}") from error
    except ValidationError as error:
        lines = (f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors(include_url=False))
        raise CostCardError(f"{name_or_path}: " + "; ".join(lines)) from error
