"""Fit the coefficients of the step-time model to logged steps, and measure the error on held-out steps.

The model is that of engine/step_time/model.py. Here it is fitted to all steps at once, by least squares of the relative
error with coefficients ≥ 0. Decode-only steps and mixed steps are fitted separately, and outliers are left out. Knows
numbers; does not know where steps come from or how results are shown.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from engine.step_time.cost import StepCost
from engine.step_time.model import StepTimeModel
from engine.step_time.regression import Matrix, Vector, solve_nonnegative
from scheduler.drivers.steps.step_log import StepEntry

# Whole blocks of this number of steps are held out, since a step is too similar to its neighbours to test their fit.
HELD_OUT_BLOCK = 20
HELD_OUT_EVERY = 5  # one block in five is held out
LEAST_STEPS = 50  # a fit needs at least this number of steps of a kind
OUTLIER_SPREADS = 5.0  # a step more than this number of standard deviations from the median is an outlier
LEAST_SPREAD = 0.02  # lower bound of the standard deviation of measured ÷ predicted, for finding outliers
RIDGE = 1e-9  # keeps the normal equations solvable if a feature is constant
IDLE_S = 0.25  # if the gap between two steps is longer, there was no work
MIN_STEP_QUANTILE = 0.01  # quantile of the measured step times that counts as the shortest step
WARM_STEPS = 50  # first steps, whose predictions by the online model are not counted


@dataclass(frozen=True, slots=True)
class Errors:
    """The errors of predictions over `steps` steps.

    The error of a step is predicted ÷ measured − 1. `mape` is the mean of its absolute value, `signed` is its mean, and
    `worst_p95` is the p95 of its absolute value. `ratio_p95` is the p95 of measured ÷ predicted.
    """

    steps: int
    mape: float
    signed: float
    worst_p95: float
    ratio_p95: float


@dataclass(frozen=True, slots=True)
class Prediction:
    entry: StepEntry
    predicted_s: float


@dataclass(frozen=True, slots=True)
class KindFit:
    """The fit of one kind of steps: coefficients, errors on held-out steps, and errors of the online model.

    The online model is replayed over all steps: it predicts each step before it observes the step.
    """

    kind: str  # "decode" or "mixed"
    cost: StepCost
    fitted: int
    outliers: int
    held_out: Errors
    online: Errors | None
    predictions: tuple[Prediction, ...]  # of the held-out steps


@dataclass(frozen=True, slots=True)
class Calibration:
    decode: KindFit
    mixed: KindFit
    min_step_s: float
    noise: float  # standard deviation of measured ÷ predicted, without outliers
    host_overhead_s: float

    @property
    def kinds(self) -> tuple[KindFit, KindFit]:
        return (self.decode, self.mixed)


def calibrate(entries: Sequence[StepEntry]) -> Calibration:
    """Fit decode-only steps and mixed steps. Raises `ValueError` if there are too few steps of a kind."""
    usable = [e for e in entries if e.elapsed_s > 0 and e.decodes + e.prefills]
    online = _replay(usable)
    min_step_s = float(np.quantile([e.elapsed_s for e in usable], MIN_STEP_QUANTILE)) if usable else 0.0
    decode, mixed = (_fit_kind(name, usable, online, min_step_s) for name in ("decode", "mixed"))
    ratios = [p.entry.elapsed_s / p.predicted_s for fit in (decode, mixed) for p in fit.predictions]
    return Calibration(decode, mixed, min_step_s, _spread(ratios), _host_overhead(entries))


def errors(predictions: Sequence[Prediction]) -> Errors:
    """Return the errors of `predictions`. Raises `ValueError` if there are no predictions."""
    ratios = np.array([p.predicted_s / p.entry.elapsed_s for p in predictions])
    if not len(ratios):
        raise ValueError("there is no step to compare with")
    off = np.abs(ratios - 1.0)
    return Errors(
        steps=len(ratios),
        mape=float(off.mean()),
        signed=float(ratios.mean() - 1.0),
        worst_p95=float(np.quantile(off, 0.95)),
        ratio_p95=float(np.quantile(1.0 / ratios, 0.95)),
    )


def _fit_kind(name: str, usable: Sequence[StepEntry], online: Sequence[Prediction], min_step_s: float) -> KindFit:
    is_mixed = name == "mixed"
    of_kind = [e for e in usable if e.work.is_mixed == is_mixed]
    if len(of_kind) < LEAST_STEPS:
        raise ValueError(f"{len(of_kind)} {name} steps are too few: {LEAST_STEPS} are needed")
    held_out = [e for i, e in enumerate(of_kind) if i // HELD_OUT_BLOCK % HELD_OUT_EVERY == 1]
    fitted = [e for i, e in enumerate(of_kind) if i // HELD_OUT_BLOCK % HELD_OUT_EVERY != 1]
    cost, outliers = _robust_fit(fitted, min_step_s)
    predictions = tuple(Prediction(e, cost.of(e.work)) for e in held_out)
    replayed = [p for p in online if p.entry.work.is_mixed == is_mixed]
    return KindFit(
        kind=name,
        cost=cost,
        fitted=len(fitted),
        outliers=outliers,
        held_out=errors(predictions),
        online=errors(replayed) if replayed else None,
        predictions=predictions,
    )


def _robust_fit(entries: Sequence[StepEntry], min_step_s: float) -> tuple[StepCost, int]:
    """Return the fit without outliers, and the number of outliers. Outliers are steps that are far from a first fit."""
    first = _fit(entries, min_step_s)
    ratios = np.array([e.elapsed_s / first.of(e.work) for e in entries])
    off = np.abs(ratios - np.median(ratios))
    limit = OUTLIER_SPREADS * max(1.48 * float(np.median(off)), LEAST_SPREAD)
    kept = [e for e, distance in zip(entries, off, strict=True) if distance <= limit]
    return _fit(kept, min_step_s), len(entries) - len(kept)


def _fit(entries: Sequence[StepEntry], min_step_s: float) -> StepCost:
    x, scale = _features(entries)
    moments = x.T @ x
    moments += RIDGE * len(entries) * np.eye(len(moments))
    step_s, prefill_token_s, attend_s, context_token_s, decode_s = (
        float(k) for k in solve_nonnegative(moments, x.sum(axis=0)) * scale
    )
    return StepCost(step_s, prefill_token_s, attend_s, context_token_s, decode_s, min_step_s)


def _features(entries: Sequence[StepEntry]) -> tuple[Matrix, Vector]:
    """Return the features of each step divided by its measured seconds, and the scale of each feature.

    The features are multiplied by the scale, which gives them a mean square of 1.
    """
    x = np.array(
        [(1.0, e.prefill_tokens, e.attended, e.context_tokens, e.decodes) for e in entries], dtype=np.float64
    ) / np.array([[e.elapsed_s] for e in entries])
    size = np.sqrt((x**2).mean(axis=0))
    scale = np.where(size > 0, 1.0 / np.where(size > 0, size, 1.0), 0.0)  # the coefficient of an absent feature is 0
    return x * scale, scale


def _replay(entries: Sequence[StepEntry]) -> list[Prediction]:
    """Return the predictions of the online model, which predicts each step before it observes the step."""
    model, predictions = StepTimeModel(), []
    for number, entry in enumerate(entries):
        if number >= WARM_STEPS:
            predictions.append(Prediction(entry, model.predict(entry.work)))
        model.observe(entry.work, entry.elapsed_s)
    return predictions


def _spread(ratios: Sequence[float]) -> float:
    """Return the standard deviation without the influence of outliers.

    It is half the distance between the quantiles 0.16 and 0.84.
    """
    low, high = np.quantile(ratios, (0.16, 0.84))
    return float(high - low) / 2


def _host_overhead(entries: Sequence[StepEntry]) -> float:
    """Return the median time between two steps in seconds: the engine is idle then, although there is work.

    Gaps of `IDLE_S` or more are left out, because there was no work in them.
    """
    gaps = (after.t - before.t - after.elapsed_s for before, after in zip(entries, entries[1:], strict=False))
    return max(0.0, median([gap for gap in gaps if gap < IDLE_S] or [0.0]))
