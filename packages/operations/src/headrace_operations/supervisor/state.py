"""What runs: `<data_dir>/run/state.json`. It is valid while a supervisor holds the lock beside it."""

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
from headrace_operations.errors import NotRunning
from headrace_runtime import whole_file
from headrace_runtime.private_files import data_folder, owner_alone, private_folder
from headrace_schemas.stack_access import remember_stack

_TRIES = 5
_TRY_INTERVAL_S = 0.05
Status = Literal["starting", "unready", "ready", "hung", "restarting", "stopped"]
"""`unready`: it lives, and says itself what it lacks. `hung`: its process is there and shows no sign of life."""


class ServiceState(BaseModel):
    """One service. `pid` is None between two of its lives."""

    model_config = ConfigDict(frozen=True)

    status: Status
    lacks: tuple[str, ...] = ()
    """What it complains of: why it is `unready`, or what it does without although it is `ready`."""
    pid: int | None = None
    url: str
    port: int
    log: str
    restarts: int = 0
    since: datetime


class RunState(BaseModel):
    """One `headrace up`."""

    model_config = ConfigDict(frozen=True)

    pid: int
    data_dir: str
    started_at: datetime
    bus: str
    services: dict[str, ServiceState]
    left_out: dict[str, str] = {}
    token_is_key: bool = False
    """The token in `run/token` is the internal key of the services."""
    token_is_password: bool = False
    """It is the password of the bus."""

    @property
    def up(self) -> bool:
        """Whether every service answers."""
        return all(service.status in ("unready", "ready") for service in self.services.values())

    @property
    def ready(self) -> bool:
        """Whether every service says that it can do its work; the gateway cannot before there is a model."""
        return all(service.status == "ready" for service in self.services.values())

    @property
    def base_url(self) -> str | None:
        """What goes into `OpenAI(base_url=...)`."""
        gateway = self.services.get("gateway")
        return f"{gateway.url}/v1" if gateway else None

    def write(self, data_dir: Path) -> None:
        text = self.model_dump_json(indent=1)
        whole_file.replace(_folder(data_dir) / "state.json", text.encode(), opener=owner_alone)


class Lock:
    """Held by the one supervisor of a data directory; the system lets go of it however that one ends."""

    def __init__(self, data_dir: Path) -> None:
        self._path = _folder(data_dir) / "lock"
        data_folder(data_dir)
        private_folder(self._path.parent)
        self._file: IO[bytes] = open(self._path, "ab", opener=owner_alone)  # noqa: SIM115 (held while we live)

    def take(self) -> None:
        """Raises `UsageError` when another supervisor has it."""
        for _ in range(_TRIES):
            try:
                return fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(_TRY_INTERVAL_S)  # `read` may be looking
        self._file.close()
        folder = self._path.parent.parent
        raise UsageError(f"Headrace is up already in {folder}; stop it, or give this one another --data-dir")

    def release(self) -> None:
        self._file.close()


def read(data_dir: Path) -> RunState:
    """What runs in `data_dir`; its token is used for its addresses from then on. Raises `NotRunning`."""
    folder = _folder(data_dir)
    lock, state = folder / "lock", folder / "state.json"
    held = lock.exists() and _held(lock)
    if held and not state.exists():
        raise NotRunning(f"Headrace is starting in {data_dir.absolute()}, or its disk had no room for {state}")
    if not held:
        raise NotRunning(
            f"Headrace is not up in {data_dir.absolute()}; start it with `headrace up`, or name its --data-dir"
        )
    found = RunState.model_validate_json(state.read_text(encoding="utf-8"))
    remember_stack(data_dir, found.model_dump())
    return found


def touch(data_dir: Path) -> None:
    """The supervisor still looks; `unwatched_s` tells when it last did. Needs no room on the disk."""
    with contextlib.suppress(OSError):
        os.utime(_folder(data_dir) / "state.json")


def unwatched_s(data_dir: Path) -> float:
    """For how long the supervisor has not looked. Far over a second: it is stopped, and what it wrote is old."""
    return max(0.0, time.time() - (_folder(data_dir) / "state.json").stat().st_mtime)


def _folder(data_dir: Path) -> Path:
    return data_dir / "run"


def _held(lock: Path) -> bool:
    with lock.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
