"""`tidegate batch`: batches from files and tables, against any server with a Batch API."""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from tidegate.batch.plan import plan_of
from tidegate.batch.requests import CHAT, ENDPOINTS, Template
from tidegate.batch.rows import FORMATS, STANDARD, BatchProblem, format_of
from tidegate.batch.run import await_results, check_accepted, submit, write_output
from tidegate.batch.server import WINDOW, BatchServer, describe, errors_of
from tidegate.batch.source import Requests, digest, failed_requests, requests_of, rows_by_id
from tidegate.batch.work import Work, directory_of, prepared, resumed

EX_FAILED, EX_INTERRUPTED = 1, 130
LOCAL = "http://127.0.0.1:8000/v1"
EPILOG = """\
examples:
  tidegate batch run requests.jsonl -o answers.jsonl
  tidegate batch run reviews.csv -o labelled.csv --template "Is this review positive? {text}" \\
      --param max_tokens=1 --param 'structured_outputs={"choice": ["yes", "no"]}'
  cat rows.jsonl | tidegate batch run - -o - --template "Summarise: {text}"
  tidegate batch submit requests.jsonl --metadata webhook=https://example.com/hook
  tidegate batch retry batch_… -o rest.csv --table reviews.csv

After Ctrl-C the server goes on; the same `run` command resumes. `--param` takes JSON or plain text.
"""


def run_batch(args: list[str]) -> int:
    """Run the subcommand. Return the exit code: 0; 1 if something failed; 130 after a Ctrl-C."""
    options = _parser().parse_args(args)
    try:
        with closing(BatchServer(options.base_url, options.api_key)) as server:
            code: int = options.run(options, server)
        return code
    except BatchProblem as problem:
        print(f"tidegate batch: {problem}", file=sys.stderr)
        return EX_FAILED
    except BrokenPipeError:  # nobody reads standard output any more
        raise
    except OSError as error:
        _tell(f"tidegate batch: {_fault(error, getattr(options, 'output', None))}")
        return EX_FAILED
    except KeyboardInterrupt:
        _tell("\nInterrupted: the server goes on with what it has. The same command resumes.")
        return EX_INTERRUPTED


def _fault(error: OSError, output: Path | None) -> str:
    """Return what is wrong with a file, and whether a run of `output` is there that can be resumed."""
    name = error.filename2 or error.filename  # of a file that was renamed: where to
    place = f"{name}: " if name else ""
    is_kept = output is not None and (directory_of(output) / "state.json").exists()
    kept = " The results are kept: the same command goes on." if is_kept else ""
    return f"{place}{error.strerror or error}.{kept}"


