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

An experience is used if it carries what the algorithm trains (`Signals`). Otherwise it is dropped with the reason that
it names itself, or else as `no_signal`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from headrace_runtime.isolation import is_fatal, reason_of
from headrace_schemas import Experience
from headrace_schemas.events.chat import SAMPLED_TEMPERATURE_MIN
from headrace_schemas.events.checkpoint import DropReason
from headrace_trainer.algorithms.catalog.hindsight import hindsight_of
from headrace_trainer.algorithms.reward_ranges import NO_LIMITS, RangeLimits
from headrace_trainer.algorithms.signals import REWARDS, Signals
from headrace_trainer.experiences.due import Due, Terms, due
from headrace_trainer.experiences.edits import EditWriter
from headrace_trainer.experiences.examples import Example, Write, examples, tokens_of
from headrace_trainer.experiences.history import History
from headrace_trainer.experiences.replies import ReplyReader
from headrace_trainer.experiences.window import Entry
from headrace_trainer.settings import TrainerSettings

_DETAIL_LENGTH_MAX = 200


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """What a trainable sequence must satisfy, and what of an experience is trained."""

    vocabulary: int
    sequence_tokens: int
    max_staleness: int
    reward_max: float
    advantage_max: float
    correction_min: float
    signals: Signals = REWARDS
    logprobs: bool = True
    """The engine's are needed: what nobody sampled cannot be trained."""
    terms: Terms | None = None
    """None: rewards are advantages as they are, between plus and minus `advantage_max`."""
    write: Write | None = None
    """Makes the tokens of edits, where they are trained."""
    replies: ReplyReader | None = None
    """Reads what users said next, where that is trained."""
    examples_max: int = 64
    ranges: RangeLimits = NO_LIMITS
    """Which rewards are strays."""

    def examples(self, experience: Experience) -> tuple[Example, ...]:
        """What of it is trained; of its answers those that a sequence has room for."""
        replied = None if self.replies is None else self.replies.examples
        found = examples(experience, self.signals, self.rules.worth, self.write, replied)
        branch = experience.branch
        if branch is None:
            return ()
        return tuple(
            one
            for one in found
            if not one.part
            or (tokens_of(one, branch) <= self.sequence_tokens and max(one.tokens, default=0) < self.vocabulary)
        )

    @property
    def rules(self) -> Terms:
        """`terms`, or the plain ones."""
        return self.terms or Terms(self.advantage_max, self.correction_min)


def limits_of(settings: TrainerSettings, vocabulary: int, context: int) -> AdmissionLimits:
    """For a model with so many token ids that can be trained on sequences of `context` tokens. Raises `SettingError`
    when edits are trained and the base cannot write them."""
    advantage = settings.advantage
    kind, signals = advantage.estimator, advantage.signals
    worth, credit = kind.worth, kind.credit
    terms = Terms(
        advantage.limit,
        advantage.correction_min,
        None if worth is None else lambda reward: worth(reward, advantage),
        None if credit is None else lambda one, turns, base, scale: credit(one, turns, base, scale, advantage),
        settings.needs.critic,
    )
    return AdmissionLimits(
        vocabulary=vocabulary,
        sequence_tokens=min(settings.memory.sequence_tokens or settings.memory.queue_tokens, context),
        max_staleness=settings.max_staleness,
        reward_max=advantage.reward_max,
        advantage_max=advantage.limit,
        correction_min=advantage.correction_min,
        signals=signals,
        logprobs=settings.needs.logprobs and not signals.written,
        terms=terms,
        write=EditWriter(Path(settings.base)) if signals.edits else None,
        replies=_reader(settings) if signals.replies else None,
        examples_max=settings.memory.examples,
        ranges=advantage.range_limits,
    )


def _reader(settings: TrainerSettings) -> ReplyReader:
    own = hindsight_of(settings.advantage)
    earlier_max = own.earlier_max if own.compared == "distributions" else 0
    return ReplyReader(Path(settings.base), own.contradicted_max, own.accepted_min, earlier_max)


@dataclass(frozen=True, slots=True)
class Dropped:
    """Why a revision cannot change the weights; `detail` says it more exactly."""

    reason: DropReason
    detail: str | None = None


EXCLUDED = Dropped("withdrawn", "excluded")
"""A version answered it that its rollout took back."""


@dataclass(frozen=True, slots=True)
class Decision:
    """`queue` it, `drop` it with a reason, or `ignore` a redelivery. `replaces`: an older revision waits no longer."""

    fate: Literal["queue", "drop", "ignore"]
    reason: DropReason | None = None
    replaces: bool = False
    detail: str | None = None


