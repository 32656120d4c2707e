"""Which version and which replica serve a call: the session's pinned version while it can, else the current one."""

from __future__ import annotations

from dataclasses import dataclass

from headrace_gateway.call import Call
from headrace_gateway.catalog import CHAMPION, Catalog
from headrace_gateway.fleet import Fleet, Member
from headrace_gateway.pins import Pins


@dataclass(frozen=True, slots=True)
class Place:
    """Who serves a call, with which weights."""

    version: str
    member: Member


class Placement:
    """Joins the catalog, the pins and the fleet. Asked anew before every attempt."""

    def __init__(self, catalog: Catalog, pins: Pins, fleet: Fleet) -> None:
        self._catalog = catalog
        self._pins = pins
        self._fleet = fleet

    def place(self, call: Call, avoid: frozenset[str] = frozenset()) -> Place | None:
        """None when no replica can take the call now. A pinned version that nobody can serve gives way."""
        place, target = self.choose(call, avoid), call.target
        if place and target.version is None and target.alias == CHAMPION:
            self._pins.set(call.identity.session_key, target.model, place.version)
        return place

    def choose(self, call: Call, avoid: frozenset[str] = frozenset()) -> Place | None:
        """As `place`, without a trace."""
        target = call.target
        pinned = None if target.alias != CHAMPION or target.version else self._pinned(call)
        for version in (pinned, self._catalog.version_of(target)):
            member = self._fleet.pick(version, call.identity.session_key, avoid) if version else None
            if version and member:
                return Place(version, member)
        return None

    def resume(self, call: Call, version: str, avoid: frozenset[str], *, with_tokens: bool) -> Place | None:
        """A replica to go on with a stream that has begun; its version is settled."""
        member = self._fleet.pick(version, call.identity.session_key, avoid, resuming=with_tokens)
        return Place(version, member) if member else None

    def _pinned(self, call: Call) -> str | None:
        if call.opens_a_run:
            return None
        version = self._pins.get(call.identity.session_key, call.target.model)
        return version if version and self._catalog.usable(call.target.model, version) else None
