"""Loopback HTTP server with configured answers, for commands that make real requests."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = tuple[int, Any]


class HttpFake:
    """Loopback server. `answer` configures the answer of a method and path; `bodies` has the posted JSON."""

    def __init__(self) -> None:
        self.answers: dict[tuple[str, str], Answer] = {}
        self.bodies: list[dict[str, Any]] = []
        self._sequences: dict[tuple[str, str], list[Answer]] = {}
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer("GET")

            def do_POST(self) -> None:
                content = self.rfile.read(int(self.headers.get("content-length", "0")))
                fake.bodies.append(json.loads(content or b"{}"))
                self._answer("POST")

            def _answer(self, method: str) -> None:
                status, body = fake._next(method, self.path.partition("?")[0])
                content = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def answer(self, method: str, path: str, body: Any, *, status: int = 200) -> None:
        self.answers[method, path] = (status, body)

    def sequence(self, method: str, path: str, answers: list[Answer]) -> None:
        """Configure several answers of a method and path; the last one is repeated."""
        self._sequences[method, path] = answers

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _next(self, method: str, path: str) -> Answer:
        sequence = self._sequences.get((method, path))
        if sequence:
            return sequence.pop(0) if len(sequence) > 1 else sequence[0]
        not_found = (404, {"error": {"message": f"nothing at {method} {path}", "code": "unknown_url"}})
        return self.answers.get((method, path), not_found)
