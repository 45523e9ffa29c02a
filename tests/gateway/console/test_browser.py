"""The console in a real browser: live numbers, the playground, the load, batches, keys, sizes and accessibility."""

import asyncio
import copy
import hashlib
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from pydantic import SecretStr

from gateway.identity import ApiKey, Keyring
from scheduler.registry.worker_status import WorkerStart
from scheduler.request import EventKind, Request, TokenEvent
from scheduler.store import connection
from scheduler.store.address import of_model
from tests.gateway.console.chromium import CHROMIUM, Browser, Page, running_browser
from tests.gateway.scripted_worker import token_by_token
from tests.gateway.second_model import OTHER, second_model
from tests.gateway.stand import Stand, serving_stand
from tests.gateway.stand import make_tiers as make_own_tiers
from tests.gateway.tiny_model import MODEL, token_ids
from tests.scheduler.builders import make_tiers
from tests.scheduler.world import World, run_world
from tests.waiting import until

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium"),
    pytest.mark.asyncio(loop_scope="module"),
]
PHONE, DESK = (390, 844), (1280, 900)
ANSWER = "The tide rises and the tide falls."
ROLES = {"root": "admin", "user": None}
KEYS = [ApiKey(name, hashlib.sha256(name.encode()).digest(), role=role) for name, role in ROLES.items()]
# Names and roles that a screen reader needs; returns what lacks them.
UNLABELLED = """[...document.querySelectorAll('button, a, input, select, textarea, [role=img], [role=meter], progress')]
    .filter((e) => !(e.getAttribute('aria-label') || e.labels?.length || e.textContent.trim()))
    .map((e) => e.outerHTML)"""
# The contrast of each visible text with its background, by WCAG's formula; returns what has less than 4.5.
FAINT = """(() => {
    const canvas = new OffscreenCanvas(1, 1).getContext('2d', {willReadFrequently: true});
    const over = (colors) => {
        canvas.clearRect(0, 0, 1, 1);
        for (const color of colors) { canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1); }
        return canvas.getImageData(0, 0, 1, 1).data;
    };
    const luminance = (data) => {
        const [r, g, b] = [...data].slice(0, 3).map((v) => v / 255)
            .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const grounds = (e) => (e ? [...grounds(e.parentElement), getComputedStyle(e).backgroundColor] : ['white']);
    const HIDDEN = '[hidden], .unseen, .skip, :disabled, dialog:not([open])';
    const faint = [];
    let looked = 0;
    for (const e of document.querySelectorAll('body *')) {
        const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
        if (!own || !e.checkVisibility() || e.closest(HIDDEN)) continue;
        looked += 1;
        const ground = grounds(e);
        const [a, b] = [luminance(over(ground)), luminance(over([...ground, getComputedStyle(e).color]))];
        const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
        if (ratio < 4.5) faint.push(`${ratio.toFixed(2)} ${e.outerHTML.slice(0, 80)}`);
    }
    return looked > 20 ? faint : ['only ' + looked + ' texts'];
})()"""

DROP = """(() => {
    const dataTransfer = new DataTransfer();
    dataTransfer.items.add(new File([%s], 'dropped.jsonl'));
    const event = new DragEvent('drop', {dataTransfer, bubbles: true, cancelable: true});
    document.querySelector('#drop').dispatchEvent(event);
})()"""
STORED = "[Object.values(sessionStorage), localStorage.length, document.cookie]"
# The outline of what has the focus; of some inputs, another element shows it.
OUTLINE = """(() => {
    const focused = document.activeElement;
    const shown = focused.type === 'radio' ? focused.nextElementSibling : focused.closest('#drop') ?? focused;
    return getComputedStyle(shown).outlineStyle;
})()"""


def answer(request: Request) -> Sequence[TokenEvent]:
    """Answer everything but a bulk load, which then runs for as long as its client wants."""
    if request.tier == "bulk" and request.sampling.max_tokens > 4:
        return ()
    return token_by_token(request, token_ids(ANSWER))


