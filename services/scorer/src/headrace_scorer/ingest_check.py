"""Checks of trajectories that other programs send over Kafka, by the same rules as the gateway's for HTTP."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from pydantic import ValidationError

from headrace_runtime.errors import InvalidEvent
from headrace_runtime.kafka.wire import Received
from headrace_schemas import Trajectory
from headrace_schemas.events.envelope import OWN_SOURCE
from headrace_schemas.rules.ingest import OWN_END_REASON, KnownModels, find_objection

Lookup = Callable[[str], Awaitable[KnownModels]]
"""Function that returns the known models, with the vocabulary of the named one. It may raise `Unavailable`."""


async def nothing_known(_model: str) -> KnownModels:
    """Return no models, for a scorer that does not follow the topics of models."""
    return KnownModels()


async def check(trajectory: Trajectory, received: Received, known_models: Lookup) -> None:
    """Raise `InvalidEvent` if an ingested trajectory breaks a rule. Trajectories of the collector are not checked."""
    from_headrace = received.envelope.source.startswith(OWN_SOURCE)
    if from_headrace and trajectory.end_reason != OWN_END_REASON:
        return
    if not from_headrace:
        _check_fields(received)
    violation = find_objection(trajectory, await known_models(trajectory.model))
    if violation is not None:
        raise InvalidEvent(violation.code, str(violation))


def _check_fields(received: Received) -> None:
    """Refuse unknown fields of other producers. Producers of Headrace may be newer and have more fields."""
    value = received.record.value
    if value is None or received.envelope.dataref is not None:
        return
    try:
        Trajectory.model_validate_json(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        text = f"{'.'.join(map(str, first['loc']))}: not a field of a trajectory; leave it out"
        raise InvalidEvent("unknown_field", text) from None