def decide(
    experience: Experience, entry: Entry | None, history: History, steps: int, limits: AdmissionLimits
) -> Decision:
    """Decide about an experience. One that breaks the decision is dropped as `invalid`, and holds up no other.

    Args:
        entry: what the window knows about the experience.
        steps: how many the lineage has taken.
    """
    try:
        return _decide(experience, entry, history, steps, limits)
    except Exception as error:
        if is_fatal(error) or isinstance(error, OSError):
            raise
        return Decision("drop", "invalid", replaces=True, detail=reason_of(error)[:_DETAIL_LENGTH_MAX])


def _decide(
    experience: Experience, entry: Entry | None, history: History, steps: int, limits: AdmissionLimits
) -> Decision:
    if entry is not None:
        if entry.seen(experience.revision):
            return Decision("ignore")
        if experience.revision < entry.revisions[-1]:
            return Decision("drop", "already_trained" if entry.trained else "superseded")
    found = objection(experience, entry, history, steps, limits)
    if found is None:
        return Decision("queue", None, replaces=True)
    return Decision("drop", found.reason, replaces=True, detail=found.detail)


def objection(
    experience: Experience, entry: Entry | None, history: History, steps: int, limits: AdmissionLimits
) -> Dropped | None:
    """Why this revision cannot change the weights, None when it can."""
    trained = entry is not None and entry.trained
    if experience.branch is None:
        return Dropped(experience.no_reward or "no_reward")
    if not trained and not limits.examples(experience):
        return _nothing(experience, limits)
    return _malformed(experience, limits) or expired(experience, entry, history, steps, limits)


def expired(
    experience: Experience, entry: Entry | None, history: History, steps: int, limits: AdmissionLimits
) -> Dropped | None:
    """The part of `objection` whose answer changes while an experience waits, because the weights move."""
    try:
        return _expired(experience, entry, history, steps, limits)
    except Exception as error:
        if is_fatal(error) or isinstance(error, OSError):
            raise
        return Dropped("invalid", reason_of(error)[:_DETAIL_LENGTH_MAX])


def _expired(
    experience: Experience, entry: Entry | None, history: History, steps: int, limits: AdmissionLimits
) -> Dropped | None:
    trained = entry is not None and entry.trained
    excluded = history.excluded_of(versions_of(experience)) is not None
    if excluded and not trained:
        return EXCLUDED
    reason = stale(experience, history, limits.max_staleness)
    if reason is not None:
        return Dropped(reason)
    if entry is not None and trained and not due_of(experience, entry, history, steps, limits):
        return EXCLUDED if excluded else Dropped("unchanged")
    return None


def due_of(
    experience: Experience, entry: Entry | None, history: History, steps: int, limits: AdmissionLimits
) -> tuple[Due, ...]:
    """What of it is to be trained. What an excluded version answered is worth nothing, whatever is said of it."""
    excluded = history.excluded_of(versions_of(experience)) is not None
    given = () if excluded else limits.examples(experience)
    return due(experience, entry, given, history, steps, limits.rules)


def stale(experience: Experience, history: History, max_staleness: int) -> DropReason | None:
    """P5, by the oldest version of all its spans (P3: the versions that the engine reported). What nobody sampled is
    never stale."""
    staleness = history.staleness(versions_of(experience))
    if staleness is None:
        return "foreign_version"
    return "stale" if staleness > max_staleness else None


def versions_of(experience: Experience) -> Sequence[str]:
    """What sampled its tokens."""
    branch = experience.branch
    sampled = branch is not None and experience.origin == "sampled"
    return tuple(dict.fromkeys(span.version for span in branch.spans)) if sampled and branch is not None else ()


def _nothing(experience: Experience, limits: AdmissionLimits) -> Dropped:
    """Why nothing of it is trained: something would be, but for one thing."""
    if experience.branch is not None and limits.write is not None and limits.signals.edits and experience.edits:
        longer = replace(limits, sequence_tokens=2**62)
        return Dropped("too_long") if longer.examples(experience) else Dropped("invalid", "edit")
    if limits.signals.rewards_alone and experience.no_reward is not None:
        return Dropped(experience.no_reward)
    return Dropped(experience.no_reward or "no_reward", "no_signal")


def _malformed(experience: Experience, limits: AdmissionLimits) -> Dropped | None:
    """The model has no such token or context, the first token would have to be predicted from nothing, or the reward
    cannot be meant."""
    assert experience.branch is not None
    token_ids = experience.branch.token_ids
    if experience.origin == "written" and limits.logprobs:
        return Dropped("invalid", "written")
    if len(token_ids) > limits.sequence_tokens:
        return Dropped("too_long")
    if max(token_ids) >= limits.vocabulary:
        return Dropped("invalid", "vocabulary")
    if any(span.temperature < SAMPLED_TEMPERATURE_MIN for span in experience.branch.spans):
        return Dropped("invalid", "temperature")
    if experience.branch.spans[0].start == 0:
        return Dropped("invalid")
    if len(limits.examples(experience)) > limits.examples_max:
        return Dropped("invalid", "examples")
    return Dropped("invalid") if abs(experience.reward or 0.0) > limits.reward_max else None
