"""The command `loadtest calibrate`: fits a cost card for the simulator to a step log, or to a sweep of an engine.

Knows flags, files and exit codes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter

from pydantic import Field

from engine.config import EngineConfig
from engine.factory import build_torch_engine
from engine.interface import EngineInfo
from loadtest.calibration.fit import Calibration, calibrate
from loadtest.calibration.report import calibration_record, cost_card
from loadtest.calibration.step_records import read_step_log
from loadtest.calibration.sweep import Sweep, SweepLimits, repeated_mape
from loadtest.commands import ModelCommand
from loadtest.machine import hardware
from loadtest.model_shapes import ShapeError
from loadtest.progress import ShownStart, progress
from loadtest.running import PLOTS, one_sentence, require
from scheduler.drivers.steps.step_log import StepEntry

QUICK_S = 3.0  # longest sweep with --quick


@dataclass(frozen=True, slots=True)
class _Measured:
    """The measured steps of one engine.

    `repeated_mape` is the mean relative deviation of identical steps from their median; None if no step was repeated.
    """

    engine: EngineInfo
    entries: Sequence[StepEntry]
    repeated_mape: float | None = None


class Calibrate(ModelCommand):
    """Fit a cost card for the simulator to the log of a worker (--step-log) or, without a log, to a sweep.

    A sweep runs an engine in this process through random steps of many sizes.
    """

    step_log: Path | None = Field(
        None, description="File that `tidegate worker --step-log` wrote; unset: measure a sweep of steps."
    )
    out: Path = Field(Path("cost-card.json"), description="Where the card is written.")
    plot: Path | None = Field(None, description="Also draw predicted against measured to this PNG.")
    name: str = Field("", description="The card's name; default: the model's.")
    price_per_hour: float = Field(0.0, ge=0, description="Price of one worker; the simulator computes costs from it.")
    seconds: float = Field(60.0, gt=0, le=3600, description="Length of the sweep.")
    max_decodes: int = Field(64, ge=1, le=4096, description="Largest number of decodes in one step of the sweep.")
    max_context: int = Field(4096, ge=32, description="Length of the longest sequence of the sweep, in tokens.")
    kv_mib: int = Field(0, ge=0, description="KV memory of the sweep's engine in MiB; 0: the engine's default.")

    def cli_cmd(self) -> None:
        with one_sentence(ShapeError, ValueError, OSError):
            if self.plot is not None:
                require(PLOTS, "--plot")
            measured = self._measured()
            calibration = calibrate(measured.entries)
        if self.step_log is None:  # no scheduler runs between the steps of a sweep
            calibration = replace(calibration, host_overhead_s=0.0)
        self._write(measured, calibration)

    def _write(self, measured: _Measured, calibration: Calibration) -> None:
        model = Path(measured.engine.model_path).name
        date = datetime.now(UTC).date().isoformat()
        measured_on = f"{hardware()}; {model}, {measured.engine.dtype} on {measured.engine.device}; {date}"
        card = cost_card(calibration, measured.engine, self.name or model, measured_on, self.price_per_hour)
        self.out.parent.mkdir(parents=True, exist_ok=True)
        self.out.write_text(card.model_dump_json(indent=2) + "\n", encoding="utf-8")
        if self.plot is not None:
            from loadtest.calibration.plot import plot_calibration  # imports matplotlib

            plot_calibration(calibration, self.plot)
        record = calibration_record(calibration, measured.repeated_mape, self.out)
        self.conclude(record, measured.engine.model_path)

    def _measured(self) -> _Measured:
        if self.step_log is None:
            return self._sweep()
        records = read_step_log(self.step_log)
        if records.engine is None:
            raise ValueError(f"{self.step_log} does not say what the engine is: its first line is missing")
        return _Measured(records.engine, records.entries)

    def _sweep(self) -> _Measured:
        config = EngineConfig(
            model=str(self.model_dir()),
            dtype=self.dtype,
            device=self.device,
            kv_cache_bytes=self.kv_mib * 2**20 or None,
            num_threads=self.num_threads,
            steps_ahead=0,  # no async scheduling, so that a measured time belongs to one step only
        )
        engine = build_torch_engine(config, ShownStart())
        seconds = min(self.seconds, QUICK_S) if self.quick else self.seconds
        limits = SweepLimits(seconds=seconds, max_decodes=self.max_decodes, max_context=self.max_context)
        sweep = Sweep(engine, limits, self.seed)
        try:
            entries = list(_shown(sweep.run(), seconds))
            with progress("repeating steps"):
                return _Measured(engine.info, entries, repeated_mape(sweep.repeat()))
        finally:
            engine.close()


def _shown(entries: Iterator[StepEntry], seconds: float) -> Iterator[StepEntry]:
    """Yield `entries`, which take about `seconds`, and show how far they are."""
    with progress("measuring steps", seconds) as show:
        began_s = perf_counter()
        for entry in entries:
            show(perf_counter() - began_s)
            yield entry
