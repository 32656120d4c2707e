"""Whether a model learns: the audit scores of its versions, and a sentence about them. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from headrace_runtime.settings.sections import Section
from headrace_schemas import ModelEvent
from headrace_schemas.http.registry_api import VersionState

Z95 = 1.96
_PLATEAU_VERSIONS_MIN = 3
"""Number of versions without a higher score after which a model that has learned is reported as not rising any more."""
_HIGH_SCORE = 0.9
"""Score from which on a plateau needs no remedy."""
_VERBS = {
    "promoted": "took over", "rejected": "was refused", "skipped": "was skipped", "rolled_back": "was taken back",
    "withdrawn": "was withdrawn", "begin": "began a rollout", "advance": "got a larger share", "hold": "was held",
}  # fmt: skip
"""Verbs for decisions and for steps of rollouts, which have precedence."""
_REFUSAL_VERBS = {
    "rejected": "Refused", "skipped": "Skipped", "rolled_back": "Taken back", "withdrawn": "Withdrawn",
    "begin": "", "advance": "", "hold": "Held",
}  # fmt: skip
_OPPONENTS = (("champion", ""), ("anchor", "anchor_"))
"""Name of each opponent at the gate, and the prefix of its statistics."""
REFUSED_STATES = frozenset({"rejected", "withdrawn", "skipped"})


@dataclass(frozen=True, slots=True)
class ScoredVersion:
    """A version with its mean score in its newest evaluation on the audit tasks (held-out tasks)."""

    version: str
    step: int
    state: str
    score: float
    error: float
    """Standard error of the score."""
    plays: int
    registered_at: datetime

    @property
    def lower(self) -> float:
        """Lower end of the 95 % interval, which is not below 0."""
        return max(0.0, self.score - Z95 * self.error)

    @property
    def upper(self) -> float:
        """Upper end of the 95 % interval, which is not above 1."""
        return min(1.0, self.score + Z95 * self.error)

    @property
    def is_refused(self) -> bool:
        """Whether the gate or a rollout refused the version, so that it serves no calls."""
        return self.state in REFUSED_STATES


@dataclass(frozen=True, slots=True)
class Learning:
    """Verdict whether a model learns: the champion's scores on audit tasks (held-out tasks) against the first
    version's.
    """

    verdict: Literal["learns", "plateau", "worse", "unclear", "unmeasured"]
    sentence: str
    swapped_at: datetime | None = None
    """Time of the last promotion."""


class GateRule(Section):
    """The settings of the section `[registry.gate]` that decide about a candidate."""

    command: tuple[str, ...] = ()
    margin: float = 0.1
    anchor_margin: float = 0.05
    alpha: float = 0.05
    minimum_score: float = 0.0


def describe_rule(rule: GateRule) -> str:
    """Return a sentence that states the rule by which the gate makes a version champion."""
    if not rule.command:
        return "Each version takes over after its probe, because no gate is set (registry.gate.command)."
    least = f", and less than {rule.margin:g} below the score {rule.minimum_score:g}" if rule.minimum_score else ""
    return (
        f"A version takes over when held-out tasks show that it is less than {rule.margin:g} worse than the champion "
        f"and less than {rule.anchor_margin:g} worse than the anchor, which is the last version shown to be better "
        f"than the anchor before it{least}. The probability of a wrong promotion is at most {rule.alpha:g} over all "
        "versions that meet one anchor."
    )


def describe_trial(versions: Sequence[VersionState]) -> str:
    """Return a sentence with the statistics of the gate's last decision, or an empty text before the first decision."""
    decisions = [
        event
        for version in versions
        for event in version.decisions
        if event.decision in ("promoted", "rejected") and "tasks" in event.statistics
    ]
    if not decisions:
        return ""
    event = max(decisions, key=lambda event: event.time)
    return f"Last decision: {event.version} was {event.decision} {describe_numbers(event)}."


def describe_numbers(event: ModelEvent) -> str:
    """Return a clause with the number of tasks and the score differences of a gate decision.

    The clause is empty for decisions of other kinds.
    """
    numbers = event.statistics
    if "tasks" not in numbers or event.decision not in ("promoted", "rejected"):
        return ""
    parts = []
    for name, prefix in _OPPONENTS:
        if (difference := numbers.get(f"{prefix}difference")) is not None:
            error = numbers.get(f"{prefix}standard_error")
            margin = numbers.get(f"{prefix}margin")
            limit = "" if margin is None else f", margin {margin:g}"
            if difference == error == 0:
                parts.append(f"identical to the {name} on every task{limit}")
                continue
            # A standard error of 0 from equal differences is no certainty.
            width = f" ± {Z95 * error:.2f}" if error else ""
            parts.append(f"{difference:+.2f}{width} against the {name}{limit}")
    against = f" ({'; '.join(parts)})" if parts else ""
    return f"after {numbers['tasks']:,.0f} tasks{against}"


def last_decision(version: VersionState) -> ModelEvent | None:
    """Return the last decision that changed the state of a version, or None before the first one."""
    return next((event for event in reversed(version.decisions) if event.decision in _VERBS), None)


