"""`tidegate batch` against a real HTTP server with files and batches, on a real store."""

import asyncio
import csv
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis
from starlette.datastructures import Headers
from starlette.responses import FileResponse

from gateway.jobs.batches.input.checks import MAX_LINES, LineError
from gateway.requests.prepare.placement import Placement
from gateway.routes.jobs.files import MAX_BATCH_BYTES
from tests.gateway.jobs.batches.test_forecasts import WORKER
from tests.gateway.offline import MODEL, OfflineGateway, jsonl, line, lines, running_gateway
from tests.gateway.stand import served
from tidegate.batch import server, work
from tidegate.batch.command import run_batch
from tidegate.batch.plan import duration


@dataclass
class CommandLine:
    gateway: OfflineGateway
    url: str

    async def __call__(self, *arguments: Any) -> int:
        """Run the command in a thread, while this loop serves. Return its exit code."""
        return await asyncio.to_thread(run_batch, [*map(str, arguments), "--base-url", self.url])


@pytest.fixture
async def batch(redis_client: Redis, tmp_path: Path) -> AsyncIterator[CommandLine]:
    async with running_gateway(redis_client, tmp_path / "data") as gateway, served(gateway) as url:
        yield CommandLine(gateway, f"{url}/v1")


def _written(path: Path, content: bytes | str) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def _results(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text().splitlines()]


async def test_requests_come_back_in_their_order(batch: CommandLine, tmp_path: Path) -> None:
    batch.gateway.completions.statuses["q3"] = [400]
    source, output = _written(tmp_path / "in.jsonl", jsonl(lines(6))), tmp_path / "out.jsonl"
    assert await batch("run", source, "-o", output) == 1  # since one line failed
    results = _results(output)
    assert [result["custom_id"] for result in results] == [f"q{n}" for n in range(6)]
    assert [result["response"]["status_code"] for result in results] == [200, 200, 200, 400, 200, 200]
    assert not (tmp_path / "out.jsonl.batch").exists()


async def test_a_table_gets_an_answer_for_each_row(batch: CommandLine, tmp_path: Path) -> None:
    source = _written(tmp_path / "in.csv", 'text,year\n"high, or low",1999\nébb,2024\n')
    output = tmp_path / "out.csv"
    batch.gateway.completions.statuses["Say ébb of 2024"] = [400]
    assert await batch("run", source, "-o", output, "--template", "Say {text} of {year}", "--model", MODEL) == 1
    with output.open(newline="", encoding="utf-8") as file:
        first, second = csv.DictReader(file)
    assert first == {"text": "high, or low", "year": "1999", "answer": "Re: Say high, or low of 1999", "error": ""}
    assert (second["text"], second["answer"]) == ("ébb", "") and "no" in second["error"]


@pytest.mark.parametrize(("suffix", "written"), [("csv", "[4.0, 0.5]"), ("jsonl", [4.0, 0.5])])
async def test_a_table_of_texts_gets_their_embeddings(
    batch: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, written: Any
) -> None:
    async def embed(path: str, body: dict[str, Any], placement: Placement) -> tuple[int, dict[str, Any]]:
        assert (path, set(body)) == ("/v1/embeddings", {"model", "input"})
        return 200, {"data": [{"object": "embedding", "index": 0, "embedding": [float(len(body["input"])), 0.5]}]}

    monkeypatch.setattr(batch.gateway.completions, "complete", embed)
    source, output = _written(tmp_path / "in.jsonl", '{"text": "ebb"}'), tmp_path / f"out.{suffix}"
    flags = ("--template", "{text}!", "--endpoint", "/v1/embeddings", "--model", MODEL)
    assert await batch("run", source, "-o", output, *flags) == 0
    with output.open(newline="") as file:
        [row] = csv.DictReader(file) if suffix == "csv" else map(json.loads, file)
    assert row["answer"] == written


