"""`GET /` and the files of the console: who gets the page, under which policy, and that all of it is served here."""

import re
from pathlib import Path

from gateway import console
from tests.gateway.stand import running_stand
from tests.gateway.tiny_model import MODEL
from tidegate.settings.gateway import GatewaySettings

BROWSER = {"accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}
STATIC = Path(console.__path__[0]) / "static"
FILES = sorted(str(path.relative_to(STATIC)) for path in STATIC.rglob("*") if path.is_file())


async def test_browsers_get_the_page_and_api_clients_json() -> None:
    async with running_stand(with_worker=False) as stand:
        shown = await stand.http.get("/", headers=BROWSER)
        assert shown.headers["content-type"].startswith("text/html") and "<main>" in shown.text
        for accept in ("*/*", "application/json"):
            answer = await stand.http.get("/", headers={"accept": accept})
            assert answer.json()["models"][0] == MODEL
            assert answer.headers["vary"] == shown.headers["vary"] == "Accept"
        for headers in (BROWSER, {}):
            probe = await stand.http.head("/", headers=headers)
            assert (probe.status_code, probe.content) == (200, b"")
        assert (await stand.http.post("/")).headers["allow"] == "GET, HEAD"
        assert "/" in (await stand.http.get("/openapi.json")).json()["paths"]


async def test_everything_comes_from_this_server_under_a_strict_policy() -> None:
    async with running_stand(with_worker=False) as stand:
        shown = await stand.http.get("/", headers=BROWSER)
        policy = shown.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "script-src 'self'" in policy and "unsafe" not in policy
        assert not re.search(r"<script(?![^>]*\bsrc=)|\bon\w+=|\bstyle=|<style", shown.text), "nothing inline"
        links = re.findall(r'(?:src|href)="([^"#]+)"', shown.text)
        assert not [link for link in links if "//" in link]
        for name in FILES:
            answer = await stand.http.get(f"/console/{name}")
            assert answer.content == (STATIC / name).read_bytes(), name
            assert answer.headers["x-content-type-options"] == "nosniff"
        for link in links:
            assert (await stand.http.get(f"/{link}")).status_code == 200, link


async def test_a_browser_asks_for_each_file_again_and_gets_304() -> None:
    async with running_stand(with_worker=False) as stand:
        first = await stand.http.get("/console/main.js")
        again = await stand.http.get("/console/main.js", headers={"if-none-match": first.headers["etag"]})
        assert first.headers["cache-control"] == "no-cache" and again.status_code == 304
        assert first.headers["content-type"].partition(";")[0] in ("text/javascript", "application/javascript")


async def test_no_other_file_is_served() -> None:
    async with running_stand(with_worker=False) as stand:
        for path in ("/console/none.js", "/console/", "/console/..%2f__init__.py", "/console/%2e%2e/__init__.py"):
            answer = await stand.http.get(path)
            assert answer.status_code == 404 and answer.json()["error"]["type"] == "invalid_request_error", path


async def test_it_can_be_switched_off() -> None:
    assert GatewaySettings(console=False).flags(GatewaySettings).count("--no-console") == 1
    async with running_stand(with_worker=False, console=False) as stand:
        assert (await stand.http.get("/", headers=BROWSER)).json()["models"][0] == MODEL
        assert (await stand.http.get("/console/main.js")).status_code == 404


def test_the_console_names_an_address_that_a_browser_on_this_machine_can_open() -> None:
    addresses = {"127.0.0.1": "127.0.0.1", "0.0.0.0": "localhost", "::": "localhost", "::1": "[::1]"}
    for host, shown in addresses.items():
        assert GatewaySettings(host=host, port=81).console_url == f"http://{shown}:81/"


def test_the_library_is_vendored_with_its_licence() -> None:
    assert "MIT" in (STATIC / "vendor" / "uPlot.LICENSE").read_text(encoding="utf-8")
