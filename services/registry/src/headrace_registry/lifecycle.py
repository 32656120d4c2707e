"""What to do next about a model: a pure function of the database, the replicas and the gate.

registered → (put into `serve`) probing → (probe passed everywhere) evaluating → (gate) promoted or rejected.
The director asks again after every change, so that a process that dies at any point continues where it was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from headrace_registry import probe
from headrace_registry.comparison import compare, mean
from headrace_registry.records import VersionRecord, View
from headrace_schemas import Replica


@dataclass(frozen=True, slots=True)
class Adopt:
    """Make a waiting version the candidate: replicas shall load it. `skipped` never get a turn."""

    version: str
    skipped: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Probed:
    """The candidate passed its probe on every live replica."""

    version: str
    statistics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Measure:
    """Let the gate play this version."""

    version: str


@dataclass(frozen=True, slots=True)
class Promote:
    """The candidate becomes champion."""

    version: str
    reason: str
    statistics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Reject:
    """The version gets no traffic."""

    version: str
    reason: str
    statistics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Release:
    """The candidate waits again: the model is pinned or paused."""

    version: str


@dataclass(frozen=True, slots=True)
class RollBack:
    """The champion can be served nowhere any more and the previous one can."""

    reason: str


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to do until something changes."""

    reason: str = ""


Action = Adopt | Probed | Measure | Promote | Reject | Release | RollBack | Wait


@dataclass(frozen=True, slots=True)
class Gate:
    """The rule of the gate; None in its place when no gate is configured."""

    margin: float
    minimum_score: float


@dataclass(frozen=True, slots=True)
class Situation:
    """What the decision depends on beside the database."""

    replicas: Sequence[Replica]
    """Live ones only."""
    gate: Gate | None
    patience_over: bool = False
    """Live replicas have had their time to get the candidate ready."""
    failures: Mapping[str, str] = field(default_factory=dict)
    """Versions that the gate could not measure in as many attempts as it has, and why."""


def plan(view: View, now: Situation) -> Action:
    """The one next step."""
    if view.champion and view.previous and probe.served_by_any(view.previous.version, now.replicas):
        error = probe.refused_by_all(view.champion.version, now.replicas)
        if error:
            return RollBack(f"no replica can serve it: {error}")
    candidate = view.candidate
    if candidate is not None:
        movable = view.model.may_move(candidate)
        return _advance(candidate, view, now) if movable else Release(candidate.version)
    waiting = [version for version in view.waiting if view.model.may_move(version)]
    return _next(waiting, view) if waiting else _baseline(view, now)


def objection(version: VersionRecord, view: View) -> str | None:
    """Why `version` can never serve this model (P7), None when it can."""
    champion = view.champion
    if champion and version.tokenizer_sha256 != champion.tokenizer_sha256:
        return f"its tokenizer differs from that of the champion {champion.version}; publish it as another model"
    if champion and version.template_sha256 != champion.template_sha256:
        return f"its chat template differs from that of the champion {champion.version}; publish it as another model"
    base = view.versions.get(version.base) if version.base else None
    if version.base and (base is None or base.state == "withdrawn"):
        return f"its base {version.base} is {'withdrawn' if base else 'not registered'}"
    return None


def _next(waiting: Sequence[VersionRecord], view: View) -> Action:
    """Whose turn it is: what an operator asked for; else the newest, and the older ones never.

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


def _advance(candidate: VersionRecord, view: View, now: Situation) -> Action:
    probed = probe.verdict(candidate.version, now.replicas, candidate.changed if candidate.state == "probing" else None)
    if probed.state == "failed":
        return Reject(candidate.version, probed.reason)
    if probed.state == "pending":
        if now.patience_over:
            return Reject(candidate.version, f"not ready in time: {probed.reason}")
        return Wait(probed.reason)
    if candidate.state == "probing":
        return Probed(candidate.version, probed.statistics)
    return _judge(candidate, view, now)


def _judge(candidate: VersionRecord, view: View, now: Situation) -> Action:
    """A candidate that passed its probe everywhere, and still does."""
    name = candidate.version
    if candidate.request == "force":
        return Promote(name, "an operator promoted it past the gate")
    if view.champion is None and candidate.step == 0:
        return Promote(name, "the first version of its model: nothing to compare with")
    if now.gate is None:
        return Promote(name, "promoted after its probe: gate.command is empty")
    if name in now.failures:
        return Reject(name, f"the gate failed: {now.failures[name]}")
    if name not in view.evaluations:
        return Measure(name)
    scores = view.evaluations[name].scores
    if mean(scores) < now.gate.minimum_score:
        numbers = {"score": mean(scores), "tasks": float(len(scores)), "minimum_score": now.gate.minimum_score}
        return Reject(name, "scores less than gate.minimum_score", numbers)
    if view.champion is None:
        numbers = {"score": mean(scores), "tasks": float(len(scores))}
        return Promote(name, "no champion to compare with", numbers)
    return _compare(name, view.champion.version, now.gate, view, now)


def _compare(name: str, champion: str, gate: Gate, view: View, now: Situation) -> Action:
    if champion in now.failures:
        return Reject(name, f"the gate failed on the champion {champion}: {now.failures[champion]}")
    mine, theirs = view.evaluations[name], view.evaluations.get(champion)
    if theirs is None or (theirs.scores.keys() != mine.scores.keys() and theirs.at < mine.at):
        return Measure(champion)  # never measured by this gate, or before its tasks changed
    try:
        compared = compare(mine.scores, theirs.scores)
    except ValueError as error:
        return Reject(name, f"cannot be compared with {champion}: {error}")
    numbers = {**compared.statistics(), "margin": gate.margin}
    if compared.not_inferior(gate.margin):
        return Promote(name, f"not inferior to {champion}", numbers)
    return Reject(name, f"inferior to {champion}", numbers)


def _baseline(view: View, now: Situation) -> Action:
    """Nothing waits: measure a champion that came to its place without the present gate."""
    champion = view.champion
    if champion is None or now.gate is None or champion.version in view.evaluations or champion.version in now.failures:
        return Wait()
    if not probe.served_by_any(champion.version, now.replicas):
        return Wait(f"no replica serves the champion {champion.version}")
    return Measure(champion.version)
