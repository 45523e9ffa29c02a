"""Take the pictures of docs/console.md: `python -m tests.gateway.console.pictures URL`, against a running server.

The page makes the load itself. It takes three minutes, on a machine that should do nothing else.
"""

import argparse
import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

from tests.gateway.console.chromium import Page, running_browser

IMAGES = Path(__file__).parents[3] / "docs" / "images"
DESK, PHONE = (1280, 720), (390, 844)
BULK_ALONE_S, WAVES_S, MOST_S = 20, 130, 30  # the page ends its load after three minutes
QUESTIONS = ("What is Tidegate?", "How much is 17 + 25?")
ANSWERED = "[...document.querySelectorAll('.facts')].filter((e) => e.textContent.includes('total')).length"
IS_READY = "!document.querySelector('#load').disabled && document.querySelectorAll('.tier').length"


async def take(url: str) -> None:
    async with running_browser() as browser, AsyncExitStack() as stack:
        load = await stack.enter_async_context(browser.page(url, size=DESK))
        dark = await stack.enter_async_context(browser.page(url, size=DESK, dark=True))
        phone = await stack.enter_async_context(browser.page(url, size=PHONE))
        for page in (load, dark, phone):
            await page.until(IS_READY)
        await load.click("#load")
        await asyncio.sleep(BULK_ALONE_S)
        await load.click("#waves")
        await asyncio.sleep(WAVES_S)
        for page, name in ((load, "load"), (dark, "dark"), (phone, "phone")):
            await talk(page)
            await page.evaluate("document.activeElement.blur(); scrollTo(0, 0)")
            await page.screenshot(IMAGES / f"console-{name}.png")


async def talk(page: Page) -> None:
    for number, question in enumerate(QUESTIONS, start=1):
        await page.type("#prompt", question)
        await page.press("Enter", 13, "\r")
        await page.until(f"{ANSWERED} >= {number}", MOST_S)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("url", metavar="URL")
    IMAGES.mkdir(exist_ok=True)
    asyncio.run(take(parser.parse_args().url))
