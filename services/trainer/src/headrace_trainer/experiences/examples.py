"""The examples of an experience, and the updates that the weights still lack for them. Pure.

An *example* is one sequence with a mask of the tokens that are in the loss; it becomes one row of a batch. Most
algorithms use one example of an experience, its branch. A side of a preference is the branch up to the end of the
answer, with that answer alone in the loss. An edit is the branch up to the beginning of the answer, with the prompt
exactly as the engine received it, followed by the edit's own tokens.

The window remembers the contributions of each example (`part`) to the weights. An example with a value (an edit, a
side of a preference) must have contributions of that value in total. An example that was withdrawn or replaced must
have contributions of zero. A branch must have the advantage of its present reward, by the baseline and scale of its
first training. The difference is trained as a correction, with the opposite sign where the weights hold too much.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256

from headrace_schemas import Branch, Experience, Span
from headrace_schemas.events.chat import Message
from headrace_schemas.events.trajectory import Edit
from headrace_trainer.algorithms.estimators import Reply
from headrace_trainer.algorithms.presets import Signals
from headrace_trainer.experiences.history import History
from headrace_trainer.experiences.window import Contribution, Entry

WriteAnswer = Callable[[Message], tuple[int, ...] | None]
"""Returns the tokens of an answer with its end token, or None where the model cannot produce it."""
FindReplyExamples = Callable[[Experience], Iterable["Example"]]
"""Returns the examples of answers that a user replied to."""


@dataclass(frozen=True, slots=True)
class Example:
    """One training sequence of an experience: the whole branch, one answer, or a replacement of an answer.

    `part` is its unique name within the experience.
    """

    part: str = ""
    """Empty for the whole branch."""
    value: float | None = None
    """1 to make the sequence likelier, -1 to make it less likely. None: the experience's reward decides, or `grade`."""
    pair: str = ""
    """Name shared by the examples that are trained together; empty where the example is trained alone."""
    turn_id: str = ""
    choice: int = 0
    """Choice of the answer that the example is about, where it is not the whole branch."""
    tokens: tuple[int, ...] = ()
    """Tokens that replace that answer; empty where the answer itself is trained."""
    length_max: int = 0
    """Length of the longest further sequence that a teacher grades for this example."""
    grade: float | None = None
    """The value that the algorithm gives to the user's `reply`, which is compared like a reward; None where the example
    is not trained by a grade."""
    reply: Reply | None = None

    @property
    def is_branch(self) -> bool:
        """Whether the example is the whole branch, trained by its reward."""
        return self.value is None and not self.part

    def span(self, branch: Branch) -> Span | None:
        """Return the tokens (span) of the answer that this example is about, or None if `branch` does not contain that
        answer.
        """
        return next((span for span in branch.spans if (span.turn_id, span.choice) == (self.turn_id, self.choice)), None)


BRANCH = Example()


def examples(
    experience: Experience,
    signals: Signals,
    worth: Callable[[float], float] | None,
    write: WriteAnswer | None,
    replied: FindReplyExamples | None = None,
    *,
    logprobs: bool = False,
) -> tuple[Example, ...]:
    """Derive the examples of an experience, in a fixed order, each part once.

    The result is empty if the experience carries no signal that is trained.

    Args:
        experience: the experience.
        signals: the signals that the algorithm trains.
        worth: maps a reward to the value that the algorithm uses; None for the reward itself.
        write: function that tokenizes edits; None if edits are not trained.
        replied: function that returns the examples of answers with replies; None if replies are not trained.
        logprobs: whether to leave out answers without the logprobs of the sampling policy. Their edits stay.
    """
    if experience.branch is None:
        return ()
    trained = experience.branch.sampled if logprobs else experience.branch
    candidates = [*_branch_examples(experience, signals, worth)]
    if signals.edits and write is not None:
        for edit in experience.edits:
            candidates += _edit_examples(experience, edit, signals, write)
    if signals.preferences:
        candidates += _preference_examples(experience, signals)
    if signals.replies and replied is not None and trained is not None:
        candidates += replied(experience.model_copy(update={"branch": trained}))
    all_answers, trained_answers = _answers_of(experience.branch), _answers_of(trained)
    present_examples = [
        example for example in candidates if _is_present(example, all_answers if example.tokens else trained_answers)
    ]
    return tuple({example.part: example for example in present_examples}.values())


def _answers_of(branch: Branch | None) -> frozenset[tuple[str, int]]:
    """Return turn id and choice of each answer of the branch, as a set, so that each look-up takes constant time."""
    return frozenset((span.turn_id, span.choice) for span in branch.spans) if branch is not None else frozenset()


