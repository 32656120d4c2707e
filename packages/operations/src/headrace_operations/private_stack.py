"""What `headrace.stack` needs of this package: a private Headrace, the addresses of one that runs, files of
versions."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from headrace.errors import UsageError
from headrace.registry import ModelRegistry
from headrace_operations.catalog import exporting, importing
from headrace_operations.supervisor import Supervisor
from headrace_operations.supervisor.overrides import Overrides
from headrace_operations.supervisor.state import RunState, read
from headrace_runtime.settings_table import ENV_PREFIX
from headrace_schemas.registry_api import VersionState

_READY_S = 300.0


class PrivateStack:
    """The services of one program, on free ports. Settings of the program's environment are not theirs."""

    def __init__(self, settings: Mapping[str, object], data_dir: Path | None) -> None:
        self._kept = data_dir is not None
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
        """Everything has stopped when this returns, and the folder is gone unless it was named."""
        self._supervisor.stop()
        self._remove()

    def _remove(self) -> None:
        if not self._kept:
            shutil.rmtree(self.data_dir, ignore_errors=True)


def start(settings: Mapping[str, object], data_dir: Path | None) -> PrivateStack:
    """Returns when a first version is served. Raises `StartFailed` and `UsageError`, and then nothing is left."""
    return PrivateStack(settings, data_dir)


def addresses(data_dir: Path) -> dict[str, str]:
    """Where the parts of a `headrace up` are. Raises `NotRunning`."""
    return _addresses(read(data_dir))


def export(registry: ModelRegistry, version: str, folder: Path, merge: bool, data_dir: Path | None) -> None:
    """Write a version's files, of an adapter with `merge` those of base and adapter in one. Raises `UsageError`.

    `data_dir` is that of a private Headrace; for another one the environment has its settings."""
    exporting.check_empty(folder)
    found = _version(registry, version)
    assert found.manifest is not None
    if merge and found.base is not None:
        below = _version(registry, found.base).manifest
        assert below is not None
        environ = Overrides(None, {"data_dir": data_dir} if data_dir else {}, os.environ).environ
        asyncio.run(importing.merged(found.manifest, below, folder.absolute(), environ))
    else:
        exporting.export(exporting.manifest_of(found.manifest), folder)


def _version(registry: ModelRegistry, version: str) -> VersionState:
    known = registry.versions(version.partition("@")[0], limit=1000)
    found = next((one for one in known if one.id == version), None)
    if found is None or found.manifest is None or found.collected:
        raise UsageError(f"{version}: the registry has no files of it; `headrace models` lists what it has")
    return found


def _addresses(state: RunState) -> dict[str, str]:
    names = ("gateway", "registry", "trainer")
    found: dict[str, str] = {name: state.services[name].url for name in names if name in state.services}
    return {**found, "bus": state.bus}
