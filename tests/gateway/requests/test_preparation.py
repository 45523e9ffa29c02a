"""The scheduler's requests of a body: adapters, cache salts, names as parts of jobs, and what no worker can do."""

import json
from dataclasses import replace
from typing import Any

import pytest

from gateway.identity import Keyring, cache_salt
from gateway.protocol.errors import ApiError
from gateway.requests.generate.service import CompletionService
from gateway.requests.prepare.placement import Placement
from gateway.requests.prepare.sampling import check_supported
from scheduler.registry.worker_status import WorkerStatus
from scheduler.request import JobDeadline, JobPart
from tests.gateway.api_keys import key
from tests.gateway.stand import Stand, make_tiers, running_stand
from tests.gateway.tiny_model import MODEL
from tests.scheduler.builders import make_request

HI: Any = [{"role": "user", "content": "hi"}]
KEYS = Keyring([key(name) for name in ("alice", "bob")])
LARK = json.dumps({"grammars": [{"name": "output", "lark_grammar": 'start: "a"'}]})
SCHEMA = json.dumps({"grammars": [{"name": "output", "json_schema": {}}]})
BODY = {"model": MODEL, "prompt": "hi", "max_tokens": 5, "temperature": 1, "seed": 3}


async def test_a_request_for_an_adapter_carries_its_name_and_others_do_not() -> None:
    async with running_stand(adapters=["mine=/nowhere"]) as stand:
        for model in ("mine", MODEL, "alias"):
            answer = await stand.client.completions.create(model=model, prompt="hi")
            assert answer.model == model
        assert [request.sampling.adapter for request in stand.worker.served] == ["mine", None, None]
        assert "mine" in {model.id async for model in stand.client.models.list()}


async def salt_of(stand: Stand, name: str, requested: str | None = None) -> str:
    """Return the salt with which a chat of this key reaches the worker."""
    client = stand.client.with_options(api_key=f"sk-{name}")
    body = None if requested is None else {"cache_salt": requested}
    await client.chat.completions.create(model=MODEL, messages=HI, extra_body=body)
    return stand.worker.served[-1].cache_salt


async def test_a_body_can_leave_the_cache_of_its_key_but_not_join_another_keys() -> None:
    async with running_stand(keyring=KEYS) as stand:
        salts = [await salt_of(stand, name, requested) for name in ("alice", "bob") for requested in (None, "x", "y")]
        assert len(set(salts)) == 6
        assert await salt_of(stand, "alice", "x") == salts[1]


def test_no_two_pairs_of_key_and_body_salt_give_the_same_salt() -> None:
    pairs = [
        (None, None),
        ("", None),
        (None, ""),
        ("a", "b"),
        ("ab", None),
        (None, "ab"),
        ('a", "b', None),
        ("null", None),
    ]
    assert len({cache_salt(owner, requested) for owner, requested in pairs}) == len(pairs)
    assert cache_salt(None, None) == "", "not every server can tell salts apart"


def worker(*unsupported: str) -> WorkerStatus:
    return WorkerStatus("w", ("m",), 100, 100, 0, unsupported=unsupported)


def test_what_any_worker_cannot_do_is_refused_by_name() -> None:
    request = make_request(bad_words=((1, 2),))
    check_supported([request], [worker(), worker("min_p")])
    with pytest.raises(ApiError) as caught:
        check_supported([make_request(), request], [worker(), worker("bad_words")])
    assert (caught.value.status, caught.value.param) == (400, "bad_words")


def test_grammars_are_named_as_the_parameter_that_asks_for_them() -> None:
    check_supported([make_request(grammar=SCHEMA)], [worker("grammar")])
    for grammar, name in ((LARK, "grammar"), (SCHEMA, "json_schema")):
        with pytest.raises(ApiError) as caught:
            check_supported([make_request(grammar=grammar)], [worker(name)])
        assert caught.value.param == "response_format"


async def names(stand: Stand, part: str, **changes: Any) -> list[str]:
    """Ask for a part of a job, with `changes` to its body. Return the names of its choices."""
    before = len(stand.worker.served)
    status, _ = await ask(stand.gateway.models.main.completions, BODY | changes, JobPart(part))
    assert status == 200
    return sorted(request.job_part for request in stand.worker.served[before:])


async def ask(completions: CompletionService, body: dict[str, Any], part: JobPart | None) -> tuple[int, dict[str, Any]]:
    batch = make_tiers()["batch"]
    placement = Placement(batch, "flex", f"req_{id(body)}", part=part)
    return await completions.complete("/v1/completions", body, placement)


def be_version(stand: Stand, fingerprint: str) -> None:
    preparation = stand.gateway.models.main.completions._preparation
    preparation.model = replace(preparation.model, fingerprint=fingerprint)


async def test_whatever_may_change_the_output_changes_the_name() -> None:
    """A gateway may come back with another model, chat template, defaults or adapters."""
    async with running_stand() as stand:
        be_version(stand, "one")
        first = await names(stand, "batch_1/7/0")
        others = [await names(stand, part) for part in ("batch_1/8/0", "batch_2/7/0", "batch_1/7/1")]
        others += [
            await names(stand, "batch_1/7/0", **c) for c in ({"prompt": "ho"}, {"seed": 4}, {"temperature": 0.5})
        ]
        be_version(stand, "two")
        others.append(await names(stand, "batch_1/7/0"))
        choices = await names(stand, "batch_1/9/0", n=2)
    assert len({*first, *choices, *(name for found in others for name in found)}) == 1 + len(others) + 2


async def test_a_request_that_is_no_part_of_a_job_has_no_name_and_a_part_has_the_jobs_deadline() -> None:
    async with running_stand() as stand:
        completions = stand.gateway.models.main.completions
        await ask(completions, dict(BODY), None)
        await ask(completions, dict(BODY), JobPart("batch_1/7/0", JobDeadline(123, 45)))
        await ask(
            completions,
            BODY | {"deadline_ms": 1000},
            JobPart("batch_1/8/0", JobDeadline(9, 45)),
        )
        plain, part, own = stand.worker.served
    assert (plain.job_part, plain.urgent_ms) == ("", 0)
    assert bool(part.job_part) and (part.deadline_ms, part.urgent_ms) == (123, 45)
    assert bool(own.job_part) and own.deadline_ms == own.arrival_ms + 1000
