"""The knobs that the SLA controller moves inside their bounds, and the record of a move.

Knows bounds, pins and the dry-run switch; does not know when a knob should move. The controller owns the knobs.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from scheduler.config import Bounds, Tier


@dataclass(frozen=True, slots=True)
class Decision:
    """One move of one knob, and the reason for it.

    `acted` is False in a dry run: the move is only reported, and the knob keeps its value.
    """

    tier: str
    knob: str  # "batch_size" | "batch_tokens" | "max_wait_ms"
    old: float
    new: float
    signal: str
    reason: str
    acted: bool = True

    @property
    def direction(self) -> str:
        return "up" if self.new > self.old else "down"


class Knob:
    """One number of a tier that the controller may move inside its bounds.

    `chosen` is the value that the controller wants. `value` is the value in use: the pinned value if the knob is
    pinned, the start value in a dry run, and otherwise the chosen value.
    """

    def __init__(self, tier: str, name: str, bounds: Bounds, pinned: float | None, dry_run: bool) -> None:
        self.tier, self.name = tier, name
        self.bounds = bounds
        self.pinned = pinned
        self._dry_run = dry_run
        self._is_count = isinstance(bounds.start, int)
        self.chosen: float = bounds.start
        self.moved: Decision | None = None  # the newest move

    @property
    def value(self) -> float:
        if self.pinned is not None:
            return self.pinned
        return self.bounds.start if self._dry_run else self.chosen

    def move(self, to: float, signal: str, reason: str) -> Decision | None:
        """Move the knob to `to`, limited by its bounds, and return the decision.

        Return None if the knob is pinned or if its chosen value stays the same.
        """
        if self.pinned is not None:
            return None
        to = min(self.bounds.max, max(self.bounds.min, int(to) if self._is_count else to))
        old, self.chosen = self.chosen, to
        if to == old:
            return None
        self.moved = Decision(self.tier, self.name, old, to, signal, reason, acted=not self._dry_run)
        return self.moved

    def inherit(self, before: "Knob") -> None:
        """Continue from the chosen value of `before`, if that knob was not pinned and its bounds are the same.

        With other bounds, the value is not taken over, since it was learned for the old bounds.
        """
        if self.bounds == before.bounds and before.pinned is None:
            self.chosen, self.moved = before.chosen, before.moved

    def explain(self) -> dict[str, Any]:
        return {
            "value": self.value,
            "chosen": self.chosen,
            "min": self.bounds.min,
            "max": self.bounds.max,
            "pinned": self.pinned is not None,
            "dry_run": self._dry_run,
            "signal": None if self.pinned is not None or self.moved is None else self.moved.signal,
            "reason": self._reason(),
        }

    def _reason(self) -> str:
        """Return why the knob has its value."""
        if self.pinned is not None:
            return "pinned in tiers.yaml"
        if self.moved is None:
            return "the start value in tiers.yaml: nothing observed asks for another"
        return f"dry run: {self.moved.reason}" if self._dry_run else self.moved.reason


class TierKnobs:
    """The three knobs of one tier."""

    def __init__(self, tier: Tier, dry_run: bool = False) -> None:
        pins = tier.pinned
        self.batch_size = Knob(tier.name, "batch_size", tier.batch_size, pins.batch_size, dry_run)
        self.batch_tokens = Knob(tier.name, "batch_tokens", tier.batch_tokens, pins.batch_tokens, dry_run)
        self.max_wait_ms = Knob(tier.name, "max_wait_ms", tier.max_wait_ms, pins.max_wait_ms, dry_run)

    def __iter__(self) -> Iterator[Knob]:
        return iter((self.batch_size, self.batch_tokens, self.max_wait_ms))

    def inherit(self, before: "TierKnobs") -> None:
        for knob, old in zip(self, before, strict=True):
            knob.inherit(old)
