"""The Kafka door: what comes from outside on `trajectories` must satisfy what the gateway asks of it over HTTP."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from pydantic import ValidationError

from headrace_runtime.errors import InvalidEvent
from headrace_runtime.wire import Received
from headrace_schemas import Trajectory
from headrace_schemas.ingest import OWN_END_REASON, Known, objection

Lookup = Callable[[str], Awaitable[Known]]
"""What is known about models, with the vocabulary of the one that is named. May raise `Unavailable`."""

_OURS = "headrace/"


async def nothing_known(_model: str) -> Known:
    """For a scorer that follows no topics."""
    return Known()


async def check(trajectory: Trajectory, received: Received, known: Lookup) -> None:
    """Raises `InvalidEvent` with the field at fault. What our own services made of captured turns passes."""
    ours = received.envelope.source.startswith(_OURS)
    if ours and trajectory.end_reason != OWN_END_REASON:
        return
    if not ours:
        _check_fields(received)
    found = objection(trajectory, await known(trajectory.model))
    if found is not None:
        raise InvalidEvent(found.code, str(found))


def _check_fields(received: Received) -> None:
    """A stranger's unknown field is a mistake; a newer release's own is not."""
    value = received.record.value
    if value is None or received.envelope.dataref is not None:
        return
    try:
        Trajectory.model_validate_json(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        text = f"{'.'.join(map(str, first['loc']))}: no field of a trajectory; leave it out"
        raise InvalidEvent("unknown_field", text) from None
