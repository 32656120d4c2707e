"""The next action for a model: a pure function of the database, the replicas and the gate.

registered → (put into `serve`) probing → (probe passed everywhere) evaluating → (trial) promoted or rejected. Where
rollouts are asked for, a version that passed gets a share of the traffic instead of all of it (`rollouts.conductor`
goes on from there), and its place at the gate is free for the next one. The
champion is then measured on the audit tasks: when no candidate can be tried, or beside a trial (`next_audit`).
The director asks for the next action after every change, so a process that dies continues where it was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeGuard

from headrace_registry import probe
from headrace_registry.records import ALONE, ModelView, Standing, VersionRecord
from headrace_schemas import Replica


@dataclass(frozen=True, slots=True)
class Adopt:
    """Make a waiting version the candidate, so that replicas load it. `skipped` versions never become candidates."""

    version: str
    skipped: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Probed:
    """The candidate passed its probe on every live replica."""

    version: str
    statistics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class RunTrial:
    """Run a trial of the candidate against champion and anchor, as far as they can be served."""

    version: str
    champion: str | None
    anchor: str | None


@dataclass(frozen=True, slots=True)
class RunAudit:
    """Measure this version on the audit tasks. No decision depends on it."""

    version: str


@dataclass(frozen=True, slots=True)
class Promote:
    """The candidate becomes champion."""

    version: str
    reason: str
    statistics: Mapping[str, float] = field(default_factory=dict)
    standing: Standing = ALONE
    """The anchor from now on; a version that was promoted without a trial is its own anchor."""


@dataclass(frozen=True, slots=True)
class BeginRollout:
    """The candidate passed what `Promote` asks for, and has to show the same on live traffic."""

    version: str
    reason: str
    statistics: Mapping[str, float] = field(default_factory=dict)
    standing: Standing = ALONE
    """The anchor if it becomes champion."""


@dataclass(frozen=True, slots=True)
class Reject:
    """The version gets no traffic."""

    version: str
    reason: str
    statistics: Mapping[str, float] = field(default_factory=dict)
    standing: Standing | None = None
    """The anchor after the trial; None: there was no trial."""


@dataclass(frozen=True, slots=True)
class Release:
    """The candidate waits again: the model is pinned or paused."""

    version: str


@dataclass(frozen=True, slots=True)
class RollBack:
    """No replica can serve the champion any more, and some replica can serve the previous version."""

    reason: str


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to do until something changes."""

    reason: str = ""


Action = Adopt | Probed | RunTrial | RunAudit | Promote | BeginRollout | Reject | Release | RollBack | Wait


@dataclass(frozen=True, slots=True)
class Situation:
    """What the decision needs besides the database."""

    replicas: Sequence[Replica]
    """Live ones only."""
    gate: bool
    """Whether one is configured."""
    watching: bool
    """Live traffic is being read."""
    slots: int
    """Rollouts at a time."""
    per_hour_max: int
    """Rollouts that may begin in an hour."""
    updates_min: int
    """Versions that have to wait before the newest of them becomes the candidate."""
    minimum_score: float = 0.0
    patience_over: bool = False
    """Live replicas had `probe_timeout_s` to get the candidate ready."""
    failures: Mapping[str, str] = field(default_factory=dict)
    """Candidates whose trial failed `gate.attempts` times, and why."""
    unmeasured: Mapping[str, str] = field(default_factory=dict)
    """Versions whose audit failed as often, and why."""
    rollouts: Mapping[str, bool] = field(default_factory=dict)
    """Versions with a word on whether they need a rollout: what an operator asked for with them."""
    rolls_out: bool = False
    """Whether all others need one."""


def plan(view: ModelView, now: Situation) -> Action:
    """The next action."""
    if view.champion and view.previous and probe.served_by_any(view.previous.version, now.replicas):
        error = probe.refused_by_all(view.champion.version, now.replicas)
        if error:
            return RollBack(f"no replica can serve it: {error}")
    candidate = view.candidate
    if candidate is not None:
        movable = view.model.may_move(candidate)
        return _advance(candidate, view, now) if movable else Release(candidate.version)
    waiting = [version for version in view.waiting if view.model.may_move(version)]
    full = _full(view, now)
    if full:
        waiting = [version for version in waiting if version.request == "force"]
    few = _few(waiting, view, now)
    if waiting and not few:
        return _next(waiting, view)
    baseline = _baseline(view, now)
    return Wait(full or few) if (full or few) and baseline == Wait() else baseline


def _full(view: ModelView, now: Situation) -> str:
    """Why no further version can begin a rollout; empty when one can, or needs none."""
    if view.under_way >= (view.slots or now.slots):
        return f"{view.under_way} rollouts are under way"
    if now.rolls_out and view.begun_lately >= now.per_hour_max:
        return f"{view.begun_lately} rollouts began within the last hour: rollout.versions_per_hour_max"
    return ""


def _few(waiting: Sequence[VersionRecord], view: ModelView, now: Situation) -> str:
    """Why what waits is not worth a look yet; empty when it is. Who asks for a version, and a model without a champion,
    need not wait."""
    if len(waiting) >= now.updates_min or view.champion is None or any(version.request for version in waiting):
        return ""
    return f"{len(waiting)} of {now.updates_min} updates: rollout.check_after_updates" if waiting else ""


