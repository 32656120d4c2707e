"""A model's rollouts as a pure state machine: who is champion, who is on the way, who may never serve again.

    shadow → canary (stage by stage) → champion → succeeded,  or hold,  or rolled back

`judge` says what the evidence asks for, `apply` does it. Each step is a `RolloutDecision` with its numbers, and `apply`
of the same decisions in the same order gives the same book, so the decisions are all that has to be stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from fractions import Fraction
from typing import Literal

from headrace_registry.rollouts.evidence import Findings
from headrace_registry.rollouts.plan import RolloutPlan
from headrace_schemas.assignment import Split
from headrace_schemas.errors import HeadraceError

Phase = Literal["shadow", "canary", "champion", "succeeded", "hold", "rolled_back"]
"""`succeeded`: it was the champion until another one was promoted."""
Kind = Literal["begin", "advance", "promote", "hold", "roll_back"]
UNDER_WAY: tuple[Phase, ...] = ("shadow", "canary")


LEFT_TO_OPERATOR = "the plan leaves it to an operator"
"""How the reason of a hold ends whose version was shown good enough."""


class NotAllowed(HeadraceError):
    """A step that this machine does not have: of a version that is barred, over, or already under way."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """One version's. Over when its phase is not one of `UNDER_WAY`."""

    version: str
    phase: Phase
    stage: int
    """Which of the plan's, from 0; in the shadow that of the canary to come."""
    slot: int
    """Its block in `assignment.Split`."""
    number: int
    """Its place in the family of versions that were tried against one champion or its equals."""
    began: datetime
    changed: datetime
    """When it came into this phase and stage."""


@dataclass(frozen=True, slots=True)
class RolloutDecision:
    """One step, with what it rests on."""

    kind: Kind
    version: str
    at: datetime
    reason: str
    statistics: Mapping[str, float] = field(default_factory=dict)
    improved: bool = False
    """Of a promotion: it was shown to be better, so a new family begins."""


@dataclass(frozen=True, slots=True)
class Book:
    """A model. `parents` are of all its versions; whoever descends from a version that was rolled back is barred."""

    champion: str
    parents: Mapping[str, str | None]
    rollouts: Mapping[str, Rollout] = field(default_factory=dict)
    """The last one of each version."""
    family: int = 0
    """How many versions have been tried against the champion or its equals."""

    @property
    def under_way(self) -> tuple[Rollout, ...]:
        return tuple(one for one in self.rollouts.values() if one.phase in UNDER_WAY)

    def split(self, plan: RolloutPlan, salt: str) -> Split:
        """Who has which block of units."""
        slots: list[str | None] = [None] * plan.slots
        for one in self.under_way:
            slots[one.slot] = one.version
        return Split(salt, self.champion, tuple(slots))

    def shares(self, plan: RolloutPlan) -> Mapping[str, Fraction]:
        """Of the candidates with users: nothing for a version in the shadow, or whose rollout is over."""
        most = Fraction(1, plan.slots + 1)
        canaries = [one for one in self.under_way if one.phase == "canary"]
        return {one.version: min(plan.stages[one.stage].share, most) for one in canaries}

    def free_slot(self, plan: RolloutPlan) -> int | None:
        taken = {one.slot for one in self.under_way}
        return next((slot for slot in range(plan.slots) if slot not in taken), None)

    def barred_by(self, version: str) -> str | None:
        """The version that was rolled back and bars this one: itself or one that it descends from.

        The champion and what it descends from earned their place since, and bar nobody behind them.
        """
        own = self.rollouts.get(version)
        if own is not None and own.phase == "rolled_back":
            return version
        earned = set(self._line(self.champion))
        for one in self._line(version):
            if one in earned:
                return None
            found = self.rollouts.get(one)
            if found is not None and found.phase == "rolled_back":
                return one
        return None

    def _line(self, version: str) -> Iterable[str]:
        """The version, its parent, and so on; a ring ends where it began."""
        seen: set[str] = set()
        one: str | None = version
        while one is not None and one not in seen:
            seen.add(one)
            yield one
            one = self.parents.get(one)


