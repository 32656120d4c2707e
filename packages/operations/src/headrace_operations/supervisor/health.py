"""Current health of services and state of their reward sources, requested over HTTP.

The state file of the supervisor has the last observation; if the supervisor is suspended, that is an old one.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

from pydantic import ValidationError

from headrace_operations.supervisor.state import RunState, ServiceState, Status
from headrace_schemas.http.registry_api import SourceList, SourceState
from headrace_schemas.http.stack_access import key_for

_BYTES_MAX = 65_536
TIMEOUT_S = 3.0
ALIVE = "yes"
_BODY_BYTES_MAX = 1_048_576
_READY, _UNREADY = 200, 503
T = TypeVar("T")


class HealthAnswer(NamedTuple):
    """Health of a service. `lacks` has the reasons that it gives, or the names of its failed checks."""

    ready: bool
    lacks: tuple[str, ...]


def request_health(url: str, timeout_s: float) -> HealthAnswer | None:
    """Request the health of a service; return None if it does not answer in time."""
    try:
        status, body = get(f"{url}/health", timeout_s, _BYTES_MAX)
    except (OSError, http.client.HTTPException):
        return None
    return HealthAnswer(status == 200, failed_checks(body))


def get(url: str, timeout_s: float, bytes_max: int, headers: Mapping[str, str] | None = None) -> tuple[int, bytes]:
    """Return status and body of a page of a service.

    Raises:
        OSError: the service does not answer in time.
        HTTPException: the answer is not HTTP.
    """
    host, _, path = url.removeprefix("http://").partition("/")
    connection = http.client.HTTPConnection(host, timeout=timeout_s)
    try:
        connection.request("GET", f"/{path}", headers=dict(headers or {}))
        answer = connection.getresponse()
        return answer.status, answer.read(bytes_max)
    finally:
        connection.close()


def failed_checks(body: bytes) -> tuple[str, ...]:
    """Parse a `/health` page (`headrace_runtime.http.web`): return its reasons, and failed checks that have no
    reason."""
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
