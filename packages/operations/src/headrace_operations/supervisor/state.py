"""State of a running Headrace: `<data_dir>/run/state.json`, valid while a supervisor holds the lock next to it, and
errors about it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from datetime import datetime
from pathlib import Path
from typing import IO, Literal

from pydantic import BaseModel, ConfigDict

from headrace.errors import UsageError
from headrace_runtime.storage import files
from headrace_runtime.storage.files import data_folder, owner_alone, private_folder
from headrace_schemas.http.stack_access import remember_stack
from headrace_schemas.values.errors import HeadraceError

_TRIES = 5
_TRY_INTERVAL_S = 0.05
Status = Literal["starting", "unready", "ready", "hung", "restarting", "stopped"]
"""`unready`: the service answers and reports failed checks. `hung`: its process shows no sign of life."""


class NotRunning(HeadraceError):
    """No `headrace up` runs on this data directory."""


class StartFailed(HeadraceError):
    """A service has invalid settings or was not ready in time. All services were stopped."""


class ServiceState(BaseModel):
    """State of one service. `pid` is None between two processes of it."""

    model_config = ConfigDict(frozen=True)

    status: Status
    lacks: tuple[str, ...] = ()
    """Failed checks or missing components; a service may be `ready` without some of them."""
    pid: int | None = None
    url: str
    port: int
    log: str
    restarts: int = 0
    since: datetime


class RunState(BaseModel):
    """State of one `headrace up`."""

    model_config = ConfigDict(frozen=True)

    pid: int
    data_dir: str
    started_at: datetime
    bus: str
    services: dict[str, ServiceState]
    left_out: dict[str, str] = {}
    token_is_key: bool = False
    """Whether the token in `run/token` is the internal key of the services."""
    token_is_password: bool = False
    """Whether the token in `run/token` is the password of the bus."""

    @property
    def up(self) -> bool:
        """Whether every service answers."""
        return all(service.status in ("unready", "ready") for service in self.services.values())

    @property
    def ready(self) -> bool:
        """Whether every service reports that it can work; the gateway cannot before a model is served."""
        return all(service.status == "ready" for service in self.services.values())

    @property
    def base_url(self) -> str | None:
        """Value for `OpenAI(base_url=...)`."""
        gateway = self.services.get("gateway")
        return f"{gateway.url}/v1" if gateway else None

    def write(self, data_dir: Path) -> None:
        text = self.model_dump_json(indent=1)
        files.replace_file(_folder(data_dir) / "state.json", text.encode(), opener=owner_alone)


class Lock:
    """Lock of the one supervisor of a data directory; the system releases it when the process ends."""

    def __init__(self, data_dir: Path) -> None:
        self._path = _folder(data_dir) / "lock"
        data_folder(data_dir)
        private_folder(self._path.parent)
        self._file: IO[bytes] = open(self._path, "ab", opener=owner_alone)  # noqa: SIM115 (open while the supervisor runs)

    def take(self) -> None:
        """Take the lock.

        Raises:
            UsageError: another supervisor holds it.
        """
        for _ in range(_TRIES):
            try:
                return fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(_TRY_INTERVAL_S)  # `read` may be testing the lock
        self._file.close()
        folder = self._path.parent.parent
        raise UsageError(f"Headrace is up already in {folder}; stop it, or choose another --data-dir")

    def release(self) -> None:
        self._file.close()


def read(data_dir: Path) -> RunState:
    """Return the state of the Headrace in `data_dir`, and remember its token for requests to its addresses.

    Raises:
        NotRunning: no supervisor runs there, or it has not written its state yet.
    """
    folder = _folder(data_dir)
    lock, state = folder / "lock", folder / "state.json"
    is_locked = lock.exists() and _is_locked(lock)
    if is_locked and not state.exists():
        raise NotRunning(f"Headrace is starting in {data_dir.absolute()}, or the disk had no space for {state}")
    if not is_locked:
        raise NotRunning(
            f"Headrace is not up in {data_dir.absolute()}; start it with `headrace up`, or name another --data-dir"
        )
    run_state = RunState.model_validate_json(state.read_text(encoding="utf-8"))
    remember_stack(data_dir, run_state.model_dump())
    return run_state


def touch(data_dir: Path) -> None:
    """Update the time at which the supervisor last checked its services. This needs no disk space."""
    with contextlib.suppress(OSError):
        os.utime(_folder(data_dir) / "state.json")


def supervisor_silence_s(data_dir: Path) -> float:
    """Return the seconds since the supervisor last checked its services.

    Much more than a second means that it is suspended and that its state file is out of date.
    """
    return max(0.0, time.time() - (_folder(data_dir) / "state.json").stat().st_mtime)


def _folder(data_dir: Path) -> Path:
    return data_dir / "run"


def _is_locked(lock: Path) -> bool:
    with lock.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
