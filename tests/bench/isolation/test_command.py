"""The commands against servers that answer at once."""

import json
import os
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import yaml
from transformers import PreTrainedTokenizerFast

from bench.isolation.command import Isolation
from bench.isolation.servers import context_of, vllm_command, with_tokenizer, write_served_shape
from loadtest.client.http import TargetError
from loadtest.model_shapes import write_shape
from loadtest.serving import serving, tidegate_command
from loadtest.traffic.scenario import ScenarioError
from scheduler.config import parse_tiers, shipped_tiers_path
from tests.bench.isolation.builders import SCENARIO
from tests.loadtest.fake_server import Body, FakeServer

SHIPPED = shipped_tiers_path()


def quick(url: str, **flags: object) -> Isolation:
    """The command with times that measure nothing."""
    times = {"duration": 0.3, "rounds": 1, "lead": 0.05, "settle": 0, "drain": 2}
    return Isolation.model_validate({"url": url, "tiers": SHIPPED, "search_seconds": 0.15, **times, **flags})


@pytest.fixture
def scenario_file(tmp_path: Path) -> Path:
    """Enough chats for a search of such short tries to see some."""
    classes = json.loads(SCENARIO.model_dump_json(exclude_none=True))["classes"]
    classes["chat"]["arrivals"]["rate_per_s"] = 20
    path = tmp_path / "small.yaml"
    path.write_text(json.dumps({"classes": classes}))
    return path


@pytest.mark.full
async def test_all_arms_run_on_one_server_that_is_told_its_tiers(
    tmp_path: Path, scenario_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result_file = tmp_path / "isolation.json"
    before = yaml.safe_load(SHIPPED.read_text()) | {"default_tier": "bulk"}
    async with FakeServer(tiers=[before]) as server, FakeServer() as peer:
        flags = {"peer_url": peer.url, "scenario": str(scenario_file), "json": result_file, "duration": 0.5}
        await quick(server.url, **flags, ttft_ms=60_000, itl_ms=60_000).measure()  # which any machine keeps
    out = capsys.readouterr().out
    result = json.loads(result_file.read_text())
    assert list(result["arms"]) == ["A0", "A1", "A2", "A3", "A5", "OURS", "X0", "XB", "X1"]
    assert result["solo_goodput"]["clients"] == result["clients"] == 64
    # every document was one that the product takes; the peer was told none
    assert len(server.tiers) > 7 and all(parse_tiers(document) for document in server.tiers) and peer.tiers == []
    assert server.tiers[-1] == before  # a server that was running is left as it was found
    chats = [r for r in result["requests"] if r["class"] == "chat" and r["arm"] == "OURS"]
    alone = [r for r in result["requests"] if r["class"] == "chat" and r["arm"] == "A0"]
    assert [r["arrival_s"] for r in chats] == [r["arrival_s"] for r in alone] and chats
    # no part finds another one's prompts in a prefix cache
    salts = {body["cache_salt"] for body in server.requests}
    assert {f"{arm}-0-1" for arm in ("A0", "A1", "A2", "A3", "A5", "OURS")} <= salts
    assert "isolation: TTFT p50" in out and "peer, with its priorities" in out


async def test_the_overload_has_a_tier_on_top(tmp_path: Path) -> None:
    result_file = tmp_path / "overload.json"
    async with FakeServer() as server:
        flags = {"experiment": "overload", "arms": "OURS", "clients": 20, "scale": 0.01, "json": result_file}
        await quick(server.url, **flags, search_seconds=0.4).measure()
    assert all("premium" in document["tiers"] for document in server.tiers[:-1]) and len(server.tiers) == 3
    result = json.loads(result_file.read_text())
    assert {name: p["ttft_ms"] for name, p in result["promises"].items()} == {"typing": 300, "chat": 500}
    measured = [goal for goal in result["goals"] if "overload" in goal["name"]]
    assert [goal["name"] for goal in measured] == [
        "1.5× overload for 60 s: misses of the top tier",
        "1.5× overload for 60 s: all misses",
    ]
    assert all(goal["value"] is not None for goal in measured)
    assert (result["clients"], result["clients_given"], result["solo_goodput"]) == (20, True, None)


async def test_deadlines_are_told_to_ours_and_not_to_best_effort(tmp_path: Path) -> None:
    result_file = tmp_path / "deadlines.json"

    def status(body: Body) -> int:
        return 429 if "deadline_ms" in body and body["max_tokens"] <= 5 else 200

    async with FakeServer(status=status) as server:
        flags = {
            "experiment": "deadlines",
            "clients": 300,
            "scale": 0.1,
            "streams": 2,
            "json": result_file,
            "report": tmp_path,
        }
        await quick(server.url, **flags).measure()
    result = json.loads(result_file.read_text())
    assert list(result["arms"]) == ["BE", "OURS"]
    told = {
        arm: {b.get("deadline_ms") for b in server.requests if b["cache_salt"].startswith(arm)}
        for arm in ("BE", "OURS")
    }
    assert told == {"BE": {None}, "OURS": {None, 15000}}
    jobs = {arm: [r for r in result["requests"] if (r["arm"], r["class"]) == (arm, "jobs")] for arm in told}
    assert len(jobs["BE"]) == len(jobs["OURS"]) == result["arms"]["BE"]["jobs"]["offered"]
    refused = sum(bool(r["error"]) for r in jobs["OURS"])
    assert 0 < refused == len(jobs["OURS"]) - result["arms"]["OURS"]["jobs"]["offered"]
    on_time = next(goal for goal in result["goals"] if goal["name"].startswith("admitted jobs"))
    assert on_time["value"] is not None and result["negative_controls"][0]["failed"] is not None
    assert "Jobs with deadlines" in (tmp_path / "index.html").read_text()


async def test_a_server_that_refuses_everything_is_not_measured_for_hours(scenario_file: Path) -> None:
    async with FakeServer(status=lambda body: 400) as server:
        with pytest.raises(TargetError, match="no request of"):
            await quick(server.url, scenario=str(scenario_file)).measure()


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"arms": "A0,A9"}, "there is no arm A9"),
        ({"shape": "9000b", "url": ""}, "there is no shape"),
        ({"tiers": "nothing.yaml"}, "nothing.yaml"),
        ({"bulk_pool": "b9"}, "b1-summaries"),
    ],
)
async def test_a_users_mistake_is_one_sentence(flags: dict[str, str], sentence: str) -> None:
    async with FakeServer() as server:
        with pytest.raises((TargetError, ScenarioError), match=sentence):
            await quick(**{"url": server.url, **flags}).measure()


