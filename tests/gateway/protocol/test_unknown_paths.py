"""Paths that this server does not have: endpoints of OpenAI get 400, mistakes in a URL a hint."""

import pytest

from tests.gateway.protocol.test_errors import error_of
from tests.gateway.stand import running_stand

NOT_SERVED = [
    ("POST", "/v1/audio/transcriptions"),
    ("POST", "/v1/images/generations"),
    ("POST", "/v1/moderations"),
    ("GET", "/v1/fine_tuning/jobs"),
    ("POST", "/v1/fine_tuning/jobs/ftjob-1/cancel"),
    ("GET", "/v1/assistants"),
    ("POST", "/v1/threads/t/messages"),
    ("GET", "/v1/vector_stores/v/files"),
    ("POST", "/v1/vector_stores"),
    ("GET", "/v1/evals"),
    ("GET", "/v1/realtime"),
    ("POST", "/v1/videos"),
    ("GET", "/v1/containers/c/files"),
    ("POST", "/v1/containers"),
    ("GET", "/v1/chat/completions/chatcmpl-1"),
    ("GET", "/v1/organization/usage/completions"),
    ("POST", "/score"),
]
MISTAKEN = [
    ("/chat/completions", "/v1/chat/completions"),
    ("/v1/v1/chat/completions", "/v1/chat/completions"),
    ("/v1/chat/completions/", "/v1/chat/completions"),
    ("//v1//chat/completions", "/v1/chat/completions"),
    ("/api/v1/completions", "/v1/completions"),
    ("/openai/deployments/tide/chat/completions", "/v1/chat/completions"),
    ("/v1/chat/completion", "/v1/chat/completions"),
    ("/v1/completion", "/v1/completions"),
    ("/v1/tokenize", "/tokenize"),
    ("/embeddings", "/v1/embeddings"),
    ("/v1/embeddings/", "/v1/embeddings"),
    ("/rerank", "/v1/rerank"),
    ("/models/tide/tiny", "/v1/models/tide/tiny"),
    ("/v1/models/", "/v1/models"),
    ("/v1/health", "/health"),
    ("/health/", "/health"),
]


async def test_endpoints_of_openai_that_are_not_served_name_those_that_are() -> None:
    async with running_stand() as stand:
        for method, path in NOT_SERVED:
            error = error_of(await stand.http.request(method, path), 400)
            assert (error["type"], error["code"]) == ("invalid_request_error", "endpoint_not_served"), path
            assert error["message"].startswith(f"{method} {path} is not served here.")
            assert (
                "/v1/chat/completions, /v1/completions, /v1/conversations, /v1/embeddings, /v1/files"
                in error["message"]
            )


async def test_mistakes_in_a_url_get_a_hint() -> None:
    async with running_stand() as stand:
        for path, meant in MISTAKEN:
            error = error_of(await stand.http.get(stand.url + path), 404)
            assert f"Did you mean {meant}?" in error["message"], path


@pytest.mark.parametrize("path", ["/made/up", "/", "/v2", "/v1", "/v1/", "/favicon.ico", "/v1/" + "a/" * 5000])
async def test_other_paths_get_no_hint(path: str) -> None:
    async with running_stand() as stand:
        response = await stand.http.post(stand.url + path)
    if path == "/":
        assert response.status_code == 405
    else:
        assert "Did you mean" not in error_of(response, 404)["message"]