def describe_refusal(event: ModelEvent | None) -> str:
    """Return a sentence with the rules that refused a version, each with its figure and its limit.

    It is the reason alone for decisions without such numbers, and empty for decisions that refuse nothing.
    """
    verb = "" if event is None else _verb(event, _REFUSAL_VERBS)
    if event is None or not verb:
        return ""
    reason, numbers = event.reason or "no reason was given", event.statistics
    if reason.startswith("harm: "):
        names = [part.partition(" at ")[0] for part in reason.removeprefix("harm: ").split(", ")]
        rules = [
            _describe_metric(f"the guardrail {name}", name, "harm_limit", numbers) for name in dict.fromkeys(names)
        ]
    elif "are not an even split" in reason:
        rules = [_describe_arms(numbers)]
    elif " units (" in reason:
        rules = _describe_open_rules(reason.partition("): ")[2], numbers)
    else:
        opponents = [(f"the margin against the {name}", prefix) for name, prefix in _OPPONENTS]
        rules = [
            _describe_margin(rule, prefix, numbers)
            for rule, prefix in opponents
            if f"{prefix}margin" in numbers
            and (event.reason is None or _names_opponent(reason, prefix, event.previous))
        ]
        if "gate.minimum_score" in reason and "minimum_score" in numbers:
            rule = f"the minimum score {numbers['minimum_score']:g} (registry.gate.minimum_score)"
            rules.append(_describe_margin(rule, "minimum_", numbers))
    if not rules:
        return f"{verb}: {reason}."
    undecided = ""
    if reason.startswith("undecided"):
        limit = reason.partition(" (")[2].partition(")")[0]
        undecided = f" The interval had to lie beyond the limit before {limit} was reached, and it did not."
    return f"{verb} by {' and by '.join(rules)}.{undecided}"


def describe_decision(version: VersionState) -> str:
    """Return a sentence about the last decision that changed the state of a version."""
    event = last_decision(version)
    if event is None:
        return f"{version.id} is {version.state.replace('_', ' ')}; nothing was decided about it yet."
    author = f" by {event.who}" if event.who else ""
    against = f", compared with {event.previous}" if event.previous else ""
    numbers = f" {numbers}" if (numbers := describe_numbers(event)) else ""
    reason = f": {event.reason}" if event.reason else ""
    return f"{version.id} {_verb(event, _VERBS)}{author}{against}{numbers}{reason}"


def _verb(event: ModelEvent, verbs: Mapping[str, str]) -> str:
    """Return the verb for the step of a rollout if it has one, otherwise that for the decision, or an empty text."""
    step = "" if event.rollout is None else event.rollout.kind
    return verbs.get(step, verbs.get(event.decision, ""))


def _names_opponent(reason: str, prefix: str, champion: str | None) -> bool:
    """Return whether the reason of the gate names the anchor, or for an empty `prefix` the champion."""
    if prefix:
        return "the anchor " in reason
    return champion is not None and champion in reason.replace(f"the anchor {champion}", "")


def _describe_margin(rule: str, prefix: str, numbers: Mapping[str, float]) -> str:
    """Return a rule of the gate about one opponent, with its figure and its limit if the decision contains them."""
    difference, margin = (numbers.get(f"{prefix}{field}") for field in ("difference", "margin"))
    if difference is None or margin is None:
        return f"{rule}, which was not shown to be reached"
    error = numbers.get(f"{prefix}standard_error")
    width = f" ± {Z95 * error:.2f}" if error else ""
    tasks = f" after {numbers['tasks']:,.0f} tasks" if "tasks" in numbers else ""
    return f"{rule}: difference {difference:+.2f}{width}{tasks}, limit {-margin:+.2f}"


def _describe_metric(rule: str, metric: str, limit: str, numbers: Mapping[str, float]) -> str:
    """Return a rule of a rollout about a metric, with the figures and the limit that the decision contains."""
    figures = [numbers.get(f"{metric}.{field}") for field in ("difference", "lower", "upper")]
    difference, lower, upper = figures
    bound = f", limit {numbers[f'{metric}.{limit}']:+.3g}" if f"{metric}.{limit}" in numbers else ""
    if difference is None or lower is None or upper is None:
        return f"{rule}: no figure{bound}"
    units = f" after {numbers['candidate_units']:,.0f} units" if "candidate_units" in numbers else ""
    return f"{rule}: difference {difference:+.3f} ({lower:+.3f} to {upper:+.3f}){units}{bound}"


def _describe_arms(numbers: Mapping[str, float]) -> str:
    """Return the rule that both arms of a rollout have one size, with the figure and the limit that decided."""
    units = [numbers.get(f"{arm}_units", 0.0) for arm in ("candidate", "control")]
    counts = f"the split of the arms: {units[0]:,.0f} units of the candidate, {units[1]:,.0f} of its control"
    if "sample_ratio_log_limit" in numbers:
        evidence, limit = numbers.get("sample_ratio_log_evidence", 0.0), numbers["sample_ratio_log_limit"]
        return f"{counts}; log evidence that they are not even {evidence:.2f}, limit {limit:.2f}"
    bound = f", limit ±{numbers['uneven_limit']:.1%}" if "uneven_limit" in numbers else ""
    return f"{counts}, difference {(units[0] - units[1]) / max(1.0, sum(units)):+.1%} of both{bound}"


