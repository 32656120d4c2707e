"""Sticky versions: a session keeps the version and the arm it began with until it is idle (see `placement`)."""

from __future__ import annotations

from dataclasses import dataclass

from headrace_gateway.settings import StickySettings
from headrace_runtime.clock import Clock
from headrace_runtime.storage.tenant_memory import TenantMemory
from headrace_schemas import UnitAssignment

_SESSIONS_MAX = 100_000
"""Sessions remembered. Beyond it the tenant with the most sessions forgets the one that was idle longest."""


@dataclass(frozen=True, slots=True)
class Pin:
    """The version that a session began with. A session without an `assignment` is no part of a rollout, also of one
    that began since."""

    version: str
    assignment: UnitAssignment | None = None


class StickyVersions:
    """In memory only: another gateway, or a restart, may choose another version for a session. Within a rollout the
    assignment is the same then: it follows from the unit and the routing alone."""

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
