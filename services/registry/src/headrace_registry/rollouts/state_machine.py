"""Pure state machine of a model's rollouts: the champion, the candidates in progress, and the versions that are barred.

shadow → canary (stage by stage) → champion → succeeded,  or hold,  or rolled back

`decide` returns the next step, and `apply` carries it out. Each step is a `RolloutDecision` with its statistics. The
same decisions in the same order give the same state, so it is sufficient to store decisions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from fractions import Fraction
from typing import Literal

from headrace_registry.rollouts.evidence import Findings
from headrace_registry.rollouts.plan import RolloutPlan
from headrace_schemas.rules.assignment import Split
from headrace_schemas.values.errors import HeadraceError

Phase = Literal["shadow", "canary", "champion", "succeeded", "hold", "rolled_back"]
"""Phase of a rollout. `succeeded` means that the version was champion until another version was promoted."""
Kind = Literal["begin", "advance", "promote", "hold", "roll_back"]
UNDER_WAY: tuple[Phase, ...] = ("shadow", "canary")


LEFT_TO_OPERATOR = "the plan leaves it to an operator"
"""End of the reason of a hold if the version was shown to be good enough, but the plan does not promote."""


class NotAllowed(HeadraceError):
    """Raised for a step that the state machine does not allow, for example a rollout of a version that is barred or
    already has a rollout."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """Rollout of one version. It is in progress while its phase is in `UNDER_WAY`."""

    version: str
    phase: Phase
    stage: int
    """Index of the present stage in the plan. In the shadow, it is that of the first stage."""
    slot: int
    """Index of the candidate's block of units in `assignment.Split`."""
    number: int
    """Number of the rollout among those against the same champion or its equals."""
    began: datetime
    changed: datetime
    """Time at which the rollout entered its present phase and stage."""


@dataclass(frozen=True, slots=True)
class RolloutDecision:
    """Decision about one rollout, for example to advance it or to roll it back, with the reason and statistics."""

    kind: Kind
    version: str
    at: datetime
    reason: str
    statistics: Mapping[str, float] = field(default_factory=dict)
    improved: bool = False
    """Whether a promoted version was shown to be better than the champion, so that the count `family` begins again."""


@dataclass(frozen=True, slots=True)
class ModelRolloutState:
    """Champion and rollouts of one model.

    `parents` contains the parent of each version of the model, because a version that descends from a rolled-back
    version is barred.
    """

    champion: str
    parents: Mapping[str, str | None]
    rollouts: Mapping[str, Rollout] = field(default_factory=dict)
    """The last rollout of each version."""
    family: int = 0
    """Number of rollouts so far against the champion or versions equal to it."""

    @property
    def under_way(self) -> tuple[Rollout, ...]:
        return tuple(rollout for rollout in self.rollouts.values() if rollout.phase in UNDER_WAY)

    def split(self, plan: RolloutPlan, salt: str) -> Split:
        """Return the assignment of units (users or sessions) to the versions whose rollouts are in progress."""
        slots: list[str | None] = [None] * plan.slots
        for rollout in self.under_way:
            slots[rollout.slot] = rollout.version
        return Split(salt, self.champion, tuple(slots))

    def shares(self, plan: RolloutPlan) -> Mapping[str, Fraction]:
        """Return the traffic share of each candidate that serves users. Candidates in the shadow and ended rollouts
        have none."""
        share_max = Fraction(1, plan.slots + 1)
        canaries = [rollout for rollout in self.under_way if rollout.phase == "canary"]
        return {rollout.version: min(plan.stages[rollout.stage].share, share_max) for rollout in canaries}

    def free_slot(self, plan: RolloutPlan) -> int | None:
        used = {rollout.slot for rollout in self.under_way}
        return next((slot for slot in range(plan.slots) if slot not in used), None)

    def barred_by(self, version: str) -> str | None:
        """Return the rolled-back version (the version itself or an ancestor) because of which `version` must not serve,
        or None.

        The champion and its ancestors count as accepted, so they bar none of their descendants.
        """
        rollout = self.rollouts.get(version)
        if rollout is not None and rollout.phase == "rolled_back":
            return version
        champion_lineage = set(self._lineage(self.champion))
        for ancestor in self._lineage(version):
            if ancestor in champion_lineage:
                return None
            ancestor_rollout = self.rollouts.get(ancestor)
            if ancestor_rollout is not None and ancestor_rollout.phase == "rolled_back":
                return ancestor
        return None

    def _lineage(self, version: str) -> Iterable[str]:
        """Yield the version and its ancestors, each once."""
        seen: set[str] = set()
        ancestor: str | None = version
        while ancestor is not None and ancestor not in seen:
            seen.add(ancestor)
            yield ancestor
            ancestor = self.parents.get(ancestor)


