"""A search of every output for planted secrets, including error messages that could quote them, and access rights."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from headrace_operations.supervisor import Supervisor
from headrace_schemas import Trajectory
from tests.support.processes import wait_until
from tests.support.service_process import bus_view
from tests.support.turns import closed
from tests.system.program import Line, none_of

TITLE = "planted secrets: in URLs, keys, files and the environment"
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


async def attack(folder: Path, rng: random.Random) -> list[Line]:
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
