"""Rules that choose the tier of requests which name none: those of clients as shipped, and each condition."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.protocol.bodies.schemas import CompletionRequest
from gateway.requests.prepare.placement import place
from gateway.requests.prepare.routing import Routed, Sent, listed_models, routed, served_model
from scheduler.config import TierConfigError, TierSet, load_tiers, parse_tiers
from scheduler.routing import Routing
from tests.gateway.api_keys import key
from tests.gateway.stand import running_stand
from tests.gateway.tiny_model import MODEL

FILE = Path(__file__).parents[3] / "tiers.yaml"
SHIPPED = load_tiers(FILE)
HI = [{"role": "user", "content": "hi"}]
TASK = "x-openwebui-task"
RECEIPT = {"x-tidegate-receipt": "1"}


def with_rules(rules: dict[str, Any], **more: Any) -> TierSet:
    document = yaml.safe_load(FILE.read_text())
    return parse_tiers({**document, "routing": {"rules": rules, **more}})


def chosen(rules: dict[str, Any], **sent: Any) -> str | None:
    facts = {"path": "/v1/chat/completions", "headers": {}, "key": None, "body": {"model": "m"}}
    found = routed(Routing.model_validate({"rules": rules}), Sent(**{**facts, **sent}))
    return None if found is None else found.name


@pytest.mark.parametrize(
    ("condition", "meets", "fails"),
    [
        ({"header": {"X-Job": "night*"}}, {"headers": {"x-job": "nightly"}}, {"headers": {"x-job": "daily"}}),
        ({"header": {"x-job": "*"}}, {"headers": {"x-job": ""}}, {}),
        ({"model": ["a", "b"]}, {"body": {"model": "b"}}, {"body": {"model": "c"}}),
        ({"model": "opus[1m]*"}, {"body": {"model": "opus[1m]-x"}}, {"body": {"model": "opusm"}}),
        ({"model_suffix": ":flex"}, {"body": {"model": "m:flex"}}, {"body": {"model": 5}}),
        ({"path": "/v1/completions"}, {"path": "/v1/completions"}, {}),
        ({"key": "etl-*"}, {"key": "etl-7"}, {"key": None}),
        (
            {"field": {"metadata.job": "night"}},
            {"body": {"metadata": {"job": "night"}}},
            {"body": {"metadata": "night"}},
        ),
        ({"field": {"store": "true"}}, {"body": {"store": True}}, {"body": {"store": None}}),
        ({"key": "a", "path": "/v1/*"}, {"key": "a"}, {"key": "a", "path": "/x"}),
    ],
)
def test_each_condition(condition: dict[str, Any], meets: dict[str, Any], fails: dict[str, Any]) -> None:
    rules = {"rule": {"tier": "bulk", **condition}}
    assert (chosen(rules, **meets), chosen(rules, **fails)) == ("rule", None)


def test_the_first_rule_wins() -> None:
    rules = {"one": {"tier": "bulk", "key": "a"}, "two": {"tier": "batch", "path": "*"}}
    assert (chosen(rules, key="a"), chosen(rules)) == ("one", "two")
    assert routed(Routing.model_validate({"rules": rules, "enabled": False}), Sent("/", {}, "a", {})) is None


def test_a_suffix_is_no_part_of_the_models_name() -> None:
    names = ("m", "odd:flex")
    found = {name: served_model(SHIPPED.routing, name, names) for name in ("m:flex", "m:batch", "odd:flex", "x:flex")}
    assert found == {"m:flex": "m", "m:batch": "m", "odd:flex": "odd:flex", "x:flex": "x:flex"}
    listed = with_rules({"flex": {"tier": "bulk", "model_suffix": ":flex", "listed": True}}).routing
    assert listed_models(listed, ("m",)) == ("m", "m:flex")


@pytest.mark.parametrize(
    ("rule", "reason"),
    [
        ({"tier": "nothing", "key": "a"}, "routing.rules.mine.tier: there is no tier 'nothing'"),
        ({"tier": "bulk"}, "routing.rules.mine: needs a condition"),
        ({"tier": "bulk", "headers": {"a": "b"}}, "routing.rules.mine.headers: Extra inputs"),
        ({"tier": "bulk", "key": "a", "listed": True}, "routing.rules.mine: listed: is for rules with a model_suffix"),
        ({"tier": "bulk", "model": []}, "routing.rules.mine.model: "),
    ],
)
def test_a_wrong_rule_is_refused_by_its_name(rule: dict[str, Any], reason: str) -> None:
    with pytest.raises(TierConfigError, match="tiers.yaml: ") as error:
        with_rules({"mine": rule})
    assert reason in str(error.value)


@pytest.mark.parametrize(
    ("path", "headers", "body", "rule", "tier"),
    [
        ("chat/completions", {TASK: "title_generation"}, {}, "open-webui-tasks", "bulk"),
        ("chat/completions", {TASK: "follow_up_generation"}, {}, "open-webui-tasks", "bulk"),
        ("chat/completions", {TASK: ""}, {}, None, "realtime"),  # as a chat of Open WebUI has it
        ("chat/completions", {TASK: "query_generation"}, {}, None, "realtime"),
        ("chat/completions", {TASK: "title_generation"}, {"service_tier": "priority"}, None, "realtime"),
        ("chat/completions", {}, {"model": f"{MODEL}:flex"}, "flex-suffix", "bulk"),
        ("chat/completions", {}, {"model": f"{MODEL}:batch", "service_tier": "auto"}, "batch-suffix", "batch"),
        ("completions", {}, {"model": f"{MODEL}:flex", "messages": None, "prompt": "a"}, "flex-suffix", "bulk"),
    ],
)
async def test_a_receipt_names_the_rule_that_chose(
    path: str, headers: dict[str, str], body: dict[str, Any], rule: str | None, tier: str
) -> None:
    async with running_stand(tiers=SHIPPED) as stand:
        asked = {"model": MODEL, "messages": HI, **body}
        sent = {name: value for name, value in asked.items() if value is not None}
        answer = await stand.post(f"/v1/{path}", sent, headers={**headers, **RECEIPT})
        assert answer.status_code == 200, answer.text
        receipt = answer.json()["tidegate"]
        assert (receipt.get("rule"), receipt["tier_served"]) == (rule, tier)
        assert stand.worker.served[0].tier == tier
        if rule is not None:
            assert stand.metric("tidegate_requests_routed_total", rule=rule) == 1


def test_a_key_that_may_not_use_the_tier_gets_the_highest_of_its_own() -> None:
    asked, rule = CompletionRequest(model="m", prompt="a"), Routed("mine", "bulk")
    placed = place(asked, RECEIPT, key("a", tiers=frozenset({"batch"})), SHIPPED, "r", rule)
    assert (placed.tier.name, placed.rule, placed.receipt_for) == ("batch", "mine", "auto")


def test_claude_codes_small_model() -> None:
    def rule_of(agent: str, model: str) -> str | None:
        found = routed(SHIPPED.routing, Sent("/v1/messages", {"user-agent": agent}, None, {"model": model}))
        return None if found is None else found.name

    assert rule_of("claude-cli/2.1.197 (external, cli)", "claude-haiku-4-5-20251001") == "claude-code-background"
    assert rule_of("claude-cli/2.1.197 (external, cli)", "claude-opus-4-8[1m]") is None
    assert rule_of("anthropic-sdk-python", "claude-haiku-4-5") is None


async def test_listed_suffixes_are_models() -> None:
    tiers = with_rules({"flex": {"tier": "bulk", "model_suffix": ":flex", "listed": True}})
    async with running_stand(tiers=tiers) as stand:
        names = [model.id async for model in stand.client.models.list()]
        assert names == [MODEL, "alias", f"{MODEL}:flex", "alias:flex"]
        assert (await stand.client.models.retrieve(f"{MODEL}:flex")).id == f"{MODEL}:flex"


async def test_a_body_that_is_parsed_in_another_process_is_routed_too() -> None:
    async with running_stand(tiers=SHIPPED) as stand:
        body = {"model": f"{MODEL}:flex", "messages": HI, "max_tokens": 4, "user": "x" * 300_000}
        answer = await stand.post("/v1/chat/completions", body, headers=RECEIPT)
    assert answer.status_code == 200, answer.text
    assert answer.json()["tidegate"]["rule"] == "flex-suffix"
