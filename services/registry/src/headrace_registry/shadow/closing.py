"""The end of a shadow: what it has found, in the transaction of the step that ends it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from sqlalchemy import update
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_registry.rollout_tables import ROLLOUTS
from headrace_registry.rollouts.kept import KeptRollout
from headrace_registry.rollouts.machine import RolloutDecision
from headrace_registry.shadow import prompts
from headrace_registry.shadow.estimate import estimate
from headrace_registry.shadow.expectations import expectations
from headrace_registry.shadow.findings import ShadowFindings
from headrace_registry.shadow.prompts import ANSWERING, KeptPrompt
from headrace_registry.shadow.reading import PromptReading, pair_of

_NUMBERS_MAX = 64
"""What a decision has room for."""
_PROMPTS_MAX = 100_000


async def closed(tx: AsyncConnection, one: KeptRollout, decision: RolloutDecision) -> RolloutDecision:
    """The decision with what the shadow has found. Its sessions are free for others from now on."""
    found = await findings(tx, one)
    await prompts.close(tx, one.rollout_id)
    values = {"shadow": found.model_dump_json(exclude_none=True)}
    await tx.execute(update(ROLLOUTS).where(ROLLOUTS.c.rollout_id == one.rollout_id).values(values))
    numbers = dict([*found.statistics().items(), *decision.statistics.items()][:_NUMBERS_MAX])
    return replace(decision, reason=f"{decision.reason}; {found.in_words()}", statistics=numbers)


async def findings(tx: AsyncConnection, one: KeptRollout) -> ShadowFindings:
    return found_in(await prompts.every(tx, one.rollout_id, _PROMPTS_MAX), one)


def found_in(kept: Sequence[KeptPrompt], one: KeptRollout) -> ShadowFindings:
    """Pure. Of prompts in their order."""
    readings = [
        (prompt, PromptReading.model_validate(prompt.found))
        for prompt in kept
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
    for prompt in kept:
        ended.update(f"{side}: {how}" for side, how in prompt.ended.items() if how != "answered")
    out = Counter(prompt.reason for prompt in kept if prompt.state == "left_out")
    return ShadowFindings.of(
        estimate(pairs, one.plan.shadow_demands),
        prompts=len(kept),
        read=len(readings),
        ended=dict(ended),
        left_out=dict(out.most_common(8)),
        tokens=sum(prompt.tokens for prompt in kept),
        expected=expectations(sessions).table,
    )
