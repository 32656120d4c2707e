"""Which version and which replica serve a call: the session's pinned version while it can, else the current one."""

from __future__ import annotations

from dataclasses import dataclass

from headrace_gateway.chat_call import ChatCall
from headrace_gateway.model_catalog import CHAMPION, ModelCatalog
from headrace_gateway.replica_set import ReplicaSet, ReplicaStatus
from headrace_gateway.sticky_versions import StickyVersions


@dataclass(frozen=True, slots=True)
class Upstream:
    """The replica and the version that serve a call."""

    version: str
    member: ReplicaStatus


class Placement:
    """Combines catalog, sticky versions and replicas. Asked again before every attempt."""

    def __init__(self, catalog: ModelCatalog, sticky_versions: StickyVersions, replica_set: ReplicaSet) -> None:
        self._catalog = catalog
        self._sticky_versions = sticky_versions
        self._replica_set = replica_set

    def place(self, call: ChatCall, avoid: frozenset[str] = frozenset()) -> Upstream | None:
        """None when no replica can take the call now. If no replica serves the session's version, it gets another."""
        place, target = self.choose(call, avoid), call.target
        if place and target.version is None and target.alias == CHAMPION:
            self._sticky_versions.set(call.identity.session_key, target.model, place.version)
        return place

    def choose(self, call: ChatCall, avoid: frozenset[str] = frozenset()) -> Upstream | None:
        """Like `place`, but changes nothing."""
        target = call.target
        pinned = None if target.alias != CHAMPION or target.version else self._pinned(call)
        for version in (pinned, self._catalog.version_of(target)):
            member = self._replica_set.pick(version, call.identity.session_key, avoid) if version else None
            if version and member:
                return Upstream(version, member)
        return None

    def resume(self, call: ChatCall, version: str, avoid: frozenset[str], *, with_tokens: bool) -> Upstream | None:
        """A replica that can continue a stream, with the version that the stream began with."""
        member = self._replica_set.pick(version, call.identity.session_key, avoid, resuming=with_tokens)
        return Upstream(version, member) if member else None

    def _pinned(self, call: ChatCall) -> str | None:
        if call.opens_a_run:
            return None
        version = self._sticky_versions.get(call.identity.session_key, call.target.model)
        return version if version and self._catalog.usable(call.target.model, version) else None
