"""Plays audit tasks with named versions, without bus and database.

The filter (`python -m headrace_registry.audits`) answers each line `measure` with a line `measured`. All versions play
the same tasks and seeds.
"""

from __future__ import annotations

from headrace_registry.evaluation import AuditLimiter, play_audit_tasks
from headrace_registry.gate import Gate
from headrace_registry.settings import RegistrySettings
from headrace_runtime.errors import SettingError
from headrace_runtime.process.programs import Lines
from headrace_runtime.settings.sections import Common
from headrace_schemas.programs.replay import Measure, Measured


async def run(_common: Common, settings: RegistrySettings) -> None:
    """Run the filter until its input ends."""
    gate = Gate(settings.gate)
    if not gate.configured:
        raise SettingError(
            "registry.gate.command", "", "is empty, so no program plays held-out tasks; see docs/gate.md"
        )
    limiter = AuditLimiter(settings.gate.concurrency)
    lines = Lines()
    async for _, value in lines.read():
        request = Measure.model_validate_json(value)
        async with gate.session() as session:
            scores = await play_audit_tasks(session, request.version, request.plays, limiter=limiter)
        measured = Measured(version=request.version, scores=tuple(scores))
        lines.write("measured", measured.model_dump_json().encode())
        lines.flush()
