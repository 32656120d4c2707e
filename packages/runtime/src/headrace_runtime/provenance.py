"""Check of the producers of rewards: only Headrace's own services may use reserved sources.

All consumers of rewards apply it, because they decode records with `headrace_runtime.wire`.
"""

from __future__ import annotations

from headrace_runtime.errors import InvalidEvent
from headrace_schemas import Reward
from headrace_schemas.values.sources import giver_of
from headrace_schemas.values.text import printable

_REVISION_MAX = 1_000_000_000
"""Highest revision of external producers, so that later revisions of a service still fit the database."""


def check(reward: Reward, producer: str) -> None:
    """Raise `InvalidEvent` if `producer`, the source of the envelope, must not give this reward."""
    giver = giver_of(reward.source)
    if giver is not None:
        if producer != f"headrace/{giver}":
            text = f"source: {printable(reward.source)!r} is reserved for the {giver}; use another source"
            raise InvalidEvent("reserved_source", text)
    elif reward.revision > _REVISION_MAX:
        raise InvalidEvent("invalid_event", f"revision: {reward.revision} is more than {_REVISION_MAX}; count from 0")
