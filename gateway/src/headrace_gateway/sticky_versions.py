"""Sticky versions: a session keeps the version it began with until it is idle (see `placement`)."""

from __future__ import annotations

from collections import OrderedDict

from headrace_gateway.settings import StickySettings
from headrace_runtime.clock import Clock


class StickyVersions:
    """In memory only: another gateway, or a restart, may choose another version for a session."""

    def __init__(self, settings: StickySettings, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self._pins: OrderedDict[str, dict[str, tuple[str, float]]] = OrderedDict()
        """By session key, then by model: the version and when it was last used."""

    def __len__(self) -> int:
        return len(self._pins)

    def get(self, session_key: str, model: str) -> str | None:
        version, used_s = self._pins.get(session_key, {}).get(model, (None, 0.0))
        return version if self._clock.monotonic_s() - used_s < self._settings.idle_s else None

    def set(self, session_key: str, model: str, version: str) -> None:
        self._pins.setdefault(session_key, {})[model] = (version, self._clock.monotonic_s())
        self._pins.move_to_end(session_key)
        if len(self._pins) > self._settings.sessions_max:
            self._pins.popitem(last=False)

    def drop(self, session_key: str) -> None:
        """The session has ended."""
        self._pins.pop(session_key, None)
