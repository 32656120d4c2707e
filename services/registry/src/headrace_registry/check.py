"""What would stop the first promotion: a gate whose program does not run, or prints something else than scores."""

from __future__ import annotations

from headrace_registry.dry_run import answering
from headrace_registry.gate import Gate, GateFailed
from headrace_registry.settings import RegistrySettings
from headrace_runtime.errors import SettingError
from headrace_runtime.settings import Common

VERSION = "dry-run@000000000000"
_DRY_RUN_S = 60.0


async def check(_common: Common, settings: RegistrySettings) -> list[str]:
    """Plays the gate once against a model that is not there, for a minute at most. Raises `SettingError`.

    A program that is still at it by then has started well: playing all tasks may take as long as `gate.timeout_s`.
    """
    gate = settings.gate
    if not gate.command:
        return []
    with answering() as base_url:
        dry = gate.model_copy(update={"base_url": base_url, "timeout_s": min(gate.timeout_s, _DRY_RUN_S)})
        try:
            await Gate(dry).play(VERSION)
        except GateFailed as error:
            if not error.timed_out:
                remedy = f"in a dry run against answers without meaning: {error}"
                raise SettingError("registry.gate.command", gate.command, remedy) from None
    return []
