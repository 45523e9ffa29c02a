"""What is measured: classes of traffic, and the arms that send them.

Pure. Knows the ways to compare; does not know servers or results.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from loadtest.traffic.scenario import TrafficClass

WITH_TIERS, WITHOUT_TIERS = "with tiers", "without tiers"
BATCHED, ONE_AT_A_TIME = "batched", "one at a time"
Comparison = Literal["tiers", "batching"]


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to send the classes. `at_once` is the most requests that are sent at the same time; None: all."""

    name: str
    classes: tuple[TrafficClass, ...]
    at_once: int | None = None


def arms_of(comparison: Comparison | None, classes: Sequence[TrafficClass]) -> tuple[Arm, ...]:
    """Return the arms of a comparison, or the only arm where nothing is compared.

    All arms of a comparison send the same requests. The first arm is the one that the others are compared with.
    """
    given = tuple(classes)
    if comparison == "tiers":
        untiered = tuple(c.model_copy(update={"service_tier": None}) for c in given)
        return Arm(WITH_TIERS, given), Arm(WITHOUT_TIERS, untiered)
    if comparison == "batching":
        return Arm(BATCHED, given), Arm(ONE_AT_A_TIME, given, at_once=1)
    return (Arm("load", given),)
