"""Takes prompts from the traffic while a rollout is in the shadow, and keeps what is said in the sessions they are
from."""

from __future__ import annotations

from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_registry.leader import LeaderLease
from headrace_registry.metrics import SHADOW_PROMPTS
from headrace_registry.rollouts import ledger
from headrace_registry.rollouts.plan import RolloutPlan
from headrace_registry.rollouts.settings import RolloutSettings
from headrace_registry.shadow import prompts
from headrace_registry.shadow.prompts import ShadowPhase
from headrace_registry.shadow.recording import is_opening
from headrace_schemas import Turn

_MINUTE_MS = 60_000


class PromptSampler:
    """Called with every turn, in the transaction that takes it."""

    def __init__(self, lease: LeaderLease, settings: RolloutSettings) -> None:
        self._lease = lease
        self._settings = settings

    async def take(self, tx: AsyncConnection, turn: Turn) -> None:
        """The first turns of users' sessions as they come, as many as a minute may have; of those taken, all turns."""
        phases = await prompts.in_shadow(tx, turn.model)
        if not phases:
            return
        await self._lease.check(tx)
        if self._may_be_asked(turn):
            for phase in phases:
                if turn.version == phase.control and await self._wanted(tx, phase):
                    await self._add(tx, phase, turn)
        for member in await ledger.memberships(tx, turn.session_key, turn.tenant):
            if prompts.is_shadow(member):
                await ledger.keep(tx, member, turn, self._settings.events_per_unit_max)

    def _may_be_asked(self, turn: Turn) -> bool:
        """A user's own session, of a tenant that has agreed, at its beginning and outside of any comparison."""
        shadow = self._settings.shadow
        return (
            turn.purpose == "train"
            and turn.shadow_of is None
            and turn.delivered
            and turn.tenant in shadow.keys
            and (turn.assignment is None or turn.assignment.arm == "rest")
            and len(turn.choices) == 1
            and turn.usage.prompt_tokens <= shadow.prompt_tokens_max
            and is_opening(turn)
        )

    async def _wanted(self, tx: AsyncConnection, phase: ShadowPhase) -> bool:
        """As many as the plan asks for, in place of those that were left out others, within rate and cost."""
        count, left_out, tokens = await prompts.taken(tx, phase.rollout_id)
        shadow = self._settings.shadow
        by_now = 1 + phase.observed_ms * shadow.prompts_per_minute / _MINUTE_MS
        wanted = RolloutPlan.model_validate_json(phase.plan).shadow_units
        return count < by_now and count - left_out < wanted and tokens < shadow.tokens_max

    async def _add(self, tx: AsyncConnection, phase: ShadowPhase, turn: Turn) -> None:
        place, _, _ = await prompts.taken(tx, phase.rollout_id)
        known = await ledger.memberships(tx, turn.session_key, turn.tenant)
        if any(member.rollout_id == phase.rollout_id for member in known):
            return
        tokens = 2 * turn.usage.prompt_tokens
        if await prompts.add(tx, phase.rollout_id, place, turn.session_key, turn.tenant, phase.observed_ms, tokens):
            SHADOW_PROMPTS.labels(turn.model, "taken").inc()
