"""Models of a demo that nobody trains: registered from a folder, served, and pinned before the agent begins."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path

from headrace.registry import ModelRegistry
from headrace_operations.catalog import importing
from headrace_operations.errors import StartFailed
from headrace_schemas.importing import StoredLine

_SERVED_S_MAX = 120.0
_POLL_S = 0.2
_WHY = "plays beside the agent, and stays as it is"


async def register(registry: str, name: str, folder: Path, label: str, environ: Mapping[str, str]) -> str:
    """The version, once it serves as the pinned champion of `name`. `folder` is absolute; `environ` has the settings of
    the services, as `headrace models register` reads them. Raises `HeadraceError`."""
    made = await importing.stored(folder, name, None, environ)
    await asyncio.to_thread(_pin, registry, name, label, made)
    return made.version


def _pin(registry: str, name: str, label: str, made: StoredLine) -> None:
    with ModelRegistry(registry, who="headrace demo") as api:
        importing.register(api, made, label=label, serve=True, why=_WHY)
        _until_champion(api, name, made.version)
        api.pin(name, made.version, reason=_WHY)


def _until_champion(api: ModelRegistry, name: str, version: str) -> None:
    """Replicas load and probe it first."""
    deadline = time.monotonic() + _SERVED_S_MAX
    while (champion := api.model(name).champion) != version:
        if time.monotonic() > deadline:
            raise StartFailed(f"{version} does not serve after {_SERVED_S_MAX:g} s (champion: {champion})")
        time.sleep(_POLL_S)