@asynccontextmanager
async def open_stand(
    valkey_url: str, tmp_path: Path, keyring: Keyring | None = None, **options: Any
) -> AsyncIterator[Stand]:
    """Run a gateway with everything that the console shows, and a worker that answers `ANSWER`."""
    redis = connection.connect(valkey_url)
    async with (
        redis,
        serving_stand(
            answer, redis=redis, tiers_file=tmp_path / "tiers.yaml", data_dir=tmp_path, keyring=keyring, **options
        ) as stand,
    ):
        yield stand


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with running_browser() as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def stand(valkey_url: str, tmp_path: Path) -> AsyncIterator[Stand]:
    async with open_stand(valkey_url, tmp_path) as running:
        yield running


@pytest.fixture(scope="module")
def explained() -> dict[str, Any]:
    """What a worker says of itself while bulk runs, with a decision of its controller."""

    async def story(world: World) -> dict[str, Any]:
        bulk = [asyncio.create_task(world.ask(f"b{i}", "bulk", max_tokens=100)) for i in range(6)]
        await world.clock.sleep(2.0)
        [text] = (await world.registry.sla()).values()
        await asyncio.gather(*bulk)
        report: dict[str, Any] = json.loads(text)
        return report

    return run_world(story, tiers=make_tiers(bulk={"batch_size": {"min": 1, "start": 2, "max": 6}}))


async def announce(stand: Stand, report: dict[str, Any]) -> None:
    stand.worker.sla = json.dumps(report)
    await stand.worker.announce()


def later(report: dict[str, Any], **engine_s: float) -> dict[str, Any]:
    """Return the worker's next report, a second later: each tier has used so many seconds of the engine more."""
    following = copy.deepcopy(report)
    following["at_ms"] += 1000
    for decision in following["decisions"]:
        decision["ago_s"] += 1.0
    for tier, seconds in engine_s.items():
        following["tiers"][tier]["engine_s"] += seconds
    return following


async def started(page: Page) -> None:
    """Wait until the page has its model, its tiers and live numbers."""
    await page.until("!document.querySelector('#load').disabled && document.querySelectorAll('.tier').length")
    await page.until("document.querySelector('#status').textContent === 'live'")


async def ask(page: Page, text: str) -> None:
    await page.type("#prompt", text)
    await page.press("Enter", 13, "\r")


# -- live numbers ------------------------------------------------------------------------------------------------------


async def test_live_numbers_arrive(browser: Browser, stand: Stand, explained: dict[str, Any]) -> None:
    await announce(stand, explained)
    async with browser.page(f"{stand.url}/") as page:
        await started(page)
        cards = await page.evaluate("[...document.querySelectorAll('.tier h3')].map((e) => e.textContent)")
        assert cards == ["realtime", "bulk", "batch"], "by priority"
        running = explained["tiers"]["bulk"]["requests"]["running"]
        await page.until(f"document.querySelectorAll('.tier')[1].innerText.includes('Running\\n{running}\\n')")
        assert "batch size 2 → 4" in await page.text("#decision-list")
        await announce(stand, later(explained, bulk=0.75, realtime=0.13))
        await page.until("document.querySelector('#share-legend').innerText.includes('75 %')")
        legend = " ".join((await page.text("#share-legend")).split())
        assert legend == "realtime 13 % bulk 75 % batch 0 % idle, overhead 12 %"
        for name in ("Answers in", "KV in use", "Busy"):
            await page.until(f"document.querySelector('#engine-list').innerText.includes('{name}')")
        assert await page.evaluate("document.querySelectorAll('.plot canvas').length") == 2
        assert page.complaints == []


