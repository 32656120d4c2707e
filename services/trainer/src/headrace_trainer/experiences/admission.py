"""Decide what to do with an experience that has just arrived: validity, supersession, staleness, dedupe. Pure.

Every revision of an experience gets exactly one outcome, now or later, and changes the weights at most once:

- a revision that was seen before is a redelivery and gets no second outcome;
- a revision below one seen before comes too late and is dropped;
- a higher revision of an experience that still waits replaces it, and the old one is dropped as `superseded`;
- a higher revision of an experience that was trained is a *correction*. It is trained with the advantage that is
  missing, A(new) - A(old), where both use the baseline and scale of the first training and A(withdrawn) = 0, and with
  the token weight of the first training. The policy gradient is linear in the advantage and the optimizer adds
  contributions up, so both steps together are nearly what training the last reward alone would have been; how nearly is
  measured (docs/algorithms.md, "Corrections"). A correction below `correction_min` is dropped as `unchanged`.

A(old) is the advantage that the present weights hold of the experience: when a version was abandoned, the contributions
of its steps are gone, and a correction then supplies the whole advantage.

An experience is used if it carries a signal that the algorithm trains (`Signals`). Otherwise it is dropped with the
reason in its `no_reward` field, or else as `no_signal`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from headrace_runtime.storage.isolation import is_fatal, reason_of
from headrace_schemas import Experience
from headrace_schemas.events.chat import SAMPLED_TEMPERATURE_MIN
from headrace_schemas.events.checkpoint import DropReason, LearnedSignals
from headrace_trainer.algorithms.catalog.hindsight import hindsight_of
from headrace_trainer.algorithms.presets import REWARDS, Signals
from headrace_trainer.algorithms.reward_ranges import NO_LIMITS, RangeLimits
from headrace_trainer.backends import BACKENDS
from headrace_trainer.experiences.examples import (
    CorrectionRules,
    Example,
    FindReplyExamples,
    PendingUpdate,
    WriteAnswer,
    examples,
    pending_updates,
    required_lengths,
)
from headrace_trainer.experiences.history import History
from headrace_trainer.experiences.replies import GradeReplies, ReplyReader
from headrace_trainer.experiences.restrictions import SetBuilder
from headrace_trainer.experiences.templates import EditWriter
from headrace_trainer.experiences.window import Entry
from headrace_trainer.settings import TrainerSettings

REWARD_MAX = 1e6
"""Rewards beyond plus or minus this are dropped as `invalid`, because their unit must be wrong."""
CORRECTION_MIN = 1e-3
"""A revised reward that moves the advantage by less than this after training is dropped as `unchanged`."""
_DETAIL_LENGTH_MAX = 200


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """Conditions under which an experience is trained, and the functions that derive training examples from it.

    The limits are numbers of token ids, tokens of a sequence, versions since sampling, and sizes of rewards and
    advantages.
    """

    vocabulary: int
    sequence_tokens: int
    max_staleness: int
    reward_max: float
    advantage_max: float
    correction_min: float
    signals: Signals = REWARDS
    logprobs: bool = True
    """Whether the engine's logprobs are needed. If so, written tokens cannot be trained."""
    correction_rules: CorrectionRules | None = None
    """None: rewards are used as advantages, between plus and minus `advantage_max`."""
    write: WriteAnswer | None = None
    """Tokenizes edits, where they are trained."""
    replies: ReplyReader | None = None
    """Finds the user's replies to answers, where they are trained."""
    grade: GradeReplies | None = None
    """Grades these replies; None where a teacher does."""
    sets: SetBuilder | None = None
    """Builds the sets of tokens that answers were sampled from; None where the back end cannot use them."""
    examples_max: int = 64
    ranges: RangeLimits = NO_LIMITS
    """Bounds beyond which a reward is a stray."""

    def examples(self, experience: Experience) -> tuple[Example, ...]:
        """Return the parts of an experience that are trained: the whole branch, single answers, or replacements of
        answers. Answers that end beyond `sequence_tokens` are left out.
        """
        worth, logprobs = self.rules.worth, self.rules.logprobs
        candidates = examples(
            experience, self.signals, worth, self.write, self._reply_examples(experience), logprobs=logprobs
        )
        branch = experience.branch
        if branch is None:
            return ()
        return tuple(
            example
            for example, length in zip(candidates, required_lengths(candidates, branch), strict=True)
            if not example.part or (length <= self.sequence_tokens and max(example.tokens, default=0) < self.vocabulary)
        )

    def _reply_examples(self, experience: Experience) -> FindReplyExamples | None:
        """Return the function that derives examples from the user's replies, or None if replies are not trained.

        If the algorithm grades replies, the whole branch of `experience` is read, and not only its trained spans.
        """
        reader, grade = self.replies, self.grade
        if reader is None:
            return None
        if grade is None:
            return reader.examples
        return lambda _trained: reader.graded_examples(experience, grade)

    def left_out_turns(self, experience: Experience, edited: Collection[str] = ()) -> tuple[str, ...]:
        """Return the turns of an experience's branch whose answers lack logprobs that training needs, except
        `edited` ones."""
        branch = experience.branch
        trained = None if branch is None else self.rules.trained_branch(branch)
        if branch is None or trained is branch:
            return ()
        trained_turns = {*edited, *(() if trained is None else trained.turn_ids)}
        return tuple(turn for turn in branch.turn_ids if turn not in trained_turns)

    def restriction_problem(self, experience: Experience) -> str | None:
        """Return the reason why the allowed tokens of a branch's positions cannot be computed, or None if they can.

        The first call for a branch may take seconds. For a branch that is too long to be trained, the result is None.
        """
        branch = experience.branch
        if branch is None or len(branch.token_ids) > self.sequence_tokens:
            return None
        if not any(span.restricted for span in branch.spans):
            return None
        return "restricted" if self.sets is None else self.sets.problem(branch)

    @property
    def rules(self) -> CorrectionRules:
        """Rules by which an experience is trained again after its reward has changed: `correction_rules`, or defaults.

        By default, rewards are used without a mapping to other values.
        """
        return self.correction_rules or CorrectionRules(self.advantage_max, self.correction_min, logprobs=self.logprobs)


