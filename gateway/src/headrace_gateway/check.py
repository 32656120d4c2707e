"""Checks that would stop the gateway's start: its keys, and declared values that cannot be read."""

from __future__ import annotations

from headrace_gateway.access import read_keys
from headrace_gateway.settings import GatewaySettings
from headrace_runtime.settings.sections import Common
from headrace_runtime.settings.source_values import SourceValues


async def check(common: Common, settings: GatewaySettings) -> list[str]:
    """Raises `SettingError`."""
    common.section_of("scorer", SourceValues)
    read_keys(settings)
    return []
