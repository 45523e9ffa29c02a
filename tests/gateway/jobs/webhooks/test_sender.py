"""One call of a webhook over real sockets: pinned addresses, certificates, redirects, receivers that hang."""

import asyncio
import ssl
import threading
from ipaddress import ip_address

import openai
import pytest
import trustme

from gateway.jobs.webhooks.lookups import MAX_LOOKUPS_OF_OWNER, Lookups, LookupsBusy, addresses_of
from gateway.jobs.webhooks.sender import WebhookFailed, WebhookSender
from gateway.keys.webhooks import Address, TargetPolicy, signed_headers
from tests.gateway.jobs.webhooks.receiver import receiving
from tests.waiting import until

LOCAL = TargetPolicy(allow_loopback=True)
SECRET = "whsec_" + "QUJDREVGR0hJSktMTU5PUFFSU1RVVldYWVo="


def resolving(*addresses: str) -> Lookups:
    return Lookups(lambda host, port: [ip_address(address) for address in addresses])


async def test_a_call_has_its_body_and_the_name_of_its_host() -> None:
    async with receiving() as receiver:
        url = f"http://hooks.test:{receiver.port}/a/b?c=d#e"
        await WebhookSender(LOCAL, lookups=resolving("127.0.0.1")).send(url, {"x-one": "1"}, b"{}")
        [(headers, body)] = receiver.got
        assert (headers["host"], headers["x-one"], body) == (f"hooks.test:{receiver.port}", "1", b"{}")


async def test_the_certificate_must_be_that_of_the_name_though_the_address_is_called() -> None:
    authority, context = trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("hooks.test").configure_cert(context)
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    async with receiving(context) as receiver:
        sender = WebhookSender(LOCAL, lookups=resolving("127.0.0.1"), context=trusting)
        await sender.send(f"https://hooks.test:{receiver.port}/", {}, b"1")
        with pytest.raises(WebhookFailed, match="certificate|hostname"):
            await sender.send(f"https://other.test:{receiver.port}/", {}, b"2")
        assert [body for _, body in receiver.got] == [b"1"]


@pytest.mark.parametrize("addresses", [["10.0.0.1"], ["169.254.169.254", "::1"], []])
async def test_a_name_with_an_address_of_the_own_network_is_not_called(addresses: list[str]) -> None:
    sender = WebhookSender(TargetPolicy(), lookups=resolving(*addresses))
    with pytest.raises(WebhookFailed, match="not one that may be called"):
        await sender.send("https://hooks.test/", {}, b"")


async def test_the_next_attempt_takes_the_next_address() -> None:
    async with receiving() as receiver:
        sender = WebhookSender(LOCAL, lookups=resolving("10.0.0.1", "127.0.0.2", "127.0.0.1"))
        url = f"http://hooks.test:{receiver.port}/"
        with pytest.raises(WebhookFailed, match="ConnectError"):
            await sender.send(url, {}, b"", attempt=2)  # nobody listens there
        await sender.send(url, {}, b"", attempt=3)
        assert len(receiver.got) == 1


async def test_numbers_that_resolve_to_this_machine_are_noticed() -> None:
    assert ip_address("127.0.0.1") in addresses_of("2130706433", 80)
    with pytest.raises(WebhookFailed, match="not one that may be called"):
        await WebhookSender(TargetPolicy()).send("https://2130706433/", {}, b"")


async def test_a_receiver_that_hangs_is_left_after_the_time_limit() -> None:
    async with receiving() as receiver:
        receiver.answers.clear()
        with pytest.raises(WebhookFailed, match="no answer within"):
            await WebhookSender(LOCAL, timeout_s=0.2).send(receiver.url, {}, b"")
        receiver.answers.set()


async def test_a_name_that_does_not_exist_is_a_failure() -> None:
    def unknown(host: str, port: int) -> list[Address]:
        raise OSError("Name or service not known")

    with pytest.raises(WebhookFailed, match="not known"):
        await WebhookSender(LOCAL, lookups=Lookups(unknown)).send("https://no.test/", {}, b"")


async def test_names_that_are_never_found_hold_up_their_owner_only() -> None:
    gate = threading.Event()

    def slow(host: str, port: int) -> list[Address]:
        if host == "hangs.test":
            gate.wait(60)
        return [ip_address("127.0.0.1")]

    async with receiving() as receiver:
        sender = WebhookSender(LOCAL, lookups=Lookups(slow, turn_s=0.05), timeout_s=0.05)
        hangs = [sender.send("http://hangs.test/", {}, b"", owner="ann") for _ in range(MAX_LOOKUPS_OF_OWNER)]
        try:
            ended = await asyncio.gather(*hangs, return_exceptions=True)
            assert {type(error) for error in ended} == {WebhookFailed}, "the limit begins with the lookup"
            url = f"http://works.test:{receiver.port}/"
            with pytest.raises(LookupsBusy):
                await sender.send(url, {}, b"", owner="ann")
            await WebhookSender(LOCAL, lookups=sender._lookups).send(url, {}, b"", owner="ben")
            assert len(receiver.got) == 1
        finally:
            gate.set()
        await until(lambda: not sender._lookups._turns._of)
        await WebhookSender(LOCAL, lookups=sender._lookups).send(url, {}, b"", owner="ann")


async def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    async with receiving() as receiver, receiving() as proxy:
        monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{proxy.port}")
        monkeypatch.setenv("ALL_PROXY", f"http://127.0.0.1:{proxy.port}")
        await WebhookSender(LOCAL).send(receiver.url, {}, b"")
        assert (len(receiver.got), proxy.got) == (1, [])


def test_signatures_hold_for_one_body_and_one_time() -> None:
    client, now = openai.OpenAI(api_key="-", base_url="http://localhost/v1"), 1_763_836_800
    body = b'{"object":"event"}'
    headers = signed_headers("evt_1", body, SECRET, now)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("time.time", lambda: now + 10)
        client.webhooks.verify_signature(body, headers, secret=SECRET)
        for wrong_body, secret in ((b"{}", SECRET), (body, SECRET[:-4] + "AAA=")):
            with pytest.raises(openai.InvalidWebhookSignatureError):
                client.webhooks.verify_signature(wrong_body, headers, secret=secret)
        patched.setattr("time.time", lambda: now + 400)
        with pytest.raises(openai.InvalidWebhookSignatureError, match="too old"):
            client.webhooks.verify_signature(body, headers, secret=SECRET)
    client.close()
