"""Planted secrets, caches shared between tenants, and other users of the machine."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from headrace_broker.dispatch import APIS, BEFORE_LOGIN
from headrace_operations.supervisor import Supervisor
from headrace_schemas import Trajectory
from tests.attack.program import attack
from tests.attack.stacks import MODEL, Serving, serving
from tests.support.processes import wait_until
from tests.support.service_process import bus_view
from tests.support.turns import closed
from tests.system.program import Line, none_of

_SERVICES = ("broker", "gateway", "collector", "scorer", "registry")
_SPY = """
import os, sys

def spy(trajectory):
    found = [f"{name}={value}" for name, value in os.environ.items()]
    for number in range(3, 64):
        try:
            found.append(f"fd {number}: {os.readlink(f'/proc/self/fd/{number}')}")
        except OSError:
            pass
    print("SPY", found, file=sys.stderr, flush=True)
    return 1.0
"""


@dataclass
class Planted:
    """Generator of secrets, a new one for each use. `outputs` holds every output by its origin, to be searched."""

    rng: random.Random
    secrets: list[str] = field(default_factory=list)
    outputs: dict[str, str] = field(default_factory=dict)

    def word(self) -> str:
        self.secrets.append(self.rng.randbytes(12).hex() + "Zq")
        return self.secrets[-1]

    def digits(self) -> str:
        self.secrets.append(str(self.rng.randrange(10**15, 10**16)))
        return self.secrets[-1]

    def leaks(self) -> list[str]:
        return [where for where, text in self.outputs.items() if any(secret in text for secret in self.secrets)]


@attack("planted secrets: in URLs, keys, files and the environment")
async def secrets(folder: Path, rng: random.Random) -> list[Line]:
    """Search every output for planted secrets, including error messages that could quote them, and access rights."""
    planted = Planted(rng)
    await asyncio.to_thread(_refused_starts, folder, planted)
    data_dir = folder / "data"
    answers: dict[str, int] = {}
    spied = await _stack(folder, data_dir, planted, answers)
    for path in sorted(path for path in data_dir.rglob("*") if path.is_file()):
        planted.outputs[str(path.relative_to(folder))] = path.read_bytes().decode("latin-1")
    everything = [data_dir, *data_dir.rglob("*")]
    open_to_others = [path for path in everything if not path.is_symlink() and path.stat().st_mode & 0o077]
    leaks, outputs = planted.leaks(), sum(bool(text) for text in planted.outputs.values())
    figure = f"{len(leaks)} of {outputs}" + (f": {leaks}" if leaks else "")
    return [
        Line("outputs, logs, pages and files with a secret", figure, "0", not leaks and outputs > len(planted.secrets)),
        Line("reward functions that looked", str(spied), "at least 1", spied > 0),
        none_of("files and folders that others may read", len(open_to_others), len(everything)),
        _doors("pages open without the key", answers, "without key", 401),
        _doors("pages closed with the key", answers, "with key", 200),
    ]


def _doors(name: str, answers: Mapping[str, int], caller: str, expected: int) -> Line:
    mine = {page: status for page, status in answers.items() if page.startswith(caller)}
    wrong = [page for page, status in mine.items() if status != expected]
    return none_of(f"{name} {wrong or ''}".strip(), len(wrong), len(mine))


def _refused_starts(folder: Path, planted: Planted) -> None:
    """Start services that must fail at once, each with an error about a setting that contains a secret."""
    file = folder / "wrong.toml"
    texts = {
        "a number": f"[security]\ninternal_key = {planted.digits()}\n",
        "misspelt": f'[security]\ninternal_kye = "{planted.word()}"\n',
        "not a table": f'security = "{planted.word()}"\n',
        "wrong scheme": f'[database]\nurl = "mysql://me:{planted.word()}@db/x"\n',
        "no URL": f'[database]\nurl = "postgresql//me:{planted.word()}@db/x"\n',
        "a list": f'[database]\nurl = ["postgresql://me:{planted.word()}@db/x"]\n',
        "unknown beside": f'[database]\nurl = "postgresql://me:{planted.word()}@db/x"\nsize = 3\n',
        "blobs": f'[blobs]\nurl = "nonsense://me:{planted.word()}@store/x"\n',
        "bus": f'[bus]\nstart_timeout_s = 1\naddress = "kafka://me:{planted.word()}@127.0.0.1:1"\n',
    }
    for number, (name, text) in enumerate(texts.items()):
        file.write_text(text)
        service = ("collector", "registry")[number % 2]
        planted.outputs[f"{service}: {name}"] = _refusal_output(folder, service, {"HEADRACE_CONFIG": str(file)})
    away = f"postgresql://me:{planted.word()}@127.0.0.1:1/x"
    environments: dict[str, dict[str, str]] = {
        "a section": {"HEADRACE_SECURITY__INTERNAL_KEY": planted.digits(), "HEADRACE_COLLECTOR__HOST": "nowhere"},
        "a plain value": {"HEADRACE_SECURITY": planted.word(), "HEADRACE_SECURITY__INTERNAL_KEY": planted.word()},
        "judge": {"HEADRACE_JUDGE__ENDPOINT__API_KEY": planted.digits(), "HEADRACE_JUDGE__ENDPOINT__BASE_URL": "x"},
        "database away": {"HEADRACE_DATABASE__URL": away, "HEADRACE_BUS__START_TIMEOUT_S": "1"},
    }
    for name, environ in environments.items():
        service = "judge" if name == "judge" else "collector"
        planted.outputs[f"{service}: {name}"] = _refusal_output(folder, service, environ)


def _refusal_output(folder: Path, service: str, environ: Mapping[str, str]) -> str:
    settings = {"HEADRACE_DATA_DIR": str(folder / "refused"), "HEADRACE_BUS__ADDRESS": "127.0.0.1:1", **environ}
    if "HEADRACE_CONFIG" in environ:
        del settings["HEADRACE_BUS__ADDRESS"]
    command = [sys.executable, "-m", f"headrace_{service}"]
    try:
        process = subprocess.run(
            command, env={**os.environ, **settings}, capture_output=True, text=True, timeout=30, check=False
        )
    except subprocess.TimeoutExpired as late:
        return str(late.stdout) + str(late.stderr)
    return process.stdout + process.stderr


def _output(command: list[str], environ: Mapping[str, str]) -> str:
    process = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environ, check=False)
    return process.stdout + process.stderr


async def _stack(folder: Path, data_dir: Path, planted: Planted, answers: dict[str, int]) -> int:
    """Run a stack with keys and a reward function that prints its environment. Return the number of its calls."""
    (folder / "spy.py").write_text(_SPY)
    key = planted.digits()
    environ = {
        **os.environ,
        "HEADRACE_SECURITY__INTERNAL_KEY": key,
        "PLANTED_API_KEY": planted.word(),
        "PLANTED_URL": f"postgresql://me:{planted.word()}@db/x",
    }
    settings = {"scorer.functions": [f"{folder}/spy.py:spy"], "scorer.reward_wait_s": 1.0}
    outputs: list[str] = []
    supervisor = Supervisor(
        data_dir, settings=settings, only=_SERVICES, auto_ports=True, environ=environ, report=outputs.append
    )
    supervisor.start()
    try:
        state = await asyncio.to_thread(supervisor.wait_up, 240)
        async with httpx.AsyncClient(timeout=30) as http:
            pages = [f"{service.url}/metrics" for service in state.services.values()]
            pages += [f"{state.services['registry'].url}/v1/models", f"{state.services['scorer'].url}/functions"]
            for page in pages:
                for caller, headers in (("without key", {}), ("with key", {"authorization": f"Bearer {key}"})):
                    answer = await http.get(page, headers=headers)
                    answers[f"{caller} {page}"] = answer.status_code
                    planted.outputs[f"{caller} {page}"] = answer.text
            for service in state.services.values():
                planted.outputs[f"{service.url}/health"] = (await http.get(f"{service.url}/health")).text
        async with bus_view(state.bus, data_dir) as view:
            await view.producer.send(closed())
            await asyncio.to_thread(wait_until, lambda: _spied(data_dir), 180, "the reward function has looked")
            assert await view.read(Trajectory)
        command = [str(Path(sys.executable).with_name("headrace")), "status", "--json", "--data-dir", str(data_dir)]
        process = await asyncio.to_thread(
            subprocess.run, command, capture_output=True, text=True, timeout=120, env=environ
        )
        planted.outputs["headrace status"] = process.stdout + process.stderr
    finally:
        await asyncio.to_thread(supervisor.stop)
    planted.outputs["headrace up"] = "\n".join(outputs)
    return (data_dir / "logs" / "scorer.log").read_text().count("SPY [")


def _spied(data_dir: Path) -> bool:
    return "SPY [" in (data_dir / "logs" / "scorer.log").read_text()


_PROMPTS = 40
_SHUFFLES = 2000
_P_MIN = 0.001
"""Lowest p-value with which the measured times still count as equal: the probability of a false alarm."""


@attack("no tenant sees in a cache what another has asked")
async def cross_tenant_cache(folder: Path, rng: random.Random) -> list[Line]:
    """For each of the victim's prompts, send that prompt and an unused one as the attacker, in random order."""
    leaks = own_hits = 0
    known_s: list[float] = []
    fresh_s: list[float] = []
    again_s: list[float] = []
    async with serving(folder, tenants=("victim", "attacker")) as running, httpx.AsyncClient(timeout=120) as http:
        for _ in range(5):
            await _ask(running, http, "attacker", _prompt(rng))  # the first calls pay for what all later ones use
        for _ in range(_PROMPTS):
            cached_prompt, unasked = _prompt(rng), _prompt(rng)
            await _ask(running, http, "victim", cached_prompt)
            for prompt in rng.sample((cached_prompt, unasked), 2):
                cached, first_s = await _ask(running, http, "attacker", prompt)
                leaks += cached > 0
                (known_s if prompt == cached_prompt else fresh_s).append(first_s)
            cached, first_s = await _ask(running, http, "attacker", cached_prompt)
            own_hits += cached > 0
            again_s.append(first_s)
    chance = paired_p(known_s, fresh_s, rng)
    control = paired_p(again_s, fresh_s, rng)
    figure = f"{_ms(known_s)} against {_ms(fresh_s)} ms at the median, p = {chance:.3f}"
    seen = f"{_ms(again_s)} against {_ms(fresh_s)} ms at the median, p = {control:.4f}"
    return [
        none_of("first calls that were told of cached tokens", leaks, 2 * _PROMPTS),
        Line("own second calls that were", f"{own_hits} of {_PROMPTS}", "all: there is a cache", own_hits == _PROMPTS),
        Line("first token of what the other has asked", figure, f"p at least {_P_MIN}", chance >= _P_MIN),
        Line("first token of an own second call", seen, f"p below {_P_MIN}: it could be seen", control < _P_MIN),
    ]


