"""The flags that commands share: of those that measure an engine in this process, and of those that ask a server.

Both know how a command ends: with its record printed and, if the user asked for it, written as JSON.
"""

from dataclasses import replace
from pathlib import Path

from pydantic import AliasChoices, BaseModel, Field

from loadtest.client.http import Target
from loadtest.machine import usable_cores
from loadtest.model_shapes import shape_with_weights
from loadtest.reporting.record import Provenance, Record
from loadtest.reporting.writers import publish
from loadtest.running import running_server

DEMO_MODEL = Path(__file__).parents[1] / "demo_model" / "weights"


class ModelCommand(BaseModel):
    """The flags of a command that measures an engine on a model, and how the command ends."""

    model: Path | None = Field(None, description="A transformers directory; without it, a shape with random weights.")
    shape: str = Field("135m", description="Shape of the random weights: tiny, 30m, 135m, 360m, 1b or 8b.")
    weights_dir: Path | None = Field(None, description="Where random weights are kept; default: a temporary one.")
    dtype: str = Field("bfloat16", description="Number format of weights and KV: bfloat16, float16 or float32.")
    device: str = Field("cpu", description="cpu, cuda or cuda:1 …")
    threads: int = Field(0, ge=0, le=1024, description="CPU threads of each system; 0: as many as cores.")
    seed: int = Field(1, ge=0, description="The same seed makes the same weights and prompts.")
    quick: bool = Field(False, description="Use the demo model and little work, to see that everything runs.")
    json_file: Path | None = Field(
        None, validation_alias=AliasChoices("json"), description="Also write the result to this file."
    )

    @property
    def num_threads(self) -> int:
        return self.threads or len(usable_cores())

    def model_dir(self) -> Path:
        """Return the directory of the model to measure; create it if necessary. Raises `ShapeError`."""
        if self.model is not None:
            return self.model
        if self.quick:
            return DEMO_MODEL
        return shape_with_weights(self.shape, self.dtype, self.device, self.seed, self.weights_dir)

    def conclude(self, record: Record, model: str) -> Record:
        """Print the record and, if the user asked for JSON, write it to a file.

        Return the record as it was written: with its provenance, and with the flags that describe the model.
        """
        options = {"threads": self.num_threads, "dtype": self.dtype, "device": self.device}
        provenance = Provenance.of_this_run(model, self.seed)
        published = replace(record, data={**options, **record.data}, provenance=provenance)
        publish(published, self.json_file)
        return published


class ServerCommand(BaseModel):
    url: str = Field("http://127.0.0.1:8000", description="Base URL of an OpenAI-compatible server.")
    model: str = Field("", description="Model to ask for; empty: the first that the server lists.")
    allow_remote: bool = Field(False, description="Accept a URL that is not this machine.")
    seed: int = Field(1, ge=0, description="The same seed sends the same requests.")
    json_file: Path | None = Field(
        None, validation_alias=AliasChoices("json"), description="Also write the result to this file."
    )

    async def target(self) -> Target:
        return await running_server(self.url, self.allow_remote, self.model)

    def provenance(self, target: Target) -> Provenance:
        return Provenance.of_this_run(target.model, self.seed)

    def conclude(self, record: Record, *, passed: bool) -> None:
        publish(record, self.json_file)
        if not passed:
            raise SystemExit(1)
