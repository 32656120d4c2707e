"""Minimal services for tests of the supervisor: each serves `/health` on its port and misbehaves on request."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from headrace_runtime.services import ServiceInfo

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
