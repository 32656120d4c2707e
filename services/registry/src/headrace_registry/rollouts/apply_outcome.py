"""Ends the rollouts that a change of roles has overtaken, in the transaction of that change.

Code that moves an alias (the model controller, a page of an operator, a rollback) need not handle rollouts. A candidate
whose control is no longer the champion has no comparison any more, and a withdrawn candidate is out.
"""

from __future__ import annotations

from sqlalchemy import update

from headrace_registry import store
from headrace_registry.rollout_tables import ROLLOUTS
from headrace_registry.rollouts import rollout_store
from headrace_registry.rollouts.rollout_store import RolloutRecord
from headrace_registry.state_changes import StateChanges
from headrace_runtime.clock import epoch_ms
from headrace_schemas import RolloutStep


async def end_overtaken(changes: StateChanges, name: str) -> None:
    """End the rollouts of the model that its roles have overtaken. Called before the routing is published, so that both
    agree."""
    model = await store.load_model(changes.tx, name)
    assert model is not None
    former_champion = (
        ROLLOUTS.c.model == name,
        ROLLOUTS.c.phase == "champion",
        ROLLOUTS.c.version != (model.champion or ""),
    )
    await changes.tx.execute(update(ROLLOUTS).where(*former_champion).values(phase="succeeded"))
    for rollout in await rollout_store.rollouts_under_way(changes.tx, name):
        version = await store.load_version(changes.tx, rollout.version)
        if rollout.version == model.champion:
            await end(changes, rollout, "champion", "it was promoted")
        elif version is None or version.state != "canary":
            await end(changes, rollout, "hold", "an operator requested the version again")
        elif rollout.control != model.champion:
            reason = f"{rollout.control}, which it was compared with, is not the champion any more"
            await hold(changes, rollout, reason)


async def hold(
    changes: StateChanges, rollout: RolloutRecord, reason: str, statistics: dict[str, float] | None = None
) -> None:
    """End the rollout without a verdict: the candidate serves no more traffic."""
    await end(changes, rollout, "hold", reason)
    await changes.set_state(rollout.version, "held", request="", rollout=None)
    step = RolloutStep(rollout_id=rollout.rollout_id, kind="hold", stage=rollout.stage, share="0")
    await changes.record_decision(rollout.model, rollout.version, "skipped", reason, statistics, rollout.control, step)
    changes.mark_changed(rollout.model)


async def end(changes: StateChanges, rollout: RolloutRecord, phase: str, reason: str) -> None:
    """Store the final phase of a rollout."""
    values = {"phase": phase, "reason": reason, "changed_ms": epoch_ms(changes.now)}
    await changes.tx.execute(update(ROLLOUTS).where(ROLLOUTS.c.rollout_id == rollout.rollout_id).values(values))
