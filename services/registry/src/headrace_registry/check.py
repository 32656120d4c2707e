"""What would stop the first promotion: a gate whose program does not run, or does not answer as it should."""

from __future__ import annotations

import asyncio
from itertools import chain

from headrace_registry.dry_run import answering
from headrace_registry.gate import Gate, GateFailed
from headrace_registry.settings import RegistrySettings
from headrace_runtime.errors import SettingError
from headrace_runtime.settings import Common
from headrace_schemas.gate import Tasks

VERSION = "dry-run@000000000000"
_DRY_RUN_S = 60.0
_TASKS = 8


async def check(_common: Common, settings: RegistrySettings) -> list[str]:
    """Has the gate's program play a few tasks with a model that is not there, for a minute at most. Raises
    `SettingError`.

    A program that is still at it by then has started well: it may be silent for `gate.silence_s`.
    """
    gate = settings.gate
    if not gate.command:
        return []
    with answering() as base_url:
        dry = gate.model_copy(update={"base_url": base_url, "silence_s": min(gate.silence_s, _DRY_RUN_S)})
        try:
            async with asyncio.timeout(_DRY_RUN_S), Gate(dry).session() as court:
                plays = enumerate(_some(court.tasks))
                await asyncio.gather(*(court.play(VERSION, task, seed) for seed, task in plays))
        except TimeoutError:
            pass
        except GateFailed as error:
            if not error.timed_out:
                remedy = f"in a dry run against answers without meaning: {error}"
                raise SettingError("registry.gate.command", gate.command, remedy) from None
    return []


def _some(tasks: Tasks) -> list[str]:
    return list(dict.fromkeys(chain(tasks.gate[:_TASKS], tasks.audit[:_TASKS])))
