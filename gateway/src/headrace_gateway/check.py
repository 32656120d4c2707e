"""What would stop the gateway's start: its keys."""

from __future__ import annotations

from headrace_gateway.access import read_keys
from headrace_gateway.settings import GatewaySettings
from headrace_runtime.settings import Common


async def check(_common: Common, settings: GatewaySettings) -> list[str]:
    """Raises `SettingError`."""
    read_keys(settings)
    return []
