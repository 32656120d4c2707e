"""Carries out what somebody asks for: one transaction with the lease, the change and its line in the audit log.

What is refused changes nothing. What is answered is durable and published.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime

from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_registry import states, store
from headrace_registry.catalog import audit
from headrace_registry.leader import LeaderLease, LostLeadership
from headrace_registry.records import ModelRecord, VersionRecord
from headrace_registry.transition import Transition
from headrace_runtime.errors import Refused, Unavailable
from headrace_runtime.processor import Processor
from headrace_schemas import Event
from headrace_schemas.registry_api import ModelState

Work = Callable[[AsyncConnection, datetime, Transition], Awaitable[str | None]]
"""Changes the state, and says what the audit log shall keep besides the request. May raise `Refused` at any point."""


class RegistryChanges:
    """Only the leader makes any. `changed` wakes whoever acts on the state."""

    def __init__(self, processor: Processor, lease: LeaderLease, changed: Callable[[], None]) -> None:
        self._processor = processor
        self._lease = lease
        self._changed = changed

    async def make(self, name: str, act: audit.Act, work: Work) -> ModelState:
        """The model afterwards. Raises `Refused`."""
        self.check_leads()
        after: list[ModelState] = []
        refused: list[Refused] = []

        async def step(tx: AsyncConnection, now: datetime) -> Sequence[Event]:
            after.clear()
            refused.clear()
            await self._lease.check(tx)
            try:
                async with tx.begin_nested():
                    transition = Transition(tx, now, act.asker.who or None)
                    detail = await work(tx, now, transition)
                    events = await transition.finish()
                    noted = audit.Act(act.asker, act.action, act.version, act.why, detail or act.detail)
                    await audit.write(tx, now, name, noted)
                    after.append(await states.of_model(tx, await model(tx, name)))
            except Refused as error:
                refused.append(error)
                return ()
            return events

        try:
            await self._processor.step(step)
        except LostLeadership:
            raise _standby() from None
        except Unavailable as error:
            raise Refused(503, "unavailable", f"not done, or done and not yet published: {error}") from None
        if refused:
            raise refused[0]
        self._changed()
        return after[0]

    def check_leads(self) -> None:
        """Raises `Refused` 503 while another registry leads."""
        if not self._lease.held.is_set():
            raise _standby()


async def model(tx: AsyncConnection, name: str) -> ModelRecord:
    """Raises `Refused` 404."""
    record = await store.model(tx, name)
    if record is None:
        raise Refused(404, "model_not_found", f"there is no model {name!r}", "model")
    return record


async def version(tx: AsyncConnection, record: ModelRecord, name: str) -> VersionRecord:
    """Raises `Refused` 404."""
    found = await store.version(tx, name)
    if found is None or found.model != record.model:
        raise Refused(404, "version_not_found", f"model {record.model!r} has no version {name!r}", "version")
    return found


def _standby() -> Refused:
    return Refused(503, "not_leader", "this registry is a standby; ask the leader")
