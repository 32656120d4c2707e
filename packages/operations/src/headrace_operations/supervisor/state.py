"""State of a running Headrace: the supervisor's file `<data_dir>/run/state.json`, and requests to the services.

The file is valid while a supervisor holds the lock next to it. It contains the supervisor's last observation, which is
old if the supervisor is suspended. Requests over HTTP show the present health and the state of reward sources.
"""

from __future__ import annotations

import contextlib
import fcntl
import http.client
import json
import os
import socket
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from headrace.errors import UsageError
from headrace_runtime.storage import disk
from headrace_runtime.storage.disk import data_folder, open_for_owner, private_folder
from headrace_schemas.http.registry_api import SourceList, SourceState
from headrace_schemas.http.stack_access import key_for, remember_stack
from headrace_schemas.values.errors import HeadraceError

_TRIES = 5
_TRY_INTERVAL_S = 0.05
Status = Literal["starting", "unready", "ready", "hung", "restarting", "stopped"]
"""`unready`: the service answers and reports failed checks. `hung`: its process shows no sign of life."""


class NotRunning(HeadraceError):
    """Error: no `headrace up` runs on this data directory."""


class StartFailed(HeadraceError):
    """Error: a service has invalid settings or was not ready in time. All services were stopped."""


class ServiceState(BaseModel):
    """State of one service. `pid` is None while the service has no process, for example before a restart."""

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
    """Contents of the state file of a running `headrace up`: its process, addresses and services."""

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
        """Whether all services answer their health check, ready or not."""
        return all(service.status in ("unready", "ready") for service in self.services.values())

    @property
    def ready(self) -> bool:
        """Whether every service reports that it can work; the gateway cannot before a model is served."""
        return all(service.status == "ready" for service in self.services.values())

    @property
    def base_url(self) -> str | None:
        """URL of the gateway's API, for `OpenAI(base_url=...)`."""
        gateway = self.services.get("gateway")
        return f"{gateway.url}/v1" if gateway else None

    def write(self, data_dir: Path) -> None:
        text = self.model_dump_json(indent=1)
        disk.replace_file(_folder(data_dir) / "state.json", text.encode(), opener=open_for_owner)


class Lock:
    """Lock by which at most one supervisor runs on a data directory. The system releases it when the process ends."""

    def __init__(self, data_dir: Path) -> None:
        self._path = _folder(data_dir) / "lock"
        data_folder(data_dir)
        private_folder(self._path.parent)
        self._file: IO[bytes] = open(self._path, "ab", opener=open_for_owner)  # noqa: SIM115 (open while the supervisor runs)

    def take(self) -> None:
        """Acquire the lock.

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
    """Return the state of the Headrace in `data_dir`, and use its token for later requests to its addresses.

    Raises:
        NotRunning: no supervisor runs there, or its state is not written yet or damaged.
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
    try:
        run_state = RunState.model_validate_json(state.read_bytes())
    except FileNotFoundError:
        raise NotRunning(f"Headrace has just stopped in {data_dir.absolute()}; start it with `headrace up`") from None
    except ValidationError:
        raise NotRunning(f"{state} is damaged; stop `headrace up` and start it again") from None
    remember_stack(data_dir, run_state.model_dump())
    return run_state


def touch(data_dir: Path) -> None:
    """Update the time at which the supervisor last checked its services, which needs no disk space."""
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


_BYTES_MAX = 65_536
TIMEOUT_S = 3.0
ALIVE = "yes"
_BODY_BYTES_MAX = 1_048_576
_READY, _UNREADY = 200, 503
T = TypeVar("T")


class HealthAnswer(NamedTuple):
    """Health of a service. `lacks` has the reasons why it is not ready, or the names of its failed checks."""

    ready: bool
    lacks: tuple[str, ...]


def request_health(url: str, timeout_s: float) -> HealthAnswer | None:
    """Request `/health` of a service; return None if it does not answer in time."""
    try:
        status, body = get(f"{url}/health", timeout_s, _BYTES_MAX)
    except (OSError, http.client.HTTPException):
        return None
    return HealthAnswer(status == 200, failed_checks(body))