def begin(plan: RolloutPlan, book: Book, version: str, now: datetime) -> RolloutDecision:
    """A version starts its rollout. Raises `NotAllowed`."""
    if version not in book.parents:
        raise NotAllowed(f"{version} is not registered; register it before its rollout")
    if version == book.champion:
        raise NotAllowed(f"{version} is the champion; roll out another version")
    if any(one.version == version for one in book.under_way):
        raise NotAllowed(f"{version} is under way already; wait for its end or stop it")
    barred = book.barred_by(version)
    if barred is not None:
        of = "it" if barred == version else f"{barred}, which it descends from,"
        raise NotAllowed(f"{version} is barred: {of} was rolled back; roll out a version that does not descend from it")
    if book.free_slot(plan) is None:
        taken = ", ".join(one.version for one in book.under_way)
        raise NotAllowed(f"{version} finds no slot: {taken} are under way; wait for an end, or plan for more slots")
    number = book.family + 1
    return RolloutDecision("begin", version, now, f"number {number} of its family", {"number": float(number)})


def stop(book: Book, version: str, reason: str, now: datetime) -> RolloutDecision:
    """An operator ends a rollout without judging the version. Raises `NotAllowed`."""
    _running(book, version)
    return RolloutDecision("hold", version, now, reason)


def roll_back(book: Book, version: str, reason: str, now: datetime) -> RolloutDecision:
    """An operator takes a version back for good. Raises `NotAllowed`."""
    _running(book, version)
    return RolloutDecision("roll_back", version, now, reason)


def judge(plan: RolloutPlan, rollout: Rollout, found: Findings, now: datetime) -> RolloutDecision | None:
    """What the evidence asks for; None: to go on."""
    if rollout.phase not in UNDER_WAY:
        return None
    step = _danger(found) or (
        _from_shadow(plan, rollout, found, now)
        if rollout.phase == "shadow"
        else _from_canary(plan, rollout, found, now)
    )
    if step is None and (now - rollout.began).total_seconds() >= plan.duration_max_s:
        step = "hold", _undecided(found, f"duration_max_s = {plan.duration_max_s:g}")
    if step is None:
        return None
    kind, reason = step
    return RolloutDecision(kind, rollout.version, now, reason, found.statistics, kind == "promote" and found.improved)


_Step = tuple[Kind, str]


def _danger(found: Findings) -> _Step | None:
    if found.harmed:
        return "roll_back", f"harm: {', '.join(found.harmed)}"
    if found.sample_ratio_broken:
        arms = f"{found.candidates} units with the candidate and {found.controls} with its control"
        return "hold", f"{arms} are no even split: some got lost or were counted twice, so nothing is compared"
    return None


def _from_shadow(plan: RolloutPlan, rollout: Rollout, found: Findings, now: datetime) -> _Step | None:
    in_time = (now - rollout.began).total_seconds() < plan.shadow_duration_max_s
    if found.shadow_units < plan.shadow_units and in_time:
        return None
    return "advance", f"no harm in {found.shadow_units} answers beside the champion"


def _from_canary(plan: RolloutPlan, rollout: Rollout, found: Findings, now: datetime) -> _Step | None:
    stage = plan.stages[rollout.stage]
    last = rollout.stage + 1 == len(plan.stages)
    if found.candidates >= stage.units_min and (now - rollout.changed).total_seconds() >= stage.duration_min_s:
        if last and found.shown and not found.open_guardrails:
            shown = f"{' and '.join(found.shown)}; every guardrail not inferior"
            return ("promote", shown) if plan.promotes else ("hold", f"{shown}; {LEFT_TO_OPERATOR}")
        if not last and not found.too_risky.get(rollout.stage + 1):
            share = plan.stages[rollout.stage + 1].share
            return "advance", f"no harm in {found.candidates} units at {stage.share}; on to {share}"
    if found.candidates >= plan.units_max:
        return "hold", _undecided(found, f"units_max = {plan.units_max}")
    return None