async def test_without_a_worker_no_share_is_shown_and_a_start_is(
    browser: Browser, stand: Stand, explained: dict[str, Any]
) -> None:
    await announce(stand, explained)
    async with browser.page(f"{stand.url}/") as page:
        await started(page)
        await announce(stand, later(explained, bulk=0.75))
        await page.until("document.querySelector('#share-legend').innerText.includes('75 %')")
        await stand.worker.registry.withdraw("w1")
        await stand.worker.registry.announce_start(WorkerStart("w2", "loading the model", 12.0, 0.4))
        await page.until("document.querySelector('#status').textContent === 'no worker'")
        await page.until("!document.querySelector('#share-legend').innerText.includes('%')")
        assert "Engine\n–" in await page.text(".tier:nth-of-type(2)")
        await page.until("/w2[^]*loading the model, 40 %/.test(document.querySelector('#engine-list').innerText)")


async def test_a_gateway_that_has_not_answered_yet_is_not_away(
    browser: Browser, stand: Stand, explained: dict[str, Any]
) -> None:
    await announce(stand, explained)
    hold = (
        "const real = fetch; fetch = (path, ...more) => path === 'ready' ? new Promise(() => {}) : real(path, ...more);"
    )
    async with browser.page(f"{stand.url}/") as page:
        await page.call("Page.addScriptToEvaluateOnNewDocument", source=f"{hold} window.isHeld = true;")
        await page.call("Page.reload")
        await until_on_next_page(page, "window.isHeld && document.querySelector('#status').textContent === 'live'")
        assert "does not answer" not in await page.text("#engine-list")


async def test_tiers_may_have_any_names(
    browser: Browser, valkey_url: str, tmp_path: Path, explained: dict[str, Any]
) -> None:
    """Also names that each object of JavaScript has, or an object of the page."""
    own = make_own_tiers(constructor={"priority": 6}, t={"priority": 5})
    report = copy.deepcopy(explained)
    for name in ("constructor", "t"):
        report["tiers"][name] = copy.deepcopy(report["tiers"]["bulk"])
    async with open_stand(valkey_url, tmp_path, tiers=own) as stand:
        await announce(stand, report)
        async with browser.page(f"{stand.url}/") as page:
            await started(page)
            await announce(stand, later(report, constructor=0.13, t=0.75))
            await page.until("document.querySelector('#share-legend').innerText.includes('75 %')")
            legend = " ".join((await page.text("#share-legend")).split())
            assert legend == "realtime 0 % bulk 0 % constructor 13 % t 75 % batch 0 % idle, overhead 12 %"
            assert "NaN" not in await page.text("#tiers")
            assert page.complaints == []


async def test_the_chosen_model_is_asked_and_its_tiers_and_workers_are_shown(
    browser: Browser, valkey_url: str, tmp_path: Path, explained: dict[str, Any]
) -> None:
    async with (
        connection.connect(of_model(valkey_url, OTHER)) as own,
        open_stand(valkey_url, tmp_path, more_models=[(second := second_model(own, make_tiers())).source]) as stand,
    ):
        second.worker.sla = json.dumps(explained)
        await second.worker.announce()
        [status] = await second.worker.registry.workers()
        await second.worker.registry.announce(replace(status, max_model_len=100), second.worker.sla)

        async def is_known() -> bool:  # the gateway reads the workers now and then, and the page the models once
            models = (await stand.http.get("/v1/models")).json()["data"]
            return any(model["id"] == OTHER and model["max_model_len"] == 100 for model in models)

        await until(is_known)
        serving = asyncio.create_task(second.worker.run())
        async with browser.page(f"{stand.url}/") as page:
            await started(page)
            running = f"Running\\n{explained['tiers']['bulk']['requests']['running']}\\n"
            assert not await page.evaluate(f"document.querySelector('#tier-cards').innerText.includes('{running}')")
            await page.evaluate(f"document.querySelector('#chat-model').value = '{OTHER}'")
            await page.evaluate("document.querySelector('#chat-model').dispatchEvent(new Event('change'))")
            await page.until(f"document.querySelector('#tier-cards').innerText.includes('{running}')")
            assert await page.text("#model") == OTHER
            assert await page.evaluate("['max', 'value'].map((n) => document.querySelector('#max-tokens')[n])") == [
                "100",
                "50",
            ]
            assert "batch size 2 → 4" in await page.text("#decision-list")
            await ask(page, "Hello?")
            await page.until("document.querySelector('.assistant .said')?.textContent === 'From the second.'")
            await page.click("#load")
            await page.until("document.querySelector('#load-note').textContent.includes('bulk requests run')")
            await second.worker.registry.withdraw("w1")
            await page.until("document.querySelector('#status').textContent === 'no worker'")
            await page.evaluate("document.querySelector('#chat-model').selectedIndex = 0")
            await page.evaluate("document.querySelector('#chat-model').dispatchEvent(new Event('change'))")
            assert "another model" in await page.text("#load-note") and await page.text("#load") == "Load it"
            await page.until("document.querySelector('#decision-list .empty')")
            assert await page.text("#model") == MODEL
            assert page.complaints == []
        serving.cancel()
        await second.worker.stop()


