"""Derives the examples of an experience: its branch, single answers of it, and edited answers. Pure.

An *example* is one sequence with a mask of the tokens that are in the loss; it becomes one row of a batch. Most
algorithms use one example of an experience, its branch. A side of a preference is the branch up to the end of the
answer, with that answer alone in the loss. An edit is the branch up to the beginning of the answer, with the prompt
exactly as the engine received it (P2), followed by the edit's own tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from hashlib import sha256

from headrace_schemas import Branch, Experience, Span
from headrace_schemas.events.chat import Message
from headrace_schemas.events.experience import Edit
from headrace_trainer.algorithms.estimators import Reply
from headrace_trainer.algorithms.needs import Signals

WriteAnswer = Callable[[Message], tuple[int, ...] | None]
"""Returns the tokens of an answer with its end token, or None where the model cannot produce it."""
FindReplyExamples = Callable[[Experience], Iterable["Example"]]
"""Returns the examples of answers that a user replied to."""


@dataclass(frozen=True, slots=True)
class Example:
    """One sequence of an experience. `part` identifies it within the experience."""

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
        """Whether it is the whole branch, trained by its reward."""
        return self.value is None and not self.part

    def span(self, branch: Branch) -> Span | None:
        """Return the span of the answer that the example is about."""
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
    """Return the examples of an experience in a fixed order, each part once.

    The result is empty if the experience carries no signal that is trained. With `logprobs`, answers are trained by
    the logprobs of the policy that sampled them, and answers without these are no examples; their edits are.
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
    present_examples = [
        example for example in candidates if _is_present(example, experience.branch if example.tokens else trained)
    ]
    return tuple({example.part: example for example in present_examples}.values())


def _is_present(example: Example, branch: Branch | None) -> bool:
    """Return whether `branch` has the answer that the example is about, or any answer."""
    return branch is not None and (not example.turn_id or example.span(branch) is not None)


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
    """Yield the example of a written branch. It is trained as a demonstration unless its preferences or its reward
    decide
    otherwise: a rejected answer is no demonstration, a side of a preference is trained as a preference where the
    algorithm uses them, and where rewards are labels the label decides."""
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


def tokens_of(example: Example, branch: Branch) -> int:
    """Return the length of the longest sequence that the example needs."""
    span = example.span(branch)
    if span is None:
        return len(branch.token_ids)
    length = span.start + len(example.tokens) if example.tokens else span.stop
    return max(length, example.length_max)