def get(url: str, timeout_s: float, bytes_max: int, headers: Mapping[str, str] | None = None) -> tuple[int, bytes]:
    """Return status and body of a page of a service.

    Args:
        url: address of the page.
        timeout_s: time limit of the whole answer, also of one that arrives byte by byte.
        bytes_max: largest part of the body that is read.
        headers: headers of the request.

    Raises:
        OSError: the service does not answer in time.
        HTTPException: the answer is not HTTP.
    """
    host, _, path = url.removeprefix("http://").partition("/")
    deadline_s = time.monotonic() + timeout_s
    connection = http.client.HTTPConnection(host, timeout=timeout_s)
    try:
        connection.request("GET", f"/{path}", headers=dict(headers or {}))
        with (
            _DeadlineSocket(connection.sock, deadline_s) as reading,
            http.client.HTTPResponse(reading, method="GET") as answer,
        ):
            answer.begin()
            return answer.status, answer.read(bytes_max)
    finally:
        connection.close()


class _DeadlineSocket(socket.socket):
    """Reading side of a connection, with a time limit of all reads together."""

    def __init__(self, connection: socket.socket, deadline_s: float) -> None:
        super().__init__(fileno=os.dup(connection.fileno()))
        self._deadline_s = deadline_s

    def recv_into(self, *arguments: Any) -> int:
        left_s = self._deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the answer is not complete in time")
        self.settimeout(left_s)
        return super().recv_into(*arguments)


def failed_checks(body: bytes) -> tuple[str, ...]:
    """Return the reasons in a `/health` response, and the names of failed checks that have no reason."""
    try:
        page = json.loads(body)
        reasons = page.get("reasons", {})
        unexplained = [name for name, holds in page["checks"].items() if not holds and name not in reasons]
        return tuple(dict.fromkeys([*unexplained, *map(str, reasons.values())]))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return ()


def check_health(state: RunState) -> tuple[RunState, dict[str, str]]:
    """Check all services in parallel.

    Returns:
        `state` with the current status of each service and the components that it lacks, and for each service `yes` if
        it answered at all, otherwise the kind of failure.
    """
    results = _request_all(state.services, _check_health)
    services = {name: service for name, (service, _) in results.items()}
    return state.model_copy(update={"services": services}), {name: alive for name, (_, alive) in results.items()}


def sources(state: RunState, alive: Mapping[str, str], key: str | None) -> tuple[SourceState, ...]:
    """Return the state of the reward functions and rubrics of every service that publishes it.

    Args:
        state: the services.
        alive: second value of `check_health`. Services that did not answer there are not requested again.
        key: `security.internal_key`; by default the key that `headrace up` stored for the service.
    """
    answering = {name: service for name, service in state.services.items() if alive.get(name) == ALIVE}
    states_by_service = _request_all(answering, lambda service: _read_source_states(service, key))
    return tuple(source for states in states_by_service.values() for source in states)


def _request_all(services: Mapping[str, ServiceState], request: Callable[[ServiceState], T]) -> dict[str, T]:
    if not services:
        return {}
    with ThreadPoolExecutor(max_workers=len(services)) as pool:
        futures = {name: pool.submit(request, service) for name, service in services.items()}
        return {name: future.result() for name, future in futures.items()}


def _check_health(service: ServiceState) -> tuple[ServiceState, str]:
    try:
        status, body = _get(service, "/health", {})
    except TimeoutError:
        return service, f"no answer in {TIMEOUT_S:g} s"
    except ConnectionRefusedError:
        return service, "connection refused"
    except (OSError, http.client.HTTPException) as error:
        return service, type(error).__name__
    if status not in (_READY, _UNREADY):  # another program answered on this port
        return service, ALIVE
    observed: Status = "ready" if status == _READY else "unready"
    return service.model_copy(update={"status": observed, "lacks": failed_checks(body)}), ALIVE


def _read_source_states(service: ServiceState, key: str | None) -> tuple[SourceState, ...]:
    key = key or key_for(service.url)
    try:
        status, body = _get(service, "/sources", {"Authorization": f"Bearer {key}"} if key else {})
        return SourceList.model_validate_json(body, extra="ignore").data if status == 200 else ()
    except (OSError, http.client.HTTPException, ValidationError):
        return ()


def _get(service: ServiceState, path: str, headers: Mapping[str, str]) -> tuple[int, bytes]:
    return get(f"{service.url}{path}", TIMEOUT_S, _BODY_BYTES_MAX, headers)