def begin(plan: RolloutPlan, state: ModelRolloutState, version: str, now: datetime) -> RolloutDecision:
    """Return the decision that begins the rollout of a version. Raises `NotAllowed`."""
    if version not in state.parents:
        raise NotAllowed(f"{version} is not registered; register it before its rollout")
    if version == state.champion:
        raise NotAllowed(f"{version} is the champion; roll out another version")
    if any(rollout.version == version for rollout in state.under_way):
        raise NotAllowed(f"{version} is already under way; wait for its end or stop it")
    barred = state.barred_by(version)
    if barred is not None:
        subject = "it" if barred == version else f"{barred}, which it descends from,"
        raise NotAllowed(
            f"{version} is barred: {subject} was rolled back; roll out a version that does not descend from it"
        )
    if state.free_slot(plan) is None:
        versions = ", ".join(rollout.version for rollout in state.under_way)
        raise NotAllowed(
            f"{version} has no free slot: {versions} use all; wait until a rollout ends, or set more slots"
        )
    number = state.family + 1
    return RolloutDecision("begin", version, now, f"number {number} of its family", {"number": float(number)})


def stop(state: ModelRolloutState, version: str, reason: str, now: datetime) -> RolloutDecision:
    """Return the decision by which an operator ends a rollout without a promotion or a rollback. Raises
    `NotAllowed`."""
    _require_running(state, version)
    return RolloutDecision("hold", version, now, reason)


def roll_back(state: ModelRolloutState, version: str, reason: str, now: datetime) -> RolloutDecision:
    """Return the decision by which an operator rolls a version back, so that it is barred. Raises `NotAllowed`."""
    _require_running(state, version)
    return RolloutDecision("roll_back", version, now, reason)


def decide(plan: RolloutPlan, rollout: Rollout, findings: Findings, now: datetime) -> RolloutDecision | None:
    """Return the next step that the findings require for a rollout, or None if it continues unchanged."""
    if rollout.phase not in UNDER_WAY:
        return None
    step = _harm_step(findings) or (
        _shadow_step(plan, rollout, findings, now)
        if rollout.phase == "shadow"
        else _canary_step(plan, rollout, findings, now)
    )
    if step is None and (now - rollout.began).total_seconds() >= plan.duration_max_s:
        step = "hold", _undecided_reason(findings, f"duration_max_s = {plan.duration_max_s:g}")
    if step is None:
        return None
    kind, reason = step
    return RolloutDecision(
        kind, rollout.version, now, reason, findings.statistics, kind == "promote" and findings.improved
    )


_Step = tuple[Kind, str]


def _harm_step(findings: Findings) -> _Step | None:
    if findings.harmed:
        return "roll_back", f"harm: {', '.join(findings.harmed)}"
    if findings.sample_ratio_broken:
        arms = f"{findings.candidates} units with the candidate and {findings.controls} with its control"
        return "hold", f"{arms} are not an even split: units were lost or counted twice, so the arms cannot be compared"
    return None


def _shadow_step(plan: RolloutPlan, rollout: Rollout, findings: Findings, now: datetime) -> _Step | None:
    has_time = (now - rollout.began).total_seconds() < plan.shadow_duration_max_s
    if findings.shadow_units < plan.shadow_units and has_time:
        return None
    return "advance", f"no harm in {findings.shadow_units} answers beside the champion"


def _canary_step(plan: RolloutPlan, rollout: Rollout, findings: Findings, now: datetime) -> _Step | None:
    stage = plan.stages[rollout.stage]
    is_last = rollout.stage + 1 == len(plan.stages)
    if findings.candidates >= stage.units_min and (now - rollout.changed).total_seconds() >= stage.duration_min_s:
        if is_last and findings.successes and not findings.open_guardrails:
            reason = f"{' and '.join(findings.successes)}; every guardrail not inferior"
            return ("promote", reason) if plan.promotes else ("hold", f"{reason}; {LEFT_TO_OPERATOR}")
        if not is_last and not findings.too_risky.get(rollout.stage + 1):
            share = plan.stages[rollout.stage + 1].share
            return "advance", f"no harm in {findings.candidates} units at {stage.share}; on to {share}"
    if findings.candidates >= plan.units_max:
        return "hold", _undecided_reason(findings, f"units_max = {plan.units_max}")
    return None


