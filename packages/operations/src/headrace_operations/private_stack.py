"""Private services for a program, the addresses of a running Headrace, and the export of versions."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from headrace.errors import UsageError
from headrace.registry import ModelRegistry
from headrace_operations import catalog
from headrace_operations.supervisor import Supervisor
from headrace_operations.supervisor.overrides import Overrides
from headrace_operations.supervisor.state import RunState, read
from headrace_runtime.settings.table import ENV_PREFIX
from headrace_schemas.http.registry_api import VersionState

_READY_S = 300.0


class PrivateStack:
    """The services of one program on free ports, which ignore Headrace's variables in the program's environment."""

    def __init__(self, settings: Mapping[str, object], data_dir: Path | None) -> None:
        self._keeps_data_dir = data_dir is not None
        self.data_dir = data_dir.absolute() if data_dir else Path(tempfile.mkdtemp(prefix="headrace-"))
        environ = {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}
        try:
            self._supervisor = Supervisor(self.data_dir, settings=settings, auto_ports=True, environ=environ)
            self._supervisor.start()
            self.addresses = _addresses(self._supervisor.wait_ready(_READY_S))
        except BaseException:
            self._remove()
            raise

    def stop(self) -> None:
        """Stop all services and wait for them. Remove the data directory unless the caller chose it."""
        self._supervisor.stop()
        self._remove()

    def _remove(self) -> None:
        if not self._keeps_data_dir:
            shutil.rmtree(self.data_dir, ignore_errors=True)


def start(settings: Mapping[str, object], data_dir: Path | None) -> PrivateStack:
    """Start the services of a private Headrace, and return when a first version is served.

    Raises:
        StartFailed: a service did not start. All services were stopped and a temporary data directory was removed.
        UsageError: a setting is invalid.
    """
    return PrivateStack(settings, data_dir)


def addresses(data_dir: Path) -> dict[str, str]:
    """Return the URLs of gateway, registry and trainer, and the bus address, of the `headrace up` that runs on
    `data_dir`.

    Raises:
        NotRunning: no `headrace up` runs on `data_dir`.
    """
    return _addresses(read(data_dir))


def export(registry: ModelRegistry, version: str, folder: Path, merge: bool, data_dir: Path | None) -> None:
    """Write the files of a version into `folder`.

    Args:
        registry: client of the registry that has the version.
        version: version id, `name@digest`.
        folder: an empty or missing folder.
        merge: merge an adapter into its base and write the merged weights.
        data_dir: data directory of a private Headrace; None reads the blob settings from the environment.

    Raises:
        UsageError: the folder is not empty or the registry has no files of the version.
    """
    catalog.check_empty(folder)
    state = _version(registry, version)
    assert state.manifest is not None
    if merge and state.base is not None:
        base_manifest = _version(registry, state.base).manifest
        assert base_manifest is not None
        environ = Overrides(None, {"data_dir": data_dir} if data_dir else {}, os.environ).environ
        asyncio.run(catalog.merge_adapter(state.manifest, base_manifest, folder.absolute(), environ))
    else:
        catalog.export(catalog.fetch_manifest(state.manifest), folder)


def _version(registry: ModelRegistry, version: str) -> VersionState:
    versions = registry.versions(version.partition("@")[0], limit=1000)
    state = next((candidate for candidate in versions if candidate.id == version), None)
    if state is None or state.manifest is None or state.collected:
        raise UsageError(f"{version}: the registry has no files of this version; `headrace models` lists all versions")
    return state


def _addresses(state: RunState) -> dict[str, str]:
    names = ("gateway", "registry", "trainer")
    urls: dict[str, str] = {name: state.services[name].url for name in names if name in state.services}
    return {**urls, "bus": state.bus}
