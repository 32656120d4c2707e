"""What of an experience is trained: its branch, single answers of it, and what should have been answered. Pure.

An *example* is one sequence with the tokens of it that are in the loss; a row of a batch is made of one. Most
algorithms know one example of an experience, its branch. A side of a preference is the branch up to the end of the
answer, with that answer alone in the loss. An edit is the same up to the beginning of the answer, exactly as the engine
was asked (P2), and then the edit's own tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from hashlib import sha256

from headrace_schemas import Branch, Experience, Span
from headrace_schemas.events.chat import Message
from headrace_schemas.events.experience import Edit
from headrace_trainer.algorithms.signals import Signals

Write = Callable[[Message], tuple[int, ...] | None]
"""The tokens of an answer, with the one that ends it; None where the model cannot be made to say it."""
Replied = Callable[[Experience], Iterable["Example"]]
"""The answers that somebody replied to, and those that were accepted."""


@dataclass(frozen=True, slots=True)
class Example:
    """One sequence of an experience. Compared by `part`, which names it within the experience."""

    part: str = ""
    """Empty: the branch as it is."""
    value: float | None = None
    """1: to be made likelier, -1: less likely. None: the experience's reward says."""
    pair: str = ""
    """What it is trained together with has the same; empty where it is trained alone."""
    turn_id: str = ""
    choice: int = 0
    """The answer that it is about, where it is not the whole branch."""
    tokens: tuple[int, ...] = ()
    """Written in place of that answer; empty where the answer itself is trained."""
    length_max: int = 0
    """Of the sequences that a teacher is asked about besides its own."""

    def span(self, branch: Branch) -> Span | None:
        """The answer that it is about."""
        return next((span for span in branch.spans if (span.turn_id, span.choice) == (self.turn_id, self.choice)), None)


BRANCH = Example()


def examples(
    experience: Experience,
    signals: Signals,
    worth: Callable[[float], float] | None,
    write: Write | None,
    replied: Replied | None = None,
) -> tuple[Example, ...]:
    """In a fixed order, each part once. None of them: the experience carries nothing that is trained."""
    if experience.branch is None:
        return ()
    found = [*_branch(experience, signals, worth)]
    if signals.edits and write is not None:
        for edit in experience.edits:
            found += _edited(experience, edit, signals, write)
    if signals.preferences:
        found += _compared(experience, signals)
    if signals.replies and replied is not None:
        found += replied(experience)
    held = [one for one in found if not one.turn_id or one.span(experience.branch) is not None]
    return tuple({one.part: one for one in held}.values())


def _branch(experience: Experience, signals: Signals, worth: Callable[[float], float] | None) -> Iterator[Example]:
    if experience.origin == "written" and signals.written:
        yield from _demonstration(experience, signals, worth)
    elif signals.branches:
        if experience.origin == "sampled":
            yield Example(value=1.0)
    elif signals.rewards and experience.reward is not None and (worth is None or worth(experience.reward) != 0.0):
        yield BRANCH


def _demonstration(
    experience: Experience, signals: Signals, worth: Callable[[float], float] | None
) -> Iterator[Example]:
    """What somebody wrote is to be learned, unless it says otherwise: a rejected answer is none to learn, a side of a
    preference is trained as such where preferences are, and where rewards are labels the label says what it is."""
    sides = {one.side for one in experience.preferences}
    if experience.no_reward == "withdrawn" or "rejected" in sides or (sides and signals.preferences):
        return
    if worth is None or experience.reward is None:
        yield Example(value=1.0)
    elif worth(experience.reward) != 0.0:
        yield BRANCH


def _edited(experience: Experience, edit: Edit, signals: Signals, write: Write) -> Iterator[Example]:
    tokens = write(edit.message)
    if not tokens:
        return
    name = f"{edit.turn_id}/{edit.choice}/{sha256(repr(tokens).encode()).hexdigest()[:16]}"
    pair = f"edit/{experience.experience_id}/{name}" if signals.paired else ""
    yield Example(f"edit/{name}", 1.0, pair, edit.turn_id, edit.choice, tokens)
    if signals.replaced:
        yield Example(f"replaced/{name}", -1.0, pair, edit.turn_id, edit.choice)


def _compared(experience: Experience, signals: Signals) -> Iterator[Example]:
    for side in experience.preferences:
        name = f"{side.turn_id}/{side.choice}/{side.preference_id}"
        # A tenant's preferences never meet those of another one.
        tenant = f"{len(experience.tenant)}/{experience.tenant}"
        pair = f"preference/{tenant}/{side.preference_id}" if signals.paired else ""
        value = 1.0 if side.side == "chosen" else -1.0
        yield Example(f"preference/{name}", value, pair, side.turn_id, side.choice)


def tokens_of(example: Example, branch: Branch) -> int:
    """The length of its sequence."""
    span = example.span(branch)
    if span is None:
        return len(branch.token_ids)
    own = span.start + len(example.tokens) if example.tokens else span.stop
    return max(own, example.length_max)
