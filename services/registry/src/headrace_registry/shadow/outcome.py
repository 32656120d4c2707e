"""The outcome of a shadow, stored in the transaction of the step that ends it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from sqlalchemy import update
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_registry.rollouts.estimate import estimate
from headrace_registry.rollouts.findings import ShadowFindings, expectations
from headrace_registry.rollouts.state_machine import RolloutDecision
from headrace_registry.shadow import prompts
from headrace_registry.shadow.prompt_reader import PromptReading, pair_of
from headrace_registry.shadow.prompts import ANSWERING, PromptRecord
from headrace_registry.storage.rollout_store import RolloutRecord
from headrace_registry.storage.tables import ROLLOUTS

_NUMBERS_MAX = 64
"""Largest number of statistics in a decision."""
_PROMPTS_MAX = 100_000


async def record_outcome(tx: AsyncConnection, rollout: RolloutRecord, decision: RolloutDecision) -> RolloutDecision:
    """Store the findings of the shadow and return the decision with them. Its sessions may be drawn into arms from now
    on."""
    findings = await load_findings(tx, rollout)
    await prompts.release_sessions(tx, rollout.rollout_id)
    values = {"shadow": findings.model_dump_json(exclude_none=True)}
    await tx.execute(update(ROLLOUTS).where(ROLLOUTS.c.rollout_id == rollout.rollout_id).values(values))
    numbers = dict([*findings.statistics().items(), *decision.statistics.items()][:_NUMBERS_MAX])
    return replace(decision, reason=f"{decision.reason}; {findings.in_words()}", statistics=numbers)


async def load_findings(tx: AsyncConnection, rollout: RolloutRecord) -> ShadowFindings:
    """Return the findings of the shadow so far."""
    return summarize_prompts(await prompts.all_prompts(tx, rollout.rollout_id, _PROMPTS_MAX), rollout)


def summarize_prompts(prompts_taken: Sequence[PromptRecord], rollout: RolloutRecord) -> ShadowFindings:
    """Return the findings from the prompts in their order."""
    readings = [
        (prompt, PromptReading.model_validate(prompt.found))
        for prompt in prompts_taken
        if prompt.state == "read" and prompt.found
    ]
    pairs = [pair for prompt, reading in readings if (pair := pair_of(prompt, reading)) is not None]
    sessions = [
        (reading.kinds, values)
        for prompt, reading in readings
        for values, answered in (
            (reading.logged, True),
            *((getattr(reading, side), prompt.ended.get(side) == "answered") for side in ANSWERING),
        )
        if answered
    ]
    ended: Counter[str] = Counter()
    for prompt in prompts_taken:
        ended.update(f"{side}: {outcome}" for side, outcome in prompt.ended.items() if outcome != "answered")
    left_out = Counter(prompt.reason for prompt in prompts_taken if prompt.state == "left_out")
    return ShadowFindings.of(
        estimate(pairs, rollout.plan.shadow_demands),
        prompts=len(prompts_taken),
        read=len(readings),
        ended=dict(ended),
        left_out=dict(left_out.most_common(8)),
        tokens=sum(prompt.tokens for prompt in prompts_taken),
        expected=expectations(sessions).table,
    )
