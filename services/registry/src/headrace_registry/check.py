"""Check of the gate's program before the first promotion: it must run, and print valid lines.

A stand-in for the gateway answers the program's calls with a fixed text, because no model is served yet.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain

from headrace_registry.gate.gate import Gate, GateFailed
from headrace_registry.settings import GateRaySettings, RegistrySettings
from headrace_runtime.errors import SettingError
from headrace_runtime.settings.sections import Common
from headrace_schemas.programs import Tasks

_TEXT = "This answer is a placeholder."
_TOKENS = 5
_BODY_BYTES_MAX = 16_777_216


@contextlib.contextmanager
def run_stand_in() -> Iterator[str]:
    """Run a stand-in for the gateway on loopback inside the context, and yield its base URL. It answers each chat
    request with the same text."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self._send(json.dumps({"object": "list", "data": []}))

    def do_POST(self) -> None:
        length = int(self.headers.get("content-length", "0"))
        try:
            request = json.loads(self.rfile.read(min(length, _BODY_BYTES_MAX)) or b"{}")
        except (ValueError, RecursionError):
            request = {}
        if not self.path.endswith("/chat/completions"):  # feedback, ends of sessions
            self._send("{}", status=202)
        elif isinstance(request, dict) and request.get("stream"):
            chunks = [_completion(request, "delta", {"role": "assistant", "content": _TEXT}, None),
                      _completion(request, "delta", {}, "stop")]  # fmt: skip
            self._send("".join(f"data: {chunk}\n\n" for chunk in [*chunks, "[DONE]"]), kind="text/event-stream")
        else:
            self._send(_completion(request, "message", {"role": "assistant", "content": _TEXT}, "stop"))

    def _send(self, text: str, *, status: int = 200, kind: str = "application/json") -> None:
        content = text.encode()
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Print nothing, because the base class would print a line for each request."""


def _completion(request: object, part: str, message: dict[str, str], finish_reason: str | None) -> str:
    fields = request if isinstance(request, dict) else {}
    count = fields.get("n")
    indices = range(count if isinstance(count, int) and 0 < count <= 128 else 1)
    tokens = _TOKENS if message else 0
    choice: dict[str, object] = {part: message, "finish_reason": finish_reason}
    if fields.get("logprobs"):
        choice["logprobs"] = {"content": [{"token": "t", "logprob": -1.0, "bytes": None, "top_logprobs": []}] * tokens}
    if fields.get("return_token_ids"):
        choice["token_ids"] = [0] * tokens
    return json.dumps(
        {
            "id": "chatcmpl-placeholder",
            "object": "chat.completion" if part == "message" else "chat.completion.chunk",
            "created": 0,
            "model": fields.get("model"),
            "choices": [{"index": index, **choice} for index in indices],
            "usage": {"prompt_tokens": 1, "completion_tokens": _TOKENS, "total_tokens": 1 + _TOKENS},
            **({"prompt_token_ids": [0]} if fields.get("return_token_ids") else {}),
        }
    )


VERSION = "check@000000000000"
_CHECK_S = 60.0
_TASKS = 8


async def check(_common: Common, settings: RegistrySettings) -> list[str]:
    """Check that the gate's program plays a few tasks, against a stand-in for the gateway. Return an empty list of
    notes.

    If the program still runs after a minute, the check succeeds, because the program may print nothing for
    `gate.silence_s`.

    Raises:
        SettingError: the program fails, or prints invalid lines.
    """
    gate = settings.gate
    if not gate.command:
        return []
    Gate(gate)
    with run_stand_in() as base_url:
        overrides = {"base_url": base_url, "silence_s": min(gate.silence_s, _CHECK_S), "ray": GateRaySettings()}
        check_settings = gate.model_copy(
            update=overrides
        )  # workers on other machines could not reach a stand-in on this one
        try:
            async with asyncio.timeout(_CHECK_S), Gate(check_settings).session() as session:
                plays = enumerate(_sample_tasks(session.tasks))
                await asyncio.gather(*(session.play(VERSION, task, seed) for seed, task in plays))
        except TimeoutError:
            pass
        except GateFailed as error:
            if not error.timed_out:
                remedy = f"in a check against a stand-in gateway: {error}"
                raise SettingError("registry.gate.command", gate.command, remedy) from None
    return []


def _sample_tasks(tasks: Tasks) -> list[str]:
    return list(dict.fromkeys(chain(tasks.gate[:_TASKS], tasks.audit[:_TASKS])))
