"""The base of commands that measure a running server: their common flags, and how a command ends."""

from pathlib import Path

from pydantic import AliasChoices, BaseModel, Field

from loadtest.client.http import Target
from loadtest.reporting.output import publish
from loadtest.reporting.record import Provenance, Record
from loadtest.running import running_server


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
