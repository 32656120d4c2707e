"""Facts about images and running containers, and their limits."""

from __future__ import annotations

from dataclasses import dataclass

from tests.compose.engine import Engine, Project, ask_image, image
from tests.repo.compose_files import Service

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
