"""A headless Chromium that tests drive by the DevTools protocol, over a pipe: no package and no port is needed.

Each page has a profile of its own. It reaches this machine only, and keeps what the browser complains about.
"""

import asyncio
import contextlib
import json
import os
import shutil
import sys
import tempfile
from base64 import b64decode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import IO, Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)
MAX_MESSAGE_BYTES = 2**26  # a screenshot is one message
# Chromium reads commands from descriptor 3 and writes to 4. They are moved out of the way first: 3 may be one of them.
LAUNCH = (
    "import fcntl, os, sys; r, w = (fcntl.fcntl(int(n), fcntl.F_DUPFD, 10) for n in sys.argv[1:3]); "
    "os.dup2(r, 3); os.dup2(w, 4); os.execv(sys.argv[3], sys.argv[3:])"
)
# Resolves when the expression holds; the browser's own timer asks for it.
UNTIL = """new Promise((resolve, reject) => {
    const end = Date.now() + %d;
    (function look() {
        if (%s) resolve(true);
        else if (Date.now() > end) reject(new Error("it did not hold in time"));
        else setTimeout(look, 20);
    })();
})"""

# The middle of an element, after the page has been scrolled to it.
MIDDLE = """(() => {
    const element = document.querySelector(%s);
    element.scrollIntoView({block: "center"});
    const box = element.getBoundingClientRect();
    return [box.x + box.width / 2, box.y + box.height / 2];
})()"""


class Browser:
    """A running Chromium."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.WriteTransport) -> None:
        self._reader = reader
        self._writer = writer
        self._numbers = count()
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._pages: dict[str, Page] = {}
        self.downloads: asyncio.Queue[str] = asyncio.Queue()  # file names of completed downloads
        self._names: dict[str, str] = {}

    async def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        answered = self._answers[number] = asyncio.get_running_loop().create_future()
        message = {"id": number, "method": method, "params": params} | ({"sessionId": session} if session else {})
        self._writer.write(json.dumps(message).encode() + b"\0")
        async with asyncio.timeout(60):
            answer = await answered
        assert "error" not in answer, f"{method}: {answer['error']}"
        result: dict[str, Any] = answer["result"]
        return result

    async def receive(self) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):  # the browser has ended
            while True:
                message = json.loads((await self._reader.readuntil(b"\0"))[:-1])
                if "id" in message:
                    self._answers.pop(message["id"]).set_result(message)
                else:
                    self._note(message)

    def _note(self, event: dict[str, Any]) -> None:
        params = event["params"]
        if event["method"] == "Browser.downloadWillBegin":
            self._names[params["guid"]] = params["suggestedFilename"]
        if event["method"] == "Browser.downloadProgress" and params["state"] == "completed":
            self.downloads.put_nowait(self._names[params["guid"]])
        page = self._pages.get(event.get("sessionId", ""))
        if page is not None and (complaint := _complaint(event["method"], params)):
            page.complaints.append(complaint)

    @asynccontextmanager
    async def page(self, url: str, *, size: tuple[int, int] = (1280, 900), dark: bool = False) -> AsyncIterator["Page"]:
        """Yield a page that has loaded `url`. `size` is its width and height."""
        context = (await self.call("Target.createBrowserContext"))["browserContextId"]
        target = (await self.call("Target.createTarget", url="about:blank", browserContextId=context))["targetId"]
        session = (await self.call("Target.attachToTarget", targetId=target, flatten=True))["sessionId"]
        page = self._pages[session] = Page(self, session, context)
        for domain in ("Page", "Runtime", "Log"):
            await page.call(f"{domain}.enable")
        await page.resize(*size)
        await page.prefer("color-scheme", "dark" if dark else "light")
        try:
            await page.call("Page.navigate", url=url)
            await page.until("location.href !== 'about:blank' && document.readyState === 'complete'")
            yield page
        finally:
            del self._pages[session]
            await self.call("Target.disposeBrowserContext", browserContextId=context)


class Page:
    """One page. `complaints` holds errors of its scripts, warnings, and what the browser has refused."""

    def __init__(self, browser: Browser, session: str, context: str) -> None:
        self._browser = browser
        self._session = session
        self._context = context
        self.complaints: list[str] = []

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        return await self._browser.call(method, self._session, **params)

    async def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression, or what its promise gives."""
        answer = await self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            details = answer["exceptionDetails"]
            raise AssertionError(f"{details.get('exception', {}).get('description', details['text'])}: {expression}")
        return answer["result"].get("value")

    async def until(self, expression: str, timeout_s: float = 30.0) -> None:
        """Return as soon as a JavaScript expression holds."""
        await self.evaluate(UNTIL % (1000 * timeout_s, expression))

    async def text(self, selector: str) -> str:
        found: str = await self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText")
        return found

    async def click(self, selector: str) -> None:
        """Click into the middle of an element, as a mouse does: what covers it would get the click."""
        x, y = await self.evaluate(MIDDLE % json.dumps(selector))
        for kind in ("mousePressed", "mouseReleased"):
            await self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    async def type(self, selector: str, text: str) -> None:
        await self.evaluate(f"document.querySelector({json.dumps(selector)}).focus()")
        await self.call("Input.insertText", text=text)

    async def press(self, key: str, code: int, text: str = "") -> None:
        """Press a key, such as ("Enter", 13, "\\r") or ("Tab", 9)."""
        for kind in ("keyDown", "keyUp"):
            more = {"text": text} if text and kind == "keyDown" else {}
            await self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **more)

    async def choose_file(self, selector: str, path: Path) -> None:
        found = await self.call("Runtime.evaluate", expression=f"document.querySelector({json.dumps(selector)})")
        await self.call("DOM.setFileInputFiles", files=[str(path)], objectId=found["result"]["objectId"])

    async def allow_downloads(self, directory: Path) -> None:
        context = {"browserContextId": self._context}
        where = {"downloadPath": str(directory), "eventsEnabled": True, **context}
        await self._browser.call("Browser.setDownloadBehavior", behavior="allow", **where)

    async def prefer(self, feature: str, value: str) -> None:
        """Set one preference of the user, such as ("reduced-motion", "reduce"), and no other."""
        await self.call("Emulation.setEmulatedMedia", features=[{"name": f"prefers-{feature}", "value": value}])

    async def resize(self, width: int, height: int) -> None:
        is_phone = width < 600
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=is_phone
        )

    async def screenshot(self, path: Path, *, full: bool = False) -> None:
        shot = await self.call("Page.captureScreenshot", captureBeyondViewport=full)
        path.write_bytes(b64decode(shot["data"]))


