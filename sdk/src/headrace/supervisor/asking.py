"""Asks the living: each service's own `/health`, with the reasons that it gives."""

from __future__ import annotations

import http.client
import json
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from headrace.supervisor.state import RunState, ServiceState, Status

_BYTES_MAX = 65_536
TIMEOUT_S = 3.0


class Answer(NamedTuple):
    """What a service says of itself. `lacks` are its reasons, or the names of the checks that do not hold."""

    ready: bool
    lacks: tuple[str, ...]


def ask(url: str, timeout_s: float) -> Answer | None:
    """None when it does not answer in time."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=timeout_s)
    try:
        connection.request("GET", "/health")
        answer = connection.getresponse()
        return Answer(answer.status == 200, lacking(answer.read(_BYTES_MAX)))
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def lacking(body: bytes) -> tuple[str, ...]:
    """What a service complains of (`headrace_runtime.web`): its reasons, else the checks that do not hold."""
    try:
        page = json.loads(body)
        reasons = page.get("reasons", {})
        unexplained = [name for name, holds in page["checks"].items() if not holds and name not in reasons]
        return tuple(dict.fromkeys([*unexplained, *map(str, reasons.values())]))
    except (ValueError, KeyError, TypeError, AttributeError):
        return ()


def asked(state: RunState, timeout_s: float = TIMEOUT_S) -> RunState:
    """`state`, which a supervisor wrote some time ago, with what its services say now."""
    with ThreadPoolExecutor(max(1, len(state.services))) as threads:
        now = threads.map(lambda one: _now(one, timeout_s), state.services.values())
        return state.model_copy(update={"services": dict(zip(state.services, now, strict=True))})


def _now(service: ServiceState, timeout_s: float) -> ServiceState:
    if service.status in ("stopped", "restarting"):
        return service
    answer = ask(service.url, timeout_s)
    if answer is not None:
        status: Status = "ready" if answer.ready else "unready"
        return service.model_copy(update={"status": status, "lacks": answer.lacks})
    if service.status in ("starting", "hung"):
        return service
    return service.model_copy(update={"status": "unready", "lacks": (f"no answer within {timeout_s:g} s",)})