async def test_it_connects_again_after_the_store_was_away(
    browser: Browser, stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken() -> dict[str, Any]:
        raise ConnectionError("no store")

    async with browser.page(f"{stand.url}/") as page:
        await page.until("document.querySelector('#status').textContent === 'live'")
        await page.until("/Answers in\\n[0-9]/.test(document.querySelector('#engine-list').innerText)")
        monkeypatch.setattr(stand.gateway.client, "backlogs", broken)
        await page.until("document.querySelector('#status').textContent.includes('store is not reachable')")
        await page.until("document.querySelector('#engine-list').innerText.includes('Answers in\\n–')")
        monkeypatch.undo()
        await page.until("document.querySelector('#status').textContent === 'live'")


# -- playground --------------------------------------------------------------------------------------------------------


async def test_a_chat_streams_and_shows_its_times(browser: Browser, stand: Stand) -> None:
    async with browser.page(f"{stand.url}/") as page:
        await started(page)
        await page.evaluate(
            "window.grown = []; new MutationObserver(() => { const e = document.querySelector('.assistant .said');"
            "if (e) grown.push(e.textContent.length); })"
            ".observe(document.querySelector('#messages'), {childList: true, subtree: true})"
        )
        await ask(page, "Hello?")
        await page.until("document.querySelector('.assistant .facts')?.textContent.includes('total')")
        assert await page.text(".assistant .said") == ANSWER
        assert "tier default · first token" in await page.text(".assistant .facts")
        assert len(set(await page.evaluate("grown"))) > 5, "the text came in pieces"
        await page.click("#tier-choice label:nth-of-type(2) span")
        await page.evaluate("document.querySelector('#max-tokens').value = 4")
        await ask(page, "And as bulk?")
        await page.until("document.querySelectorAll('.assistant .facts')[1]?.textContent.includes('tier flex')")
        asked = stand.worker.served[-1]
        assert (asked.tier, asked.sampling.max_tokens) == ("bulk", 4)
        await page.click("#chat-clear")
        assert await page.evaluate("document.querySelectorAll('.message').length") == 0
        assert page.complaints == []


async def test_stop_ends_the_generation(browser: Browser, stand: Stand) -> None:
    async with browser.page(f"{stand.url}/") as page:
        await page.until("document.querySelector('#chat-model').value")
        stand.worker.gate.clear()
        await ask(page, "Hello?")
        await until(lambda: bool(stand.worker.served))
        await page.click("#stop")
        await until(lambda: stand.worker.cancelled == [stand.worker.served[0].id])
        await page.until("document.querySelector('.assistant .facts').textContent.includes('stopped')")
        assert await page.evaluate("document.activeElement.id") == "prompt"
        stand.worker.gate.set()
        await ask(page, "Once more?")
        await page.until("document.querySelectorAll('.assistant .said')[1]?.textContent.length > 0")


async def test_a_failed_question_is_not_sent_with_the_next_one(browser: Browser, stand: Stand) -> None:
    script = stand.worker.script
    stand.worker.script = lambda request: [TokenEvent(request.id, EventKind.FAILED, 0, error="boom")]
    async with browser.page(f"{stand.url}/") as page:
        await page.until("document.querySelector('#chat-model').value")
        await ask(page, "Hello?")
        await page.until("document.querySelector('.facts.bad')")
        stand.worker.script = script
        await ask(page, "Hello?")
        await page.until("document.querySelectorAll('.assistant .facts')[1]?.textContent.includes('total')")
    failed, answered = stand.worker.served
    assert answered.prompt_token_ids == failed.prompt_token_ids


# -- load --------------------------------------------------------------------------------------------------------------


def bulk_ids(stand: Stand) -> set[str]:
    return {request.id for request in stand.worker.served if request.tier == "bulk" and request.sampling.max_tokens > 4}


async def test_the_button_turns_a_bulk_load_on_and_off(browser: Browser, stand: Stand) -> None:
    async with browser.page(f"{stand.url}/") as page:
        await started(page)
        await page.evaluate("document.querySelector('#load-size').value = '16'")
        await page.click("#load")
        assert await page.evaluate("document.querySelector('#load').getAttribute('aria-pressed')") == "true"
        await until(lambda: len(bulk_ids(stand)) == 16)
        await page.until("!document.querySelector('#ttft-legend').innerText.split('beside bulk')[1].includes('–')")
        await page.click("#load")
        await until(lambda: bulk_ids(stand) <= set(stand.worker.cancelled))
        assert await page.text("#load") == "Load it"
        assert page.complaints == []


async def test_probes_go_on_after_there_was_no_worker(browser: Browser, stand: Stand) -> None:
    def failed() -> int:
        return sum("503" in complaint and "completions" in complaint for complaint in page.complaints)

    async with browser.page(f"{stand.url}/") as page:
        await started(page)
        await page.click("#load")
        await until(lambda: bool(bulk_ids(stand)))
        await stand.worker.registry.withdraw("w1")
        await until(lambda: failed() > 5)
        before = len(stand.worker.served)
        await stand.worker.announce()
        await until(lambda: any(request.tier == "realtime" for request in stand.worker.served[before:]))


async def test_a_key_without_bulk_starts_no_load(browser: Browser, valkey_url: str, tmp_path: Path) -> None:
    key = ApiKey("chat", hashlib.sha256(b"chat").digest(), tiers=frozenset({"realtime"}))
    async with open_stand(valkey_url, tmp_path, Keyring([key])) as stand:
        async with browser.page(f"{stand.url}/") as page:
            await enter_key(page, "chat")
            await page.until("!document.querySelector('#load').disabled")
            await page.click("#load")
            await page.until("document.querySelector('#load-note').textContent.includes('may not use flex')")
        assert [request.sampling.max_tokens for request in stand.worker.served] == [1], (
            "only the request that finds it out"
        )


# -- batches -----------------------------------------------------------------------------------------------------------


def batch_input(count: int) -> str:
    body = {"model": MODEL, "max_tokens": 4, "messages": [{"role": "user", "content": "Hello?"}]}
    lines = [
        {"custom_id": f"q{n}", "method": "POST", "url": "/v1/chat/completions", "body": body} for n in range(count)
    ]
    return "\n".join(json.dumps(line) for line in lines)


async def test_a_batch_from_upload_to_download(browser: Browser, stand: Stand, tmp_path: Path) -> None:
    file, downloads = tmp_path / "questions.jsonl", tmp_path / "downloads"
    file.write_text(batch_input(12))
    downloads.mkdir()
    async with browser.page(f"{stand.url}/") as page:
        await page.allow_downloads(downloads)
        await page.choose_file("#batch-file", file)
        await page.until("document.querySelector('#batch-list .state')?.textContent === 'completed'")
        assert "12 of 12" in await page.text("#batch-list") and "questions.jsonl" in await page.text("#batch-list")
        await page.click("#batch-list button")
        async with asyncio.timeout(30):
            name = await browser.downloads.get()
        [output] = downloads.iterdir()
        assert name.endswith("_output.jsonl") and len(output.read_text().splitlines()) == 12
        assert page.complaints == []


async def test_a_batch_whose_file_has_no_name_is_shown_by_its_id(browser: Browser, stand: Stand) -> None:
    file = await stand.client.files.create(file=("none.jsonl", b"{}"), purpose="batch")
    created = await stand.client.batches.create(
        input_file_id=file.id, endpoint="/v1/completions", completion_window="24h", metadata={"file": " "}
    )
    async with browser.page(f"{stand.url}/") as page:
        await page.until("document.querySelector('#batch-list')?.innerText.includes('failed')")
        assert await page.text("#batch-list b") == created.id
        assert await page.evaluate("document.querySelector('#batch-list progress').value") == 0


async def test_a_dropped_batch_can_be_cancelled(browser: Browser, stand: Stand) -> None:
    stand.worker.gate.clear()
    async with browser.page(f"{stand.url}/") as page:
        await page.evaluate(DROP % json.dumps(batch_input(3)))
        await page.until("document.querySelector('#batch-list .state')?.textContent === 'in progress'")
        await page.click("#batch-list button")
        await page.until("document.querySelector('#batch-list .state').textContent === 'cancelled'")
    stand.worker.gate.set()


# -- keys --------------------------------------------------------------------------------------------------------------


async def enter_key(page: Page, key: str) -> None:
    await page.until("document.querySelector('#key-dialog').open")
    await page.type("#key", key)
    await page.click("#key-form button[type=submit]")


async def test_a_key_is_asked_for_and_kept_in_the_tab(browser: Browser, valkey_url: str, tmp_path: Path) -> None:
    async with open_stand(valkey_url, tmp_path, Keyring(KEYS)) as stand, browser.page(f"{stand.url}/") as page:
        await enter_key(page, "wrong")
        await page.until("document.querySelector('#key-dialog').open")
        assert "does not accept" in await page.text("#key-reason")
        await page.evaluate("document.querySelector('#key').value = ''")
        await enter_key(page, "root")
        await page.until("document.querySelector('#status').textContent === 'live'")
        assert await page.evaluate(STORED) == [["root"], 0, ""]
        await ask(page, "Hello?")
        await page.until("document.querySelector('.assistant .facts')?.textContent.includes('total')")


async def test_a_key_that_is_revoked_leaves_no_numbers(
    browser: Browser, valkey_url: str, tmp_path: Path, explained: dict[str, Any]
) -> None:
    async with open_stand(valkey_url, tmp_path, Keyring(KEYS)) as stand:
        await announce(stand, explained)
        async with browser.page(f"{stand.url}/") as page:
            await page.until("document.querySelector('#key-dialog').open")
            await enter_key(page, "root")
            await started(page)
            await page.until("document.querySelector('#engine-list').innerText.includes('KV in use')")
            stand.gateway.keyring.replace(KEYS[1:])
            await page.until("document.querySelector('#status').textContent === 'API key needed'")
            assert await page.evaluate("document.querySelector('#key-dialog').open")
            for numbers in ("#share-legend", "#tiers"):
                assert not await page.evaluate(f"document.querySelector('{numbers}').checkVisibility()")
            await page.until("document.querySelector('#engine-list').innerText.includes('KV in use\\n–')")


async def test_without_admin_rights_the_playground_works(browser: Browser, valkey_url: str, tmp_path: Path) -> None:
    async with open_stand(valkey_url, tmp_path, Keyring(KEYS)) as stand, browser.page(f"{stand.url}/") as page:
        await enter_key(page, "user")
        await page.until("!document.querySelector('#admin-note').hidden && document.querySelector('#chat-model').value")
        await page.until("document.querySelector('#admin-note').textContent.includes('admin: true')")
        assert not await page.evaluate("document.querySelector('#tiers').checkVisibility()")
        await ask(page, "Hello?")
        await page.until("document.querySelector('.assistant .facts')?.textContent.includes('total')")
        await page.click("#batch-example")
        await page.until("document.querySelector('#batch-list .state')?.textContent === 'completed'")


async def until_on_next_page(page: Page, expression: str) -> None:
    """Wait until the expression holds. The pages may change meanwhile, which ends what runs in them."""

    async def holds() -> bool:
        try:
            return bool(await page.evaluate(expression))
        except AssertionError:
            return False

    await until(holds)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the provider's, of Authlib's older names
async def test_a_user_signs_in_without_a_key_and_out_again(browser: Browser, valkey_url: str, tmp_path: Path) -> None:
    mock = pytest.importorskip("oidc_provider_mock", reason="signing in needs tidegate[oidc]")
    user = mock.User(sub="ada", claims={"groups": ["sre"]})
    with mock.run_server_in_thread(user_claims=[user]) as provider:
        issuer = f"http://127.0.0.1:{provider.server_port}"
        settings: dict[str, Any] = {
            "api_key": SecretStr("sk-operator"),
            "oidc_issuer": issuer,
            "oidc_client_id": "tidegate",
            "oidc_client_secret": SecretStr("secret"),
            "oidc_roles": ["groups=sre:admin"],
        }
        async with open_stand(valkey_url, tmp_path, **settings) as stand, browser.page(f"{stand.url}/") as page:
            await page.until("document.querySelector('#key-dialog').open")
            await page.click("#key-form .sign-in")
            await until_on_next_page(page, "document.querySelector('button[value=ada]') !== null")
            await page.click("button[value=ada]")
            await until_on_next_page(page, "document.querySelector('#status')?.textContent === 'live'")
            assert await page.evaluate("document.querySelector('#sign-out').title") == "ada: admin"
            assert await page.evaluate(STORED) == [[], 0, ""], "no script sees the cookie"
            await ask(page, "Hello?")
            await page.until("document.querySelector('.assistant .facts')?.textContent.includes('total')")
            await page.click("#sign-out")
            await until_on_next_page(page, "document.querySelector('#key-dialog')?.open === true")


# -- sizes and accessibility -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [PHONE, DESK], ids=["phone", "desk"])
async def test_it_fits_and_can_be_read(
    browser: Browser, stand: Stand, explained: dict[str, Any], size: tuple[int, int]
) -> None:
    await announce(stand, explained)
    async with browser.page(f"{stand.url}/", size=size) as page:
        await page.until("document.querySelector('#decision-list').innerText.includes('batch size')")
        await page.until("document.querySelector('#chat-model').value")
        await ask(page, "Hello?")
        await page.until("document.querySelector('.assistant .facts')?.textContent.includes('total')")
        assert await page.evaluate("document.documentElement.scrollWidth") == size[0], "no horizontal scroll"
        assert await page.evaluate(FAINT) == []
        await page.prefer("color-scheme", "dark")
        assert await page.evaluate(FAINT) == []
        assert await page.evaluate(UNLABELLED) == []
        headings = await page.evaluate("[...document.querySelectorAll('h1, h2, h3')].map((e) => Number(e.tagName[1]))")
        assert headings[0] == 1 and all(b - a <= 1 for a, b in zip(headings, headings[1:], strict=False))
        assert await page.evaluate("['header', 'main', 'nav'].every((name) => document.querySelector(name))")
        ids = await page.evaluate("[...document.querySelectorAll('[id]')].map((e) => e.id)")
        assert len(ids) == len(set(ids))


async def test_the_keyboard_reaches_everything_and_its_focus_is_visible(browser: Browser, stand: Stand) -> None:
    async with browser.page(f"{stand.url}/") as page:
        await started(page)
        reached: list[str] = []
        while "decision-list" not in reached and len(reached) < 30:
            await page.press("Tab", 9)
            reached.append(await page.evaluate("document.activeElement.id"))
            assert await page.evaluate(OUTLINE) != "none", reached
        expected = [
            "docs-link",
            "pause",
            "key-button",
            "load-size",
            "load",
            "waves",
            "chat-model",
            "chat-clear",
            "messages",
            "prompt",
        ]
        assert [name for name in reached if name in expected] == expected
        assert {"send", "batch-example", "batch-file", "decision-list"} <= set(reached)
