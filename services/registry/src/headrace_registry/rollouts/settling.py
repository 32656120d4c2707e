"""Ends the rollouts that a change of roles has overtaken, in the transaction of that change.

Whoever moves an alias (the director, an operator, a replica that died) does not have to know of rollouts: a candidate
whose control is not the champion any more is compared with nobody, and one that was withdrawn is out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlalchemy import update

from headrace_registry import store
from headrace_registry.rollout_tables import ROLLOUTS
from headrace_registry.rollouts import kept
from headrace_registry.rollouts.kept import KeptRollout
from headrace_runtime.clock import epoch_ms
from headrace_schemas import RolloutStep

if TYPE_CHECKING:
    from headrace_registry.transition import Transition


async def settle(transition: Transition, name: str) -> None:
    """Called before the routing is published, so that both say the same."""
    model = await store.model(transition.tx, name)
    assert model is not None
    former = (ROLLOUTS.c.model == name, ROLLOUTS.c.phase == "champion", ROLLOUTS.c.version != (model.champion or ""))
    await transition.tx.execute(update(ROLLOUTS).where(*former).values(phase="succeeded"))
    for one in await kept.under_way(transition.tx, name):
        version = await store.version(transition.tx, one.version)
        if one.version == model.champion:
            await end(transition, one, "champion", "it was promoted")
        elif version is None or version.state != "canary":
            await end(transition, one, "hold", "an operator asked for it anew")
        elif one.control != model.champion:
            reason = f"{one.control}, which it was compared with, is not the champion any more"
            await hold(transition, one, reason)


async def hold(
    transition: Transition, one: KeptRollout, reason: str, statistics: dict[str, float] | None = None
) -> None:
    """It serves nobody any more, and nothing is said against it."""
    await end(transition, one, "hold", reason)
    await transition.set_state(one.version, "held", request="", rollout=None)
    step = RolloutStep(rollout_id=one.rollout_id, kind="hold", stage=one.stage, share="0")
    await transition.decide(one.model, one.version, "skipped", reason, statistics, one.control, step)
    transition.touch(one.model)


async def end(transition: Transition, one: KeptRollout, phase: str, reason: str) -> None:
    changed = {"phase": phase, "reason": reason, "changed_ms": epoch_ms(transition.now)}
    await transition.tx.execute(update(ROLLOUTS).where(ROLLOUTS.c.rollout_id == one.rollout_id).values(changed))
