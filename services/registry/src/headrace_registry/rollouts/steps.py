"""The machine's decisions, each in one transaction: the row of the rollout, the version's state, the event."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import asdict
from fractions import Fraction

from sqlalchemy import insert, update

from headrace_registry import store
from headrace_registry.records import ModelRecord, Standing
from headrace_registry.rollout_tables import ROLLOUTS
from headrace_registry.rollouts import kept, machine, settling
from headrace_registry.rollouts.kept import KeptRollout
from headrace_registry.rollouts.machine import Kind, RolloutDecision
from headrace_registry.rollouts.plan import RolloutPlan
from headrace_registry.shadow import closing
from headrace_registry.transition import Transition
from headrace_runtime.clock import epoch_ms
from headrace_schemas import RolloutStep
from headrace_schemas.ids import uuid7


def fresh_salt() -> str:
    """A rollout's own, so that the same users are not first every time."""
    return secrets.token_hex(16)


async def begin(
    transition: Transition,
    model: ModelRecord,
    version: str,
    kind: str,
    plan: RolloutPlan,
    *,
    standing: Standing,
    reason: str,
    statistics: Mapping[str, float],
) -> None:
    """The candidate gets its first share, and its place at the gate is free. Raises `NotAllowed`."""
    tx, now = transition.tx, transition.now
    others = await kept.under_way(tx, model.model)
    if others:  # units stay where they are: one salt, one number of slots, one kind of unit
        plan = plan.model_copy(update={"unit": others[0].plan.unit, "slots": others[0].slots})
    book = await kept.book(tx, model)
    decision = machine.begin(plan, book, version, now)
    after, _ = machine.apply(plan, book, decision)
    rollout = after.rollouts[version]
    values = {
        "rollout_id": str(uuid7(epoch_ms(now))),
        "model": model.model,
        "version": version,
        "control": model.champion,
        "kind": kind,
        "plan": plan.model_dump_json(),
        "salt": others[0].salt if others else fresh_salt(),
        "slots": plan.slots,
        "phase": rollout.phase,
        "stage": rollout.stage,
        "slot": rollout.slot,
        "number": rollout.number,
        "reason": reason,
        "statistics": "{}",
        "chart": "[]",
        "standing": json.dumps(asdict(standing)),
        "began_ms": epoch_ms(now),
        "changed_ms": epoch_ms(now),
        "observed_ms": 0,
        "stage_observed_ms": 0,
    }
    await tx.execute(insert(ROLLOUTS).values(values))
    await transition.forget_result(version)
    await transition.set_state(version, "canary", request="", rollout=None)
    await transition.set_roles(model, candidate=None, family=after.family)
    begun = await kept.one(tx, str(values["rollout_id"]))
    assert begun is not None
    numbers = {**statistics, "number": float(rollout.number)}
    await transition.decide(
        model.model, version, "probed", reason, numbers, model.champion, _step(begun, "begin", begun.stage)
    )


async def take(transition: Transition, one: KeptRollout, decision: RolloutDecision) -> None:
    """Do what was decided about a rollout, with all that follows. Raises `NotAllowed`."""
    model = await store.model(transition.tx, one.model)
    assert model is not None
    if one.phase == "shadow":
        decision = await closing.closed(transition.tx, one, decision)
    after, _ = machine.apply(one.plan, await kept.book(transition.tx, model), decision)
    rollout = after.rollouts[one.version]
    if decision.kind == "hold":
        await settling.hold(transition, one, decision.reason, dict(decision.statistics))
    elif decision.kind == "roll_back":
        await roll_back(transition, model, one, decision.reason, decision.statistics)
    elif decision.kind == "promote":
        await promote(transition, model, one, decision.reason, decision.statistics, family=after.family)
    else:
        changed = {
            "phase": rollout.phase,
            "stage": rollout.stage,
            "reason": decision.reason,
            "changed_ms": epoch_ms(transition.now),
            "stage_observed_ms": one.observed_ms,
            "share": None,
        }
        await transition.tx.execute(update(ROLLOUTS).where(ROLLOUTS.c.rollout_id == one.rollout_id).values(changed))
        step = _step(one, decision.kind, rollout.stage)
        numbers = decision.statistics
        await transition.decide(one.model, one.version, "probed", decision.reason, numbers, one.control, step)
        transition.touch(one.model)


async def share_out(
    transition: Transition, one: KeptRollout, share: Fraction, reason: str, statistics: Mapping[str, float]
) -> None:
    """Another share within its stage, by an adaptive split."""
    own = None if share == one.stage_share else str(share)
    await transition.tx.execute(update(ROLLOUTS).where(ROLLOUTS.c.rollout_id == one.rollout_id).values(share=own))
    step = RolloutStep(rollout_id=one.rollout_id, kind="advance", stage=one.stage, share=str(share))
    await transition.decide(one.model, one.version, "probed", reason, statistics, one.control, step)
    transition.touch(one.model)


async def promote(
    transition: Transition,
    model: ModelRecord,
    one: KeptRollout,
    reason: str,
    statistics: Mapping[str, float],
    *,
    family: int,
) -> None:
    """The candidate is champion. Whoever else is under way holds (`settling`)."""
    await settling.end(transition, one, "champion", reason)
    standing = one.standing
    if standing.anchor is not None and standing.anchor == model.anchor:
        standing = Standing(standing.anchor, max(standing.trials, model.trials), standing.lead)
    step = _step(one, "promote", one.stage)
    await transition.promote(model, one.version, reason, statistics, standing, step)
    await transition.set_roles(model, family=family)


async def roll_back(
    transition: Transition, model: ModelRecord, one: KeptRollout, reason: str, statistics: Mapping[str, float]
) -> None:
    """The candidate is out for good, and what descends from it as well."""
    await settling.end(transition, one, "rolled_back", reason)
    step = _step(one, "roll_back", one.stage).model_copy(update={"excludes": one.plan.experiences == "exclude"})
    await transition.withdraw(model, one.version, reason, statistics, step)


def _step(one: KeptRollout, kind: Kind, stage: int) -> RolloutStep:
    ends = {"promote": Fraction(1), "hold": Fraction(0), "roll_back": Fraction(0)}
    share = ends.get(kind, min(one.plan.stages[stage].share, Fraction(1, one.slots + 1)))
    return RolloutStep(rollout_id=one.rollout_id, kind=kind, stage=stage, share=str(share))
