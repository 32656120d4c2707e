"""Selection of the version and the replica for a call. A session keeps its version and arm until it is idle.

The version is that to which the session is pinned while a replica can serve it, else that of the arm to which the
session is assigned, else the champion.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace_gateway.requests.chat_call import CHAMPION, ChatCall
from headrace_gateway.routing.model_catalog import ModelCatalog
from headrace_gateway.routing.replica_set import ReplicaSet, ReplicaStatus
from headrace_gateway.settings import StickySettings
from headrace_runtime.clock import Clock
from headrace_runtime.storage.tenant_memory import TenantMemory
from headrace_schemas import UnitAssignment

_SESSIONS_MAX = 100_000
"""Sessions remembered. Beyond it the tenant with the most sessions forgets the one that was idle longest."""


@dataclass(frozen=True, slots=True)
class Pin:
    """Version with which a session began. A session without an `assignment` is not part of a rollout, even of a
    later one."""

    version: str
    assignment: UnitAssignment | None = None


class StickyVersions:
    """Versions of sessions in memory.

    Another gateway, or this one after a restart, may choose another version for a session. Within a rollout the
    assignment is still the same, because it depends only on the unit and the routing.
    """

    def __init__(self, settings: StickySettings, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self._pins: TenantMemory[str, dict[str, tuple[Pin, float]]] = TenantMemory(_SESSIONS_MAX)
        """By tenant and session key, then by model: the pin and when it was last used. A session key reaches us inside
        response ids, which any tenant may name."""

    def __len__(self) -> int:
        return len(self._pins)

    def get(self, tenant: str, session_key: str, model: str) -> Pin | None:
        pin, used_s = (self._pins.get(tenant, session_key) or {}).get(model, (None, 0.0))
        return pin if self._clock.monotonic_s() - used_s < self._settings.idle_s else None

    def set(self, tenant: str, session_key: str, model: str, pin: Pin) -> None:
        pins = self._pins.get(tenant, session_key) or {}
        self._pins.set(tenant, session_key, {**pins, model: (pin, self._clock.monotonic_s())})

    def drop(self, tenant: str, session_key: str) -> None:
        """Forget the versions of a session of `tenant` that has ended."""
        self._pins.pop(tenant, session_key)


@dataclass(frozen=True, slots=True)
class Upstream:
    """The replica and the version that serve a call, and the arm that its unit was assigned to."""

    version: str
    member: ReplicaStatus
    assignment: UnitAssignment | None = None


class Placement:
    """Selection of replicas from catalog, sticky versions and replica set. The relay calls it before every attempt."""

    def __init__(self, catalog: ModelCatalog, sticky_versions: StickyVersions, replica_set: ReplicaSet) -> None:
        self._catalog = catalog
        self._sticky_versions = sticky_versions
        self._replica_set = replica_set

    def assign(self, call: ChatCall, avoid: frozenset[str] = frozenset()) -> Upstream | None:
        """Return the replica and version for the call, or None while no replica can take it.

        The session gets another version if no replica serves its own.
        """
        upstream, target = self.choose(call, avoid), call.target
        if upstream and target.version is None and target.alias == CHAMPION:
            pin = Pin(upstream.version, upstream.assignment)
            self._sticky_versions.set(call.identity.tenant, call.identity.session_key, target.model, pin)
        return upstream

    def choose(self, call: ChatCall, avoid: frozenset[str] = frozenset()) -> Upstream | None:
        """Return the result of `assign` without pinning the session."""
        target = call.target
        pin = None if target.alias != CHAMPION or target.version else self._pin(call)
        current = self._catalog.version_of(target)
        assignment = pin.assignment if pin else None
        for version in (pin.version if pin else None, current):
            member = self._pick(call, version, avoid) if version else None
            if version and member:
                return Upstream(version, member, assignment)
        return None

    def has_time(self, call: ChatCall, load_max: float) -> bool:
        """Return whether background work may call the replica now: its load is below `load_max`, so that no user has to
        wait.
        """
        upstream = self.choose(call)
        return upstream is not None and upstream.member.load < load_max

    def resume(self, call: ChatCall, version: str, avoid: frozenset[str], *, with_tokens: bool) -> Upstream | None:
        """Return a replica that can continue a stream with the same version after its replica failed, or None.

        Args:
            with_tokens: whether the replica must continue from the exact tokens that were sampled so far.
        """
        member = self._pick(call, version, avoid, begun=True, resuming=with_tokens)
        return Upstream(version, member) if member else None

    def may_resume(self, call: ChatCall, version: str) -> bool:
        """Return whether a broken stream may wait for a replica that has its version or will load it."""
        holders = self._replica_set.holders(version)
        if not holders:
            return self._catalog.usable(call.target.model, version)
        return any(replica.resumes for replica in holders)

    def lacking(self, call: ChatCall) -> frozenset[str]:
        """Return the abilities (such as grammars) that a call needs and no replica of its model has."""
        needs = call.request.needs
        return self._replica_set.lacking(call.target.model, needs) if needs else needs

    def _pick(
        self, call: ChatCall, version: str, avoid: frozenset[str], *, begun: bool = False, resuming: bool = False
    ) -> ReplicaStatus | None:
        key, needs = call.identity.session_key, call.request.needs
        return self._replica_set.pick(version, key, avoid, needs=needs, begun=begun, resuming=resuming)

    def _pin(self, call: ChatCall) -> Pin | None:
        """Return the version to which the session is pinned, or a new one if that version was withdrawn."""
        model, identity = call.target.model, call.identity
        pin = None if call.opens_a_run else self._sticky_versions.get(identity.tenant, identity.session_key, model)
        if pin and self._catalog.usable(model, pin.version):
            is_under_way = self._catalog.under_way(model, pin.assignment)
            return pin if is_under_way or pin.assignment is None else Pin(pin.version)
        version, assignment = self._catalog.draw(model, identity)
        return Pin(version, assignment) if version else None
