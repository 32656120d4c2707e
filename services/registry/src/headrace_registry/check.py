"""Checks the gate before the first promotion: its program must run and print valid lines."""

from __future__ import annotations

import asyncio
from itertools import chain

from headrace_registry.gate import Gate, GateFailed
from headrace_registry.settings import GateRaySettings, RegistrySettings
from headrace_registry.stand_in_gateway import run_stand_in
from headrace_runtime.errors import SettingError
from headrace_runtime.settings.sections import Common
from headrace_schemas.programs.gate import Tasks

VERSION = "check@000000000000"
_CHECK_S = 60.0
_TASKS = 8


async def check(_common: Common, settings: RegistrySettings) -> list[str]:
    """Play a few tasks of the gate's program against a stand-in gateway, for one minute at most. Raises `SettingError`.

    A program that still runs after a minute has passed, because it may stay silent for `gate.silence_s`.
    """
    gate = settings.gate
    if not gate.command:
        return []
    Gate(gate)
    with run_stand_in() as base_url:
        overrides = {"base_url": base_url, "silence_s": min(gate.silence_s, _CHECK_S), "ray": GateRaySettings()}
        check_settings = gate.model_copy(
            update=overrides
        )  # workers on other machines could not reach a stand-in on this one
        try:
            async with asyncio.timeout(_CHECK_S), Gate(check_settings).session() as session:
                plays = enumerate(_sample_tasks(session.tasks))
                await asyncio.gather(*(session.play(VERSION, task, seed) for seed, task in plays))
        except TimeoutError:
            pass
        except GateFailed as error:
            if not error.timed_out:
                remedy = f"in a check against a stand-in gateway: {error}"
                raise SettingError("registry.gate.command", gate.command, remedy) from None
    return []


def _sample_tasks(tasks: Tasks) -> list[str]:
    return list(dict.fromkeys(chain(tasks.gate[:_TASKS], tasks.audit[:_TASKS])))
