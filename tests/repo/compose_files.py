"""Compose files as Docker Compose reads them, with the variables of `.env.example` and the required secrets."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
MAIN = ROOT / "docker-compose.yml"
EXAMPLE = ROOT / "examples/email_agent/docker-compose.yml"
SECRETS = {"POSTGRES_PASSWORD": "secret", "INTERNAL_KEY": "123", "GATEWAY_KEY_SHA256": "ab" * 32}
_VARIABLE = re.compile(r"(?<!\$)\$\{(?P<name>\w+)(?::(?P<kind>[-?])(?P<text>[^}]*))?\}")

Service = dict[str, Any]


OWN_IMAGES = {"inference-vllm": "headrace-inference-vllm", "trainer-trinity": "headrace-trinity"}
"""Images by container, for containers with another image than their service's."""


def variables(path: Path) -> dict[str, str | None]:
    """Return the variables of a file with their defaults, or None for a variable that Compose requires."""
    defaults: dict[str, str | None] = {}
    for use in _VARIABLE.finditer(path.read_text(encoding="utf-8")):
        if use["kind"] is not None or use["name"] not in defaults:
            defaults[use["name"]] = use["text"] if use["kind"] == "-" else None
    return defaults


def env_example() -> dict[str, str]:
    lines = (ROOT / ".env.example").read_text(encoding="utf-8").splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def filled(path: Path, **values: str) -> dict[str, Any]:
    """Return the file with all variables replaced. `values` override `.env.example`."""
    chosen = {**env_example(), **SECRETS, **values}

    def value(use: re.Match[str]) -> str:
        return chosen.get(use["name"]) or (use["text"] if use["kind"] == "-" else "")

    text = _VARIABLE.sub(value, path.read_text(encoding="utf-8"))
    loaded: dict[str, Any] = yaml.safe_load(text.replace("$$", "$"))
    return loaded


@cache
def services(**values: str) -> dict[str, Service]:
    """Return the services of the main file. The result is shared, so callers must not change it."""
    containers: dict[str, Service] = filled(MAIN, **values)["services"]
    return containers


def ours() -> dict[str, Service]:
    """Return the services whose images are built in this repository."""
    return {name: service for name, service in services().items() if "build" in service}


def image_of(container: str) -> str:
    return OWN_IMAGES.get(container, f"headrace-{service_of(container)}")


def service_of(container: str) -> str:
    """Return the service of one of our containers: the part of its name before the hyphen.

    The rest of the name is the device of the service.
    """
    return container.partition("-")[0]
