"""Checks trajectories that came from outside over Kafka, by the rules that the gateway has for HTTP."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from pydantic import ValidationError

from headrace_runtime.errors import InvalidEvent
from headrace_runtime.wire import Received
from headrace_schemas import Trajectory
from headrace_schemas.envelope import OWN_SOURCE
from headrace_schemas.ingest import OWN_END_REASON, KnownModels, find_objection

Lookup = Callable[[str], Awaitable[KnownModels]]
"""Returns the known models, with the vocabulary of the named one. May raise `Unavailable`."""


async def nothing_known(_model: str) -> KnownModels:
    """For a scorer that follows no topics."""
    return KnownModels()


async def check(trajectory: Trajectory, received: Received, known: Lookup) -> None:
    """Raises `InvalidEvent` with the field at fault. Trajectories that our own collector made pass unchecked."""
    ours = received.envelope.source.startswith(OWN_SOURCE)
    if ours and trajectory.end_reason != OWN_END_REASON:
        return
    if not ours:
        _check_fields(received)
    found = find_objection(trajectory, await known(trajectory.model))
    if found is not None:
        raise InvalidEvent(found.code, str(found))


def _check_fields(received: Received) -> None:
    """Refuse unknown fields of other producers. Our own producers may be newer and have more fields."""
    value = received.record.value
    if value is None or received.envelope.dataref is not None:
        return
    try:
        Trajectory.model_validate_json(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        text = f"{'.'.join(map(str, first['loc']))}: not a field of a trajectory; leave it out"
        raise InvalidEvent("unknown_field", text) from None
