"""Choice of the next action for a model: a pure function of the database, the replicas and the gate.

registered → (listed in the routing's `serve`) probing → (probe passed on all live replicas) evaluating → (trial)
promoted or rejected. If rollouts are configured, a version that has passed the trial gets a share of the traffic
instead of all of it (`control.rollout_controller` continues from there), and the gate is free for the next version. The
champion is measured on the audit tasks when no candidate can be tried, or during a trial (`next_audit`). The model
controller chooses the next action after each change, so a process that was killed continues where it was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeGuard

from headrace_registry.storage.records import CHAMPION_IS_ANCHOR, AnchorState, ModelView, VersionRecord
from headrace_registry.versions import probe
from headrace_schemas import Replica


@dataclass(frozen=True, slots=True)
class Adopt:
    """Action that makes a waiting version the candidate, so that replicas load it.

    The older versions in `skipped` will not become candidates.
    """

    version: str
    skipped: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Probed:
    """Action that records that the candidate has passed its probe on each live replica."""

    version: str
    statistics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class RunTrial:
    """Action that starts a trial: the gate compares the candidate with the champion and the anchor. An opponent that no
    replica can serve is None."""

    version: str
    champion: str | None
    anchor: str | None


@dataclass(frozen=True, slots=True)
class RunAudit:
    """Action that lets a version play the audit tasks: held-out tasks that measure progress, and on which no decision
    depends."""

    version: str


@dataclass(frozen=True, slots=True)
class Promote:
    """Action that makes the candidate the champion."""

    version: str
    reason: str
    statistics: Mapping[str, float] = field(default_factory=dict)
    anchor_state: AnchorState = CHAMPION_IS_ANCHOR
    """The anchor after the promotion. A version that was promoted without a trial is its own anchor."""


@dataclass(frozen=True, slots=True)
class BeginRollout:
    """Action that begins a rollout of the candidate, which has passed the trial, on live traffic."""

    version: str
    reason: str
    statistics: Mapping[str, float] = field(default_factory=dict)
    anchor_state: AnchorState = CHAMPION_IS_ANCHOR
    """The anchor if the candidate becomes champion."""


@dataclass(frozen=True, slots=True)
class Reject:
    """Action that rejects a version, so that it serves no traffic."""

    version: str
    reason: str
    statistics: Mapping[str, float] = field(default_factory=dict)
    anchor_state: AnchorState | None = None
    """The anchor after the trial; None if there was no trial."""


@dataclass(frozen=True, slots=True)
class Release:
    """Action that ends the candidacy of a version without a decision about it: it waits to be chosen again.

    It is chosen if the model was paused or pinned to a version while the candidate was tested.
    """

    version: str


@dataclass(frozen=True, slots=True)
class RollBack:
    """Action that makes the previous version the champion again.

    It is chosen if no replica can serve the champion any more, and a replica can serve the previous version.
    """

    reason: str


@dataclass(frozen=True, slots=True)
class Wait:
    """Action that does nothing until the next change."""

    reason: str = ""


Action = Adopt | Probed | RunTrial | RunAudit | Promote | BeginRollout | Reject | Release | RollBack | Wait


@dataclass(frozen=True, slots=True)
class LifecycleInputs:
    """Data for the choice of the next action that are not in the database."""

    replicas: Sequence[Replica]
    """Replicas that are alive."""
    gate: bool
    """Whether a gate program is configured."""
    watching: bool
    """Whether live traffic is being read."""
    slots: int
    """Maximum number of concurrent rollouts."""
    per_hour_max: int
    """Maximum number of rollouts that may begin within an hour."""
    updates_min: int
    """Number of waiting versions from which on the newest of them becomes the candidate."""
    minimum_score: float = 0.0
    probe_timed_out: bool = False
    """Whether live replicas have had `probe_timeout_s` to load and probe the candidate."""
    failures: Mapping[str, str] = field(default_factory=dict)
    """Candidates whose trials have failed as often as they may, with the reason."""
    unmeasured: Mapping[str, str] = field(default_factory=dict)
    """Versions whose audits have failed as often as they may, with the reason."""
    rollouts: Mapping[str, bool] = field(default_factory=dict)
    """For each version for which an operator requested a kind of rollout, whether that kind needs a rollout on live
    traffic."""
    rollouts_by_default: bool = False
    """Whether all other versions need a rollout on live traffic."""


def plan(view: ModelView, inputs: LifecycleInputs) -> Action:
    """Choose the next action for a model."""
    if view.champion and view.previous and probe.served_by_any(view.previous.version, inputs.replicas):
        error = probe.refused_by_all(view.champion.version, inputs.replicas)
        if error:
            return RollBack(f"no replica can serve it: {error}")
    candidate = view.candidate
    if candidate is not None:
        movable = view.model.may_change_roles(candidate)
        return _advance(candidate, view, inputs) if movable else Release(candidate.version)
    waiting = [version for version in view.waiting if view.model.may_change_roles(version)]
    rollout_limit = _rollout_limit(view, inputs)
    if rollout_limit:
        waiting = [version for version in waiting if version.request == "force"]
    missing_updates = _missing_updates(waiting, view, inputs)
    if waiting and not missing_updates:
        return _choose_candidate(waiting, view)
    fallback = _audit_or_wait(view, inputs)
    return (
        Wait(rollout_limit or missing_updates)
        if (rollout_limit or missing_updates) and fallback == Wait()
        else fallback
    )


def _rollout_limit(view: ModelView, inputs: LifecycleInputs) -> str:
    """Return the reason why no further rollout may begin now, or an empty string if one may."""
    if view.under_way >= (view.slots or inputs.slots):
        return f"{view.under_way} rollouts are under way"
    if inputs.rollouts_by_default and view.rollouts_last_hour >= inputs.per_hour_max:
        return f"{view.rollouts_last_hour} rollouts began within the last hour: rollout.versions_per_hour_max"
    return ""


def _missing_updates(waiting: Sequence[VersionRecord], view: ModelView, inputs: LifecycleInputs) -> str:
    """Return the reason why no waiting version becomes the candidate yet, or an empty string if one does.

    There is no such reason if an operator requested a waiting version, or if the model has no champion.
    """
    if len(waiting) >= inputs.updates_min or view.champion is None or any(version.request for version in waiting):
        return ""
    return f"{len(waiting)} of {inputs.updates_min} updates: rollout.check_after_updates" if waiting else ""


def incompatibility(version: VersionRecord, view: ModelView) -> str | None:
    """Return the reason why `version` can never serve this model, or None if it can."""
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


def _choose_candidate(waiting: Sequence[VersionRecord], view: ModelView) -> Action:
    """Return the action that makes a waiting version the candidate: a version that an operator requested, else the
    newest.

    Older versions are skipped. For a model without a champion, the version of the earliest step is chosen, so that
    there is a baseline.
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
    problem = incompatibility(chosen, view)
    return Reject(chosen.version, problem) if problem else Adopt(chosen.version, skipped)


