"""`tidegate doctor`: check this machine and the settings of `serve`, and say what to do.

Reads and tries what `serve` with the same flags would use; changes nothing. Exit codes: 0 if `serve` can start,
otherwise 1.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from engine.config import EngineStartError
from gateway.files.object_storage import BadStorageUrl
from gateway.http.server.tls import CertificateError
from gateway.keys.file import KeyringError
from scheduler.config import TierConfigError
from tidegate.doctor.machine import (
    Finding,
    Level,
    check_descriptors,
    check_engine,
    describe_packages,
    error,
    try_engine,
)
from tidegate.doctor.server import (
    check_certificate,
    check_data_dir,
    check_keys,
    check_port,
    check_storage,
    check_store,
    check_tiers,
    check_upstream,
)
from tidegate.settings.commands import DoctorSettings, ServeSettings
from tidegate.settings.models import ModelsError
from tidegate.supervision.process import CannotStart
from tidegate.valkey import ValkeyError

Check = Callable[[ServeSettings], Iterable[Finding]]

# In this order: what takes long comes last. The name is the subject of an error that ends the check.
CHECKS: tuple[tuple[str, Check], ...] = (
    ("software", describe_packages),
    ("tiers", check_tiers),
    ("keys", check_keys),
    ("certificate", check_certificate),
    ("port", check_port),
    ("descriptors", check_descriptors),
    ("data", check_data_dir),
    ("storage", check_storage),
    ("store", check_store),
    ("upstream", check_upstream),
    ("engine", check_engine),
)
OF_A_WORKER = (check_tiers, check_engine, try_engine)
EX_FAILED = 1
COLOURS = {Level.OK: 32, Level.WARNING: 33, Level.ERROR: 31}
# Mistakes of settings and faults of the machine, each told in one sentence.
FAULTS = (
    *(CannotStart, EngineStartError, TierConfigError, KeyringError, CertificateError, ValkeyError, BadStorageUrl),
    OSError,
)


def run_doctor(settings: DoctorSettings) -> int:
    """Print what each check finds. Return the exit code."""
    checks = (*CHECKS, ("start", try_engine)) if settings.trial else CHECKS
    has_error = False
    for finding in findings(settings, checks):
        _print(finding)
        has_error |= finding.level is Level.ERROR
    print(f"\n{_conclusion(settings, has_error)}")
    return EX_FAILED if has_error else 0


def findings(settings: ServeSettings, checks: Iterable[tuple[str, Check]]) -> Iterator[Finding]:
    """Yield what the checks find. The error that ends a check is a finding too.

    Each model of several is checked by itself.
    """
    try:
        workers = settings.workers()
    except ModelsError as fault:
        yield error("models", str(fault))
        return
    for subject, check in checks:
        for name, own in workers if check in OF_A_WORKER else [("worker", settings)]:
            try:
                yield from (_named(finding, name) for finding in check(own))
            except FAULTS as fault:
                yield _named(error(subject, str(fault)), name)


def _named(finding: Finding, worker: str) -> Finding:
    """Return a finding that names its model, if there are several."""
    model = worker.removeprefix("worker").removeprefix(" of ")
    return replace(finding, text=f"{model}: {finding.text}") if model else finding


def _print(finding: Finding) -> None:
    word = f"{finding.level.value:8}"
    if sys.stdout.isatty():
        word = f"\033[{COLOURS[finding.level]}m{word}\033[0m"
    print(f"{word}{finding.subject:12}{finding.text}", flush=True)
    if finding.remedy:
        print(f"{'':20}→ {finding.remedy}", flush=True)


def _conclusion(settings: DoctorSettings, has_error: bool) -> str:
    if has_error:
        return "`tidegate serve` cannot run with these settings: see the lines marked `error`."
    hint = "" if settings.trial else " `tidegate doctor --trial` also starts the engine."
    return f"`tidegate serve` can run with these settings.{hint}"
