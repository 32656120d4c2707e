"""The trainability of the last responses, so that an answer to feedback can report that the feedback has no effect."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace_runtime.storage.tenant_memory import TenantMemory
from headrace_schemas import DeadLetter, Feedback, Turn
from headrace_schemas.events.trajectory import untrained_reason

TURNS_MAX = 65_536
"""Responses that are remembered, about 15 MB. Beyond it the tenant with the most responses forgets its oldest."""


@dataclass(frozen=True, slots=True)
class Teaching:
    """Whether feedback can train anything, and the reason why not, in the words of the account."""

    teaches: bool
    reason: str | None = None

    def fields(self) -> dict[str, bool | str]:
        """Return the fields of an answer."""
        return {"teaches": self.teaches} if self.reason is None else {"teaches": self.teaches, "reason": self.reason}


class RecentTurns:
    """The last responses of this process. Responses of other gateways and of earlier processes are unknown."""

    def __init__(self) -> None:
        self._reasons: TenantMemory[str, str] = TenantMemory(TURNS_MAX)
        """Why each response cannot be trained; empty if it can."""

    def note(self, tenant: str, response_id: str, event: Turn | DeadLetter) -> None:
        """Remember whether a response can be trained."""
        reason = untrained_reason(event) if isinstance(event, Turn) else "dead_letter"
        self._reasons.set(tenant, response_id, reason or "")

    def teaching(self, events: Sequence[Feedback]) -> Teaching | None:
        """Return whether the events of one feedback can train anything, or None if that is unknown.

        A preference needs both of its answers. All other feedback teaches if one of its responses can be trained.
        Feedback about a session or a task is unknown: turns that follow may be trained.
        """
        first = events[0]
        if not first.has_content or not any(event.msg_ids for event in events):
            return None
        names = {name for event in events for name in event.msg_ids}
        if first.preference is not None:
            names = {answer.turn_id for answer in first.preference.pair}
        known = [self._reasons.get(first.tenant, name) for name in sorted(names)]
        outcomes = [reason for reason in known if reason is not None]
        reasons = [reason for reason in outcomes if reason]
        all_known = len(outcomes) == len(names)
        if first.preference is not None:
            can_teach, cannot_teach = all_known and not reasons, bool(reasons)
        else:
            can_teach, cannot_teach = "" in outcomes, all_known and len(reasons) == len(names)
        if cannot_teach:
            return Teaching(False, ", ".join(sorted(set(reasons))))
        return Teaching(True) if can_teach else None
