"""Attacks of another user of the machine, and of a client without the token, on a stack's broker, files and pages."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import subprocess
from pathlib import Path
from typing import Any

from headrace_broker.dispatch import APIS, BEFORE_LOGIN
from headrace_operations.supervisor import Supervisor
from tests.system.program import Line, none_of

TITLE = "another user of the machine: the broker, the files and the pages"
_SERVICES = ("broker", "gateway", "collector", "scorer", "registry")
_GUARDED = ("/metrics", "/functions", "/sources", "/ledger/x", "/reload", "/resume", "/settings", "/v1/trajectories")
_NOBODY = "65534"
_PYTHON = shutil.which("python3", path="/usr/bin:/bin")
_PROGRAM = r"""
import http.client, json, os, socket, struct, sys
asked = json.load(sys.stdin)
found = {"uid": os.geteuid(), "kafka": [], "files": [], "tried": 0, "pages": []}
for key, version in asked["requests"]:
    body = struct.pack(">hhih", key, version, 7, -1) + bytes(64)
    with socket.create_connection(("127.0.0.1", asked["kafka_port"]), 5) as broker:
        broker.settimeout(3)
        try:
            broker.sendall(struct.pack(">i", len(body)) + body)
            if broker.recv(4):
                found["kafka"].append([key, version])
        except OSError:
            pass
for folder in asked["folders"]:
    found["tried"] += 1
    try:
        found["files"] += [name for name in os.listdir(folder)]
    except OSError:
        pass
for path in asked["files"]:
    found["tried"] += 1
    try:
        open(path, "rb").read(1)
        found["files"].append(path)
    except OSError:
        pass
for port in asked["ports"]:
    for path in asked["pages"]:
        for method in ("GET", "POST"):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request(method, path, body=b"{}", headers={"content-type": "application/json"})
            status = connection.getresponse().status
            if status not in (401, 404, 405):
                found["pages"].append(f"{method} {port}{path}: {status}")
print(json.dumps(found))
"""


async def attack(folder: Path, rng: random.Random) -> list[Line]:
    del rng
    if os.geteuid() != 0 or not shutil.which("setpriv") or _PYTHON is None:
        reason = "it takes root, setpriv and the system's Python to become another user"
        return [Line("another user of the machine", f"not played: {reason}", "played as root", True)]
    await asyncio.to_thread(folder.chmod, 0o755)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    data_dir = folder / "data"
    supervisor = Supervisor(data_dir, only=_SERVICES, auto_ports=True, environ=environ)
    supervisor.start()
    try:
        state = await asyncio.to_thread(supervisor.wait_up, 240)
        everything = [data_dir, *data_dir.rglob("*")]
        requests = [
            [api.key, version] for api in APIS if api.key not in BEFORE_LOGIN for version in api.supported_versions
        ]
        job: dict[str, Any] = {
            "kafka_port": int(state.bus.rpartition(":")[2]),
            "requests": requests,
            "folders": [str(path) for path in everything if path.is_dir()],
            "files": [str(path) for path in everything if path.is_file()],
            "ports": [service.port for service in state.services.values()],
            "pages": _GUARDED,
        }
        answers = await asyncio.to_thread(_play, job)
    finally:
        await asyncio.to_thread(supervisor.stop)
    pages = 2 * len(_GUARDED) * len(job["ports"])
    return [
        Line("the program ran as", f"user {answers['uid']}", f"user {_NOBODY}", str(answers["uid"]) == _NOBODY),
        none_of(
            f"requests that the broker answered {answers['kafka'] or ''}".strip(), len(answers["kafka"]), len(requests)
        ),
        none_of(
            f"files and folders that could be read {answers['files'][:5] or ''}".strip(),
            len(answers["files"]),
            answers["tried"],
        ),
        none_of(f"guarded pages that answered {answers['pages'][:5] or ''}".strip(), len(answers["pages"]), pages),
    ]


def _play(job: dict[str, Any]) -> dict[str, Any]:
    command = ["setpriv", "--reuid", _NOBODY, "--regid", _NOBODY, "--clear-groups", str(_PYTHON), "-I", "-c", _PROGRAM]
    process = subprocess.run(command, input=json.dumps(job), capture_output=True, text=True, timeout=300, check=True)
    answers: dict[str, Any] = json.loads(process.stdout)
    return answers
