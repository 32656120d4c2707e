"""Selection of the version and the replica for a call. A session keeps its version and its arm of the rollout until it
is idle.

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
"""Number of sessions that are remembered. Beyond it the tenant with the most sessions loses the one that was idle
longest."""


@dataclass(frozen=True, slots=True)
class Pin:
    """Version that a session keeps. Without an `assignment` the session takes part in no rollout, also not in a later
    one."""

    version: str
    assignment: UnitAssignment | None = None


class StickyVersions:
    """Memory of the version that each session keeps.

    Another gateway, or this one after a restart, may choose another version for a session. Within a rollout the
    assignment is still the same, because it depends only on the unit and the routing.
    """

    def __init__(self, settings: StickySettings, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self._pins: TenantMemory[str, dict[str, tuple[Pin, float]]] = TenantMemory(_SESSIONS_MAX)
        """For each tenant and session key, the pin of each model and the time of its last use. The tenant is part of
        the key, because clients can send session keys of other tenants inside response ids."""

    def __len__(self) -> int:
        return len(self._pins)

    def get(self, tenant: str, session_key: str, model: str) -> Pin | None:
        pin, used_s = (self._pins.get(tenant, session_key) or {}).get(model, (None, 0.0))
        return pin if self._clock.monotonic_s() - used_s < self._settings.idle_s else None

    def set(self, tenant: str, session_key: str, model: str, pin: Pin) -> None:
        pins = self._pins.get(tenant, session_key) or {}
        self._pins.set(tenant, session_key, {**pins, model: (pin, self._clock.monotonic_s())})

    def drop(self, tenant: str, session_key: str) -> None:
        """Forget the versions of a session that has ended."""
        self._pins.pop(tenant, session_key)


@dataclass(frozen=True, slots=True)
class Upstream:
    """Version and replica that serve a call, and the rollout assignment of its session."""

    version: str
    member: ReplicaStatus
    assignment: UnitAssignment | None = None


class Placement:
    """Selection of the replica for a call. The relay calls it before each attempt."""

    def __init__(self, catalog: ModelCatalog, sticky_versions: StickyVersions, replica_set: ReplicaSet) -> None:
        self._catalog = catalog
        self._sticky_versions = sticky_versions
        self._replica_set = replica_set

    def assign(self, call: ChatCall, avoid: frozenset[str] = frozenset()) -> Upstream | None:
        """Return the version and the replica for the call, or None while no replica can accept it. The session then
        keeps this version.

        The session gets the current version if no replica serves the one that it has kept.
        """
        upstream, target = self.choose(call, avoid), call.target
        if upstream and target.version is None and target.alias == CHAMPION:
            pin = Pin(upstream.version, upstream.assignment)
            self._sticky_versions.set(call.identity.tenant, call.identity.session_key, target.model, pin)
        return upstream

    def choose(self, call: ChatCall, avoid: frozenset[str] = frozenset()) -> Upstream | None:
        """Return the same result as `assign`, but do not record the version for the session."""
        target = call.target
        pin = None if target.alias != CHAMPION or target.version else self._pin(call)
        current = self._catalog.version_of(target)
        assignment = pin.assignment if pin else None
        for version in (pin.version if pin else None, current):
            member = self._pick(call, version, avoid) if version else None
            if version and member:
                return Upstream(version, member, assignment)
        return None

    def has_spare_capacity(self, call: ChatCall, load_max: float) -> bool:
        """Return whether the load of the replica for the call is below `load_max`, so that background work delays no
        user."""
        upstream = self.choose(call)
        return upstream is not None and upstream.member.load < load_max

    def resume(self, call: ChatCall, version: str, avoid: frozenset[str], *, with_tokens: bool) -> Upstream | None:
        """Return the replica that continues a stream with the same version after its replica failed, or None.

        Args:
            with_tokens: whether the replica must continue from the exact tokens that were sampled so far.
        """
        member = self._pick(call, version, avoid, begun=True, resuming=with_tokens)
        return Upstream(version, member) if member else None

    def may_resume(self, call: ChatCall, version: str) -> bool:
        """Return whether it is useful to wait for a replica that can continue a broken stream: one that has or will
        have its version."""
        holders = self._replica_set.holders(version)
        if not holders:
            return self._catalog.is_usable(call.target.model, version)
        return any(replica.resumes for replica in holders)

    def missing_abilities(self, call: ChatCall) -> frozenset[str]:
        """Return the abilities (such as grammars) that a call needs and no single replica of its model has; empty if
        one has all."""
        needs = call.request.needs
        return self._replica_set.missing_abilities(call.target.model, needs) if needs else needs

    def _pick(
        self, call: ChatCall, version: str, avoid: frozenset[str], *, begun: bool = False, resuming: bool = False
    ) -> ReplicaStatus | None:
        key, needs = call.identity.session_key, call.request.needs
        return self._replica_set.pick(version, key, avoid, needs=needs, begun=begun, resuming=resuming)

    def _pin(self, call: ChatCall) -> Pin | None:
        """Return the version that the session has kept, or draw one if it has none or if that version was withdrawn."""
        model, identity = call.target.model, call.identity
        pin = None if call.opens_a_run else self._sticky_versions.get(identity.tenant, identity.session_key, model)
        if pin and self._catalog.is_usable(model, pin.version):
            is_under_way = self._catalog.is_under_way(model, pin.assignment)
            return pin if is_under_way or pin.assignment is None else Pin(pin.version)
        version, assignment = self._catalog.draw(model, identity)
        return Pin(version, assignment) if version else None
