"""`python -m bench locust`: its flags, the server that it starts, and where its results go.

The two runs of Locust are in `bench.locust.runs`.
"""

import shlex
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path

from pydantic import AliasChoices, BaseModel, Field

from bench.isolation.admin import tiers_in_force, tiers_restored
from bench.isolation.servers import serving_tidegate
from bench.locust.runs import LocustRun, Users, answered_per_s, locust_record, run_both
from loadtest.client.http import Target
from loadtest.extras import LOCUST, require
from loadtest.reporting.output import publish
from loadtest.reporting.page import write_page
from loadtest.reporting.record import Drawing, Provenance
from loadtest.running import ends_on_sigterm, print_progress, run_to_end, running_server
from loadtest.shipped_tiers import read_shipped_tiers


class Locust(BaseModel):
    """Locust's users on one server, first with continuous batching and then with one request at a time.

    Writes one page for both runs.
    """

    url: str = Field("", description="A running Tidegate with the demo model; empty: one is started.")
    server_flags: str = Field("", description="More flags for `tidegate serve`, in one string.")
    users: int = Field(50, ge=1, le=500, description="Locust users, of the realtime and the bulk tier.")
    spawn_rate: float = Field(10.0, gt=0, description="Users that start each second.")
    seconds: float = Field(60.0, gt=0, le=3600, description="Seconds of each of the two runs.")
    threads: int = Field(0, ge=0, description="CPU threads of the server that is started; 0: the server's own choice.")
    allow_remote: bool = Field(False, description="Accept a URL that is not this machine.")
    report_dir: Path = Field(
        Path("locust-report"), validation_alias=AliasChoices("report"), description="Directory for index.html."
    )
    json_file: Path | None = Field(
        None, validation_alias=AliasChoices("json"), description="Also write the result to this file."
    )

    def cli_cmd(self) -> None:
        with ends_on_sigterm():
            run_to_end(self.compare())

    async def compare(self) -> None:
        """Run Locust in both ways and report the results.

        Raises `TargetError` if Locust or the server fails, and `MissingExtra` if a package is missing. Exits with 1 if
        no request was answered with continuous batching.
        """
        require(LOCUST, "locust")
        users = Users(self.users, self.spawn_rate, self.seconds)
        async with AsyncExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tidegate-locust-")))
            target = await self._server(stack, folder)
            ours = await tiers_in_force(target) if self.url else read_shipped_tiers()
            print_progress(f"two runs of {self.seconds:g} s with {self.users} users")
            if self.url:
                await stack.enter_async_context(tiers_restored(target))
            runs = await run_both(target, ours, users, folder)
        self._conclude(runs, users, target)

    async def _server(self, stack: AsyncExitStack, folder: Path) -> Target:
        if self.url:
            return await running_server(self.url, self.allow_remote)
        flags = shlex.split(self.server_flags)
        return (await stack.enter_async_context(serving_tidegate(None, "auto", folder, self.threads, flags))).target

    def _conclude(self, runs: list[LocustRun], users: Users, target: Target) -> None:
        from bench.locust.plot import draw_runs  # imports matplotlib

        provenance = Provenance.of_this_run(target.model, seed=0)
        record = locust_record(runs, Drawing(draw_runs(runs)), users, provenance)
        publish(record, self.json_file)
        print(f"\nwritten: {write_page(self.report_dir, record)}")
        if not answered_per_s(runs[0]):
            raise SystemExit(1)