@pytest.mark.full
async def test_a_server_is_ended_with_its_block_and_one_that_does_not_start_says_why(tmp_path: Path) -> None:
    program = (
        "import http.server, os, sys\n"
        "class Ok(http.server.BaseHTTPRequestHandler):\n"
        "    def do_GET(self):\n"
        '        body = b\'{"data": [{"id": "m"}]}\'\n'
        "        self.send_response(200); self.send_header('Content-Length', str(len(body))); self.end_headers()\n"
        "        self.wfile.write(body)\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n"
        "http.server.HTTPServer(('127.0.0.1', int(sys.argv[-1])), Ok).serve_forever()\n"
    )
    async with serving([sys.executable, "-c", program], tmp_path / "log", "/ready", dict(os.environ)) as server:
        assert server.target.model == "m"
        pid = int((tmp_path / "pid").read_text())
        assert pid == server.pid
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with pytest.raises(TargetError, match="broken on purpose"):
        async with serving([sys.executable, "-c", "raise SystemExit('broken on purpose')"], tmp_path / "log", "/", {}):
            raise AssertionError("it is not ready")


def test_a_served_shape_has_a_tokenizer_and_both_servers_take_it(tmp_path: Path) -> None:
    model = write_served_shape(tmp_path / "tiny", "tiny", 1024)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
    assert len(tokenizer) == 512 and context_of(model) == 1024
    assert all(tokenizer.decode([i], skip_special_tokens=True) == f"w{i}" for i in range(1, 512))
    write_shape(tmp_path / "bare", "tiny")
    assert with_tokenizer(model, tmp_path) == model
    assert (with_tokenizer(tmp_path / "bare", tmp_path / "made") / "tokenizer.json").exists()
    ours = tidegate_command(model, "dummy", tmp_path, 2, ["--no-optimize"])
    assert ours[-3:] == ["--threads", "2", "--no-optimize"] and ours[ours.index("--model") + 1] == str(model)
    theirs = vllm_command(Path("python"), model, "dummy", [])
    assert theirs[theirs.index("--scheduling-policy") + 1] == "priority"
    assert "--model" not in tidegate_command(None, "auto", tmp_path, None, [])


async def test_a_load_that_cannot_hold_any_more_is_left_at_once_and_the_search_has_an_end(
    tmp_path: Path, scenario_file: Path
) -> None:
    """The tries get no answers: waiting for them would take the whole drain of each."""
    result_file = tmp_path / "search.json"
    async with FakeServer(is_silent=lambda body: body["cache_salt"].startswith("solo-")) as server:
        flags = {"scenario": str(scenario_file), "json": result_file, "arms": "OURS", "ttft_ms": 50, "drain": 60}
        with suppress(SystemExit):  # the arm itself may be too short for anything
            await quick(server.url, **flags, search_seconds=1).measure()
    result = json.loads(result_file.read_text())
    tried = result["solo_goodput"]["probes"]
    assert all(probe["was_cut"] for probe in tried) and result["solo_goodput"]["clients"] == 0
    assert [probe["clients"] for probe in tried] == [1.0, 0.5, 0.25]  # below, a try would see fewer than eight
    assert result["clients"] == 0.25 and any("No load that was tried" in w for w in result["warnings"])
