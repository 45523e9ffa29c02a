"""The page /docs: everything that it loads comes from this server."""

import asyncio
import re
import shutil
import tempfile
from pathlib import Path

import pytest

from gateway.routes.pages import ASSETS
from tests.gateway.stand import running_stand

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


async def test_every_asset_of_the_page_is_served_here() -> None:
    async with running_stand(with_worker=False) as stand:
        page = await stand.http.get("/docs")
        links = re.findall(r'(?:src|href)="([^"]+)"', page.text)
        assert {link.rpartition("/")[2] for link in links} == {*ASSETS, "start.js"}
        for link in links:
            answer = await stand.http.get(f"/{link}")
            assert answer.status_code == 200 and answer.content, link
            assert answer.headers["content-type"].split(";")[0] in (*ASSETS.values(), "text/javascript")
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "http" not in policy
        assert "//" not in page.text.replace("<!DOCTYPE html>", ""), "no address of another server"
        assert (await stand.http.get("/redoc")).status_code == 404


@pytest.mark.skipif(BROWSER is None, reason="no Chromium")
async def test_a_browser_without_other_servers_shows_the_api() -> None:
    assert BROWSER is not None
    async with running_stand(with_worker=False) as stand:
        with tempfile.TemporaryDirectory() as profile:
            dom, log = await browse(BROWSER, f"{stand.url}/docs", Path(profile))
    assert "/v1/chat/completions" in dom, log
    assert "Content Security Policy" not in log


async def browse(browser: str, url: str, profile: Path) -> tuple[str, str]:
    """Return the page's elements after its scripts have run, and the browser's log. It reaches this machine only."""
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=20000", "--dump-dom"]
    flags += ["--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", f"--user-data-dir={profile}"]
    flags += ["--enable-logging=stderr", "--disable-dev-shm-usage"]
    process = await asyncio.create_subprocess_exec(
        browser, *flags, url, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(60):
        dom, log = await process.communicate()
    return dom.decode(), log.decode()
