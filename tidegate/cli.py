"""The command `tidegate`: reads the settings of a subcommand and runs it.

The modules of a subcommand, also those of its settings, are imported only after it is chosen: `serve` starts two more
such processes, and what they import takes most of their start.
"""

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from pkgutil import resolve_name

from pydantic import ValidationError
from pydantic_settings import CliApp, SettingsError

from engine import gguf
from engine.config import EngineStartError
from engine.imports import without_collections
from tidegate.logs import configure_logging
from tidegate.settings import base
from tidegate.settings.base import CONFIG_VARIABLE, CommonSettings
from tidegate.supervision.keeper import EX_CONFIG
from tidegate.supervision.process import keep_files_private

EX_USAGE = 2
NO_MODEL = ("adopt", "backup", "restore")  # commands with the flags of `serve` that need no model
EX_INTERRUPTED = 130  # 128 + SIGINT
EX_PIPE = 141  # 128 + SIGPIPE

USAGE = """\
usage: tidegate COMMAND [--config FILE] [--flag value …]

Serve interactive and bulk LLM traffic on one GPU, behind the OpenAI API.

commands:
  serve      everything on this machine: store, worker and gateway (http://127.0.0.1:8000/v1)
  gateway    only the HTTP server, with an existing Redis or Valkey (--redis-url)
  worker     only an engine, with an existing Redis or Valkey (--redis-url)
  doctor     check this machine and the settings of `serve`, and say what to do
  demo       start everything on free ports, ask questions, run bulk requests beside chat, print a table
  simulate   simulate a load on virtual workers: latency percentiles, and the number of workers needed
  top        watch a running server: queues, SLOs, workers, batches; see `tidegate top --help`
  batch      run batches from files and tables; see `tidegate batch --help`
  adopt      tie the storage of files to the store, where a gateway refuses to start because they do not match
  backup     write what store and storage of files hold into a folder, also while the server runs
  restore    write a backup into an empty store
  keys       add, list and revoke the API keys of a file; see `tidegate keys --help`
  loadtest   load generators; see `tidegate loadtest --help`

`tidegate COMMAND --help` lists a command's flags. Each flag can also be set as TIDEGATE_<FLAG> in the environment
or in a YAML file (--config FILE, or TIDEGATE_CONFIG). A flag overrides the environment, and the environment overrides
the file. `tidegate --version` prints the version.
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the subcommand in `arguments` (default: the command line).

    Exits with the subcommand's code, with 130 after a Ctrl-C that the subcommand does not handle, or with 141 if nobody
    reads the output any more.
    """
    try:
        code = _run_arguments(list(sys.argv[1:] if arguments is None else arguments))
        sys.stdout.flush()
    except KeyboardInterrupt:
        code = EX_INTERRUPTED
    except BrokenPipeError:  # as in `tidegate batch list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python still writes at its end
        code = EX_PIPE
    sys.exit(code)


