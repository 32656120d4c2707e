"""What of an experience is still to be trained: what is new, and what the weights hold too little or too much of. Pure.

The window remembers the contributions of each example (`part`) to the weights. An example with a value (an edit, a side
of a preference) shall have contributions of that value, an example that is gone (a withdrawn preference, an edit that
was written anew) of none; a branch shall have the advantage of its present reward, on the terms of its first training.
What is missing is trained as a correction, with the opposite sign where there is too much.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headrace_schemas import Experience
from headrace_trainer.experiences.examples import BRANCH, Example
from headrace_trainer.experiences.history import History
from headrace_trainer.experiences.window import Contribution, Entry

Turns = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Terms:
    """By what rewards are turned into advantages after the first training."""

    advantage_max: float
    correction_min: float
    worth: Callable[[float], float] | None = None
    """What a reward counts as."""
    credit: Callable[[float, Sequence[float | None], float, float], Turns] | None = None
    """The advantages of the spans, where turns have advantages of their own."""
    anew: bool = False
    """What the weights have lost is appraised as if it were new: a critic's terms of the first training say nothing
    now."""


@dataclass(frozen=True, slots=True)
class Due:
    """One example. `missing` is the advantage to train it with; None: its reward is to be compared with others
    first."""

    example: Example
    missing: float | None
    token_weight: float | None = None
    """Of the contribution that is corrected; None where the weights hold none."""
    turns: Turns = ()
    """What each span misses, where turns have advantages of their own."""

    @property
    def new(self) -> bool:
        """The weights hold nothing of it."""
        return self.token_weight is None


def due(
    experience: Experience,
    entry: Entry | None,
    given: Sequence[Example],
    history: History,
    steps: int,
    terms: Terms,
) -> tuple[Due, ...]:
    """`given` are the examples of the experience. In their order, then those that are gone."""
    if entry is None or not entry.trained:
        return tuple(Due(one, one.value) for one in given)
    held: dict[str, list[Contribution]] = {}
    for past in entry.held(history, steps):
        held.setdefault(past.part, []).append(past)
    tried = {past.part for past in entry.contributions}
    found: list[Due] = []
    for one in given:
        if one.value is None and (one.part not in tried or (terms.anew and one.part not in held)):
            found.append(Due(one, None))
        else:
            target = _advantage(experience, entry, terms) if one.value is None else one.value
            turns = _turns(experience, entry, target, terms) if one.value is None else ()
            found.append(_missing(one, target, turns, held.pop(one.part, [])))
    found += [_missing(_gone(several[0]), 0.0, (), several) for several in held.values()]
    return tuple(one for one in found if one.missing is None or _matters(one, terms.correction_min))


def turns_of(experience: Experience) -> tuple[float | None, ...]:
    """The reward of each span's turn, at the first span of the turn; None where it has none."""
    assert experience.branch is not None
    rewards: dict[str, float | None] = {one.turn_id: one.value for one in experience.turn_rewards}
    return tuple(rewards.pop(span.turn_id, None) for span in experience.branch.spans)


def _advantage(experience: Experience, entry: Entry, terms: Terms) -> float:
    reward = experience.reward
    if reward is not None and terms.worth is not None:
        reward = terms.worth(reward)
    return entry.advantage_of(reward, terms.advantage_max)


def _turns(experience: Experience, entry: Entry, advantage: float, terms: Terms) -> Turns:
    if terms.credit is None:
        return ()
    found = terms.credit(advantage, turns_of(experience), *(entry.turn_terms or (0.0, 0.0)))
    return tuple(max(-terms.advantage_max, min(terms.advantage_max, value)) for value in found)


def _missing(example: Example, target: float, turns: Turns, held: Sequence[Contribution]) -> Due:
    missing = target - math.fsum(one.advantage for one in held)
    spans = max((len(one.turns) for one in held), default=len(turns))
    by_span = [
        (turns[place] if place < len(turns) else 0.0)
        - math.fsum(one.turns[place] for one in held if place < len(one.turns))
        for place in range(spans)
    ]
    return Due(example, missing, held[0].token_weight if held else None, tuple(by_span))


def _matters(one: Due, least: float) -> bool:
    assert one.missing is not None
    return max(map(abs, one.turns or (one.missing,))) >= least


def _gone(one: Contribution) -> Example:
    what = one.what
    if what is None or not what.part:
        return BRANCH
    return Example(what.part, None, "", what.turn_id, what.choice, what.tokens)