def _is_present(example: Example, answers: frozenset[tuple[str, int]]) -> bool:
    """Return whether `answers` contains the answer of the example, or for a whole branch, whether it has any answer."""
    return (example.turn_id, example.choice) in answers if example.turn_id else bool(answers)


def _branch_examples(
    experience: Experience, signals: Signals, worth: Callable[[float], float] | None
) -> Iterator[Example]:
    if experience.origin == "written" and signals.written:
        yield from _demonstration_examples(experience, signals, worth)
    elif signals.branches:
        if experience.origin == "sampled":
            yield Example(value=1.0)
    elif signals.rewards and experience.reward is not None and (worth is None or worth(experience.reward) != 0.0):
        yield BRANCH


def _demonstration_examples(
    experience: Experience, signals: Signals, worth: Callable[[float], float] | None
) -> Iterator[Example]:
    """Yield the example of a branch that a person or a data set wrote, at most one.

    It is a demonstration with the value 1, unless the algorithm maps its reward to a label, which then decides. Nothing
    is yielded for a withdrawn branch, a rejected side of a preference, and a branch whose preferences are trained.
    """
    sides = {preference.side for preference in experience.preferences}
    if experience.no_reward == "withdrawn" or "rejected" in sides or (sides and signals.preferences):
        return
    if worth is None or experience.reward is None:
        yield Example(value=1.0)
    elif worth(experience.reward) != 0.0:
        yield BRANCH


def _edit_examples(experience: Experience, edit: Edit, signals: Signals, write: WriteAnswer) -> Iterator[Example]:
    tokens = write(edit.message)
    if not tokens:
        return
    name = f"{edit.turn_id}/{edit.choice}/{sha256(repr(tokens).encode()).hexdigest()[:16]}"
    pair = f"edit/{experience.experience_id}/{name}" if signals.paired else ""
    yield Example(f"edit/{name}", 1.0, pair, edit.turn_id, edit.choice, tokens)
    if signals.replaced:
        yield Example(f"replaced/{name}", -1.0, pair, edit.turn_id, edit.choice)


def _preference_examples(experience: Experience, signals: Signals) -> Iterator[Example]:
    for side in experience.preferences:
        name = f"{side.turn_id}/{side.choice}/{side.preference_id}"
        # Preferences of two tenants must never share a pair, even if their ids are equal.
        tenant = f"{len(experience.tenant)}/{experience.tenant}"
        pair = f"preference/{tenant}/{side.preference_id}" if signals.paired else ""
        value = 1.0 if side.side == "chosen" else -1.0
        yield Example(f"preference/{name}", value, pair, side.turn_id, side.choice)


def required_lengths(examples: Sequence[Example], branch: Branch) -> list[int]:
    """Return, for each example, the length in tokens of the longest sequence that its training computes.

    This is the part of `branch` up to the end of the example's answer or its replacement, or a longer sequence that a
    teacher grades. If the branch does not have the answer, it is the whole branch.
    """
    spans = {(span.turn_id, span.choice): span for span in reversed(branch.spans)}
    lengths: list[int] = []
    for example in examples:
        span = spans.get((example.turn_id, example.choice))
        length = len(branch.token_ids)
        if span is not None:
            length = max(span.start + len(example.tokens) if example.tokens else span.stop, example.length_max)
        lengths.append(length)
    return lengths


SpanAdvantages = tuple[float, ...]
"""The advantage of each span of a branch."""


@dataclass(frozen=True, slots=True)
class CorrectionRules:
    """Rules for training an experience again after its reward has changed.

    The first training used the advantage of the old reward. A correction trains the advantage of the new reward minus
    that of the old one.
    """

    advantage_max: float
    correction_min: float
    worth: Callable[[float], float] | None = None
    """Maps a reward to the value that the algorithm uses."""
    credit: Callable[[float, Sequence[float | None], float, float], SpanAdvantages] | None = None
    """Computes the advantages of the spans, where turns have advantages of their own."""
    reestimate_lost: bool = False
    """Whether an example that was removed from the weights gets new token advantages, as its critic has changed."""
    logprobs: bool = True
    """Whether answers are trained by the logprobs of the policy that sampled them."""

    def trained_branch(self, branch: Branch) -> Branch | None:
        """Return the branch with only the spans that can be trained, or None if there are none.

        If the algorithm needs logprobs, spans without logprobs cannot be trained.
        """
        return branch.sampled if self.logprobs else branch


