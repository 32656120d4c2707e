"""What the services themselves say right now: whether they answer, and how the sources of rewards fare.

The supervisor's file says what it saw last; a supervisor that is stopped saw it long ago.
"""

from __future__ import annotations

import http.client
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from pydantic import ValidationError

from headrace_operations.supervisor.health import get, lacking
from headrace_operations.supervisor.state import RunState, ServiceState, Status
from headrace_schemas.source_api import SourceList, SourceState
from headrace_schemas.stack_access import key_for

TIMEOUT_S = 3.0
ALIVE = "yes"
_BODY_BYTES_MAX = 1_048_576
_READY, _UNREADY = 200, 503
T = TypeVar("T")


def asked(state: RunState) -> tuple[RunState, dict[str, str]]:
    """Each service asked at the same time: `state` with what they lack now, and whether they are alive: `yes` (it
    answered, whatever it said), or what it did instead.
    """
    found = _each(state.services, _health)
    services = {name: service for name, (service, _) in found.items()}
    return state.model_copy(update={"services": services}), {name: alive for name, (_, alive) in found.items()}


def sources(state: RunState, alive: Mapping[str, str], key: str | None) -> tuple[SourceState, ...]:
    """How reward functions and rubrics fare, of every service that says so. Those that did not answer a moment ago
    (`alive`, as `asked` returned it) are not waited for once more. `key` is `security.internal_key`."""
    answering = {name: service for name, service in state.services.items() if alive.get(name) == ALIVE}
    found = _each(answering, lambda service: _sources(service, key))
    return tuple(one for said in found.values() for one in said)


def _each(services: Mapping[str, ServiceState], ask: Callable[[ServiceState], T]) -> dict[str, T]:
    if not services:
        return {}
    with ThreadPoolExecutor(max_workers=len(services)) as pool:
        asked = {name: pool.submit(ask, service) for name, service in services.items()}
        return {name: future.result() for name, future in asked.items()}


def _health(service: ServiceState) -> tuple[ServiceState, str]:
    try:
        status, body = _get(service, "/health", {})
    except TimeoutError:
        return service, f"no answer in {TIMEOUT_S:g} s"
    except ConnectionRefusedError:
        return service, "nobody listens"
    except (OSError, http.client.HTTPException) as error:
        return service, type(error).__name__
    if status not in (_READY, _UNREADY):  # somebody else's page
        return service, ALIVE
    said: Status = "ready" if status == _READY else "unready"
    return service.model_copy(update={"status": said, "lacks": lacking(body)}), ALIVE


def _sources(service: ServiceState, key: str | None) -> tuple[SourceState, ...]:
    key = key or key_for(service.url)
    try:
        status, body = _get(service, "/sources", {"Authorization": f"Bearer {key}"} if key else {})
        return SourceList.model_validate_json(body, extra="ignore").data if status == 200 else ()
    except (OSError, http.client.HTTPException, ValidationError):
        return ()


def _get(service: ServiceState, path: str, headers: Mapping[str, str]) -> tuple[int, bytes]:
    return get(f"{service.url}{path}", TIMEOUT_S, _BODY_BYTES_MAX, headers)