def paired_p(some: list[float], baseline: list[float], rng: random.Random) -> float:
    """Return the two-sided p-value of a sign-flip permutation test on the median of the paired differences.

    The arguments are pairs by position. The test is Fisher's randomisation test.
    """
    differences = [sample - other for sample, other in zip(some, baseline, strict=True)]
    observed = abs(statistics.median(differences))
    flipped = ([value * rng.choice((-1, 1)) for value in differences] for _ in range(_SHUFFLES))
    return sum(abs(statistics.median(values)) >= observed for values in flipped) / _SHUFFLES


async def _ask(running: Serving, http: httpx.AsyncClient, tenant: str, prompt: str) -> tuple[int, float]:
    """Send a prompt. Return the number of cached tokens, and the seconds to the first event that contains a token."""
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": 2,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    began = time.perf_counter()
    first_s = cached = 0.0
    headers = {"authorization": f"Bearer {tenant}"}
    url = f"{running.gateway.url}/v1/chat/completions"
    async with http.stream("POST", url, json=body, headers=headers) as answer:
        assert answer.status_code == 200, (await answer.aread())[:300]
        async for line in answer.aiter_lines():
            if not first_s and '"token_ids":[' in line.replace("prompt_token_ids", ""):
                first_s = time.perf_counter() - began
            if '"cached_tokens":' in line:
                cached = int(line.split('"cached_tokens":')[1].split("}")[0].split(",")[0])
    assert first_s, "no token came"
    return int(cached), first_s


def _prompt(rng: random.Random) -> str:
    """Return a prompt of about a thousand tokens that shares no prefix with any other prompt."""
    return "".join(rng.choice("abcdefghijklmnopqrstuvwxyz 0123456789") for _ in range(1000))


def _ms(times: list[float]) -> float:
    return round(1000 * statistics.median(times), 1)


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


@attack("another user of the machine: the broker, the files and the pages")
async def other_users(folder: Path, rng: random.Random) -> list[Line]:
    """Attack the broker, the files and the pages of a stack as another user, and as a client without the token."""
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
