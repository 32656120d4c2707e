"""Takes prompts from the traffic while a rollout is in the shadow, and stores the events of their sessions."""

from __future__ import annotations

from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_registry.metrics import SHADOW_PROMPTS
from headrace_registry.rollouts.plan import RolloutPlan
from headrace_registry.rollouts.settings import EVENTS_PER_UNIT_MAX, RolloutSettings
from headrace_registry.shadow import prompts
from headrace_registry.shadow.prompts import ShadowPhase
from headrace_registry.shadow.rerun import is_opening
from headrace_registry.storage import unit_store
from headrace_registry.storage.leader import LeaderLease
from headrace_schemas import Turn

_MINUTE_MS = 60_000
_PROMPT_TOKENS_MAX = 8192
"""Tokens of a prompt beyond which it is left out."""


class PromptSampler:
    """Sampler of prompts. `sample` is called with every turn, in the transaction that processes it."""

    def __init__(self, lease: LeaderLease, settings: RolloutSettings) -> None:
        self._lease = lease
        self._settings = settings

    async def sample(self, tx: AsyncConnection, turn: Turn) -> None:
        """Take the first turns of users' sessions as they come, within the rate; of sessions taken, store all turns."""
        phases = await prompts.in_shadow(tx, turn.model)
        if not phases:
            return
        await self._lease.check(tx)
        if self._may_be_sampled(turn):
            for phase in phases:
                if turn.version == phase.control and await self._needs_prompt(tx, phase):
                    await self._add(tx, phase, turn)
        for member in await unit_store.memberships(tx, turn.session_key, turn.tenant):
            if prompts.is_shadow(member):
                await unit_store.add_event(tx, member, turn, EVENTS_PER_UNIT_MAX)

    def _may_be_sampled(self, turn: Turn) -> bool:
        """Return whether the turn opens a user's session of a tenant that has agreed, outside of any comparison."""
        shadow = self._settings.shadow
        return (
            turn.purpose == "train"
            and turn.shadow_of is None
            and turn.delivered
            and turn.tenant in shadow.keys
            and (turn.assignment is None or turn.assignment.arm == "rest")
            and len(turn.choices) == 1
            and turn.usage.prompt_tokens <= _PROMPT_TOKENS_MAX
            and is_opening(turn)
        )

    async def _needs_prompt(self, tx: AsyncConnection, phase: ShadowPhase) -> bool:
        """Return whether the plan needs another prompt, within rate and cost. Prompts that were left out are
        replaced."""
        count, left_out, tokens = await prompts.prompt_totals(tx, phase.rollout_id)
        shadow = self._settings.shadow
        allowed = 1 + phase.observed_ms * shadow.prompts_per_minute / _MINUTE_MS
        units = RolloutPlan.model_validate_json(phase.plan).shadow_units
        return count < allowed and count - left_out < units and tokens < shadow.tokens_max

    async def _add(self, tx: AsyncConnection, phase: ShadowPhase, turn: Turn) -> None:
        number, _, _ = await prompts.prompt_totals(tx, phase.rollout_id)
        members = await unit_store.memberships(tx, turn.session_key, turn.tenant)
        if any(member.rollout_id == phase.rollout_id for member in members):
            return
        tokens = 2 * turn.usage.prompt_tokens
        if await prompts.add_prompt(
            tx, phase.rollout_id, number, turn.session_key, turn.tenant, phase.observed_ms, tokens
        ):
            SHADOW_PROMPTS.labels(turn.model, "taken").inc()