def objection(version: VersionRecord, view: ModelView) -> str | None:
    """Why `version` can never serve this model (P7), None when it can."""
    if version.retired:
        return "it is retired; register its files again to bring it back"
    champion = view.champion
    if champion and version.tokenizer_sha256 != champion.tokenizer_sha256:
        return f"its tokenizer differs from that of the champion {champion.version}; publish it as another model"
    if champion and version.template_sha256 != champion.template_sha256:
        return f"its chat template differs from that of the champion {champion.version}; publish it as another model"
    base = view.versions.get(version.base) if version.base else None
    if version.base and (base is None or base.state == "withdrawn"):
        return f"its base {version.base} is {'withdrawn' if base else 'not registered'}"
    if base is not None and base.retired:
        return f"its base {base.version} is retired; register its files again to bring it back"
    return None


def _next(waiting: Sequence[VersionRecord], view: ModelView) -> Action:
    """Choose the next candidate: a version that an operator asked for, else the newest one; older ones are skipped.

    A model without a champion starts with its earliest step, so that there is a baseline to compare with.
    """
    skipped: tuple[str, ...] = ()
    requested = [version for version in waiting if version.request]
    if requested:
        chosen = max(requested, key=lambda version: version.changed)
    elif view.champion is None:
        chosen = min(waiting, key=lambda version: (version.step, version.number))
    else:
        chosen = waiting[-1]
        skipped = tuple(version.version for version in waiting[:-1])
    problem = objection(chosen, view)
    return Reject(chosen.version, problem) if problem else Adopt(chosen.version, skipped)


def _advance(candidate: VersionRecord, view: ModelView, now: Situation) -> Action:
    probed = probe.result(candidate.version, now.replicas, candidate.changed if candidate.state == "probing" else None)
    if probed.state == "failed":
        return Reject(candidate.version, probed.reason)
    if probed.state == "pending":
        if now.patience_over:
            return Reject(candidate.version, f"not ready in time: {probed.reason}")
        return Wait(probed.reason)
    if candidate.state == "probing":
        return Probed(candidate.version, probed.statistics)
    return _decide(candidate, view, now)


def _decide(candidate: VersionRecord, view: ModelView, now: Situation) -> Action:
    """The action for a candidate that passes its probe on every live replica."""
    name = candidate.version
    if candidate.request == "force":
        return Promote(name, "an operator promoted it past the gate")
    if view.champion is None and candidate.step == 0:
        return Promote(name, "the first version of its model: nothing to compare with")
    if not now.gate:
        return _passed(Promote(name, "promoted after its probe: gate.command is empty"), view, now)
    if name in now.failures:
        return Reject(name, f"the gate failed: {now.failures[name]}")
    champion = view.champion.version if view.champion else None
    result = view.trial_result
    if result is not None and result.champion == champion:
        if result.passed:
            return _passed(Promote(name, result.reason, result.statistics, result.standing), view, now)
        return Reject(name, result.reason, result.statistics, result.standing)
    return _try(name, champion, view, now)


def _passed(promotion: Promote, view: ModelView, now: Situation) -> Action:
    """A promotion, or the rollout that goes before it. Without a champion there is nothing to compare with."""
    if view.champion is None or not now.rollouts.get(promotion.version, now.rolls_out):
        return promotion
    if not now.watching:
        return Wait("live traffic is not being read yet")
    return BeginRollout(promotion.version, promotion.reason, promotion.statistics, promotion.standing)


def _try(name: str, champion: str | None, view: ModelView, now: Situation) -> Action:
    """Choose the opponents: versions that some replica serves. A version that is still loading is waited for; one that
    every replica refuses is left out.
    """
    opponents = [one for one in (champion, view.model.anchor) if one and not probe.refused_by_all(one, now.replicas)]
    for one in opponents:
        if not probe.served_by_any(one, now.replicas):
            return Wait(f"no replica serves {one}, the opponent of {name}")
    if not opponents and now.minimum_score == 0:
        why = f"no replica can serve the champion {champion}" if champion else "no champion"
        return Promote(name, f"{why}: nothing to compare with")
    anchor = view.model.anchor
    return RunTrial(name, champion if champion in opponents else None, anchor if anchor in opponents else None)


def next_audit(view: ModelView, now: Situation) -> RunAudit | None:
    """The audit to run now, which a trial need not wait for: of the champion, or of the champion before it, whose score
    a trial or a promotion may have overtaken. None where every score is known or cannot be measured.
    """
    for version in (view.champion, view.previous):
        if _is_unmeasured(version, view, now) and probe.served_by_any(version.version, now.replicas):
            return RunAudit(version.version)
    return None


def _is_unmeasured(version: VersionRecord | None, view: ModelView, now: Situation) -> TypeGuard[VersionRecord]:
    """Whether the gate has to measure it. What nobody trains is no candidate for anything: no gate plays it."""
    if not now.gate or version is None or not version.trained or version.state == "withdrawn":
        return False
    return version.version not in view.audited and version.version not in now.unmeasured


def _baseline(view: ModelView, now: Situation) -> Action:
    """No version waits: measure what served if its score is not known yet."""
    audit = next_audit(view, now)
    if audit is not None:
        return audit
    if _is_unmeasured(view.champion, view, now):
        return Wait(f"no replica serves the champion {view.champion.version}")
    return Wait()