async def test_parquet_keeps_its_types(batch: CommandLine, tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    source, output = tmp_path / "in.parquet", tmp_path / "out.parquet"
    parquet.write_table(pyarrow.table({"n": [1, 2], "tags": [["a"], ["b", "c"]]}), source)
    assert await batch("run", source, "-o", output, "--template", "{n}", "--model", MODEL) == 0
    answers = [{"answer": f"Re: {n}", "error": None} for n in (1, 2)]
    rows = [{"n": 1, "tags": ["a"]}, {"n": 2, "tags": ["b", "c"]}]
    assert parquet.read_table(output).to_pylist() == [row | answer for row, answer in zip(rows, answers, strict=True)]


async def test_a_column_of_several_types_becomes_one_of_texts_in_parquet(batch: CommandLine, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    source = _written(tmp_path / "in.jsonl", '{"n": 1, "tags": null}\n{"n": "two", "tags": null}\n{"n": [3]}\n')
    assert await batch("run", source, "-o", tmp_path / "out.parquet", "--template", "{n}", "--model", MODEL) == 0
    rows = parquet.read_table(tmp_path / "out.parquet").to_pylist()
    assert [(row["n"], row["tags"], row["answer"]) for row in rows] == [
        ("1", None, "Re: 1"),
        ("two", None, "Re: two"),
        ("[3]", None, "Re: [3]"),
    ]


@pytest.mark.parametrize(
    ("header", "template"), [(",text", "{text}"), ("n,user.name", "{user.name}"), ("n,a[0]", "{a[0]}")]
)
async def test_columns_may_have_any_name(batch: CommandLine, tmp_path: Path, header: str, template: str) -> None:
    """The first is what pandas writes: a column of row numbers without a name."""
    source, output = _written(tmp_path / "in.csv", f"{header}\n0,ebb\n"), tmp_path / "out.csv"
    assert await batch("run", source, "-o", output, "--template", template, "--model", MODEL) == 0
    assert output.read_text().splitlines() == [f"{header},answer,error", "0,ebb,Re: ebb,"]


async def test_a_run_whose_input_was_refused_begins_again(
    batch: CommandLine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out.jsonl"
    assert await batch("run", _written(tmp_path / "in.jsonl", jsonl([line("a", body={})])), "-o", output) == 1
    assert "body.model" in capsys.readouterr().err
    assert await batch("run", _written(tmp_path / "in.jsonl", jsonl(lines(2))), "-o", output) == 0
    assert len(_results(output)) == 2


async def test_a_part_that_was_refused_runs_again_beside_the_others(
    batch: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work, "MAX_PART_LINES", 2)
    source, output = _written(tmp_path / "in.jsonl", jsonl(lines(4))), tmp_path / "out.jsonl"
    quota, refused = (
        batch.gateway.app.state.gateway.batches._run_parts.quota,
        [LineError("token_limit_exceeded", "Later.")],
    )

    async def reserve(*args: Any) -> tuple[LineError, ...]:
        return (refused.pop(),) if refused else ()

    monkeypatch.setattr(quota, "reserve", reserve)
    assert await batch("run", source, "-o", output) == 1
    assert await batch("run", source, "-o", output) == 0
    assert [result["custom_id"] for result in _results(output)] == [f"q{n}" for n in range(4)]
    assert set(batch.gateway.completions.answered.values()) == {1}


def test_a_part_is_not_larger_than_a_server_takes() -> None:
    assert work.MAX_PART_BYTES <= MAX_BATCH_BYTES and work.MAX_PART_LINES <= MAX_LINES


async def test_a_run_that_was_cut_off_goes_on_without_a_second_batch(
    batch: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, output = _written(tmp_path / "in.jsonl", jsonl(lines(3))), tmp_path / "out.jsonl"
    permits = batch.gateway.completions.permits = asyncio.Semaphore(0)

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(server, "sleep", interrupt)
        assert await batch("run", source, "-o", output) == 130
    assert not output.exists()
    for _ in range(3):
        permits.release()
    assert await batch("run", source, "-o", output) == 0
    assert len(_results(output)) == 3
    assert set(batch.gateway.completions.answered.values()) == {1}
    assert len([item async for item in batch.gateway.client.batches.list()]) == 1


async def test_an_output_that_cannot_be_written_is_said_and_the_same_command_goes_on(
    batch: CommandLine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, output = _written(tmp_path / "in.jsonl", jsonl(lines(2))), tmp_path / "out.jsonl"
    output.mkdir()
    assert await batch("run", source, "-o", output) == 1
    assert "out.jsonl: Is a directory. The results are kept: the same command goes on." in capsys.readouterr().err
    output.rmdir()
    assert await batch("run", source, "-o", output) == 0
    assert len(_results(output)) == 2 and len(batch.gateway.completions.answered) == 2
    assert await batch("run", source, "-o", source / "out.jsonl") == 1
    assert capsys.readouterr().err.endswith(": Not a directory.\n")


async def test_the_output_does_not_take_the_place_of_the_input(
    batch: CommandLine, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    source = _written(tmp_path / "in.jsonl", jsonl(lines(2)))
    assert await batch("run", source, "-o", "in.jsonl") == 1
    assert "in.jsonl is the input: name another file with -o." in capsys.readouterr().err
    assert await batch("retry", "batch_1", "--table", "in.jsonl", "-o", source) == 1
    assert "is the input" in capsys.readouterr().err
    assert source.read_bytes() == jsonl(lines(2))


async def test_another_input_does_not_resume_a_run(
    batch: CommandLine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out.jsonl"
    work.prepared(work.directory_of(output), {"input": "another"}, ((r, None) for r in lines(1)))
    assert await batch("run", _written(tmp_path / "in.jsonl", jsonl(lines(3))), "-o", output) == 1
    assert "belongs to an unfinished run" in capsys.readouterr().err


async def test_failed_lines_run_again_alone(
    batch: CommandLine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    batch.gateway.completions.statuses["q1"] = [400]
    assert await batch("run", _written(tmp_path / "in.jsonl", jsonl(lines(3))), "-o", tmp_path / "out.jsonl") == 1
    [first] = [item async for item in batch.gateway.client.batches.list()]
    assert first.id in capsys.readouterr().err  # in the command to repeat them
    assert await batch("retry", first.id, "-o", tmp_path / "rest.jsonl") == 0
    assert [result["custom_id"] for result in _results(tmp_path / "rest.jsonl")] == ["q1"]
    assert await batch("retry", (await _newest(batch)).id, "-o", tmp_path / "none.jsonl") == 1
    assert "has no failed lines" in capsys.readouterr().err


async def test_a_retry_of_a_table_has_its_rows(batch: CommandLine, tmp_path: Path) -> None:
    table, labelled, rest = (tmp_path / name for name in ("in.csv", "out.csv", "rest.csv"))
    _written(table, "text,year\nebb,1999\nflood,2024\n")
    batch.gateway.completions.statuses["Say flood"] = [400]
    assert await batch("run", table, "-o", labelled, "--template", "Say {text}", "--model", MODEL) == 1
    failed = (await _newest(batch)).id
    for source in (table, labelled):  # the second has an answer and an error from the first run
        batch.gateway.completions.statuses["Say flood"] = []
        assert await batch("retry", failed, "-o", rest, "--table", source) == 0
        with rest.open(newline="") as file:
            assert list(csv.DictReader(file)) == [
                {"text": "flood", "year": "2024", "answer": "Re: Say flood", "error": ""}
            ]


async def test_a_retry_with_another_table_is_refused(
    batch: CommandLine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    batch.gateway.completions.statuses["q1"] = [400]
    assert await batch("run", _written(tmp_path / "in.jsonl", jsonl(lines(3))), "-o", tmp_path / "out.jsonl") == 1
    other = _written(tmp_path / "other.csv", "text\nebb\n")
    assert await batch("retry", (await _newest(batch)).id, "-o", tmp_path / "rest.csv", "--table", other) == 1
    assert "no row for 'q1'" in capsys.readouterr().err


async def test_a_download_that_is_cut_off_goes_on(
    batch: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection is lost after some bytes of each answer: what has come is kept, and the rest is asked for."""
    content = jsonl(lines(40))
    file_id, asked = await batch.gateway.upload(content), list[str | None]()
    whole = FileResponse.__call__

    async def cut_off(response: FileResponse, scope: Any, receive: Any, send: Any) -> None:
        asked.append(Headers(scope=scope).get("range"))

        async def send_some(message: Any) -> None:
            if message["type"] == "http.response.body" and len(message["body"]) > 1000:
                await send({"type": "http.response.body", "body": message["body"][:1000], "more_body": True})
                raise ConnectionResetError
            await send(message)

        await whole(response, scope, receive, send_some)

    monkeypatch.setattr(FileResponse, "__call__", cut_off)
    client = server.BatchServer(batch.url, "none")
    await asyncio.to_thread(client.download, file_id, tmp_path / "copy")
    await asyncio.to_thread(client.close)
    assert (tmp_path / "copy").read_bytes() == content
    assert asked[0] is None and asked[1:] == [f"bytes={n}000-" for n in range(1, len(asked))] and len(asked) > 3


async def test_a_fetch_that_was_interrupted_goes_on(
    batch: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = await batch.gateway.ended((await batch.gateway.submit(lines(3))).id)
    output, download = tmp_path / "out.jsonl", server.BatchServer.download

    def interrupted(self: server.BatchServer, file_id: str, path: Path) -> None:
        if file_id == ended.output_file_id:
            raise KeyboardInterrupt
        download(self, file_id, path)

    with monkeypatch.context() as patched:
        patched.setattr(server.BatchServer, "download", interrupted)
        assert await batch("fetch", ended.id, "-o", output) == 130
    assert (await batch.gateway.client.files.delete(ended.input_file_id)).deleted  # it is not needed again
    assert await batch("fetch", ended.id, "-o", output) == 0
    assert [result["custom_id"] for result in _results(output)] == ["q0", "q1", "q2"]
    assert {path.name for path in tmp_path.iterdir()} == {"out.jsonl", "data"}


async def _newest(batch: CommandLine) -> Any:
    return [item async for item in batch.gateway.client.batches.list()][0]


async def test_submit_status_list_fetch_and_cancel(
    batch: CommandLine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    permits = batch.gateway.completions.permits = asyncio.Semaphore(0)
    source = _written(tmp_path / "in.jsonl", jsonl(lines(2)))
    assert await batch("submit", source, "--metadata", "team=tides") == 0
    batch_id = capsys.readouterr().out.strip()
    assert await batch("status", batch_id) == 0 and await batch("list") == 0
    assert all(batch_id in text and "tides" in text for text in capsys.readouterr().out.splitlines())
    permits.release()
    await batch.gateway.answered(batch_id, 1)
    assert await batch("cancel", batch_id) == 0
    await batch.gateway.ended(batch_id)
    assert await batch("fetch", batch_id, "-o", tmp_path / "out.jsonl") == 1
    errors = [result["error"] for result in _results(tmp_path / "out.jsonl")]
    assert sorted(error is None for error in errors) == [False, True]


@pytest.mark.parametrize(
    ("name", "content", "flags", "message"),
    [
        ("in.csv", "text\nebb\n", [], "add --template"),
        ("in.csv", "text\nebb\n", ["--template", "{txt}"], "there is 'text'"),
        ("in.csv", "a,b\n1\n", ["--template", "{a}"], "line 2: the number of fields differs"),
        ("in.csv", "", ["--template", "{a}"], "no rows"),
        ("in.csv", b"text\n\xff\n", ["--template", "{text}"], "not UTF-8"),
        ("in.jsonl", "{oh\n", [], "line 1: this is not JSON"),
        ("in.jsonl", "[1]\n", [], "must be a JSON object"),
        ("in.jsonl", jsonl([line("a"), line("a")]), [], "not unique"),
        ("in.jsonl", jsonl([line("a"), line("b", url="/v1/completions")]), [], "one endpoint a run"),
        ("in.jsonl", jsonl(lines(1)), ["--template", "{a}"], "leave --template out"),
        ("in.txt", "text", [], "add --format"),
        ("in.parquet", "text", ["--template", "{a}"], "no Parquet file"),
        ("in.csv", "text\nebb\n", ["--template", "{text"], "is not valid"),
        ("in.csv", "text\nebb\n", ["--template", "{text.size}"], "is not valid"),
        ("in.csv", "text\nebb\n", ["--template", "{text[high]}"], "is not valid"),
        ("in.csv", "a,a\n1,2\n", ["--template", "{a}"], "a column twice"),
        ("in.jsonl", '{"text": "\\ud83d"}\n', ["--template", "{text}"], "surrogate"),
    ],
)
def test_input_that_cannot_be_used_is_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: bytes | str, flags: list[str], message: str
) -> None:
    assert run_batch(["validate", str(_written(tmp_path / name, content)), "--model", MODEL, *flags]) == 1
    assert message in capsys.readouterr().err


def test_a_server_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = _written(tmp_path / "in.jsonl", jsonl(lines(1)))
    flags = ["-o", str(tmp_path / "out.jsonl"), "--base-url", "http://127.0.0.1:9/v1"]
    assert run_batch(["run", str(source), *flags]) == 1
    assert "http://127.0.0.1:9/v1 does not answer" in capsys.readouterr().err


def test_rows_may_come_from_standard_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with _written(tmp_path / "rows", "\ufefftext\tn\r\nebb\t1\r\n").open() as file:
        monkeypatch.setattr("sys.stdin", file)
        assert run_batch(["validate", "-", "--format", "tsv", "--template", "{text} {n}", "--model", MODEL]) == 0
    assert "1 requests" in capsys.readouterr().out


def test_a_table_on_standard_input_without_its_format_is_told_the_flag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with _written(tmp_path / "rows", "text,n\nebb,1\n").open() as file:
        monkeypatch.setattr("sys.stdin", file)
        assert run_batch(["validate", "-", "--template", "{text}", "--model", MODEL]) == 1
    said = "standard input, line 1: this is not JSON (Expecting value). For another format, add --format csv,"
    assert said in capsys.readouterr().err


async def test_a_plan_says_what_the_server_expects(
    redis_client: Redis, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "q"}], "max_tokens": 1000, "ignore_eos": True}
    source = _written(tmp_path / "in.jsonl", jsonl([line(f"q{n}", body=body) for n in range(1000)]))
    async with (
        running_gateway(redis_client, tmp_path / "data", workers=[WORKER]) as gateway,
        served(gateway) as url,
    ):
        gateway.completions.permits = asyncio.Semaphore(0)  # the batch must not end before its status is read
        assert await CommandLine(gateway, f"{url}/v1")("plan", source, "--window", "1h") == 0
        printed = capsys.readouterr().out
        assert await CommandLine(gateway, f"{url}/v1")("submit", source, "--window", "1h") == 1
        assert "The earliest feasible completion_window is '104m'" in capsys.readouterr().err
        assert await CommandLine(gateway, f"{url}/v1")("submit", source, "--window", "1h", "--best-effort") == 0
        batch_id = capsys.readouterr().out.strip()
        assert await CommandLine(gateway, f"{url}/v1")("status", batch_id) == 0
    assert f"1000 requests for /v1/chat/completions ({MODEL}), in 1 batch(es)." in printed
    assert "Output tokens: about 1 M (from 1 M to 1 M)." in printed and "Time: about 5 h 3" in printed
    assert "Earliest window: 104m; 1h is not feasible" in printed
    assert "Peak effect on realtime: answers up to 1.25 times as long" in printed
    assert "ends about" in capsys.readouterr().out


async def test_a_plan_for_a_server_without_estimates_counts(
    batch: CommandLine, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch.gateway.app.router, "routes", [])
    source = _written(tmp_path / "in.jsonl", jsonl(lines(3)))
    assert await batch("plan", source) == 0
    printed = capsys.readouterr().out
    assert "3 requests" in printed and "Prompt tokens: about 26, at 4 bytes a token." in printed
    assert "3 answers have no max_tokens" in printed and "no estimates" in printed


@pytest.mark.parametrize(
    ("seconds", "words"), [(40, "40 s"), (89.6, "90 s"), (720, "12 min"), (12_000, "3 h 20 min"), (187_200, "2 d 4 h")]
)
def test_durations_in_words(seconds: float, words: str) -> None:
    assert duration(seconds) == words