def _parser() -> argparse.ArgumentParser:
    server, source = _server_options(), _source_options()
    parser = argparse.ArgumentParser(
        prog="tidegate batch",
        description="Run batches on any server with OpenAI's Batch API.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(required=True, metavar="ACTION")

    def action(
        name: str, run: Callable[[argparse.Namespace, BatchServer], int], about: str, *parents: argparse.ArgumentParser
    ) -> Any:
        added = actions.add_parser(name, parents=list(parents), help=about, description=about)
        added.set_defaults(run=run)
        return added

    output = {"type": Path, "required": True, "metavar": "FILE", "help": "where results go; - for standard output"}
    action("run", _run, "submit, wait, and write the results in the order of the input", server, source).add_argument(
        "-o", "--output", **output
    )
    action("submit", _submit, "upload and start; print the ids of the batches", server, source)
    action("plan", _plan, "say what the input would take, without sending it", server, source)
    action("validate", _validate, "check the input without sending it", server, source)
    action("status", _status, "show one batch", server).add_argument("batch_id")
    action("list", _list, "show the newest batches", server).add_argument("--limit", type=int, default=20, metavar="N")
    action("cancel", _cancel, "cancel a batch; finished lines keep their results", server).add_argument("batch_id")
    fetch = action("fetch", _fetch, "download the results of a batch that has ended", server)
    fetch.add_argument("batch_id")
    fetch.add_argument("-o", "--output", **output)
    retry = action("retry", _retry, "run the failed lines of a batch again", server)
    retry.add_argument("batch_id")
    retry.add_argument("-o", "--output", **output)
    retry.add_argument("--table", type=Path, metavar="FILE", help="the table of the batch: answers join its rows")
    retry.add_argument("--format", choices=sorted(set(FORMATS.values())), help="of the table; default: by its suffix")
    retry.add_argument("--id-column", metavar="NAME", help="the table's column with the custom_id, as the batch had it")
    return parser


def _server_options() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(add_help=False)
    group = options.add_argument_group("server")
    url = os.environ.get("OPENAI_BASE_URL", LOCAL)
    group.add_argument("--base-url", default=url, metavar="URL", help=f"default: OPENAI_BASE_URL, or {LOCAL}")
    key = os.environ.get("TIDEGATE_API_KEY") or os.environ.get("OPENAI_API_KEY") or "none"
    group.add_argument("--api-key", default=key, metavar="KEY", help="default: TIDEGATE_API_KEY, or OPENAI_API_KEY")
    group.add_argument("--window", default=WINDOW, metavar="TIME", help=f"completion_window; default: {WINDOW}")
    group.add_argument("--best-effort", action="store_true", help="also if the window is too short")
    group.add_argument("--metadata", action="append", default=[], metavar="NAME=TEXT", help="repeatable")
    return options


def _source_options() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(add_help=False)
    options.add_argument(
        "input", type=Path, help="requests (JSONL), or rows (CSV, TSV, JSONL, Parquet); - for standard input"
    )
    options.add_argument("--format", choices=sorted(set(FORMATS.values())), help="of the input; default: by its suffix")
    group = options.add_argument_group("requests from rows")
    group.add_argument("--template", metavar="TEXT", help="the prompt, with columns in braces: 'Summarise: {text}'")
    group.add_argument("--system", metavar="TEXT", help="the system message")
    group.add_argument("--model", help="default: the first that the server names")
    group.add_argument("--endpoint", choices=ENDPOINTS, default=CHAT, help=f"default: {CHAT}")
    group.add_argument("--id-column", metavar="NAME", help="column with the custom_id; default: row-1, row-2 …")
    group.add_argument(
        "--param", action="append", default=[], metavar="NAME=JSON", help="a field of each body; repeatable"
    )
    return options


def _run(options: argparse.Namespace, server: BatchServer) -> int:
    work = _work(options, _purpose(options), _requests(options, server))
    return _carry_out(work, server, options)


def _carry_out(work: Work, server: BatchServer, options: argparse.Namespace) -> int:
    submit(work, server, _pairs(options.metadata, "--metadata"), options.window, options.best_effort)
    _tell(f"Running as {', '.join(part.batch_id or '' for part in work.parts)}.")
    return _finish(work, server, options)


def _finish(work: Work, server: BatchServer, options: argparse.Namespace) -> int:
    """Wait for the results, write them, and say how many lines have failed."""
    await_results(work, server, _tell)
    succeeded, failed = write_output(work, options.output, format_of(options.output))
    work.remove()
    _tell(f"{succeeded} lines succeeded, {failed} failed.")
    if failed:
        _tell(f"Run the failed ones again: tidegate batch retry {work.parts[0].batch_id} -o FILE")
    return EX_FAILED if failed else 0


def _submit(options: argparse.Namespace, server: BatchServer) -> int:
    with _prepared_once(options, server) as work:
        submit(work, server, _pairs(options.metadata, "--metadata"), options.window, options.best_effort)
    for part in work.parts:
        print(part.batch_id)
    return 0


def _plan(options: argparse.Namespace, server: BatchServer) -> int:
    with _prepared_once(options, server) as work:
        for line in plan_of(work, server, options.window):
            print(line)
    return 0


def _validate(options: argparse.Namespace, server: BatchServer) -> int:
    with _prepared_once(options, server) as work:
        lines = sum(part.lines for part in work.parts)
        print(f"{lines} requests for {work.endpoint}, in {len(work.parts)} batch(es).")
    return 0


def _status(options: argparse.Namespace, server: BatchServer) -> int:
    batch = server.retrieve(options.batch_id)
    print("\n".join([describe(batch), *errors_of(batch)]))
    return EX_FAILED if batch.status == "failed" else 0


def _list(options: argparse.Namespace, server: BatchServer) -> int:
    for batch in server.newest(options.limit):
        print(describe(batch))
    return 0


def _cancel(options: argparse.Namespace, server: BatchServer) -> int:
    print(describe(server.cancel(options.batch_id)))
    return 0


def _fetch(options: argparse.Namespace, server: BatchServer) -> int:
    """Write the results of a batch in the order of its input. The same command resumes a fetch that was cut off."""
    purpose = {"fetch": options.batch_id, "base_url": options.base_url}
    work = _work(options, purpose, _requests_of_batch(options, server))
    for part in work.parts:  # one, unless the server takes more lines in a batch than others do
        part.batch_id = options.batch_id
    return _finish(work, server, options)


def _retry(options: argparse.Namespace, server: BatchServer) -> int:
    table = options.table
    named = {"table": digest(table), "id_column": options.id_column} if table else {}
    work = _work(options, {"retry": options.batch_id, **named}, _failed_requests(options, server))
    return _carry_out(work, server, options)


def _work(options: argparse.Namespace, purpose: dict[str, Any], requests: Requests) -> Work:
    """Return the unfinished run of the output, or a new one of `requests`."""
    _check_output(options)  # before anything is sent
    directory = directory_of(options.output)
    work = resumed(directory, purpose)
    if work is not None:
        _tell(f"Resuming the run in {directory}.")
        return work
    return prepared(directory, purpose, requests)


def _check_output(options: argparse.Namespace) -> None:
    """Raise `BatchProblem` if results cannot be written as the output, or would replace what they are made of."""
    format_of(options.output)
    for source in (getattr(options, "input", None), getattr(options, "table", None)):
        if source is not None and source != STANDARD and source.resolve() == options.output.resolve():
            raise BatchProblem(f"{options.output} is the input: name another file with -o.")


@contextmanager
def _prepared_once(options: argparse.Namespace, server: BatchServer) -> Iterator[Work]:
    """Prepare a run that is never resumed. Its directory is removed at the end of the block."""
    with tempfile.TemporaryDirectory() as scratch:
        yield prepared(Path(scratch) / "work", {}, _requests(options, server))


def _requests(options: argparse.Namespace, server: BatchServer) -> Requests:
    yield from requests_of(options.input, format_of(options.input, options.format), _template(options, server))


def _requests_of_batch(options: argparse.Namespace, server: BatchServer) -> Requests:
    batch = server.retrieve(options.batch_id)
    check_accepted(batch)
    directory = directory_of(options.output)
    source = directory.with_name(f"{directory.name}.{batch.id}-input.jsonl")
    server.download(batch.input_file_id, source)  # which a later call goes on with
    yield from requests_of(source, "jsonl", None)
    source.unlink()


def _failed_requests(options: argparse.Namespace, server: BatchServer) -> Requests:
    table = options.table
    rows = rows_by_id(table, format_of(table, options.format), options.id_column) if table else None
    with tempfile.TemporaryDirectory() as scratch:
        yield from failed_requests(server, options.batch_id, Path(scratch), rows)


def _template(options: argparse.Namespace, server: BatchServer) -> Template | None:
    if options.template is None:
        return None
    model = options.model or server.first_model()
    parameters = {name: _json_or_text(text) for name, text in _pairs(options.param, "--param").items()}
    return Template(options.template, model, options.endpoint, options.system, options.id_column, parameters)


def _purpose(options: argparse.Namespace) -> dict[str, Any]:
    """Return what distinguishes this run from another one with the same output.

    The window does not: a run whose window was refused goes on with a longer one.
    """
    names = ("template", "system", "model", "endpoint", "id_column", "param", "base_url", "metadata")
    return {"input": str(options.input), "sha256": digest(options.input), **{n: getattr(options, n) for n in names}}


def _pairs(items: list[str], flag: str) -> dict[str, str]:
    pairs = [item.partition("=") for item in items]
    for name, equals, _ in pairs:
        if not name or not equals:
            raise BatchProblem(f"{flag} takes NAME=VALUE.")
    return {name: value for name, _, value in pairs}


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _tell(text: str) -> None:
    print(text, file=sys.stderr)
