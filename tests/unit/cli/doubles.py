"""Test doubles for the CLI: minimal services, a server with configured responses, and a hostile data directory."""

from __future__ import annotations

import json
import os
import re
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from headrace.topics import Entry, Progress, Range
from headrace_operations.supervisor.state import Lock, RunState, ServiceState
from headrace_runtime.services import ServiceInfo
from headrace_schemas import EVENTS
from headrace_schemas.http.catalog import AuditList, GarbageReport, NoteList
from headrace_schemas.http.registry_api import ModelList, ModelState, RolloutList, RolloutState, SourceList, VersionList
from headrace_schemas.values.text import printable

SOURCE = """
import http.server, json, os, pathlib, signal, socket, sys, time
name = __name__ if __name__ != "__main__" else pathlib.Path(__file__).stem
name = name.removeprefix("dummy_")
folder = pathlib.Path(os.environ["DUMMY_FOLDER"])
told = (folder / f"{name}.told").read_text() if (folder / f"{name}.told").exists() else ""
print(f"{name} starts", flush=True)
with (folder / "starts").open("a") as file:
    file.write(f"{name} {os.getpid()}\\n")
(folder / f"{name}.environ").write_text(json.dumps({k: v for k, v in os.environ.items() if k.startswith("HEADRACE_")}))

def stop(*_):
    with (folder / "stops").open("a") as file:
        file.write(f"{name}\\n")
    sys.exit(0)

signal.signal(signal.SIGTERM, signal.SIG_IGN if told == "ignore SIGTERM" else stop)
if told == "refuse settings":
    print(f"setting {name}.prot = 1: unknown", flush=True)
    sys.exit(2)
if told == "crash":
    sys.exit("boom")
if told == "never answer":
    time.sleep(600)
if told == "leave a child":
    if os.fork() == 0:
        (folder / "child").write_text(str(os.getpid()))
        time.sleep(600)

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/stuck":
            time.sleep(600)
        self.send_response(503 if told == "unready" else 200)
        self.end_headers()
        self.wfile.write(json.dumps({"checks": {"bus": True, "model": told != "unready"}}).encode())
    def log_message(self, *_):
        pass

held = os.environ.get("LISTEN_PID") == str(os.getpid())
port = int(os.environ[f"HEADRACE_{name.upper()}__PORT"])
pipe = int(os.environ.pop("LIVENESS_FD"))
if told != "answer only":
    http.server.HTTPServer.service_actions = lambda _server: os.write(pipe, b".")
server = http.server.HTTPServer(("127.0.0.1", port), Handler, bind_and_activate=not held)
if held:
    server.socket = socket.socket(fileno=3)
server.serve_forever(0.05)
"""


class Dummies:
    """Modules `dummy_<name>` in a folder, and the environment variables with which processes can import them."""

    def __init__(self, folder: Path, *names: str) -> None:
        self.folder = folder
        self.services = {
            name: ServiceInfo(module=f"dummy_{name}", summary="", is_bus=name == "broker", is_gateway=name == "gateway")
            for name in names
        }
        for info in self.services.values():
            (folder / f"{info.module}.py").write_text(SOURCE)

    @property
    def environ(self) -> Mapping[str, str]:
        path = os.pathsep.join([str(self.folder), *sys.path])
        return {"PATH": os.environ["PATH"], "PYTHONPATH": path, "DUMMY_FOLDER": str(self.folder)}

    def tell(self, name: str, behaviour: str) -> None:
        """Set the behaviour of the service `name` at its next start."""
        (self.folder / f"{name}.told").write_text(behaviour)

    def lines(self, file: str) -> list[str]:
        path = self.folder / file
        return path.read_text().splitlines() if path.exists() else []

    @property
    def starts(self) -> list[str]:
        return [line.split()[0] for line in self.lines("starts")]

    @property
    def pids(self) -> list[int]:
        return [int(line.split()[1]) for line in self.lines("starts")]


Answer = tuple[int, Any]


