"""Docker Compose or podman-compose, whichever is here, for one project that is taken down again.

Facts about images and running containers, and their limits.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.repo.compose_files import EXAMPLE, MAIN, ROOT, Service

BUILD_S_MAX = 5400.0
COMMAND_S_MAX = 1800.0
_NICE = ("nice", "-n", "5")


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
