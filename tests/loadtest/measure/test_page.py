"""The page of a measurement in a real browser: plots, sizes, colours, and nothing from outside."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from loadtest.measure.command import draw
from loadtest.measure.report import load_record
from loadtest.reporting.record import Provenance
from loadtest.reporting.writers import write_page_file
from tests.gateway.console.chromium import CHROMIUM, Browser, running_browser
from tests.loadtest.measure.builders import BULK, CHAT, answered, cut_off, failed, measured

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium"),
    pytest.mark.asyncio(loop_scope="module"),
]
PHONE, DESK = (390, 844), (1280, 900)
PLOTS = 5  # three latencies, tokens and first tokens over time
LONG = "python -m loadtest run --url http://127.0.0.1:80 --compare tiers --users 50 --bulk-users 16 --html report.html"
NOW = Provenance(LONG, "2026-01-01T00:00:00+00:00", "a machine with a rather long name, 2 cores", "m", 1)
WIDTH = "document.documentElement.scrollWidth"
TABLE_FITS = "((e) => e.scrollWidth <= e.clientWidth)(document.querySelector('.scroll'))"
SMALLEST_TEXT = "Math.min(...[...document.querySelectorAll('svg text')].map((t) => t.getBoundingClientRect().height))"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with running_browser() as running:
        yield running


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    def part(start_s: float, ttft_s: float) -> list:  # type: ignore[type-arg]
        chats = [answered(start_s + 0.05 * i, ttft_s + 0.01 * (i % 7)) for i in range(30)]
        bulk = [answered(start_s + 0.1 * i, 0.5, class_name="bulk") for i in range(10)]
        return [*chats, *bulk, failed(start_s, 429, f"rate_limit_exceeded: {'wait ' * 30}"), cut_off(start_s + 1)]

    parts = [part(10.0 * i, 0.05 if i % 2 == 0 else 0.4) for i in range(4)]
    record = load_record(measured("tiers", *parts, classes=(CHAT, BULK)), {}, NOW, draw)
    return write_page_file(tmp_path_factory.mktemp("page") / "report.html", record)


@pytest.mark.parametrize("size", [PHONE, DESK])
async def test_the_page_shows_its_plots_at_any_width(browser: Browser, page_file: Path, size: tuple[int, int]) -> None:
    async with browser.page(page_file.as_uri(), size=size) as page:
        assert await page.evaluate("document.querySelectorAll('figure [role=img] svg').length") == PLOTS
        assert await page.evaluate(WIDTH) <= size[0], "nothing scrolls sideways but tables"
        assert await page.evaluate(TABLE_FITS), "both arms and their ratio are in view"
        assert await page.evaluate(SMALLEST_TEXT) >= 7, "text in plots can be read"
        assert await page.evaluate("performance.getEntriesByType('resource').length") == 0
        assert LONG in await page.text("dl code")
        assert page.complaints == []


async def test_small_plots_are_beside_each_other_on_a_desk(browser: Browser, page_file: Path) -> None:
    tops = "new Set([...document.querySelectorAll('.small figure')].map((f) => f.getBoundingClientRect().top)).size"
    async with browser.page(page_file.as_uri(), size=DESK) as page:
        assert await page.evaluate(tops) < PLOTS
        await page.resize(*PHONE)
        assert await page.evaluate(tops) == PLOTS


async def test_the_page_is_light_or_dark_as_the_reader_prefers(browser: Browser, page_file: Path) -> None:
    colours = "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.querySelector('svg')).color]"
    async with browser.page(page_file.as_uri(), size=DESK) as page:
        light = await page.evaluate(colours)
        await page.prefer("color-scheme", "dark")
        dark = await page.evaluate(colours)
    assert light[0] != dark[0] and light[1] != dark[1]


async def test_the_page_names_arms_errors_and_what_to_doubt(browser: Browser, page_file: Path) -> None:
    async with browser.page(page_file.as_uri(), size=DESK) as page:
        text = await page.text("main")
    for part in (
        "with tiers",
        "without tiers",
        "ratio",
        "HTTP 429 rate_limit_exceeded",
        "had no end",
        "To run it again",
    ):
        assert part in text
