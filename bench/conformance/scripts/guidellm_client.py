"""guidellm: short benchmarks of chats at several rates, of completions, and of /v1/responses.

Its prompts have a given number of tokens, for which it loads the demo model's tokenizer.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from checks import BASE_URL, check, main

GUIDELLM = Path(sys.executable).parent / "guidellm"
TOKENIZER = Path(__file__).parents[3] / "demo_model" / "weights"
PROMPT_TOKENS, OUTPUT_TOKENS = 32, 16
REQUESTS = 6


def benchmarks(profile: str, constraint: str, endpoint: str = "") -> list[dict[str, Any]]:
    """Return the reports of the benchmarks of one run. The default of `endpoint` is guidellm's own."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        flags = {
            "--backend": f"kind=openai_http,target={BASE_URL.removesuffix('/v1')}"
            + (f",request_format={endpoint}" if endpoint else ""),
            "--tokenizer": f"kind=hf_auto,model={TOKENIZER}",
            "--profile": profile,
            "--constraint": constraint,
            "--data": f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={OUTPUT_TOKENS}",
            "--output": f"kind=json,path={report}",
        }
        command = [str(GUIDELLM), "run", "--disable-console", *(part for flag in flags.items() for part in flag)]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=150)
        assert done.returncode == 0, done.stderr[-300:]
        found: list[dict[str, Any]] = json.loads(report.read_text())["benchmarks"]
        return found


def assert_complete(benchmark: dict[str, Any]) -> None:
    """Check that no request of the benchmark failed, and what it measured of those that ended in its time."""
    requests = benchmark["requests"]["successful"]
    assert requests and not benchmark["requests"]["errored"], benchmark["metrics"]["request_totals"]
    for request in requests:
        assert request["info"]["status"] == "completed" and request["response_id"], request["info"]
        assert request["output_tokens"] == OUTPUT_TOKENS, request["output_metrics"]
        assert request["prompt_tokens"] >= PROMPT_TOKENS, request["input_metrics"]  # a chat has those of its template
        assert 0 < request["time_to_first_token_ms"] < request["request_latency"] * 1000, request["info"]["timings"]


def assert_all_succeed(endpoint: str) -> None:
    [benchmark] = benchmarks("kind=concurrent,streams=2", f"kind=max_requests,count={REQUESTS}", endpoint)
    assert_complete(benchmark)
    assert benchmark["metrics"]["request_totals"]["successful"] == REQUESTS, benchmark["metrics"]["request_totals"]


@check
def chats() -> None:
    """chats, two at a time: each succeeds, with the tokens that were asked for"""
    assert_all_succeed("")


@check
def other_endpoints() -> None:
    """the same over /v1/completions and /v1/responses"""
    for endpoint in ("/v1/completions", "/v1/responses"):
        assert_all_succeed(endpoint)


@check
def sweep() -> None:
    """a sweep: one chat after the other, as many as go, and at a rate between, without an error"""
    found = benchmarks("kind=sweep,sweep_size=3", "kind=max_duration,seconds=2")
    assert [b["config"]["strategy"]["type_"] for b in found] == ["synchronous", "throughput", "constant"], len(found)
    for benchmark in found:
        assert_complete(benchmark)


main()
