"""LiteLLM's proxy in front of the server: an endpoint that is not served does not stop the others."""

import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
from checks import API_KEY, BASE_URL, MODEL, check, main
from openai import OpenAI, OpenAIError

HELLO = [{"role": "user", "content": "Hello!"}]
MASTER_KEY = "sk-" + secrets.token_hex(32)  # the proxy does not start without one
CONFIG = f"""
model_list:
  - model_name: demo
    litellm_params: {{model: "openai/{MODEL}", api_base: "{BASE_URL}", api_key: "{API_KEY}"}}
"""

with socket.create_server(("127.0.0.1", 0)) as probe:
    port = probe.getsockname()[1]
client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=MASTER_KEY, max_retries=0)


@check
def chat() -> None:
    """chat and its stream through the proxy"""
    assert client.chat.completions.create(model="demo", messages=HELLO).choices[0].message.content
    assert list(client.chat.completions.create(model="demo", messages=HELLO, stream=True))


@check
def not_served() -> None:
    """after requests for embeddings, which are not served, chats are answered as before"""
    for _ in range(3):
        try:
            client.embeddings.create(model="demo", input="x")
        except OpenAIError as error:
            assert getattr(error, "status_code", None) == 400, error
        else:
            raise AssertionError("no error")
    assert client.chat.completions.create(model="demo", messages=HELLO).choices[0].message.content


with tempfile.TemporaryDirectory() as folder:
    config = Path(folder) / "config.yaml"
    config.write_text(CONFIG)
    command = [str(Path(sys.executable).parent / "litellm"), "--config", str(config), "--port", str(port)]
    log = open(Path(folder) / "log", "wb")  # noqa: SIM115
    proxy = subprocess.Popen(
        [*command, "--host", "127.0.0.1"],
        stdout=log,
        stderr=subprocess.STDOUT,
        env={**os.environ, "LITELLM_MASTER_KEY": MASTER_KEY},
    )
    try:
        until_s = time.monotonic() + 120
        while time.monotonic() < until_s and proxy.poll() is None:
            try:
                if httpx.get(f"http://127.0.0.1:{port}/health/liveliness", timeout=2).status_code == 200:
                    break
            except httpx.TransportError:
                time.sleep(0.5)
        main()
    finally:
        proxy.kill()
        proxy.wait()
