"""What to do with an experience that has just arrived: validity, supersession, staleness, dedupe. Pure.

Every revision of an experience gets exactly one outcome, now or later, and changes the weights at most once (P4):

- one that was seen before is a redelivery and gets none: it has its outcome, or waits for it;
- one below a revision seen before comes too late and is dropped;
- a higher revision of an experience that still waits takes its place, and the old one is dropped as `superseded`;
- a higher revision of an experience that was trained is a *correction*. It is trained with the advantage that is
  missing, A(new) - A(old), where both use the baseline and scale of the first training and A(withdrawn) = 0, and with
  the token weight of the first training. The policy gradient is linear in the advantage and the optimizer adds
  contributions up, so both together are nearly what training the last reward alone would have been; how nearly is
  measured (docs/algorithms.md, "Corrections"). A correction below `correction_min` is dropped as `unchanged`.

A(old) is what the present weights hold of the experience: when a version was abandoned, the contributions of its steps
are gone, and a correction then supplies the whole advantage.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from headrace_schemas import Experience
from headrace_schemas.events.checkpoint import DropReason
from headrace_trainer.experiences.history import History
from headrace_trainer.experiences.window import Entry
from headrace_trainer.settings import TrainerSettings

Dropped = DropReason | Literal["excluded"]
"""Why a revision is dropped. Events say `excluded` in a field of its own: `DropReason` is a list that older readers
know."""


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """What a trainable sequence must satisfy."""

    vocabulary: int
    sequence_tokens: int
    max_staleness: int
    reward_max: float
    advantage_max: float
    correction_min: float


def limits_of(settings: TrainerSettings, vocabulary: int, context: int) -> AdmissionLimits:
    """For a model with so many token ids that can be trained on sequences of `context` tokens."""
    return AdmissionLimits(
        vocabulary=vocabulary,
        sequence_tokens=min(settings.memory.sequence_tokens or settings.memory.queue_tokens, context),
        max_staleness=settings.max_staleness,
        reward_max=settings.advantage.reward_max,
        advantage_max=settings.advantage.limit,
        correction_min=settings.advantage.correction_min,
    )


@dataclass(frozen=True, slots=True)
class Decision:
    """`queue` it, `drop` it with a reason, or `ignore` a redelivery. `replaces`: an older revision waits no longer."""

    fate: Literal["queue", "drop", "ignore"]
    reason: Dropped | None = None
    replaces: bool = False


def decide(
    experience: Experience, entry: Entry | None, history: History, steps: int, limits: AdmissionLimits
) -> Decision:
    """`entry` is what the window knows about the experience, `steps` how many the lineage has taken."""
    if entry is not None:
        if entry.seen(experience.revision):
            return Decision("ignore")
        if experience.revision < entry.revisions[-1]:
            return Decision("drop", "already_trained" if entry.trained else "superseded")
    reason = objection(experience, entry, history, steps, limits)
    return Decision("drop" if reason else "queue", reason, replaces=True)


def objection(
    experience: Experience, entry: Entry | None, history: History, steps: int, limits: AdmissionLimits
) -> Dropped | None:
    """Why this revision cannot change the weights, None when it can."""
    trained = entry is not None and entry.trained
    if experience.branch is None or (experience.reward is None and not trained):
        return experience.no_reward
    return _malformed(experience, limits) or expired(experience, entry, history, steps, limits)


def expired(
    experience: Experience, entry: Entry | None, history: History, steps: int, limits: AdmissionLimits
) -> Dropped | None:
    """The part of `objection` whose answer changes while an experience waits, because the weights move."""
    trained = entry is not None and entry.trained
    excluded = history.excluded_of(versions_of(experience)) is not None
    if excluded and not trained:
        return "excluded"
    reason = stale(experience, history, limits.max_staleness)
    if reason is None and entry is not None and trained:
        missing = missing_advantage(experience, entry, history, steps, limits.advantage_max)
        reason = "unchanged" if abs(missing) < limits.correction_min else None
    return "excluded" if excluded and reason == "unchanged" else reason


def stale(experience: Experience, history: History, max_staleness: int) -> DropReason | None:
    """P5, by the oldest version of all its spans (P3: the versions that the engine reported)."""
    staleness = history.staleness(versions_of(experience))
    if staleness is None:
        return "foreign_version"
    return "stale" if staleness > max_staleness else None


def missing_advantage(
    experience: Experience, entry: Entry, history: History, steps: int, advantage_max: float
) -> float:
    """A(new) - A(old): what a correction has to add to the present weights. What an excluded version answered is worth
    nothing, whatever its reward."""
    held = entry.held(history, steps)
    reward = None if history.excluded_of(versions_of(experience)) else experience.reward
    return entry.advantage_of(reward, advantage_max) - math.fsum(one.advantage for one in held)


def versions_of(experience: Experience) -> Sequence[str]:
    branch = experience.branch
    return () if branch is None else tuple(dict.fromkeys(span.version for span in branch.spans))


def _malformed(experience: Experience, limits: AdmissionLimits) -> DropReason | None:
    """The model has no such token or context, the first token would have to be predicted from nothing, or the reward
    cannot be meant."""
    assert experience.branch is not None
    token_ids = experience.branch.token_ids
    if len(token_ids) > limits.sequence_tokens:
        return "too_long"
    if max(token_ids) >= limits.vocabulary or experience.branch.spans[0].start == 0:
        return "invalid"
    return "invalid" if abs(experience.reward or 0.0) > limits.reward_max else None
