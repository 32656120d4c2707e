"""The shortened demo through the containers of every image, and the container engine that builds and runs them.

The agent and the judgement are those of `headrace demo`. When the run breaks off, reports/compose-test.log holds the
last output of the containers.

Facts about images and running containers, and their limits.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headrace.errors import HeadraceError
from headrace_cli.commands.shared import console
from headrace_cli.demo import recipe as demo
from headrace_cli.demo.console_reporter import ConsoleReporter
from headrace_cli.demo.demo_run import Options, StackAddress
from headrace_cli.demo.report import Report
from headrace_cli.demo.runner import run_on_stack
from tests.repo.deployments import EXAMPLE, MAIN, ROOT, Service, env_example, filled, ours, service_of, services
from tests.support.processes import free_port
from tests.system.program import Program, Run, no_problems

BUILD_S_MAX = 5400.0
COMMAND_S_MAX = 1800.0
_NICE = ("nice", "-n", "5")
HEALTHY_S_MAX = 1200.0
POLL_S = 2.0
LOG_LINES = 200
LEFT_OUT = {
    "judge": "needs an endpoint",
    "inference-gpu": "needs a GPU",
    "trainer-gpu": "needs a GPU",
    "inference-vllm": "needs a GPU, and an image of many gigabytes",
    "trainer-trinity": "needs GPUs, and an image of many gigabytes",
}
"""Services of Headrace that are not started; the judge's image is built all the same."""
RUNNING = ["kafka", "postgres", *(name for name in ours() if name not in LEFT_OUT)]


class EngineFailed(Exception):
    """A command of the engine failed; the message ends with its last output."""


@dataclass(frozen=True, slots=True)
class Engine:
    """`compose` runs projects, `tool` looks at single images and containers."""

    compose: tuple[str, ...]
    tool: str

    @classmethod
    def find(cls) -> Engine:
        """Raises `EngineFailed` when there is none."""
        if shutil.which("docker") and _works("docker", "compose", "version") and _works("docker", "info"):
            return cls(("docker", "compose"), "docker")
        if shutil.which("podman-compose") and _works("podman", "info"):
            return cls(("podman-compose", "--in-pod", "false"), "podman")
        raise EngineFailed("there is neither a running Docker with its compose plugin nor podman with podman-compose")


@dataclass(frozen=True, slots=True)
class Project:
    """The stack under a name of its own, with its own volumes."""

    engine: Engine
    name: str
    env_file: Path
    profiles: tuple[str, ...] = ("cpu", "judge")

    def build(self, service: str) -> None:
        _run([*_NICE, *self._compose("build", service)], BUILD_S_MAX)

    def up(self, services: Sequence[str]) -> None:
        _run(self._compose("up", "-d", "--no-build", *services), COMMAND_S_MAX)

    def down(self) -> None:
        """Remove containers, networks and volumes."""
        _run(self._compose("down", "--volumes", "--timeout", "20"), COMMAND_S_MAX)

    def container(self, service: str) -> str | None:
        """Its id, None before it exists."""
        labels = (f"com.docker.compose.project={self.name}", f"com.docker.compose.service={service}")
        filters = [part for label in labels for part in ("--filter", f"label={label}")]
        return _run([self.engine.tool, "ps", "--all", "--quiet", *filters]).strip() or None

    def passes(self, service: str, test: Sequence[str]) -> bool:
        """Return whether a health check passes now: its command, in a second container of the same image and network.

        Some versions of podman run no health checks, and some machines let no command enter a container.
        """
        container = self.container(service)
        if container is None:
            return False
        options = ("--rm", "--network", f"container:{container}", "--entrypoint", test[1])
        return _works(self.engine.tool, "run", *options, self.inspect(service)["Config"]["Image"], *test[2:])

    def inspect(self, service: str) -> dict[str, Any]:
        containers: list[dict[str, Any]] = json.loads(
            _run([self.engine.tool, "inspect", self.container(service) or service])
        )
        return containers[0]

    def logs(self, service: str, lines: int) -> str:
        container = self.container(service)
        if container is None:
            return "it was never made"
        command = [self.engine.tool, "logs", "--tail", str(lines), container]
        result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        return result.stdout

    def _compose(self, *command: str) -> list[str]:
        profiles = [part for profile in self.profiles for part in ("--profile", profile)]
        files = ["-f", str(MAIN), "-f", str(EXAMPLE)]
        return [*self.engine.compose, *files, "-p", self.name, "--env-file", str(self.env_file), *profiles, *command]