def limits_of(settings: TrainerSettings, vocabulary: int, context: int) -> AdmissionLimits:
    """Return the admission limits for a base model.

    Args:
        settings: The trainer's settings.
        vocabulary: The number of token ids of the model.
        context: The longest sequence that the model can be trained on, in tokens.

    Raises:
        SettingError: Edits or replies are trained, and the base has no tokenizer or chat template for them.
    """
    advantage = settings.advantage
    kind, signals = advantage.estimator, advantage.signals
    worth, credit, grade = kind.worth, kind.credit, kind.grade
    correction_rules = CorrectionRules(
        advantage.limit,
        CORRECTION_MIN,
        None if worth is None else lambda reward: worth(reward, advantage),
        None if credit is None else lambda value, turns, base, scale: credit(value, turns, base, scale, advantage),
        settings.needs.critic,
        settings.needs.logprobs,
    )
    return AdmissionLimits(
        vocabulary=vocabulary,
        sequence_tokens=min(settings.memory.sequence_tokens or settings.memory.queue_tokens, context),
        max_staleness=settings.max_staleness,
        reward_max=REWARD_MAX,
        advantage_max=advantage.limit,
        correction_min=CORRECTION_MIN,
        signals=signals,
        logprobs=settings.needs.logprobs and not signals.written,
        correction_rules=correction_rules,
        write=EditWriter(Path(settings.base)) if signals.edits else None,
        replies=open_reply_reader(settings) if signals.replies else None,
        grade=None if grade is None else lambda replies: grade(replies, advantage),
        sets=SetBuilder(Path(settings.base), vocabulary) if BACKENDS.get(settings.backend).restricts else None,
        examples_max=settings.memory.examples,
        ranges=advantage.range_limits,
    )


def learned_signals(settings: TrainerSettings) -> LearnedSignals:
    """Return the kinds of feedback that the algorithm trains, for the gateway and the account."""
    return settings.advantage.signals.announcement(settings.algorithm, logprobs=settings.needs.logprobs)


def open_reply_reader(settings: TrainerSettings) -> ReplyReader:
    """Open the reader of users' replies with the base's tokenizer and chat template.

    Raises:
        SettingError: the chat template does not mark where messages begin and end.
    """
    hindsight = hindsight_of(settings.advantage)
    earlier_max = hindsight.earlier_max if hindsight.compared == "distributions" else 0
    return ReplyReader(Path(settings.base), hindsight.contradicted_max, hindsight.accepted_min, earlier_max)


@dataclass(frozen=True, slots=True)
class Objection:
    """Reason why a revision of an experience cannot change the weights, with an optional more exact `detail`."""

    reason: DropReason
    detail: str | None = None


EXCLUDED = Objection("withdrawn", "excluded")
"""The objection to answers of a version whose rollout excluded it."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Decision to queue an experience, drop it with a reason, or ignore a redelivery.

    `replaces` is whether an older revision of the experience, which waits, must be removed from the queue.
    """

    action: Literal["queue", "drop", "ignore"]
    reason: DropReason | None = None
    replaces: bool = False
    detail: str | None = None