def apply(
    plan: RolloutPlan, state: ModelRolloutState, decision: RolloutDecision
) -> tuple[ModelRolloutState, tuple[RolloutDecision, ...]]:
    """Apply a decision to the state.

    Returns:
        The new state, and all decisions: `decision`, then those that end other rollouts because of it.

    Raises:
        NotAllowed: the state has no such step.
    """
    if decision.kind == "begin":
        return _begin_state(plan, state, decision), (decision,)
    rollout = _require_running(state, decision.version)
    if decision.kind == "advance":
        return _with_rollout(state, _advance_rollout(plan, rollout, decision.at)), (decision,)
    phases: dict[Kind, Phase] = {"promote": "champion", "hold": "hold", "roll_back": "rolled_back"}
    new_state = _with_rollout(state, replace(rollout, phase=phases[decision.kind], changed=decision.at))
    if decision.kind == "hold":
        return new_state, (decision,)
    if decision.kind == "roll_back":
        return _end_affected(new_state, decision, "roll_back")
    if rollout.phase != "canary" or rollout.stage + 1 < len(plan.stages):
        raise NotAllowed(
            f"{rollout.version} is in {rollout.phase}, stage {rollout.stage}: only the last stage promotes"
        )
    family = 0 if decision.improved else new_state.family
    former = new_state.rollouts.get(state.champion)
    if former is not None:
        new_state = _with_rollout(new_state, replace(former, phase="succeeded", changed=decision.at))
    return _end_affected(replace(new_state, champion=rollout.version, family=family), decision, "hold")


def _end_affected(
    state: ModelRolloutState, decision: RolloutDecision, kind: Kind
) -> tuple[ModelRolloutState, tuple[RolloutDecision, ...]]:
    """End the rollouts that a decision affects: those of descendants after a rollback, all others after a promotion."""
    decisions = [decision]
    for rollout in state.under_way:
        if kind == "roll_back" and state.barred_by(rollout.version) is None:
            continue
        reason = (
            f"it descends from {decision.version}, which was rolled back"
            if kind == "roll_back"
            else f"{decision.version} is the champion now, and the version that it was compared with no longer serves"
        )
        phase: Phase = "rolled_back" if kind == "roll_back" else "hold"
        state = _with_rollout(state, replace(rollout, phase=phase, changed=decision.at))
        decisions.append(RolloutDecision(kind, rollout.version, decision.at, reason))
    return state, tuple(decisions)


def _begin_state(plan: RolloutPlan, state: ModelRolloutState, decision: RolloutDecision) -> ModelRolloutState:
    begin(plan, state, decision.version, decision.at)
    slot = state.free_slot(plan)
    assert slot is not None
    phase: Phase = "shadow" if plan.shadow_units else "canary"
    number = state.family + 1
    rollout = Rollout(decision.version, phase, 0, slot, number, decision.at, decision.at)
    return _with_rollout(replace(state, family=number), rollout)


def _advance_rollout(plan: RolloutPlan, rollout: Rollout, now: datetime) -> Rollout:
    if rollout.phase == "shadow":
        return replace(rollout, phase="canary", changed=now)
    if rollout.stage + 1 >= len(plan.stages):
        raise NotAllowed(f"{rollout.version} is in its last stage {rollout.stage}")
    return replace(rollout, stage=rollout.stage + 1, changed=now)


def _require_running(state: ModelRolloutState, version: str) -> Rollout:
    rollout = state.rollouts.get(version)
    if rollout is None or rollout.phase not in UNDER_WAY:
        problem = "has no rollout" if rollout is None else f"is {rollout.phase.replace('_', ' ')}"
        raise NotAllowed(f"{version} {problem}: begin one before")
    return rollout


def _with_rollout(state: ModelRolloutState, rollout: Rollout) -> ModelRolloutState:
    return replace(state, rollouts={**state.rollouts, rollout.version: rollout})


def _undecided_reason(findings: Findings, limit: str) -> str:
    parts = []
    if findings.too_risky:
        stage, names = min(findings.too_risky.items())
        parts.append(f"{', '.join(names)} not shown to be harmless enough for stage {stage + 1}")
    if findings.open_guardrails:
        parts.append(f"{', '.join(findings.open_guardrails)} not shown to be good enough")
    if not findings.successes:
        parts.append("no success shown")
    return f"undecided after {findings.candidates} units ({limit}): {'; '.join(parts) or 'the last stage is not over'}"
