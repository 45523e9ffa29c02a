"""The page /docs: everything that it loads comes from this server."""

import re

import pytest

from gateway.routes.pages import ASSETS
from tests.gateway.console.chromium import CHROMIUM, running_browser
from tests.gateway.stand import running_stand, serving_stand


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


@pytest.mark.full
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")
async def test_a_browser_without_other_servers_shows_the_api() -> None:
    async with (
        serving_stand(with_worker=False) as stand,
        running_browser() as browser,
        browser.page(f"{stand.url}/docs") as page,
    ):
        await page.until("document.body.innerText.includes('/v1/chat/completions')")
        assert page.complaints == []