class HttpFake:
    """Loopback HTTP server. `answer` configures the response of a method and path; `bodies` holds the received JSON."""

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
        """Configure successive responses for a method and path; the last response is repeated."""
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


NOW = datetime(2026, 1, 1, tzinfo=UTC)
VERSION = "m@" + "a" * 12
HOSTILE = [
    "a\x1b[2J\x1b]0;title\x07b",
    "a\x9b31m\x90\x9cb\x7f",
    "a\u202eb\u2066c\u2069\u200f\u061cd",
    "a\u200b\u2060\ufeffb\u2028c\u2029\u00add",
    "a\x00\x08\x0b\x0c\rb",
    "[/] [/red] [link=https://evil.example]a[/link] [@click=x]b[/] [bold",
    "\\[red]\\\\[/] \U000e0041\u3164 {x} %s $\\frac",
]
TOGETHER = "".join(HOSTILE[:4]) + HOSTILE[6]
"""All hidden and controlling characters in one text. Unclosed markup and NUL are tested separately."""
_SAMPLES = ("m", VERSION, "a" * 64, "1", "a" * 16, "00-" + "a" * 32 + "-" + "a" * 16 + "-01")
_PAGES: tuple[tuple[str, type[BaseModel]], ...] = (
    (r"GET /v1/models", ModelList), (r"GET /v1/models/[^/]+", ModelState),
    (r"GET /v1/models/[^/]+/versions", VersionList),
    (r"GET /v1/models/[^/]+/notes", NoteList), (r"GET /v1/audit", AuditList), (r"POST /v1/garbage", GarbageReport),
    (r"GET /v1/rollouts", RolloutList), (r"(GET|POST) /v1/rollouts/.+", RolloutState),
    (r"POST /v1/models/.+", ModelState), (r"GET /v1/sources", SourceList),
)  # fmt: skip


def hidden(text: str) -> list[str]:
    """Return the characters of `text` that a terminal would interpret or not display."""
    return [character for character in text if character not in "\n\t" and printable(character) != character]


class Poison:
    """Generator of JSON for a pydantic model: every field is set, and each unrestricted text field has a hostile
    text."""

    def __init__(self, model: type[BaseModel], text: str) -> None:
        self._schema = model.model_json_schema(mode="serialization")
        self._text = text

    def build(self) -> Any:
        return self._value(self._schema)

    def _value(self, part: dict[str, Any]) -> Any:
        if "$ref" in part:
            return self._value(self._schema["$defs"][part["$ref"].rsplit("/", 1)[1]])
        for choice in ("anyOf", "oneOf", "allOf"):
            if choice in part:
                return self._value(part[choice][0])
        if "const" in part or "enum" in part:
            return part.get("const", part.get("enum", [None])[0])
        makers: dict[str, Callable[[dict[str, Any]], Any]] = {
            "object": self._object,
            "array": self._array,
            "boolean": self._true,
        }
        makers["integer"] = makers["number"] = self._number
        maker: Callable[[dict[str, Any]], Any] = makers.get(part.get("type", ""), self._string)
        return maker(part)

    def _number(self, part: dict[str, Any]) -> Any:
        return part.get("minimum", 1)

    def _true(self, _part: dict[str, Any]) -> bool:
        return True

    def _object(self, part: dict[str, Any]) -> Any:
        if "properties" in part:
            return {name: self._value(inner) for name, inner in part["properties"].items()}
        for inner in part.get("patternProperties", {}).values():
            return {"m": self._value(inner)}
        inner = part.get("additionalProperties")
        return {self._text: self._value(inner)} if isinstance(inner, dict) and "propertyNames" not in part else {}

    def _array(self, part: dict[str, Any]) -> Any:
        items = part.get("prefixItems") or [part.get("items", {})] * max(1, part.get("minItems", 1))
        return [self._value(item) for item in items]

    def _string(self, part: dict[str, Any]) -> str:
        if part.get("format") == "date-time":
            return "2026-01-01T00:00:00Z"
        if pattern := part.get("pattern"):
            return next(sample for sample in _SAMPLES if re.search(pattern, sample))
        return self._text[: part.get("maxLength", 1000)]


