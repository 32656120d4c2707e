"""Applies decisions of the state machine to the database: each in one transaction with the rollout's row, the version's
state and an event."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import asdict
from fractions import Fraction

from sqlalchemy import insert, update

from headrace_registry.rollouts import state_machine
from headrace_registry.rollouts.plan import RolloutPlan
from headrace_registry.rollouts.state_machine import Kind, RolloutDecision
from headrace_registry.shadow import prompt_reader
from headrace_registry.storage import rollout_store, store
from headrace_registry.storage.records import AnchorState, ModelRecord
from headrace_registry.storage.rollout_store import RolloutRecord
from headrace_registry.storage.tables import ROLLOUTS
from headrace_registry.versions import state_changes
from headrace_registry.versions.transition import Transition
from headrace_runtime.clock import epoch_ms
from headrace_schemas import RolloutStep
from headrace_schemas.values.ids import uuid7


def new_salt() -> str:
    """Return a new random salt, so that rollouts do not begin with the same users each time."""
    return secrets.token_hex(16)


async def begin(
    transition: Transition,
    model: ModelRecord,
    version: str,
    kind: str,
    plan: RolloutPlan,
    *,
    anchor_state: AnchorState,
    reason: str,
    statistics: Mapping[str, float],
) -> None:
    """Begin the rollout of a candidate that has passed the gate: store the rollout with its first traffic share.

    Raises:
        NotAllowed: the model's other rollouts do not permit it.
    """
    tx, now = transition.tx, transition.now
    active = await rollout_store.rollouts_under_way(tx, model.model)
    if active:  # units must not change arms, so salt, slots and kind of unit are those of the others
        plan = plan.model_copy(update={"unit": active[0].plan.unit, "slots": active[0].slots})
    state = await rollout_store.load_model_state(tx, model)
    decision = state_machine.begin(plan, state, version, now)
    after, _ = state_machine.apply(plan, state, decision)
    planned = after.rollouts[version]
    values = {
        "rollout_id": str(uuid7(epoch_ms(now))),
        "model": model.model,
        "version": version,
        "control": model.champion,
        "kind": kind,
        "plan": plan.model_dump_json(),
        "salt": active[0].salt if active else new_salt(),
        "slots": plan.slots,
        "phase": planned.phase,
        "stage": planned.stage,
        "slot": planned.slot,
        "number": planned.number,
        "reason": reason,
        "statistics": "{}",
        "chart": "[]",
        "standing": json.dumps(asdict(anchor_state)),
        "began_ms": epoch_ms(now),
        "changed_ms": epoch_ms(now),
        "observed_ms": 0,
        "stage_observed_ms": 0,
    }
    await tx.execute(insert(ROLLOUTS).values(values))
    await transition.delete_trial_result(version)
    await transition.set_state(version, "canary", request="", rollout=None)
    await transition.set_roles(model, candidate=None, family=after.family)
    begun = await rollout_store.load_rollout(tx, str(values["rollout_id"]))
    assert begun is not None
    numbers = {**statistics, "number": float(planned.number)}
    await transition.record_decision(
        model.model, version, "probed", reason, numbers, model.champion, _step(begun, "begin", begun.stage)
    )


async def apply_decision(transition: Transition, rollout: RolloutRecord, decision: RolloutDecision) -> None:
    """Apply a decision about a rollout, and end other rollouts that it affects. Raises `NotAllowed`."""
    model = await store.load_model(transition.tx, rollout.model)
    assert model is not None
    if rollout.phase == "shadow":
        decision = await prompt_reader.record_outcome(transition.tx, rollout, decision)
    after, _ = state_machine.apply(rollout.plan, await rollout_store.load_model_state(transition.tx, model), decision)
    planned = after.rollouts[rollout.version]
    if decision.kind == "hold":
        await state_changes.hold(transition, rollout, decision.reason, dict(decision.statistics))
    elif decision.kind == "roll_back":
        await roll_back(transition, model, rollout, decision.reason, decision.statistics)
    elif decision.kind == "promote":
        await promote(transition, model, rollout, decision.reason, decision.statistics, family=after.family)
    else:
        changed = {
            "phase": planned.phase,
            "stage": planned.stage,
            "reason": decision.reason,
            "changed_ms": epoch_ms(transition.now),
            "stage_observed_ms": rollout.observed_ms,
            "share": None,
        }
        await transition.tx.execute(update(ROLLOUTS).where(ROLLOUTS.c.rollout_id == rollout.rollout_id).values(changed))
        step = _step(rollout, decision.kind, planned.stage)
        numbers = decision.statistics
        await transition.record_decision(
            rollout.model, rollout.version, "probed", decision.reason, numbers, rollout.control, step
        )
        transition.mark_changed(rollout.model)


async def set_share(
    transition: Transition, rollout: RolloutRecord, share: Fraction, reason: str, statistics: Mapping[str, float]
) -> None:
    """Set the share of a candidate in an adaptive split, within the limit of its stage."""
    stored_share = None if share == rollout.stage_share else str(share)
    await transition.tx.execute(
        update(ROLLOUTS).where(ROLLOUTS.c.rollout_id == rollout.rollout_id).values(share=stored_share)
    )
    step = RolloutStep(rollout_id=rollout.rollout_id, kind="advance", stage=rollout.stage, share=str(share))
    await transition.record_decision(
        rollout.model, rollout.version, "probed", reason, statistics, rollout.control, step
    )
    transition.mark_changed(rollout.model)


async def promote(
    transition: Transition,
    model: ModelRecord,
    rollout: RolloutRecord,
    reason: str,
    statistics: Mapping[str, float],
    *,
    family: int,
) -> None:
    """Make the candidate of a rollout the champion. Other rollouts in progress end in hold.

    `family` is the number of rollouts so far against the new champion or versions equal to it. The more there were, the
    smaller is the allowed error of the next rollout.
    """
    await state_changes.end(transition, rollout, "champion", reason)
    anchor_state = rollout.anchor_state
    if anchor_state.anchor is not None and anchor_state.anchor == model.anchor:
        anchor_state = AnchorState(anchor_state.anchor, max(anchor_state.trials, model.trials), anchor_state.lead)
    step = _step(rollout, "promote", rollout.stage)
    await transition.promote(model, rollout.version, reason, statistics, anchor_state, step)
    await transition.set_roles(model, family=family)


async def roll_back(
    transition: Transition, model: ModelRecord, rollout: RolloutRecord, reason: str, statistics: Mapping[str, float]
) -> None:
    """Withdraw the candidate of a rollout and its descendants, so that they are never served again."""
    await state_changes.end(transition, rollout, "rolled_back", reason)
    step = _step(rollout, "roll_back", rollout.stage).model_copy(
        update={"excludes": rollout.plan.experiences == "exclude"}
    )
    await transition.withdraw(model, rollout.version, reason, statistics, step)


def _step(rollout: RolloutRecord, kind: Kind, stage: int) -> RolloutStep:
    """Build the part of an event that describes a step of a rollout: its kind, its stage and the candidate's share
    after it."""
    final_shares = {"promote": Fraction(1), "hold": Fraction(0), "roll_back": Fraction(0)}
    share = final_shares.get(kind, min(rollout.plan.stages[stage].share, Fraction(1, rollout.slots + 1)))
    return RolloutStep(rollout_id=rollout.rollout_id, kind=kind, stage=stage, share=str(share))