def _complaint(method: str, params: dict[str, Any]) -> str:
    """Return what an event complains about; an empty string if it does not."""
    if method == "Runtime.exceptionThrown":
        return str(params["exceptionDetails"])
    if method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
        return str(params["args"])
    if method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
        return f"{params['entry']['text']} {params['entry'].get('url', '')}"
    return ""


@asynccontextmanager
async def running_browser() -> AsyncIterator[Browser]:
    """Run a Chromium with an empty profile. It ends with the block."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process, answers, commands = await _start(Path(profile))
        loop, reader = asyncio.get_running_loop(), asyncio.StreamReader(limit=MAX_MESSAGE_BYTES)
        source, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), answers)
        sink, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, commands)
        browser = Browser(reader, sink)
        receiving = asyncio.create_task(browser.receive())
        try:
            yield browser
            await browser.call("Browser.close")
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            await process.wait()
            await receiving
            source.close()
            sink.close()


async def _start(profile: Path) -> tuple[asyncio.subprocess.Process, IO[bytes], IO[bytes]]:
    """Start Chromium. Return its process and the files of its answers and of commands for it."""
    assert CHROMIUM is not None
    (commands_end, commands), (answers, answers_end) = os.pipe(), os.pipe()
    argv = [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
    try:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-ISc", LAUNCH, str(commands_end), str(answers_end), *argv),
            pass_fds=(commands_end, answers_end),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
    finally:
        os.close(commands_end)
        os.close(answers_end)  # so that reading ends with the browser
    return process, open(answers, "rb", 0), open(commands, "wb", 0)
