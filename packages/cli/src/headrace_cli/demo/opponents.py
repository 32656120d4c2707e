"""Untrained models of a demo: registered from a folder, served, and pinned before the agent begins."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path

from headrace.registry import ModelRegistry
from headrace_operations.catalog import importing
from headrace_operations.errors import StartFailed
from headrace_schemas.programs.models import StoredLine

_SERVED_S_MAX = 120.0
_POLL_S = 0.2
_WHY = "plays beside the agent, and stays as it is"


async def register(registry: str, name: str, folder: Path, label: str, environ: Mapping[str, str]) -> str:
    """Register a version and return it once it is served as the pinned champion of `name`.

    Args:
        registry: URL of the registry.
        name: model name.
        folder: absolute path of the model.
        label: label of the version.
        environ: environment with the settings of the services.

    Raises:
        HeadraceError: the version could not be registered, or not served in time.
    """
    stored = await importing.store_folder(folder, name, None, environ)
    await asyncio.to_thread(_pin, registry, name, label, stored)
    return stored.version


def _pin(registry: str, name: str, label: str, stored: StoredLine) -> None:
    with ModelRegistry(registry, who="headrace demo") as api:
        importing.register(api, stored, label=label, serve=True, why=_WHY)
        _wait_champion(api, name, stored.version)
        api.pin(name, stored.version, reason=_WHY)


def _wait_champion(api: ModelRegistry, name: str, version: str) -> None:
    """Wait until replicas have loaded and probed the version and it is champion."""
    deadline = time.monotonic() + _SERVED_S_MAX
    while (champion := api.model(name).champion) != version:
        if time.monotonic() > deadline:
            raise StartFailed(f"{version} does not serve after {_SERVED_S_MAX:g} s (champion: {champion})")
        time.sleep(_POLL_S)