def _run_arguments(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0 if args else EX_USAGE
    if args[0] == "--version":
        from importlib.metadata import version

        print(f"tidegate {version('tidegate')}")
        return 0
    if args[0] not in COMMANDS:
        print(f"tidegate: there is no command {args[0]!r}\n\n{USAGE}", end="", file=sys.stderr)
        return EX_USAGE
    return _run(*args)


def _run(name: str, *args: str) -> int:
    """Run a command with its arguments. Return its exit code."""
    function, kind_name = COMMANDS[name]
    if kind_name is None:
        run_with_arguments: Callable[[list[str]], int] = resolve_name(function)
        return run_with_arguments(list(args))
    with without_collections():
        kind: type[CommonSettings] = resolve_name(f"tidegate.settings.{kind_name}")
    settings = _load(kind, name, list(args))
    if name in ("gateway", "worker") and not settings.redis_url:
        needed = "this command needs a store: set --redis-url redis://HOST:PORT (or unix:///PATH)"
        print(f"tidegate: {needed}", file=sys.stderr)
        return EX_USAGE
    if name == "worker" and getattr(settings, "engine", "") == "static":
        function = "tidegate.worker.static_worker:run_static_worker"
    with without_collections():
        run: Callable[[CommonSettings], int] = resolve_name(function)
    return run(settings)


def run_loadtest(args: list[str]) -> int:
    os.execv(sys.executable, [sys.executable, "-m", "loadtest", *args])


def run_simulate(args: list[str]) -> int:
    return run_loadtest(["simulate", *args])


# The function of each command, and the settings that it gets, in tidegate.settings. Both are imported when they are
# needed. None: the function gets the arguments.
COMMANDS: dict[str, tuple[str, str | None]] = {
    "serve": ("tidegate.serve:run_serve", "commands:ServeSettings"),
    "gateway": ("tidegate.gateway.process:run_gateway", "gateway:GatewaySettings"),
    "worker": ("tidegate.worker.engine_worker:run_worker", "worker:WorkerSettings"),
    "doctor": ("tidegate.doctor.command:run_doctor", "commands:DoctorSettings"),
    "demo": ("tidegate.demo.command:run_demo", "commands:DemoSettings"),
    # Whoever adopts has the flags of `serve` or of `gateway`.
    "adopt": ("tidegate.adopt:run_adopt", "commands:ServeSettings"),
    "backup": ("tidegate.backup.command:run_backup", "commands:BackupSettings"),
    "restore": ("tidegate.backup.command:run_restore", "commands:RestoreSettings"),
    "keys": ("tidegate.keys:run_keys", None),
    "batch": ("tidegate.batch.command:run_batch", None),
    "top": ("tidegate.top.command:run_top", None),
    "simulate": ("tidegate.cli:run_simulate", None),
    "loadtest": ("tidegate.cli:run_loadtest", None),
}


def _load(kind: type[CommonSettings], command: str, args: list[str]) -> CommonSettings:
    """Return the settings from flags, environment and file.

    If settings are invalid, print one line for each mistake and end the program.
    """
    try:
        args = _take_config(args)
        named = type(
            kind.__name__, (kind,), {"model_config": {"cli_prog_name": f"tidegate {command}"}, "__doc__": kind.__doc__}
        )
        settings: CommonSettings = CliApp.run(named, cli_args=_joined_lists(joined_vllm_args(args)))
    except ValidationError as error:
        for e in error.errors(include_url=False):
            name = ".".join(str(part) for part in e["loc"]).replace("_", "-")
            flag = f"--{name}: " if name else ""  # an error about several settings names them itself
            print(f"tidegate {command}: {flag}{e['msg'].removeprefix('Value error, ')}", file=sys.stderr)
        sys.exit(EX_USAGE)
    except (SettingsError, base.SettingsError) as error:
        print(f"tidegate {command}: {error}", file=sys.stderr)
        sys.exit(EX_USAGE)
    configure_logging(command, settings.log_level, settings.log_format)
    keep_files_private()
    return _with_unpacked_model(command, settings)


def _with_unpacked_model(command: str, settings: CommonSettings) -> CommonSettings:
    """Return the settings with a directory in place of a GGUF file. If it cannot be read, end the program."""
    paths = settings.named_models or {"": settings.model or ""}
    if not any(path.endswith(gguf.SUFFIX) for path in paths.values()) or command in NO_MODEL:
        return settings
    # The native engine reads the file itself, and unpacks its weights where it cannot keep the blocks.
    computes = getattr(settings, "engine", "native") == "vllm" and command != "gateway"
    with_weights = computes and settings.load_format == "auto"
    try:
        paths = {
            name: str(gguf.unpacked(Path(path).expanduser(), with_weights=with_weights))
            if path.endswith(gguf.SUFFIX)
            else path
            for name, path in paths.items()
        }
    except EngineStartError as error:
        print(f"tidegate {command}: {error}", file=sys.stderr)
        sys.exit(EX_CONFIG)
    if settings.named_models:
        return settings.model_copy(update={"model": ",".join(f"{name}={path}" for name, path in paths.items())})
    return settings.model_copy(update={"model": paths[""], "served_model_name": list(settings.base_names)})


def _take_config(args: list[str]) -> list[str]:
    """Return `args` without `--config FILE`. FILE is put into the environment, where child processes find it as well.

    Raises `SettingsError` if FILE is missing or invalid.
    """
    rest: list[str] = []
    items = iter(args)
    for item in items:
        name, _, value = item.partition("=")
        if name != "--config":
            rest.append(item)
            continue
        os.environ[CONFIG_VARIABLE] = value if "=" in item else next(items, "")
        if not os.environ[CONFIG_VARIABLE]:
            raise base.SettingsError("--config needs a FILE")
    if os.environ.get(CONFIG_VARIABLE):
        from tidegate.settings.commands import check_file  # with the settings of all commands

        check_file(Path(os.environ[CONFIG_VARIABLE]))
    return rest


def joined_vllm_args(args: list[str]) -> list[str]:
    """Join `--vllm-args VALUE` to one argument, because VALUE looks like a flag."""
    items = iter(args)
    return [f"{item}={next(items, '')}" if item == "--vllm-args" else item for item in items]


def _joined_lists(args: list[str]) -> list[str]:
    """Join the names after `--served-model-name` with commas: `a b` → `a,b`. All other arguments stay as they are."""
    joined: list[str] = []
    in_names = False
    for item in args:
        if in_names and not item.startswith("--") and not joined[-1].startswith("--"):
            joined[-1] += f",{item}"
            continue
        in_names = item == "--served-model-name" or (in_names and not item.startswith("--"))
        joined.append(item)
    return joined