def decide(
    experience: Experience, entry: Entry | None, history: History, steps: int, limits: AdmissionLimits
) -> Decision:
    """Decide about an experience that arrived. If an error occurs, it is dropped as `invalid`.

    Args:
        experience: the experience.
        entry: the window's entry of the experience, or None if it was not seen before.
        history: versions of the lineage.
        steps: number of steps that the lineage has taken.
        limits: the conditions.
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
        if entry.has_seen(experience.revision):
            return Decision("ignore")
        if experience.revision < entry.revisions[-1]:
            return Decision("drop", "already_trained" if entry.trained else "superseded")
    rejection = find_objection(experience, entry, history, steps, limits)
    if rejection is None:
        return Decision("queue", None, replaces=True)
    return Decision("drop", rejection.reason, replaces=True, detail=rejection.detail)


def find_objection(
    experience: Experience, entry: Entry | None, history: History, steps: int, limits: AdmissionLimits
) -> Objection | None:
    """Return the reason why this revision cannot change the weights, or None when it can."""
    trained = entry is not None and entry.trained
    if experience.branch is None:
        return Objection(experience.no_reward or "no_reward")
    if not trained and not limits.examples(experience):
        return _objection_without_examples(experience, limits)
    return _find_malformation(experience, limits) or find_expiry(experience, entry, history, steps, limits)


def find_expiry(
    experience: Experience, entry: Entry | None, history: History, steps: int, limits: AdmissionLimits
) -> Objection | None:
    """Return the reason why a waiting experience can no longer be trained with the present weights, or None."""
    try:
        return _find_expiry(experience, entry, history, steps, limits)
    except Exception as error:
        if is_fatal(error) or isinstance(error, OSError):
            raise
        return Objection("invalid", reason_of(error)[:_DETAIL_LENGTH_MAX])


def _find_expiry(
    experience: Experience, entry: Entry | None, history: History, steps: int, limits: AdmissionLimits
) -> Objection | None:
    trained = entry is not None and entry.trained
    versions = versions_of(experience, limits.rules)
    excluded = history.find_excluded(versions) is not None
    if excluded and not trained:
        return EXCLUDED
    reason = staleness_reason(versions, history, limits.max_staleness)
    if reason is not None:
        return Objection(reason)
    if entry is not None and trained and not pending_updates_of(experience, entry, history, steps, limits):
        return EXCLUDED if excluded else Objection("unchanged")
    return None


def pending_updates_of(
    experience: Experience, entry: Entry | None, history: History, steps: int, limits: AdmissionLimits
) -> tuple[PendingUpdate, ...]:
    """Return the updates that the weights lack for an experience.

    Answers of an excluded version have no examples, so their contributions are reversed.
    """
    excluded = history.find_excluded(versions_of(experience, limits.rules)) is not None
    trained_examples = () if excluded else limits.examples(experience)
    return pending_updates(experience, entry, trained_examples, history, steps, limits.rules)


def staleness_reason(versions: Sequence[str], history: History, max_staleness: int) -> DropReason | None:
    """Return why an experience sampled by these versions is too old to be trained, or None if it is fresh.

    The oldest version of all its spans counts, as the engine reported it. Tokens that no model sampled are never
    stale.
    """
    staleness = history.staleness(versions)
    if staleness is None:
        return "foreign_version"
    return "stale" if staleness > max_staleness else None


def versions_of(experience: Experience, rules: CorrectionRules) -> Sequence[str]:
    """Return the versions that sampled the trained tokens of an experience, for its staleness. Written tokens and
    answers of foreign servers have no version.
    """
    branch = experience.branch
    if branch is None or experience.origin != "sampled":
        return ()
    spans = (rules.trained_branch(branch) or branch).spans
    return tuple(dict.fromkeys(span.version for span in spans if span.no_logprobs != "foreign"))


def _objection_without_examples(experience: Experience, limits: AdmissionLimits) -> Objection:
    """Return the reason why an experience has no examples: it is too long or invalid, or has no reward, no logprobs, or
    no signal that the algorithm uses.
    """
    if experience.branch is not None and limits.write is not None and limits.signals.edits and experience.edits:
        longer = replace(limits, sequence_tokens=2**62)
        return Objection("too_long") if longer.examples(experience) else Objection("invalid", "edit")
    if limits.signals.rewards_alone and experience.no_reward is not None:
        return Objection(experience.no_reward)
    if experience.branch is not None and limits.rules.trained_branch(experience.branch) is None:
        return Objection(experience.no_reward or "no_reward", "no_logprobs")
    return Objection(experience.no_reward or "no_reward", "no_signal")


def _find_malformation(experience: Experience, limits: AdmissionLimits) -> Objection | None:
    """Return why an experience with examples cannot be trained, whatever the weights are, or None if it can.

    Reasons are for example a token id outside the vocabulary, too long a sequence, a trained first token, which no
    prefix predicts, and a reward beyond `reward_max`.
    """
    assert experience.branch is not None
    if experience.origin == "written" and limits.logprobs:
        return Objection("invalid", "written")
    branch = limits.rules.trained_branch(experience.branch) or experience.branch
    if len(branch.token_ids) > limits.sequence_tokens:
        return Objection("too_long")
    if max(branch.token_ids) >= limits.vocabulary:
        return Objection("invalid", "vocabulary")
    if any(span.temperature < SAMPLED_TEMPERATURE_MIN for span in branch.spans):
        return Objection("invalid", "temperature")
    if experience.branch.spans[0].start == 0:
        return Objection("invalid")
    if len(limits.examples(experience)) > limits.examples_max:
        return Objection("invalid", "examples")
    if abs(experience.reward or 0.0) > limits.reward_max:
        return Objection("invalid")
    detail = limits.restriction_problem(experience)
    return None if detail is None else Objection("invalid", detail)