def _describe_open_rules(text: str, numbers: Mapping[str, float]) -> list[str]:
    """Return the rules that a rollout had not fulfilled at its end.

    Args:
        text: the rules as the reason of the hold lists them.
        numbers: statistics of the decision.
    """
    rules = []
    for part in text.split("; "):
        names, separator, end = part.partition(" not shown to be ")
        stage = end.rpartition("stage ")[2] if "stage" in end else ""
        for name in names.split(", ") if separator else ():
            rule = f"the guardrail {name}" + (f" before stage {stage}" if stage else "")
            limit = f"stage_{stage}_limit" if stage else "limit"
            is_metric = name != "arms of one size"
            rules.append(_describe_metric(rule, name, limit, numbers) if is_metric else _describe_arms(numbers))
    if "no success shown" in text:
        metrics = [name.removesuffix(".success_limit") for name in numbers if name.endswith(".success_limit")]
        rules += [_describe_metric(f"the success {name}", name, "success_limit", numbers) for name in metrics]
    return rules


def scored_versions(versions: Sequence[VersionState]) -> list[ScoredVersion]:
    """Return the versions that have an audit score, by ascending step.

    Standard errors are raised to at least 1 / (plays + 2), because equal results of few plays do not prove certainty.
    """
    scored = []
    for version in versions:
        audits = [event for event in version.decisions if event.decision == "evaluated" and "score" in event.statistics]
        if not audits:
            continue
        numbers = audits[-1].statistics
        plays = numbers.get("tasks", 0.0)
        error = max(numbers.get("score_standard_error", 0.5), 1 / (plays + 2))
        score, at = numbers["score"], version.registered_at
        scored.append(ScoredVersion(version.id, version.step, version.state, score, error, int(plays), at))
    return sorted(scored, key=lambda version: (version.step, version.version))


def describe_learning(model: str, champion: str | None, versions: Sequence[VersionState]) -> Learning:
    """Return whether the audit score of the champion is shown to differ from that of the first measured version.

    Until the champion is measured, the last measured version before it that was promoted stands for it.
    """
    promotions = [event.time for version in versions for event in version.decisions if event.decision == "promoted"]
    swapped_at = max(promotions, default=None)
    scored = scored_versions(versions)
    if not scored:
        return Learning("unmeasured", f"{model}: no version has an audit score yet.", swapped_at)
    first = scored[0]
    last = next((version for version in scored if version.version == champion), None)
    pending = ""
    if last is None:
        step = next((version.step for version in versions if version.id == champion), 0)
        serving = [version for version in scored if version.step < step and not version.is_refused]
        last = serving[-1] if serving else first
        pending = " The champion is not scored yet."
    if last == first:
        reason = "only the first version has an audit score so far" if pending else "the first version is the champion"
        return Learning("unmeasured", f"{model}: {reason} (audit score {first.score:.2f}).", swapped_at)
    difference = last.score - first.score
    width = Z95 * math.hypot(first.error, last.error)
    lower, upper = difference - width, difference + width
    count = len({version.step for version in scored if first.step <= version.step <= last.step}) - 1
    numbers = (
        f"audit score {first.score:.2f} → {last.score:.2f} in {count} version{'' if count == 1 else 's'} "
        f"(95 %: {lower:+.2f} to {upper:+.2f})"
    )
    verdict: Literal["learns", "plateau", "worse", "unclear"] = "unclear"
    state, end = "is not shown to change", ""
    if lower > 0:
        verdict, state = "learns", "learns"
        if plateau := _describe_plateau([version for version in scored if version.step <= last.step]):
            verdict, state, end = "plateau", "has learned but no longer rises", f" {plateau}"
    elif upper < 0:
        verdict, state = "worse", "got worse"
    return Learning(verdict, f"{model} {state}: {numbers}.{end}{pending}", swapped_at)


def _describe_plateau(scored: Sequence[ScoredVersion]) -> str:
    """Return the length of a plateau and what to do, or an empty text if the score rose recently.

    A plateau begins at the version with the highest score if at least `_PLATEAU_VERSIONS_MIN` versions follow it.

    Args:
        scored: versions by step, at least one.
    """
    highest, newest = max(scored, key=lambda version: version.score), scored[-1]  # the first highest one of several
    count = len({version.step for version in scored if version.step > highest.step})
    if count < _PLATEAU_VERSIONS_MIN:
        return ""
    hours = (newest.registered_at - highest.registered_at).total_seconds() / 3600
    period = f"{hours:.1f} hours" if hours >= 1 else f"{60 * hours:.0f} minutes"
    remedy = (
        "The score is near its maximum: add harder tasks if the agent must learn more."
        if highest.score >= _HIGH_SCORE
        else "Add tasks or a reward source that tells good answers from bad ones; the page Rewards shows which differ."
    )
    return (
        f"No rise in the last {count} versions ({newest.step - highest.step} steps, {period}): step {highest.step} "
        f"reached {highest.score:.2f}. {remedy}"
    )