def apply(plan: RolloutPlan, book: Book, decision: RolloutDecision) -> tuple[Book, tuple[RolloutDecision, ...]]:
    """The book after it, and every decision that this was: the given one, then what follows from it for others.

    Raises `NotAllowed` when the book has no such step.
    """
    if decision.kind == "begin":
        return _begun(plan, book, decision), (decision,)
    rollout = _running(book, decision.version)
    if decision.kind == "advance":
        return _with(book, _advanced(plan, rollout, decision.at)), (decision,)
    phases: dict[Kind, Phase] = {"promote": "champion", "hold": "hold", "roll_back": "rolled_back"}
    ended = _with(book, replace(rollout, phase=phases[decision.kind], changed=decision.at))
    if decision.kind == "hold":
        return ended, (decision,)
    if decision.kind == "roll_back":
        return _follow(ended, decision, "roll_back")
    if rollout.phase != "canary" or rollout.stage + 1 < len(plan.stages):
        raise NotAllowed(
            f"{rollout.version} is in {rollout.phase}, stage {rollout.stage}: only the last stage promotes"
        )
    family = 0 if decision.improved else ended.family
    before = ended.rollouts.get(book.champion)
    if before is not None:
        ended = _with(ended, replace(before, phase="succeeded", changed=decision.at))
    return _follow(replace(ended, champion=rollout.version, family=family), decision, "hold")


def _follow(book: Book, decision: RolloutDecision, kind: Kind) -> tuple[Book, tuple[RolloutDecision, ...]]:
    """Whom else it ends: after a rollback those who descend from the version, after a promotion all others."""
    decisions = [decision]
    for one in book.under_way:
        if kind == "roll_back" and book.barred_by(one.version) is None:
            continue
        reason = (
            f"it descends from {decision.version}, which was rolled back"
            if kind == "roll_back"
            else f"{decision.version} is the champion now, and what it was compared with serves no more"
        )
        phase: Phase = "rolled_back" if kind == "roll_back" else "hold"
        book = _with(book, replace(one, phase=phase, changed=decision.at))
        decisions.append(RolloutDecision(kind, one.version, decision.at, reason))
    return book, tuple(decisions)


def _begun(plan: RolloutPlan, book: Book, decision: RolloutDecision) -> Book:
    begin(plan, book, decision.version, decision.at)
    slot = book.free_slot(plan)
    assert slot is not None
    phase: Phase = "shadow" if plan.shadow_units else "canary"
    number = book.family + 1
    started = Rollout(decision.version, phase, 0, slot, number, decision.at, decision.at)
    return _with(replace(book, family=number), started)


def _advanced(plan: RolloutPlan, rollout: Rollout, now: datetime) -> Rollout:
    if rollout.phase == "shadow":
        return replace(rollout, phase="canary", changed=now)
    if rollout.stage + 1 >= len(plan.stages):
        raise NotAllowed(f"{rollout.version} is in its last stage {rollout.stage}")
    return replace(rollout, stage=rollout.stage + 1, changed=now)


def _running(book: Book, version: str) -> Rollout:
    found = book.rollouts.get(version)
    if found is None or found.phase not in UNDER_WAY:
        is_what = "has no rollout" if found is None else f"is {found.phase.replace('_', ' ')}"
        raise NotAllowed(f"{version} {is_what}: begin one before")
    return found


def _with(book: Book, rollout: Rollout) -> Book:
    return replace(book, rollouts={**book.rollouts, rollout.version: rollout})


def _undecided(found: Findings, limit: str) -> str:
    parts = []
    if found.too_risky:
        stage, names = min(found.too_risky.items())
        parts.append(f"{', '.join(names)} not shown to be harmless enough for stage {stage + 1}")
    if found.open_guardrails:
        parts.append(f"{', '.join(found.open_guardrails)} not shown to be good enough")
    if not found.shown:
        parts.append("no success shown")
    return f"undecided after {found.candidates} units ({limit}): {'; '.join(parts) or 'the last stage is not over'}"
