"""`tidegate top`: a running server in a terminal, from GET /admin/overview. Works with any URL and key."""

import argparse
import os
import select
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
from rich.console import Console
from rich.live import Live

from tidegate.away import away
from tidegate.top.view import notice, screen

LOCAL = "http://127.0.0.1:8000"
TIMEOUT_S = 10.0  # seconds for the server to answer; it waits 2 s for its store
LEAST_INTERVAL_S = 0.1  # seconds between two looks
FILE_COLUMNS = 160  # width of what is not written to a terminal, so that no cell is cut
EX_FAILED = 1
END_KEYS = frozenset(b"qQ\x04")  # also Ctrl-D; Ctrl-C is a signal
NEXT_KEYS = frozenset(b"mM")


class Refused(Exception):
    """The server will not show its overview. The message is a sentence for the user; another try does not help."""


class Away(Exception):
    """The server does not answer now. The message is a sentence for the user."""


def run_top(args: list[str]) -> int:
    """Run the command. Return the exit code: 0; 1 if the server does not show its overview."""
    options = _parser().parse_args(args)
    url = options.base_url.rstrip("/").removesuffix("/v1")
    headers = {"authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    on_terminal = sys.stdout.isatty()
    console = Console(width=None if on_terminal else FILE_COLUMNS)
    try:
        with httpx.Client(base_url=url, headers=headers, timeout=TIMEOUT_S) as client:
            if options.once or not on_terminal:
                console.print(screen(_read(client, options.model), url))
            else:
                _watch(client, url, options.model, console, max(options.interval_s, LEAST_INTERVAL_S))
    except KeyboardInterrupt:
        pass
    except (Refused, Away) as problem:
        print(f"tidegate top: {problem}", file=sys.stderr)
        return EX_FAILED
    except (httpx.InvalidURL, httpx.UnsupportedProtocol):
        print(f"tidegate top: {url!r} is no URL of a server, such as {LOCAL}.", file=sys.stderr)
        return EX_FAILED
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tidegate top",
        description="Watch a running server: queues, SLOs, workers, batches. "
        "Press m for the next one of several models, q or Ctrl-C to end.",
    )
    url = os.environ.get("OPENAI_BASE_URL") or LOCAL
    parser.add_argument("--base-url", default=url, metavar="URL", help=f"default: OPENAI_BASE_URL, or {LOCAL}")
    key = os.environ.get("TIDEGATE_API_KEY") or os.environ.get("OPENAI_API_KEY")
    parser.add_argument(
        "--api-key",
        default=key,
        metavar="KEY",
        help="a key with `role: read`; default: TIDEGATE_API_KEY, or OPENAI_API_KEY",
    )
    parser.add_argument("--model", metavar="NAME", help="one of several models; default: the first one")
    parser.add_argument("--interval-s", type=float, default=1.0, metavar="S", help="seconds between two looks")
    parser.add_argument("--once", action="store_true", help="print the state once, as without a terminal")
    return parser


def _read(client: httpx.Client, model: str | None) -> dict[str, Any]:
    """Return the server's overview, of its first model by default. Raises `Away` and `Refused`."""
    try:
        answer = client.get("/admin/overview", params={"model": model} if model else {})
    except httpx.UnsupportedProtocol:
        raise
    except httpx.TransportError as error:
        raise Away(away(str(client.base_url), error)) from None
    if answer.status_code == 404 and model and "error" in answer.text:
        raise Refused(_message(answer))
    if answer.status_code == 404:
        raise Refused(f"{client.base_url} has no /admin/overview: it is no Tidegate, or an older one.")
    if answer.status_code in (401, 403):
        raise Refused(f"{_message(answer)} Set TIDEGATE_API_KEY to a key with `role: read` or `admin: true`.")
    if answer.status_code != 200:
        raise Away(f"{client.base_url} answered {answer.status_code}: {_message(answer)}")
    try:
        overview: dict[str, Any] = answer.json()
        return overview
    except ValueError:
        raise Refused(f"{client.base_url} answered with something else than JSON: it is no Tidegate.") from None


def _message(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return answer.text[:200]


def _watch(client: httpx.Client, url: str, model: str | None, console: Console, interval_s: float) -> None:
    """Show the overview again and again, until a key ends it. A server that is away is waited for."""
    models: list[str] = []
    with _key_by_key(), Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            try:
                overview = _read(client, model)
                model, models = overview["model"], overview["models"]
                view = screen(overview, url)
            except Away as problem:
                view = notice(str(problem), url)
            live.update(view, refresh=True)
            pressed = _pressed_within(interval_s)
            if END_KEYS & pressed:
                return
            if NEXT_KEYS & pressed and model in models:
                model = models[(models.index(model) + 1) % len(models)]


def _pressed_within(seconds: float) -> frozenset[int]:
    """Wait, and return as soon as a key is pressed that does something; the end of the terminal is Ctrl-D."""
    until_s = time.monotonic() + seconds
    while (left_s := until_s - time.monotonic()) > 0:
        if not sys.stdin.isatty():
            time.sleep(left_s)
        elif select.select([sys.stdin], [], [], left_s)[0]:
            pressed = frozenset(os.read(sys.stdin.fileno(), 64) or b"\x04")
            if pressed & (END_KEYS | NEXT_KEYS):
                return pressed
    return frozenset()


@contextmanager
def _key_by_key() -> Iterator[None]:
    """Let the terminal pass on each key at once, without showing it, within the block."""
    if not sys.stdin.isatty():
        yield
        return
    import termios  # not on Windows
    import tty

    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
