"""Applies a change that an operator requests: lease check, change and audit entry in one transaction.

A refused change leaves the state as it was. An answered change is durable and published.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime

from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_registry.pages import states
from headrace_registry.storage import audit, store
from headrace_registry.storage.leader import LeaderLease, LostLeadership
from headrace_registry.versions.transition import Transition
from headrace_runtime.errors import Refused, Unavailable
from headrace_runtime.stream.processor import Processor
from headrace_schemas import Event
from headrace_schemas.http.registry_api import ModelState

Work = Callable[[AsyncConnection, datetime, Transition], Awaitable[str | None]]
"""Changes the state, or raises `Refused`. Returns the detail that the audit log stores besides the request."""


class RegistryChanges:
    """Changes requested over REST. Only the leader makes any. `changed` is called after each of them."""

    def __init__(self, processor: Processor, lease: LeaderLease, changed: Callable[[], None]) -> None:
        self._processor = processor
        self._lease = lease
        self._changed = changed

    async def make(self, name: str, action: audit.AuditedAction, work: Work) -> ModelState:
        """Apply `work` to the model `name` in one transaction, and return the model's state afterwards.

        Raises:
          Refused: The change is not allowed, this registry is a standby, or the bus or the database is
              unavailable.
        """
        self.require_leadership()
        model_states: list[ModelState] = []
        refusals: list[Refused] = []

        async def step(tx: AsyncConnection, now: datetime) -> Sequence[Event]:
            model_states.clear()
            refusals.clear()
            await self._lease.check(tx)
            try:
                async with tx.begin_nested():
                    transition = Transition(tx, now, action.asker.who or None)
                    detail = await work(tx, now, transition)
                    events = await transition.finish()
                    audited_action = audit.AuditedAction(
                        action.asker, action.action, action.version, action.why, detail or action.detail
                    )
                    await audit.add_entry(tx, now, name, audited_action)
                    model_states.append(await states.model_state(tx, await store.require_model(tx, name)))
            except Refused as error:
                refusals.append(error)
                return ()
            return events

        try:
            await self._processor.step(step)
        except LostLeadership:
            raise _standby() from None
        except Unavailable as error:
            raise Refused(503, "unavailable", f"the change was not made, or it is not published yet: {error}") from None
        if refusals:
            raise refusals[0]
        self._changed()
        return model_states[0]

    def require_leadership(self) -> None:
        """Raise `Refused` 503 unless this registry is the leader."""
        if not self._lease.acquired.is_set():
            raise _standby()


def _standby() -> Refused:
    return Refused(503, "not_leader", "this registry is a standby; send the request to the leader")