def image(engine: Engine, name: str) -> dict[str, Any]:
    """Return the engine's description of an image."""
    images: list[dict[str, Any]] = json.loads(_run([engine.tool, "image", "inspect", name]))
    return images[0]


def ask_image(engine: Engine, name: str, *command: str) -> str:
    """Return the output of a command in a fresh container of an image."""
    return _run([engine.tool, "run", "--rm", "--entrypoint", command[0], name, *command[1:]]).strip()


def _works(*command: str) -> bool:
    try:
        return subprocess.run(command, capture_output=True, timeout=60, check=False).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def _run(command: Sequence[str], timeout_s: float = 120.0) -> str:
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, cwd=ROOT, check=False)
    except subprocess.TimeoutExpired:
        raise EngineFailed(f"{' '.join(command)}: not done after {timeout_s:g} s") from None
    if result.returncode:
        raise EngineFailed(
            f"{' '.join(command)}: status {result.returncode}\n{(result.stdout + result.stderr)[-3000:]}"
        )
    return result.stdout


BASE = "python:3.11-slim"
WITH_TORCH = {"inference", "trainer"}
_TORCH = "import importlib.util as find; print(find.find_spec('torch') is not None)"


@dataclass(frozen=True, slots=True)
class Image:
    """One of our images. `added_mb` is its size beyond the base image; a shared layer counts in both images."""

    name: str
    size_mb: int
    added_mb: int
    user: str
    torch: bool
    build_s: float

    def shortfalls(self, service: str) -> list[str]:
        problems = []
        if self.user in ("", "0", "root"):
            problems.append(f"image {self.name} runs as root")
        if self.torch != (service in WITH_TORCH):
            problems.append(f"image {self.name} {'has' if self.torch else 'lacks'} torch")
        return problems


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a container in the engine; 0 is no limit."""

    memory_bytes: int
    cpus: float

    def shortfalls(self, service: str, service_limits: Service) -> list[str]:
        problems = (
            [] if self.memory_bytes else [f"{service} has no limit of memory, wanted {service_limits['mem_limit']}"]
        )
        if abs(self.cpus - float(service_limits["cpus"])) > 0.01:
            problems.append(f"{service} may use {self.cpus} cores, wanted {service_limits['cpus']}")
        return problems


def look_at_image(engine: Engine, name: str, build_s: float) -> Image:
    built, base = image(engine, name), image(engine, BASE)
    return Image(
        name=name,
        size_mb=built["Size"] // 1_000_000,
        added_mb=(built["Size"] - base["Size"]) // 1_000_000,
        user=built["Config"]["User"],
        torch=ask_image(engine, name, "python3", "-c", _TORCH) == "True",
        build_s=round(build_s, 1),
    )


def look_at_limits(project: Project, service: str) -> Limits:
    host = project.inspect(service)["HostConfig"]
    cpus = host.get("NanoCpus", 0) / 1e9 or host.get("CpuQuota", 0) / (host.get("CpuPeriod", 0) or 100_000)
    return Limits(host.get("Memory", 0), round(cpus, 3))


def play(run: Run) -> None:
    try:
        run.figures |= _play_stack(run.options, run.seed, run.folder)
        shortfalls = run.figures["shortfalls"]
    except (EngineFailed, HeadraceError, TimeoutError) as error:
        shortfalls = [f"{type(error).__name__}: {error}"]
    run.add(no_problems("images, limits, containers and the demo", shortfalls, shown_max=20))
    for shortfall in shortfalls:
        print(f"    {shortfall}")


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(seed=0)
    parser.add_argument(
        "--traffic-s", type=float, default=240.0, help="limit of the agent's work (default: %(default)s)"
    )
    parser.add_argument("--no-build", action="store_true", help="use the images that exist")


def _play_stack(options: argparse.Namespace, seed: int, folder: Path) -> dict[str, Any]:
    engine = Engine.find()
    key, ports = secrets.token_hex(16), {name: free_port() for name in ("GATEWAY_PORT", "REGISTRY_PORT", "KAFKA_PORT")}
    values = _env_file(folder / ".env", key, ports, seed)
    project = Project(engine, f"headrace-test-{os.getpid()}", folder / ".env")
    images = _images(project, build=not options.no_build)
    try:
        healthy_s = _start(project)
        limits = {name: look_at_limits(project, name) for name in RUNNING}
        os.environ["OPENAI_API_KEY"] = key
        (folder / "out").mkdir()
        report, problems = asyncio.run(_demo(options.traffic_s, seed, ports, folder / "out"))
    except BaseException:
        _keep_logs(project)
        raise
    finally:
        project.down()
    problems += [text for name, image in images.items() for text in image.shortfalls(name)]
    problems += [text for name, limit in limits.items() for text in limit.shortfalls(name, services(**values)[name])]
    problems += [f"container of {name} is still there" for name in RUNNING if project.container(name)]
    return _figures(engine, images, limits, report) | {"healthy_s": healthy_s, "shortfalls": problems}


def _figures(engine: Engine, images: dict[str, Image], limits: dict[str, Limits], report: Report) -> dict[str, Any]:
    return {
        "engine": " ".join(engine.compose),
        "images": {name: asdict(image) for name, image in images.items()},
        "limits": {name: asdict(limit) for name, limit in limits.items()},
        "not_started": LEFT_OUT,
        "demo": asdict(report),
    }


def _env_file(path: Path, key: str, ports: dict[str, int], seed: int) -> dict[str, str]:
    """Write a user's settings, with generated keys and ports."""
    values = env_example() | {
        "POSTGRES_PASSWORD": secrets.token_hex(16),
        "INTERNAL_KEY": secrets.token_hex(32),
        "GATEWAY_KEY_SHA256": hashlib.sha256(key.encode()).hexdigest(),
        "SEED": str(seed),
        **{name: str(port) for name, port in ports.items()},
    }
    path.write_text("".join(f"{name}={value}\n" for name, value in values.items()), encoding="utf-8")
    return values


