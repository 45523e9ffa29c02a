"""A server with a model that calls tools as it is told, for agents whose prompts fit into no small model's context.

A prompt with `CALL {…} THEN n` is answered by this call of a tool; once `tide-n` is in the prompt, because the tool
has said so, by a sentence with it. Other prompts, such as those for titles, get a short answer. Knows OpenAI's
completions, which a Tidegate with `--engine openai` sends; does not know agents.
"""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

CONTEXT = 65_536  # tokens; the prompts of agents have 10,000 to 40,000
PIECE = 8  # characters of an answer in one event
TASK = re.compile(r"CALL (\{.*?\}) THEN (\d+)", re.DOTALL)


def answer_to(prompt: str) -> str:
    """Return what the model writes after `prompt`."""
    if (task := TASK.search(prompt)) is None:
        return "A short task"
    call, number = task.groups()
    said = f"tide-{number}"
    return f"The tool said {said}." if said in prompt else f"<tool_call>\n{call}\n</tool_call>"


class _Handler(BaseHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        models = {"data": [{"id": "scripted", "owned_by": "bench", "max_model_len": CONTEXT}]}
        self._send("application/json", json.dumps(models).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        text = answer_to(str(body["prompt"]))
        pieces = [text[i : i + PIECE] for i in range(0, len(text), PIECE)]
        reasons = [None] * (len(pieces) - 1) + ["stop"]
        choices = [
            {"index": 0, "text": piece, "finish_reason": reason} for piece, reason in zip(pieces, reasons, strict=True)
        ]
        frames = [json.dumps({"object": "text_completion", "choices": [choice]}) for choice in choices]
        self._send("text/event-stream", "".join(f"data: {frame}\n\n" for frame in (*frames, "[DONE]")).encode())

    def _send(self, media_type: str, data: bytes) -> None:
        self.send_response(200)
        self.send_header("content-type", media_type)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def scripted_model() -> Iterator[str]:
    """Run the server until the block ends. Yield its URL."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