class HostileServer(HttpFake):
    """HTTP server of the registry's and the gateway's routes; all other routes return an error with a hostile
    message."""

    text = ""

    def _next(self, method: str, path: str) -> tuple[int, Any]:
        for pattern, model in _PAGES:
            if re.fullmatch(pattern, f"{method} {path}"):
                return 200, Poison(model, self.text).build()
        if path == "/v1/feedback":
            return 202, {"event_ids": [self.text], "teaches": False, "reason": self.text}
        if path in ("/health", "/ready"):
            return 503, {"status": self.text, "lacks": [self.text], self.text: self.text}
        return 400, {"error": {"message": self.text, "code": self.text, "type": self.text, "param": self.text}}


class HostileTopics:
    """Topics with two records each: an event with hostile texts, and a record that is not a valid event."""

    def __init__(self, text: str) -> None:
        self._text = text

    async def ends(self, topics: Iterable[str]) -> dict[str, dict[int, int]]:
        return {topic: {0: 2} for topic in topics}

    async def partitions(self, topic: str) -> tuple[int, ...]:
        return (0,)

    async def read(
        self, topic_range: Range, progress: Progress | None = None, ends: Mapping[int, int] | None = None
    ) -> AsyncIterator[Entry]:
        text, kind = self._text, EVENTS.get(topic_range.topic)
        headers = ((text, text.encode("utf-8", "replace")),)
        event = None
        if kind is not None:
            try:
                event = kind.model_validate(Poison(kind, text).build())
            except ValidationError:
                event = None  # the model has a rule about several fields; the record below has the same texts
        yield Entry(topic_range.topic, 0, 0, NOW, text, event, None if event else text, headers)
        yield Entry(topic_range.topic, 0, 1, NOW, text, None, text, headers)

    async def records(self, topic_range: Range, *_: Any, **__: Any) -> AsyncIterator[Any]:
        value = self._text.encode("utf-8", "replace")
        for offset in (0, 1):
            yield SimpleNamespace(
                topic=topic_range.topic, partition=0, offset=offset, key=value, value=value, headers=[("x", value)],
                timestamp=0,
            )  # fmt: skip


class HostileStack:
    """Data directory of a Headrace that seems to run and whose texts are hostile."""

    def __init__(self, folder: Path, server: HostileServer, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self._server, self._patch = folder, server, monkeypatch
        self._lock = Lock(folder)
        self._lock.take()
        self.file = folder / "rows.jsonl"

    def set_text(self, text: str) -> None:
        """Use `text` for every text that the stack returns from now on."""
        self._server.text = text
        service = ServiceState(
            status="ready", lacks=(text,), pid=1, url=self._server.url, port=1, log=f"{text}.log", since=NOW
        )
        services = dict.fromkeys(("gateway", "registry", "scorer", text), service)
        state = RunState(
            pid=1, data_dir=str(self.folder), started_at=NOW, bus="127.0.0.1:1", services=services,
            left_out={text: text},
        )  # fmt: skip
        state.write(self.folder)
        (self.folder / "logs").mkdir(exist_ok=True)
        (self.folder / "logs" / "gateway.log").write_bytes(text.encode("utf-8", "replace") + b"\n\xff\xfe\n")
        self.file.write_text(json.dumps({text: text, "question": text}) + "\n")

        @asynccontextmanager
        async def connected(_bus: str) -> AsyncIterator[HostileTopics]:
            yield HostileTopics(text)

        for name, module in list(sys.modules.items()):
            if name.startswith(("headrace_cli", "headrace_operations", "headrace.")) and hasattr(module, "connected"):
                self._patch.setattr(module, "connected", connected)

    def close(self) -> None:
        self._lock.release()


def join_arguments(values: Sequence[str]) -> str:
    """Return `values` as one printable line, for the message of an assertion."""
    return printable(" ".join(values), 500)