def _advance(candidate: VersionRecord, view: ModelView, inputs: LifecycleInputs) -> Action:
    probed = probe.probe_result(
        candidate.version, inputs.replicas, candidate.changed if candidate.state == "probing" else None
    )
    if probed.state == "failed":
        return Reject(candidate.version, probed.reason)
    if probed.state == "pending":
        if inputs.probe_timed_out:
            return Reject(candidate.version, f"not ready in time: {probed.reason}")
        return Wait(probed.reason)
    if candidate.state == "probing":
        return Probed(candidate.version, probed.statistics)
    return _decide(candidate, view, inputs)


def _decide(candidate: VersionRecord, view: ModelView, inputs: LifecycleInputs) -> Action:
    """Return the action for a candidate that has passed its probe on every live replica."""
    name = candidate.version
    if candidate.request == "force":
        return Promote(name, "an operator promoted it past the gate")
    if view.champion is None and candidate.step == 0:
        return Promote(name, "the first version of its model: nothing to compare with")
    if not inputs.gate:
        return _promote_or_roll_out(Promote(name, "promoted after its probe: gate.command is empty"), view, inputs)
    if name in inputs.failures:
        return Reject(name, f"the gate failed: {inputs.failures[name]}")
    champion = view.champion.version if view.champion else None
    result = view.trial_result
    if result is not None and result.champion == champion:
        if result.passed:
            return _promote_or_roll_out(
                Promote(name, result.reason, result.statistics, result.anchor_state), view, inputs
            )
        return Reject(name, result.reason, result.statistics, result.anchor_state)
    return _start_trial(name, champion, view, inputs)


def _promote_or_roll_out(promotion: Promote, view: ModelView, inputs: LifecycleInputs) -> Action:
    """Return `promotion`, or the beginning of a rollout if the version must first prove itself on live traffic.

    A model without a champion needs no rollout, because there is nothing to compare with.
    """
    if view.champion is None or not inputs.rollouts.get(promotion.version, inputs.rollouts_by_default):
        return promotion
    if not inputs.watching:
        return Wait("live traffic is not being read yet")
    return BeginRollout(promotion.version, promotion.reason, promotion.statistics, promotion.anchor_state)


def _start_trial(name: str, champion: str | None, view: ModelView, inputs: LifecycleInputs) -> Action:
    """Return the action that starts the trial, against those opponents that a replica serves.

    While an opponent is still loading, the action is to wait. An opponent that all replicas refuse is left out.
    """
    opponents = [
        opponent
        for opponent in (champion, view.model.anchor)
        if opponent and not probe.refused_by_all(opponent, inputs.replicas)
    ]
    for opponent in opponents:
        if not probe.served_by_any(opponent, inputs.replicas):
            return Wait(f"no replica serves {opponent}, the opponent of {name}")
    if not opponents and inputs.minimum_score == 0:
        reason = f"no replica can serve the champion {champion}" if champion else "no champion"
        return Promote(name, f"{reason}: nothing to compare with")
    anchor = view.model.anchor
    return RunTrial(name, champion if champion in opponents else None, anchor if anchor in opponents else None)


def next_audit(view: ModelView, inputs: LifecycleInputs) -> RunAudit | None:
    """Return an audit that may run now, even during a trial, or None if no version needs one.

    It is that of the champion, or of the previous version if a promotion has interrupted its audit.
    """
    for version in (view.champion, view.previous):
        if _is_unmeasured(version, view, inputs) and probe.served_by_any(version.version, inputs.replicas):
            return RunAudit(version.version)
    return None


def _is_unmeasured(version: VersionRecord | None, view: ModelView, inputs: LifecycleInputs) -> TypeGuard[VersionRecord]:
    """Return whether `version` still needs an audit. Versions that no trainer of this installation published are never
    audited."""
    if not inputs.gate or version is None or not version.trained or version.state == "withdrawn":
        return False
    return version.version not in view.audited and version.version not in inputs.unmeasured


def _audit_or_wait(view: ModelView, inputs: LifecycleInputs) -> Action:
    """Return the action while no candidate can be tried: an audit of a served version without an audit score, else to
    wait."""
    audit = next_audit(view, inputs)
    if audit is not None:
        return audit
    if _is_unmeasured(view.champion, view, inputs):
        return Wait(f"no replica serves the champion {view.champion.version}")
    return Wait()