def _images(project: Project, *, build: bool) -> dict[str, Image]:
    """One build after the other, so that the layer with torch is made once."""
    images = {}
    for name in sorted({service_of(name) for name in ours()}):
        began = time.monotonic()
        if build:
            project.build(name)
        image = look_at_image(project.engine, ours()[name]["image"], time.monotonic() - began if build else 0.0)
        print(f"{image.name}: {image.added_mb} MB over its base, {image.build_s:.0f} s", flush=True)
        images[name] = image
    return images


def _start(project: Project) -> float:
    """Up, and until every check of every container passes; how long that took. Raises `TimeoutError`."""
    began = time.monotonic()
    project.up([*RUNNING, *filled(EXAMPLE)["services"].keys() - LEFT_OUT.keys()])
    waiting = list(RUNNING)
    while waiting:
        waiting = [name for name in waiting if not project.passes(name, services()[name]["healthcheck"]["test"])]
        if waiting and time.monotonic() - began > HEALTHY_S_MAX:
            raise TimeoutError(f"not healthy after {HEALTHY_S_MAX:g} s: {', '.join(waiting)}")
        time.sleep(POLL_S if waiting else 0)
    print(f"every container is healthy after {time.monotonic() - began:.0f} s", flush=True)
    return round(time.monotonic() - began, 1)


async def _demo(traffic_s: float, seed: int, ports: dict[str, int], out: Path) -> tuple[Report, list[str]]:
    """The agent of the demo, at work through the published ports. The agent must have become better, if by little."""
    played = demo.read(ROOT / "examples/email_agent").model_copy(update={"environment": ("OPENAI_API_KEY",)})
    goal = played.short.model_copy(update={"traffic_s_max": traffic_s})
    addresses = StackAddress(f"127.0.0.1:{ports['KAFKA_PORT']}", f"http://127.0.0.1:{ports['GATEWAY_PORT']}")
    reporter = ConsoleReporter(console())
    report = await run_on_stack(played, Options(seed, goal, out, out, out, {}), addresses, reporter)
    problems = report.shortfalls(goal)
    if report.after <= report.before:
        problems.append(f"the agent did not become better: {report.before:.3f} → {report.after:.3f}")
    reporter.print_summary(report, [])
    return report, problems


def _keep_logs(project: Project) -> None:
    path = ROOT / "reports/compose-test.log"
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(f"== {name}\n{project.logs(name, LOG_LINES)}\n" for name in RUNNING), encoding="utf-8")


PROGRAM = Program("Build every image and play the shortened demo through the published port.", play, _add_arguments)