@dataclass(frozen=True, slots=True)
class PendingUpdate:
    """An example and the advantage that training must still apply to it.

    `advantage` is None until the reward was compared with its group.
    """

    example: Example
    advantage: float | None
    token_weight: float | None = None
    """Token weight of the contribution that is corrected, or None where the weights hold none."""
    turns: SpanAdvantages = ()
    """The missing advantage of each span, where turns have advantages of their own."""

    @property
    def is_new(self) -> bool:
        """Whether the weights hold no contribution of the example."""
        return self.token_weight is None


def pending_updates(
    experience: Experience,
    entry: Entry | None,
    examples: Sequence[Example],
    history: History,
    steps: int,
    rules: CorrectionRules,
) -> tuple[PendingUpdate, ...]:
    """Return the updates that the weights still lack for an experience.

    Args:
        experience: the newest revision of the experience.
        entry: the window's entry of the experience, or None if it was not seen before.
        examples: the examples of this revision.
        history: versions of the lineage.
        steps: number of steps that the lineage has taken.
        rules: rules that convert the reward to an advantage.

    Returns:
        The updates of `examples`, in their order, followed by reversals of examples that were withdrawn.
    """
    if entry is None or not entry.trained:
        return tuple(PendingUpdate(example, example.value) for example in examples)
    contributions: dict[str, list[Contribution]] = {}
    for contribution in entry.contributions_in_weights(history, steps):
        contributions.setdefault(contribution.part, []).append(contribution)
    trained_parts = {contribution.part for contribution in entry.contributions}
    updates: list[PendingUpdate] = []
    for example in examples:
        if example.value is None and (
            example.part not in trained_parts or (rules.reestimate_lost and example.part not in contributions)
        ):
            updates.append(PendingUpdate(example, None))
        else:
            target = _advantage(experience, entry, example, rules) if example.value is None else example.value
            turns = _span_advantages(experience, entry, target, rules) if example.is_branch else ()
            updates.append(_pending_update(example, target, turns, contributions.pop(example.part, [])))
    updates += [
        _pending_update(_withdrawn_example(reversed_contributions[0]), 0.0, (), reversed_contributions)
        for reversed_contributions in contributions.values()
    ]
    return tuple(update for update in updates if update.advantage is None or _exceeds(update, rules.correction_min))


def turns_of(experience: Experience, rules: CorrectionRules) -> tuple[float | None, ...]:
    """Return for each trained span of the branch the reward of its turn, if it is the turn's first span; else None.

    For a turn without a reward it is None, too.
    """
    assert experience.branch is not None
    branch = rules.trained_branch(experience.branch)
    assert branch is not None, "an experience without a span that can be trained has no branch to train"
    rewards: dict[str, float | None] = {reward.turn_id: reward.value for reward in experience.turn_rewards}
    return tuple(rewards.pop(span.turn_id, None) for span in branch.spans)


def _advantage(experience: Experience, entry: Entry, example: Example, rules: CorrectionRules) -> float:
    if example.grade is not None:
        return entry.advantage_of(example.grade, rules.advantage_max, example.part)
    reward = experience.reward
    if reward is not None and rules.worth is not None:
        reward = rules.worth(reward)
    return entry.advantage_of(reward, rules.advantage_max)


def _span_advantages(experience: Experience, entry: Entry, advantage: float, rules: CorrectionRules) -> SpanAdvantages:
    if rules.credit is None:
        return ()
    advantages = rules.credit(advantage, turns_of(experience, rules), *(entry.turn_terms or (0.0, 0.0)))
    return tuple(max(-rules.advantage_max, min(rules.advantage_max, value)) for value in advantages)


def _pending_update(
    example: Example, target: float, target_turns: SpanAdvantages, contributions: Sequence[Contribution]
) -> PendingUpdate:
    missing = target - math.fsum(contribution.advantage for contribution in contributions)
    spans = max((len(contribution.turns) for contribution in contributions), default=len(target_turns))
    by_span = [
        (target_turns[span] if span < len(target_turns) else 0.0)
        - math.fsum(contribution.turns[span] for contribution in contributions if span < len(contribution.turns))
        for span in range(spans)
    ]
    return PendingUpdate(example, missing, contributions[0].token_weight if contributions else None, tuple(by_span))


def _exceeds(update: PendingUpdate, correction_min: float) -> bool:
    assert update.advantage is not None
    return max(map(abs, update.turns or (update.advantage,))) >= correction_min


def _withdrawn_example(contribution: Contribution) -> Example:
    detail = contribution.what
    if detail is None or not detail.part:
        return BRANCH
    return Example(detail.part, None, "", detail.turn_id, detail.choice, detail.tokens)
