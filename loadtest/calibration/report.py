"""Convert a calibration into a cost card and into a record. Fits nothing and draws nothing."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from engine.interface import EngineInfo
from engine.step_time.cost import StepCost
from loadtest.calibration.fit import Calibration, Errors, KindFit
from loadtest.reporting.formats import ABSENT
from loadtest.reporting.record import Record, Section, Table
from loadtest.simulation.cost_card import Coefficients, CostCard

MAX_NOISE = 0.5  # the largest noise that a cost card accepts


def cost_card(
    calibration: Calibration, info: EngineInfo, name: str, measured_on: str, price_per_hour: float
) -> CostCard:
    return CostCard(
        name=name,
        measured_on=measured_on,
        decode=_coefficients(calibration.decode.cost),
        mixed=_coefficients(calibration.mixed.cost),
        floor_s=calibration.min_step_s,
        noise=min(calibration.noise, MAX_NOISE),
        num_blocks=info.num_blocks,
        block_size=info.block_size,
        max_step_tokens=info.max_step_tokens,
        max_model_len=info.max_model_len,
        suspends_steps=info.suspends_steps,
        num_layers=info.num_layers,
        host_overhead_s=calibration.host_overhead_s,
        num_swap_blocks=info.num_swap_blocks,
        swap_block_s=info.swap_block_s,
        price_per_hour=price_per_hour,
    )


def _coefficients(cost: StepCost) -> Coefficients:
    return Coefficients(
        step_s=cost.step_s,
        prefill_token_s=cost.prefill_token_s,
        attend_s=cost.attend_s,
        context_token_s=cost.context_token_s,
        decode_s=cost.decode_s,
    )


def calibration_record(calibration: Calibration, repeated_mape: float | None, card_file: Path) -> Record:
    return Record(
        sections=[
            Section(table=_coefficients_table(calibration)),
            Section(table=_errors_table(calibration), notes=(_noise(calibration, repeated_mape),)),
            Section(notes=(f"written: {card_file}",)),
        ],
        data=_calibration_as_dict(calibration, repeated_mape),
    )


def _coefficients_table(calibration: Calibration) -> Table:
    return Table.of(
        ("steps", "fitted", "outliers", "step ms", "prefill µs/token", "attend ns", "context µs/token", "decode µs"),
        [_coefficient_cells(fit) for fit in calibration.kinds],
    )


def _errors_table(calibration: Calibration) -> Table:
    header = ("steps", "predicted by", "number", "MAPE", "signed", "p95 of |error|", "p95 of T ÷ predicted")
    rows = [_error_cells(fit.kind, "the card, held out", fit.held_out) for fit in calibration.kinds]
    rows += [_error_cells(fit.kind, "the online model", fit.online) for fit in calibration.kinds if fit.online]
    return Table.of(header, rows)


def _noise(calibration: Calibration, repeated_mape: float | None) -> str:
    repeated = ABSENT if repeated_mape is None else f"{repeated_mape:.1%}"
    return (
        f"shortest step {1e3 * calibration.min_step_s:.2f} ms; noise {calibration.noise:.1%}; host between two steps "
        f"{1e3 * calibration.host_overhead_s:.2f} ms; identical steps differ from their median by {repeated}"
    )


def _coefficient_cells(fit: KindFit) -> tuple[str, ...]:
    cost = fit.cost
    return (
        fit.kind,
        str(fit.fitted),
        str(fit.outliers),
        f"{1e3 * cost.step_s:.2f}",
        f"{1e6 * cost.prefill_token_s:.1f}" if fit.kind == "mixed" else ABSENT,
        f"{1e9 * cost.attend_s:.1f}" if fit.kind == "mixed" else ABSENT,
        f"{1e6 * cost.context_token_s:.3f}",
        f"{1e6 * cost.decode_s:.1f}",
    )


def _error_cells(kind: str, by: str, errors: Errors) -> tuple[str, ...]:
    shares = (errors.mape, errors.signed, errors.worst_p95)
    cells = (f"{shares[0]:.2%}", f"{shares[1]:+.2%}", f"{shares[2]:.1%}")
    return (kind, by, str(errors.steps), *cells, f"{errors.ratio_p95:.3f}")


def _calibration_as_dict(calibration: Calibration, repeated_mape: float | None) -> dict[str, Any]:
    kinds = {
        fit.kind: {
            "coefficients": asdict(fit.cost),
            "fitted": fit.fitted,
            "outliers": fit.outliers,
            "held_out": asdict(fit.held_out),
            "online_model": asdict(fit.online) if fit.online else None,
        }
        for fit in calibration.kinds
    }
    return {
        **kinds,
        "floor_s": calibration.min_step_s,
        "noise": calibration.noise,
        "host_overhead_s": calibration.host_overhead_s,
        "repeated_steps_mape": repeated_mape,
    }
